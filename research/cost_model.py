"""What a step of a served model costs in a simulation: the exact counts, made cheap to ask for.

Time is the larger of operations over peak and bytes over bandwidth, plus overheads that do not
depend on the device: operations of one operator hide bytes of another entirely. Operations are all
that `kvlab.research.operators` counts; bytes are those of parameters, keys and values, for what a
step's tokens carry from operator to operator stays in the caches of the chip.
"""

import dataclasses
import functools
import math

import numpy as np

from kvlab.models.config import DecoderConfig, LayerNorm
from kvlab.ops.specs import CacheSpec, Kivi4, Paged, Recompute, Ring
from kvlab.research.cache_costs import token_bytes
from kvlab.research.devices import Device
from kvlab.research.operators import LayerWork, Operator, step_operators, total


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What the cost of a decoder's steps is made of; every count is linear in these.

    Attributes:
      name: as people call it.
      token_flops: operations of a token in all layers, attention's pairs left out.
      pair_flops: operations of a query that meets a key, in all layers and heads.
      position_flops: operations of the head for a position whose logits are wanted.
      weight_bytes: of all parameters that every call reads.
      kv_bytes_per_token: keys and values of one token in all layers.
      dtype: of the computation.
    """

    name: str
    token_flops: float
    pair_flops: float
    position_flops: float
    weight_bytes: float
    kv_bytes_per_token: int
    dtype: str = "bfloat16"


def served_model(name: str, config: DecoderConfig, spec: CacheSpec) -> ServedModel:
    """Counts a decoder once.

    Args:
      name: as people call it.
      config: the decoder.
      spec: the cache of all layers.

    Raises:
      ValueError: a sliding window or a policy of retention, whose pairs depend on the layer; a
        ring, KIVI or no cache, whose bytes depend on the place of a token.
    """
    if spec.retention is not None or any(window is not None for window in config.layer_windows):
        raise ValueError(
            f"{name} reads fewer keys in some layers than its sequences have tokens; use a model "
            "without windows, and retention=all"
        )
    if isinstance(spec.placement, Recompute | Ring) or isinstance(spec.storage, Kivi4):
        raise ValueError(
            f"{name} with placement={spec.placement}, storage={spec.storage}: the bytes of a token "
            "must be the same wherever it stands; use placement=paged, storage=int8"
        )

    def count(tokens: int, pairs: int, positions: int) -> Operator:
        works = [LayerWork(heads, tokens, pairs) for heads in config.kv_heads]
        return total(step_operators(config, works, positions))

    return ServedModel(
        name,
        token_flops=count(1, 0, 0).flops,
        pair_flops=count(0, 1, 0).flops,
        position_flops=count(0, 0, 1).flops,
        weight_bytes=count(0, 0, 0).weight_bytes,
        kv_bytes_per_token=sum(
            int(sum(token_bytes(spec, heads, config.head_dim))) for heads in config.kv_heads
        ),
        dtype=config.dtype,
    )


# "OPT" (arXiv 2205.01068), Table 1, and its published config; in float16, as "PagedAttention"
# (arXiv 2309.06180) serves it. For the cost model only: no family of kvlab loads it.
_OPT_13B = DecoderConfig(
    family="opt",
    vocab_size=50_272,
    num_layers=40,
    embed_dim=5120,
    hidden_dim=20_480,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    max_length=2048,
    norm=LayerNorm(),
    activation="relu",
    gated_mlp=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
    param_dtype="float16",
    dtype="float16",
)
OPT_13B = served_model("OPT-13B", _OPT_13B, CacheSpec(Paged(16), "bfloat16"))


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Seconds of prefill and decode calls.

    Args:
      model: what runs.
      device: where.
      flops_efficiency, bandwidth_efficiency: shares of the data sheet that are reached.
      call_overhead_s: of every call, whatever it does.
      sequence_overhead_s: of every sequence in every decode step.

    Raises:
      ValueError: an efficiency outside (0, 1], a negative overhead, or a device whose peak in the
        model's dtype is not known.
    """

    model: ServedModel
    device: Device
    flops_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    call_overhead_s: float = 0.0
    sequence_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        """Validates every number."""
        for name in ("flops_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} given: want above 0, at most 1")
        for name in ("call_overhead_s", "sequence_overhead_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} given: want a number of seconds from 0")
        self.device.peak(self.model.dtype)

    @functools.cached_property
    def _rates(self) -> tuple[float, float]:
        """Operations and bytes a second that are reached."""
        peak = self.device.peak(self.model.dtype) * self.flops_efficiency
        return peak, self.device.bandwidth * self.bandwidth_efficiency

    def prefill_s(self, new_tokens: int, pairs: float, held_tokens: int) -> np.ndarray:
        """Of a prefill call.

        The head counts for every new token, as in "two operations a parameter and token", though
        an engine needs the logits of a prompt's last token alone: 2 % of OPT-13B's operations.

        Args:
          new_tokens: that it adds.
          pairs: of a query and a key that it attends to.
          held_tokens: of keys and values that it reads, the new ones too.
        """
        return self.call_overhead_s + self._seconds(new_tokens, new_tokens, pairs, held_tokens)

    def decode_s(self, sequences: int, held_tokens: np.ndarray | float) -> np.ndarray:
        """Of one decode step, or of several.

        Args:
          sequences: that get a token each.
          held_tokens: that they hold together, the new ones too; an array of several steps.
        """
        overhead = self.call_overhead_s + sequences * self.sequence_overhead_s
        return overhead + self._seconds(sequences, sequences, held_tokens, held_tokens)

    def _seconds(
        self,
        tokens: float,
        positions: int,
        pairs: np.ndarray | float,
        held_tokens: np.ndarray | float,
    ) -> np.ndarray:
        model, (peak, bandwidth) = self.model, self._rates
        products = model.token_flops * tokens + model.position_flops * positions
        flops = products + model.pair_flops * pairs
        # The new tokens are written, and read among those held.
        moved = model.weight_bytes + model.kv_bytes_per_token * (held_tokens + tokens)
        return np.maximum(flops / peak, moved / bandwidth)
