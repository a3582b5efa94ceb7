"""What is KIVI's own: groups close after they are read, at absolute places, chunk by chunk."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.attention import AttentionOptions
from kvlab.ops.caches.contiguous import ContiguousCache
from kvlab.ops.caches.kivi import KiviCache
from kvlab.ops.caches.protocol import Step
from kvlab.ops.row_table import RowTable
from kvlab.ops.specs import Kivi4
from kvlab.ops.storage import decode as decode_storage
from kvlab.ops.storage import encode_group

CHUNK, N, K, H, LENGTH = 29, 4, 2, 14, 97
STORAGE = Kivi4(16, 5)
OPTIONS = AttentionOptions(scale=H**-0.5)


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def attend(query, key, value, step, cache, table):
    return cache.attend(query, key, value, step, table, OPTIONS)


def drawn():
    random = np.random.default_rng(59)
    return [random.standard_normal((LENGTH, n, H)).astype(np.float32) for n in (N, K, K)]


def fed(arrays, pieces, residual=STORAGE.residual):
    """Feeds a text of one sequence in pieces; the outputs [LENGTH, N, H] and the cache."""
    storage = dataclasses.replace(STORAGE, residual=residual)
    inner = ContiguousCache.init(1, 128, K, H, storage)
    cache, outputs, start = KiviCache.init(inner, 1, CHUNK, K, H, storage), [], 0
    for count in pieces:
        places = start + np.arange(CHUNK, dtype=np.int32)[None]
        valid = np.arange(CHUNK)[None] < count
        part = [np.zeros((1, CHUNK, *array.shape[1:]), np.float32) for array in arrays]
        for padded, array in zip(part, arrays, strict=True):
            padded[0, :count] = array[start : start + count]
        start += count
        table = RowTable(jnp.full(1, start, jnp.int32), 128)
        output, cache = attend(*part, Step(places, valid, valid), cache, table)
        outputs.append(np.asarray(output)[0, :count])
    assert start == LENGTH
    return np.concatenate(outputs), cache


PIECES = (29, 29, 29, 10)


@pytest.mark.parametrize("changed", [0, 17, 31, 57, 96])
def test_a_later_token_changes_no_earlier_output(changed):
    arrays = drawn()
    before, _ = fed(arrays, PIECES)
    for array in arrays[1:]:
        array[changed] *= 31  # a new minimum and maximum of every group it is in
    after, _ = fed(arrays, PIECES)
    np.testing.assert_array_equal(after[:changed], before[:changed])
    assert not np.array_equal(after[changed], before[changed])


def test_groups_close_at_absolute_multiples_whatever_the_pieces():
    arrays = drawn()
    pieces = (PIECES, [1] * LENGTH, [7] * 13 + [6])
    closed = [fed(arrays, counts)[1].closed for counts in pieces]
    stored = (LENGTH - STORAGE.residual) // STORAGE.group * STORAGE.group
    for cache in closed:
        codes = np.asarray(cache.key["codes"])
        assert codes[..., :stored].any((0, 1, 2)).all()
        assert not codes[..., stored:].any()
    for leaf, *others in zip(*map(jax.tree.leaves, closed), strict=True):
        for other in others:
            np.testing.assert_array_equal(leaf, other)


def test_the_newest_tokens_are_in_full_precision():
    arrays = drawn()
    _, cache = fed(arrays, PIECES)
    keys, values = cache.gather(RowTable(jnp.full(1, LENGTH, jnp.int32), 128))
    closed = (LENGTH - STORAGE.residual) // STORAGE.group * STORAGE.group
    for array, stored in zip(arrays[1:], (keys, values), strict=True):
        assert LENGTH - closed >= STORAGE.residual
        np.testing.assert_array_equal(stored[0, closed:LENGTH], array[closed:])
        assert not np.array_equal(stored[0, :closed], array[:closed])


def test_every_value_comes_back_within_half_a_step_of_its_group():
    random = np.random.default_rng(61)
    keys, values = random.standard_normal((2, 3, 32, K, 64)).astype(np.float32)
    keys[..., 5] += 40  # an outlier channel costs the others nothing
    stored = encode_group(jnp.asarray(keys), jnp.asarray(values), Kivi4(32))
    back = [np.asarray(decode_storage(one, Kivi4(32), -1)) for one in stored]
    step = (keys.max(1, keepdims=True) - keys.min(1, keepdims=True)) / 15
    assert np.all(np.abs(back[0] - keys) <= 0.5001 * step + 1e-6)
    grouped = values.reshape(*values.shape[:-1], 2, 32)
    step = (grouped.max(-1, keepdims=True) - grouped.min(-1, keepdims=True)) / 15
    assert np.all(np.abs(back[1].reshape(grouped.shape) - grouped) <= 0.5001 * step + 1e-6)
    same = encode_group(jnp.ones((1, 32, K, 64)), jnp.zeros((1, 32, K, 64)), Kivi4(32))
    assert np.all(np.asarray(decode_storage(same[0], Kivi4(32), -1)) == 1)
    assert not np.asarray(decode_storage(same[1], Kivi4(32), -1)).any()
