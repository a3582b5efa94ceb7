"""Devices by what bounds a program on them: peak of arithmetic, bandwidth and size of memory.

The roofline: a program of some arithmetic intensity (operations a byte) attains the peak, or the
bandwidth times its intensity, whichever is less. They meet at the ridge point.
Source: Williams, Waterman and Patterson, "Roofline" (CACM 52(4), 2009).
"""

import dataclasses
import math

_SIXTEEN_BITS = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Device:
    """An accelerator by its data sheet, or any machine by what was measured on it.

    A peak belongs to a dtype of the operands; one that is None is not known, and asking for it is
    an error. On TPUs float32 products at full precision are several bfloat16 passes, of which no
    data sheet gives the rate.

    Args:
      name: as people call it.
      flops: dense peak in operations a second, 16-bit operands and float32 sums.
      bandwidth: of memory, bytes a second.
      memory: bytes.
      float32_flops: dense peak of float32 operands at full precision (no TF32).
      int8_flops: dense peak of int8 operands.

    Raises:
      ValueError: a number that is not above 0, or no peak at all.
    """

    name: str
    flops: float | None
    bandwidth: float
    memory: float
    float32_flops: float | None = None
    int8_flops: float | None = None

    def __post_init__(self) -> None:
        """Validates every number."""
        peaks = {"flops": self.flops, "float32_flops": self.float32_flops}
        peaks |= {"int8_flops": self.int8_flops}
        known = {name: value for name, value in peaks.items() if value is not None}
        if not known:
            raise ValueError(f"device {self.name!r} has no peak: give {', '.join(peaks)}")
        for name, value in {**known, "bandwidth": self.bandwidth, "memory": self.memory}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} given for device {self.name!r}: want above 0")

    def peak(self, dtype: str) -> float:
        """Operations a second of products in a dtype.

        Args:
          dtype: float32, bfloat16, float16 or int8.

        Raises:
          ValueError: another dtype, or one whose peak is not known.
        """
        sixteen = dict.fromkeys(_SIXTEEN_BITS, self.flops)
        peaks = {"float32": self.float32_flops, **sixteen, "int8": self.int8_flops}
        known = {name: value for name, value in peaks.items() if value is not None}
        if dtype not in known:
            raise ValueError(
                f"device {self.name!r} has no known peak for dtype={dtype!r}; known: "
                f"{', '.join(known)}"
            )
        return known[dtype]

    def ridge(self, dtype: str) -> float:
        """The arithmetic intensity, operations a byte, from which the peak is the limit."""
        return self.peak(dtype) / self.bandwidth

    def attainable(self, intensity: float, dtype: str) -> float:
        """Most operations a second at an arithmetic intensity in operations a byte."""
        return min(self.peak(dtype), self.bandwidth * intensity)

    def bound(self, intensity: float, dtype: str) -> str:
        """What limits at an arithmetic intensity: `compute` or `memory`."""
        return "compute" if intensity >= self.ridge(dtype) else "memory"

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """Least time for some operations and bytes that overlap entirely."""
        return max(flops / self.peak(dtype), moved / self.bandwidth)

    def scaled(self, efficiency: float) -> "Device":
        """The device that reaches a share of all its peaks and of its bandwidth.

        Args:
          efficiency: above 0, at most 1.

        Raises:
          ValueError: another efficiency.
        """
        if not 0 < efficiency <= 1:
            raise ValueError(f"efficiency={efficiency} given: want above 0, at most 1")

        def share(peak: float | None) -> float | None:
            return None if peak is None else peak * efficiency

        return dataclasses.replace(
            self,
            flops=share(self.flops),
            bandwidth=self.bandwidth * efficiency,
            float32_flops=share(self.float32_flops),
            int8_flops=share(self.int8_flops),
        )


# Dense peaks: NVIDIA's sheets print those with sparsity, twice as high, for most of them. float32
# is that of the CUDA cores. TPUs print no float32.
DEVICES = {
    device.name: device
    for device in (
        # RTX A6000 data sheet: 309.7 TFLOPS with sparsity, 38.7 single precision, 768 GB/s.
        Device("A6000", 154.8e12, 768e9, 48e9, 38.7e12, 309.7e12),
        # A100 data sheet, SXM4: 312 TFLOPS, 624 TOPS, 19.5 TFLOPS; 1,555 and 2,039 GB/s.
        Device("A100-40GB", 312e12, 1555e9, 40e9, 19.5e12, 624e12),
        Device("A100-80GB", 312e12, 2039e9, 80e9, 19.5e12, 624e12),
        # H100 data sheet, SXM5: 1,979 TFLOPS and 3,958 TOPS with sparsity, 67 TFLOPS, 3.35 TB/s.
        Device("H100-80GB", 989e12, 3350e9, 80e9, 67e12, 1979e12),
        # H200 data sheet, SXM5: as the H100, 141 GB at 4.8 TB/s.
        Device("H200-141GB", 989e12, 4800e9, 141e9, 67e12, 1979e12),
        # L4 data sheet: 242 TFLOPS and 485 TOPS with sparsity, 30.3 TFLOPS, 300 GB/s.
        Device("L4-24GB", 121e12, 300e9, 24e9, 30.3e12, 242.5e12),
        # Cloud TPU documentation, v6e page (v5e beside it): 197 TFLOPs, 393 TOPs, 16 GB, 819 GBps.
        Device("TPU-v5e", 197e12, 819e9, 16e9, None, 393e12),
        # v5p page: 459 TFLOPs, 95 GB, 2,765 GBps; its int8 is 918 TOPs in Google's announcement.
        Device("TPU-v5p", 459e12, 2765e9, 95e9, None, 918e12),
        # v6e page: 918 TFLOPs, 1,836 TOPs, 32 GB, 1,640 GBps (newer versions of it say 1,600).
        Device("TPU-v6e", 918e12, 1640e9, 32e9, None, 1836e12),
    )
}
"""Devices by name."""
