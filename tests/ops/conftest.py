"""Attention as its formula, one query at a time: what every implementation is held against."""

import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable

import numpy as np
import pytest


def _attention(
    query,
    key,
    value,
    query_positions,
    key_positions,
    query_valid,
    key_valid,
    *,
    scale,
    window=None,
    soft_cap=None,
):
    """softmax(q k^T) v in float64, over the keys that each query may see, head by head.

    Arrays as in `kvlab.ops.attention.attention`; a query that is not valid or sees no key gives 0.
    """
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    num_sequences, num_queries, num_heads, _ = query.shape
    group = num_heads // key.shape[2]
    output = np.zeros_like(query)
    for b in range(num_sequences):
        for t in range(num_queries):
            age = query_positions[b, t] - key_positions[b]
            seen = (age >= 0) & key_valid[b]
            if window is not None:
                seen &= age < window
            if not query_valid[b, t] or not seen.any():
                continue
            for n in range(num_heads):
                scores = key[b, seen, n // group] @ query[b, t, n] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max())
                output[b, t, n] = weights @ value[b, seen, n // group] / weights.sum()
    return output


@pytest.fixture(scope="session")
def numpy_attention() -> Callable[..., np.ndarray]:
    """`kvlab.ops.attention.attention` in NumPy; options are keywords."""
    return _attention


@pytest.fixture(scope="session")
def stored_pools() -> types.ModuleType:
    """tests/ops/stored_pools.py: pools of keys and values for kernels that read them in place."""
    path = pathlib.Path(__file__).parent / "stored_pools.py"
    spec = importlib.util.spec_from_file_location("kvlab_stored_pools", path)
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
