"""Where the time of prefill and decode must go on a device: bounds, times, what fits.

Counts come from `kvlab.research.operators`, bytes of the cache from `kvlab.research.cache_costs`.
Source: "LLM Inference Unveiled" (arXiv 2402.16363), section 2.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from kvlab.models.config import DecoderConfig
from kvlab.models.packing import check_format, param_bytes
from kvlab.ops.specs import CacheSpec, Recompute
from kvlab.research.cache_costs import (
    held_tokens,
    layer_window,
    read_bytes,
    sequence_bytes,
    written_bytes,
)
from kvlab.research.devices import Device
from kvlab.research.operators import (
    EXACT,
    Accounting,
    LayerWork,
    Operator,
    step_operators,
    total,
)


@dataclasses.dataclass(frozen=True)
class Phase:
    """One call of prefill, or one decode step, on a device.

    Attributes:
      operators: in the order they run.
      device: where.
      dtype: of the products' operands.
    """

    operators: tuple[Operator, ...]
    device: Device
    dtype: str

    @functools.cached_property
    def total(self) -> Operator:
        """All operators together."""
        return total(self.operators)

    @property
    def bound(self) -> str:
        """What limits the phase as a whole: `compute` or `memory`."""
        return self.device.bound(self.total.intensity, self.dtype)

    @property
    def attainable(self) -> float:
        """Most operations a second at the phase's arithmetic intensity."""
        return self.device.attainable(self.total.intensity, self.dtype)

    @property
    def seconds(self) -> float:
        """Operators one after the other, each at its own limit."""
        return sum(
            one.layers * self.device.seconds(one.flops, one.moved_bytes, self.dtype)
            for one in self.operators
        )

    @property
    def overlapped_seconds(self) -> float:
        """Least time, the operations of some operators hiding the bytes of others."""
        return self.device.seconds(self.total.flops, self.total.moved_bytes, self.dtype)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """A decoder with its caches on a device.

    An attention variant is a config with other `num_kv_heads` (`kvlab.research.variants.kv_heads`).
    What a policy of retention computes to score tokens, and the sampling, are not counted.

    Args:
      config: the decoder; its dtypes are those that count.
      specs: the cache of each layer; one `CacheSpec` stands for all.
      device: where; `Device.scaled` gives one that reaches a share of its data sheet.
      accounting: what counts.
      weights: the format of the products' weights; None is the config's `param_dtype`.

    Raises:
      ValueError: another number of specs than layers; a device whose peak in the config's dtype is
        not known; an unknown format.
    """

    config: DecoderConfig
    specs: CacheSpec | tuple[CacheSpec, ...]
    device: Device
    accounting: Accounting = EXACT
    weights: str | None = None

    def __post_init__(self) -> None:
        """Validates."""
        if len(self.layer_specs) != self.config.num_layers:
            raise ValueError(
                f"{len(self.layer_specs)} cache specs for {self.config.num_layers} layers; give "
                "one spec, or one per layer"
            )
        self.device.peak(self.config.dtype)
        check_format(self.weights)

    @property
    def layer_specs(self) -> tuple[CacheSpec, ...]:
        """One spec per layer."""
        if isinstance(self.specs, CacheSpec):
            return (self.specs,) * self.config.num_layers
        return self.specs

    @property
    def recomputes(self) -> bool:
        """Whether there is no cache."""
        return isinstance(self.layer_specs[0].placement, Recompute)

    def prefill(self, batch: int, new_tokens: int, held: int = 0) -> Phase:
        """A call that adds tokens to sequences and computes the logits of their last ones.

        Args:
          batch: sequences.
          new_tokens: that each gets.
          held: that each holds already; without a cache they are computed again.
        """
        _require(batch=batch, new_tokens=new_tokens)
        if held < 0:
            raise ValueError(f"held={held} given: want 0 or more")
        if self.recomputes:
            new_tokens, held = held + new_tokens, 0
        after = held + new_tokens

        def reads(spec: CacheSpec, window: int | None) -> tuple[int, int]:
            seen = layer_window(spec, window) or after
            keys = min(after, seen + new_tokens - 1)
            if not self.accounting.causal:
                return keys, new_tokens * keys
            return keys, _visible(after, seen) - _visible(held, seen)

        return self._phase(batch, new_tokens, held, reads)

    def decode(self, batch: int, context: int, prompt: int | None = None) -> Phase:
        """A step that gives each sequence one token.

        Args:
          batch: sequences.
          context: tokens of each, the new one included.
          prompt: how many of them were prefilled, for retention; None is all but the new one.
        """
        _require(batch=batch, context=context)
        if self.recomputes:
            return self.prefill(batch, context)
        prompt = context - 1 if prompt is None else prompt

        def reads(spec: CacheSpec, window: int | None) -> tuple[int, int]:
            held = held_tokens(spec, context, prompt)
            keys = min(held, layer_window(spec, window) or held)
            return keys, keys

        return self._phase(batch, 1, context - 1, reads)

    def _phase(
        self,
        batch: int,
        new_tokens: int,
        before: int,
        reads: Callable[[CacheSpec, int | None], tuple[int, int]],
    ) -> Phase:
        """Counts a step; `reads` gives keys read and pairs computed of one sequence in a layer."""
        config, works = self.config, []
        for spec, heads, window in zip(
            self.layer_specs, config.kv_heads, config.layer_windows, strict=True
        ):
            keys, pairs = reads(spec, window)
            sizes = (spec, heads, config.head_dim)
            stored = read_bytes(*sizes, before, before + new_tokens, keys)
            work = LayerWork(
                heads,
                batch * new_tokens,
                batch * pairs,
                batch * stored.key,
                batch * stored.value,
                batch * new_tokens * written_bytes(*sizes),
                batch * keys if self.recomputes else 0,
            )
            works.append(work)
        operators = step_operators(config, works, batch, self.accounting, self.weights)
        return Phase(operators, self.device, config.dtype)

    def ttft_s(self, prompt: int, batch: int = 1, chunk: int | None = None) -> float:
        """Predicted seconds to the first token: of all prefill calls.

        Args:
          prompt: tokens of each sequence.
          batch: sequences that are prefilled together.
          chunk: tokens that a call adds to each; None is the whole prompt. Every call reads all
            weights.
        """
        starts = range(0, prompt, chunk or prompt)
        return sum(
            self.prefill(batch, min(chunk or prompt, prompt - start), start).seconds
            for start in starts
        )

    def tpot_s(self, context: int, batch: int = 1, prompt: int | None = None) -> float:
        """Predicted seconds to each next token: of a decode step at a context of tokens."""
        return self.decode(batch, context, prompt).seconds

    def compute_bound_batch(self, context: int, prompt: int | None = None) -> int | None:
        """The smallest batch at which a decode step as a whole is bound by compute.

        A sequence more adds `f` operations and `m` bytes to a step that reads `w` bytes of weights
        once. With the ridge point `r` the step is bound by compute where `B f >= r (w + B m)`. If
        `f <= r m` that is nowhere: what each sequence brings of its own (keys and values above all,
        which no other sequence shares) is itself bound by memory, so no batch, however large, leads
        across the ridge. That is so at long contexts: with G query heads a KV head, a key of 16
        bits gives about G operations a byte, and ridge points are above 100.

        Args:
          context: tokens of each sequence.
          prompt: see `decode`.

        Returns:
          Sequences, whether they fit in memory or not; None where there is no such batch.
        """
        one, two = (self.decode(batch, context, prompt).total for batch in (1, 2))
        ridge = self.device.ridge(self.config.dtype)
        flops, moved = two.flops - one.flops, two.moved_bytes - one.moved_bytes
        gain = flops - ridge * moved
        if gain <= 0:
            return None
        return max(1, math.ceil(ridge * (one.moved_bytes - moved) / gain))

    def param_bytes(self) -> int:
        """All parameters, products' weights in their format."""
        return _param_bytes(self.config, self.weights)

    def used_bytes(self, batch: int, context: int, chunk: int = 128) -> int:
        """Parameters and caches of some sequences; activations and programs are not counted."""
        each = sequence_bytes(self.config, self.layer_specs, context, chunk=chunk)
        return self.param_bytes() + batch * each

    def largest_batch(self, context: int, *, reserved: float = 0.0, chunk: int = 128) -> int | None:
        """Most sequences of a context whose caches fit in memory beside the parameters.

        Args:
          context: tokens of each.
          reserved: bytes for what else there is (activations, programs).
          chunk: most tokens of a row of one prefill call, which rings hold.

        Returns:
          Sequences, 0 where not even one fits; None where a sequence takes no memory.
        """
        _require(context=context)
        room = self.device.memory - reserved - self.param_bytes()
        each = sequence_bytes(self.config, self.layer_specs, context, chunk=chunk)
        if not each:
            return None
        return max(0, int(room // each))

    def largest_context(self, batch: int, *, reserved: float = 0.0, chunk: int = 128) -> int:
        """Longest context that some sequences can have in memory.

        Args:
          batch: sequences.
          reserved: bytes for what else there is (activations, programs).
          chunk: see `largest_batch`.

        Returns:
          Tokens of each, the model's context at most; 0 where none fits.
        """
        _require(batch=batch)
        room = self.device.memory - reserved
        fits, fails = 0, self.config.max_length + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.used_bytes(batch, middle, chunk) <= room:
                fits = middle
            else:
                fails = middle
        return fits


def _visible(tokens: int, window: int) -> int:
    """Pairs of the first tokens of a text with the keys that each sees, itself included."""
    ramp = min(tokens, window)
    return ramp * (ramp + 1) // 2 + (tokens - ramp) * window


_param_bytes = functools.lru_cache(maxsize=64)(param_bytes)


def _require(**sizes: int) -> None:
    """Raises ValueError where a number of tokens or sequences is below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} given: want 1 or more")
