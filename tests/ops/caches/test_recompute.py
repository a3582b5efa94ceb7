"""No cache, behind the protocol of one."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.attention import AttentionOptions, attention
from kvlab.ops.caches.protocol import Step
from kvlab.ops.caches.recompute import RecomputeCache
from kvlab.ops.row_table import RowTable

B, T, N, K, H = 5, 29, 6, 2, 14
CACHE, TABLE = RecomputeCache(), RowTable.init(B, T)


def test_it_attends_to_the_step_itself(numpy_attention):
    random = np.random.default_rng(31)
    query, key, value = (
        jnp.asarray(random.standard_normal((B, T, n, H), np.float32)) for n in (N, K, K)
    )
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    valid = positions < jnp.array([[29], [1], [0], [13], [28]], jnp.int32)
    options = AttentionOptions(scale=0.3, window=11)
    step = Step(positions, valid, valid)
    output, cache = CACHE.attend(query, key, value, step, TABLE, options)
    arguments = (query, key, value, positions, positions, valid, valid)
    np.testing.assert_array_equal(output, attention(*arguments, options))
    expected = numpy_attention(*map(np.asarray, arguments), scale=0.3, window=11)
    np.testing.assert_allclose(output, expected, rtol=0, atol=5e-6)
    assert cache is CACHE


def test_it_keeps_nothing():
    numbers = jnp.zeros(3, jnp.int32)
    assert CACHE.nbytes() == 0
    assert CACHE.fork(numbers, numbers) is CACHE
    assert CACHE.reorder(numbers) is CACHE
    assert CACHE.copy(numbers, numbers) is CACHE


def test_it_has_no_keys_to_show():
    with pytest.raises(ValueError, match=r"placement=recompute .* use contiguous or paged"):
        CACHE.gather(TABLE)
