"""Stored forms of keys and values: what comes back, how many bytes, and what extremes do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.specs import STORAGES
from kvlab.ops.storage import decode, empty_keys, empty_values, encode

SYMMETRIC = [storage for storage in STORAGES if storage != "kivi4"]
QUANTISED = {"float8_e4m3fn": 2.0**-4, "int8": 0.5 / 127, "int4": 0.5 / 7}  # step over largest
B, T, K, H = 3, 5, 7, 22


def there_and_back(values, storage):
    stored = jax.jit(encode, static_argnums=1)(jnp.asarray(values), storage)
    return np.asarray(decode(stored, storage, -1)), stored


def normal(*shape):
    return np.random.default_rng(31).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("storage", QUANTISED)
def test_values_come_back_within_half_a_step_of_their_own_head(storage):
    values = normal(B, T, K, H) * np.float32(10) ** np.arange(-3, K - 3)[:, None]
    back, stored = there_and_back(values.astype(np.float32), storage)
    largest = np.abs(values).max(-1, keepdims=True)
    assert back.dtype == np.float32
    assert np.all(np.abs(back - values) <= QUANTISED[storage] * largest * 1.0001)
    assert stored["scale"].shape == (B, T, K, 1)
    np.testing.assert_allclose(np.abs(back).max(-1, keepdims=True), largest, rtol=1e-6)


@pytest.mark.parametrize("storage", SYMMETRIC)
def test_a_token_is_stored_alike_whatever_its_neighbours_are(storage):
    values = normal(B, T, K, H)
    back, _ = there_and_back(values, storage)
    values[1:, :, 3:] *= 1e4
    other, _ = there_and_back(values, storage)
    np.testing.assert_array_equal(back[0].view(np.uint8), other[0].view(np.uint8))


@pytest.mark.parametrize("storage", SYMMETRIC)
def test_empty_has_the_shape_and_bytes_of_what_is_encoded(storage):
    stored = encode(jnp.asarray(normal(B, T, K, H)), storage)
    zeros = empty_values((B, T, K, H), storage)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), stored) == jax.tree.map(
        lambda a: (a.shape, a.dtype), zeros
    )
    bits = {"float32": 32, "bfloat16": 16, "int4": 4}.get(storage, 8)
    scales = 0 if storage in ("float32", "bfloat16") else 4
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(zeros)) == B * T * K * (
        H * bits // 8 + scales
    )
    assert not np.asarray(decode(zeros, storage, 3)).any()


@pytest.mark.parametrize("storage", SYMMETRIC)
def test_the_axes_may_lie_in_any_order(storage):
    values = normal(B, T, K, H)
    back, stored = there_and_back(values, storage)
    moved = jax.tree.map(lambda a: a.transpose(0, 3, 1, 2), stored)
    again = np.asarray(decode(moved, storage, 1)).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(again, back)


@pytest.mark.parametrize("storage", QUANTISED)
def test_extremes(storage):
    ordinary = normal(H)
    rows = np.stack([np.zeros(H), ordinary * 1e37, ordinary * 1e-30, *[ordinary] * 3])
    rows = rows.astype(np.float32)
    rows[3, 4], rows[4, 4], rows[5] = np.nan, np.inf, -np.abs(rows[5])
    back, _ = there_and_back(rows, storage)
    assert not back[0].any()
    step = QUANTISED[storage] * 1.0001
    for row in (1, 2, 5):  # no overflow, no loss, and both signs alike
        assert np.all(np.abs(back[row] - rows[row]) <= step * np.abs(rows[row]).max())
    assert not np.isfinite(back[3:5]).any()  # a fault must not come back as a number


def test_int4_of_an_odd_head_is_an_error_that_names_a_way_out():
    with pytest.raises(ValueError, match="head_dim=7 is odd; use storage=int8"):
        empty_keys((3, 1, 7, 64), "int4")
