"""What a step of a served model costs: operations and bytes over what a device can do.

Time is the larger of operations over peak and bytes over bandwidth, plus overheads that do not
depend on the device. Nothing overlaps or is lost but what the parameters say.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Device:
    """An accelerator by its data sheet.

    Attributes:
      name: as people call it.
      flops: dense peak in operations a second, 16-bit.
      bandwidth: of memory, bytes a second.
      memory: bytes.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float


# NVIDIA's data sheets (dense 16-bit Tensor Core peak, HBM bandwidth).
DEVICES = {
    device.name: device
    for device in (
        Device("A100-40GB", 312e12, 1555e9, 40e9),
        Device("A100-80GB", 312e12, 2039e9, 80e9),
        Device("H100-80GB", 989e12, 3350e9, 80e9),
    )
}


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The sizes of a decoder that its cost depends on.

    Attributes:
      name: as people call it.
      num_params: parameters that every token goes through.
      num_layers, num_heads, num_kv_heads, head_dim: of its attention.
      bytes_per_value: of parameters, keys and values.
    """

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value

    @property
    def weight_bytes(self) -> float:
        """Of all parameters."""
        return self.num_params * self.bytes_per_value


# "OPT" (arXiv 2205.01068), Table 1; in float16, as "PagedAttention" (arXiv 2309.06180) serves it.
OPT_13B = ServedModel("OPT-13B", 12.85e9, 40, 40, 40, 128)


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
      ValueError: an efficiency outside (0, 1] or a negative overhead.
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

    def prefill_s(self, new_tokens: int, pairs: float, held_tokens: int) -> np.ndarray:
        """Of a prefill call.

        Args:
          new_tokens: that it adds.
          pairs: of a query and a key that it attends to.
          held_tokens: of keys and values that it reads, the new ones too.
        """
        return self.call_overhead_s + self._seconds(new_tokens, pairs, held_tokens)

    def decode_s(self, sequences: int, held_tokens: np.ndarray | float) -> np.ndarray:
        """Of one decode step, or of several.

        Args:
          sequences: that get a token each.
          held_tokens: that they hold together, the new ones too; an array of several steps.
        """
        overhead = self.call_overhead_s + sequences * self.sequence_overhead_s
        return overhead + self._seconds(sequences, held_tokens, held_tokens)

    def _seconds(
        self, tokens: float, pairs: np.ndarray | float, held_tokens: np.ndarray | float
    ) -> np.ndarray:
        model, device = self.model, self.device
        attention = 4 * model.num_layers * model.num_heads * model.head_dim * pairs
        flops = 2 * model.num_params * tokens + attention
        moved = model.weight_bytes + model.kv_bytes_per_token * held_tokens
        return np.maximum(
            flops / (device.flops * self.flops_efficiency),
            moved / (device.bandwidth * self.bandwidth_efficiency),
        )
