"""Means and their intervals, beside SciPy's."""

import numpy as np
import pytest
from scipy import stats

from kvlab.research.intervals import estimate


@pytest.mark.parametrize("count", [2, 3, 5, 11])
def test_intervals_are_students(count):
    samples = np.random.default_rng(count).normal(4.0, 0.5, count)
    found = estimate(samples.tolist())
    low, high = stats.t.interval(0.95, count - 1, samples.mean(), stats.sem(samples))
    assert found.span == pytest.approx((low, high), rel=1e-3)
    assert found.count == count


def test_one_sample_has_no_interval():
    found = estimate([4.0])
    assert (found.margin, found.span, found.is_clear) == (None, (4.0, 4.0), False)


def test_what_is_clear_of_zero():
    assert estimate([0.5, 0.5, 0.6]).is_clear
    assert not estimate([0.5, -0.5, 0.1]).is_clear
