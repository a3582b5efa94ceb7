"""exp and tanh of the CPU kernels, in units of the last place of float32."""

import ctypes

import numpy as np
import pytest

from kvlab.ops.cpu_kernels import library

pytestmark = pytest.mark.skipif(not library.available(), reason="there is no C++ compiler")


def apply(tanh, x):
    result = np.empty_like(x)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (x, result))
    library.load().KvlabElementwise(int(tanh), *pointers, ctypes.c_int64(x.size))
    return result


def error(actual, expected):
    return np.max(np.abs(actual - expected) / np.spacing(np.abs(expected).astype(np.float32)))


def test_exp():
    random = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-87, 20, 300_001), random.normal(size=9999) * 1e-3])
    x = x.astype(np.float32)
    assert error(apply(False, x), np.exp(x.astype(np.float64))) < 1.5
    special = np.float32([0.0, -0.0, -87.5, -1e30, -np.inf, np.nan])
    np.testing.assert_array_equal(apply(False, special), [1, 1, 0, 0, 0, np.nan])


def test_tanh():
    x = np.concatenate([np.linspace(-12, 12, 300_001), 10.0 ** -np.linspace(0, 30, 999)])
    x = x.astype(np.float32)
    assert error(apply(True, x), np.tanh(x.astype(np.float64))) < 2.5
    special = np.float32([0.0, np.inf, -np.inf, 1e30, np.nan])
    np.testing.assert_array_equal(apply(True, special), [0, 1, -1, 1, np.nan])
