"""Means of a few independent samples, and how far they can be trusted."""

import dataclasses
import math
import statistics
from collections.abc import Iterable

# Student's t, 97.5 %, of 1 to 10 degrees of freedom; beyond, the last one makes intervals wide.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean.

    Attributes:
      mean: of the samples.
      margin: half of its 95 % interval; None of a single sample, which has none.
      count: of samples.
    """

    mean: float
    margin: float | None
    count: int

    @property
    def span(self) -> tuple[float, float]:
        """The interval's ends; the mean twice where there is none."""
        margin = self.margin or 0.0
        return self.mean - margin, self.mean + margin

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves 0 out; False where there is none."""
        return self.margin is not None and abs(self.mean) > self.margin


def estimate(samples: Iterable[float]) -> Estimate:
    """The mean of samples of a normal distribution, with Student's interval.

    Args:
      samples: at least one.
    """
    values = list(samples)
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Estimate(mean, None, 1)
    factor = _T[min(count - 1, len(_T)) - 1]
    return Estimate(mean, factor * statistics.stdev(values) / math.sqrt(count), count)
