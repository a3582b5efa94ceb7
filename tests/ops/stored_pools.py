"""Pools of stored keys and values whose pages lie anywhere, for tests of kernels that read them.

Run as a script, it gives the CPU kernel page ids and lengths that are wrong in every way, and
checks that they read as slots without keys. It is meant for a build with sanitizers, under which
a read outside the pool ends the process.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.cpu_kernels.attention import Pool, attend
from kvlab.ops.storage import decode, encode


@dataclasses.dataclass(frozen=True)
class Case:
    """A pool, and the same keys and values in order of the text."""

    query: np.ndarray  # [B, T, N, H]
    positions: np.ndarray  # i32[B, T]: the last T of each sequence, below 0 before its first
    pool: Pool
    keys: np.ndarray  # f64[B, S, K, H], as they are read back
    values: np.ndarray  # f64[B, S, K, H]

    @property
    def query_valid(self):
        return self.positions >= 0

    @property
    def key_valid(self):
        slots = np.arange(self.keys.shape[1])[None]
        return slots < np.asarray(self.pool.lengths)[:, None]

    def formula(self, numpy_attention, **options):
        """What attention gives by the fixture of that name."""
        slots = np.arange(self.keys.shape[1], dtype=np.int32)
        places = np.broadcast_to(slots, self.keys.shape[:2])
        arrays = (self.query.astype(np.float64), self.keys, self.values)
        masks = (self.query_valid, self.key_valid)
        return numpy_attention(*arrays, self.positions, places, *masks, **options)


def make_case(
    lengths,
    num_queries=1,
    num_kv_heads=2,
    groups=3,
    head_dim=14,
    page_size=16,
    storage="float32",
    dtype=jnp.float32,
    seed=0,
):
    """Sequences of random keys; their pages are mixed, and what they leave free is NaN."""
    random = np.random.default_rng(seed)
    batch, most = len(lengths), max(*lengths, 1)
    per_row = -(-most // page_size)
    num_pages = batch * per_row + 2
    pages = np.random.default_rng(seed + 1).permutation(num_pages)[: batch * per_row]
    units = pages.reshape(batch, per_row).astype(np.int32)
    shape = (batch, most, num_kv_heads, head_dim)
    keys, values = (2 * random.standard_normal(shape).astype(np.float32) for _ in range(2))
    query = random.standard_normal((batch, num_queries, num_kv_heads * groups, head_dim))

    cache = PagedCache.init(num_pages, page_size, num_kv_heads, head_dim, storage)

    def filled(array):
        is_int = np.issubdtype(array.dtype, np.integer)  # it has no NaN, but its scale has
        return jnp.full(array.shape, 77 if is_int else np.nan, array.dtype)

    cache = jax.tree.map(filled, cache)
    slot = np.arange(most, dtype=np.int32)
    flat = units[:, slot // page_size] * page_size + slot % page_size
    flat = np.where(slot < np.asarray(lengths)[:, None], flat, num_pages * page_size)
    stored = encode(jnp.asarray(keys), storage), encode(jnp.asarray(values), storage)
    cache = cache.set(jnp.asarray(flat, jnp.int32), *stored)
    # Entries of the mapping past a sequence's pages are unmapped.
    mapped = np.arange(per_row)[None] * page_size < np.asarray(lengths)[:, None]
    units = np.where(mapped, units, num_pages).astype(np.int32)
    last = np.asarray(lengths, np.int32)[:, None]
    return Case(
        np.asarray(jnp.asarray(query, dtype)),
        last + np.arange(-num_queries, 0, dtype=np.int32)[None],
        Pool(cache.key, cache.value, storage, jnp.asarray(units), jnp.asarray(lengths, jnp.int32)),
        *(np.asarray(decode(part, storage, 3), np.float64) for part in stored),
    )


def run(case, scale=0.3, window=None, soft_cap=None, query_valid=None):
    """Output and log-normaliser of the kernel, as NumPy."""
    valid = case.query_valid if query_valid is None else query_valid
    arrays = map(jnp.asarray, (case.query, case.positions, valid))
    results = attend(*arrays, case.pool, scale, window, soft_cap)
    return tuple(np.asarray(result) for result in results)


def _wrong_ids(case):
    """The case with ids out of range in some places, and with those places unmapped."""
    units, num_pages = np.asarray(case.pool.units), case.pool.key["codes"].shape[0]
    strange = [-1, num_pages, num_pages + 1, 2**31 - 1, -(2**31), 1 << 20, -(1 << 20)]
    random = np.random.default_rng(5)
    hit = random.random(units.shape) < 0.5
    wrong = np.where(hit, random.choice(strange, units.shape), units).astype(np.int32)
    unmapped = np.where(hit, num_pages, units).astype(np.int32)
    pools = (dataclasses.replace(case.pool, units=jnp.asarray(ids)) for ids in (wrong, unmapped))
    return tuple(dataclasses.replace(case, pool=pool) for pool in pools)


def main():
    """Wrong ids, lengths and positions in pools of every storage."""
    for storage in ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4"):
        for page_size, head_dim, groups in ((1, 6, 1), (7, 16, 7), (16, 64, 3), (128, 34, 2)):
            case = make_case(
                [0, 1, 77, 130], 5, 2, groups, head_dim, page_size, storage, seed=page_size
            )
            wrong, unmapped = (run(it) for it in _wrong_ids(case))
            for one, other in zip(wrong, unmapped, strict=True):
                np.testing.assert_array_equal(one, other)
            capacity = case.pool.units.shape[1] * page_size
            for lengths in ([capacity] * 4, [capacity + 1, 2**31 - 1, -1, -(2**31)]):
                pool = dataclasses.replace(case.pool, lengths=jnp.asarray(lengths, jnp.int32))
                run(dataclasses.replace(case, pool=pool), window=3)
                for position in (2**31 - 1, 2**31 - 2, -1, -(2**31)):
                    positions = np.full_like(case.positions, position)
                    far = dataclasses.replace(case, pool=pool, positions=positions)
                    for window in (None, 1, 2**31 - 1):
                        run(far, window=window)
    print("nothing was read outside a pool")


if __name__ == "__main__":
    sys.exit(main())
