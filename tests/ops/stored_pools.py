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


def _any_bytes(storage, page_size, head_dim, groups):
    """A case of arbitrary codes, made without a program of XLA: those take long when watched."""
    random = np.random.default_rng(page_size)
    batch, num_queries, num_kv_heads, num_pages, per_row = 4, 5, 2, 9, 3
    codes = head_dim // 2 if storage == "int4" else head_dim
    dtype = jnp.dtype("uint8" if storage == "int4" else storage)
    heads = num_pages, num_kv_heads

    def stored(shape, scales):
        drawn = random.integers(0, 64, shape).astype(np.float32).astype(dtype)
        part = {"codes": jnp.asarray(drawn)}
        if dtype.itemsize == 1:
            part["scale"] = jnp.asarray(random.random(scales, np.float32))
        return part

    units = random.integers(0, num_pages, (batch, per_row), np.int32)
    lengths = np.int32([0, 1, 2 * page_size, 3 * page_size])
    pool = Pool(
        stored((*heads, codes, page_size), (*heads, 1, page_size)),
        stored((*heads, page_size, codes), (*heads, page_size, 1)),
        storage,
        jnp.asarray(units),
        jnp.asarray(lengths),
    )
    query = random.standard_normal((batch, num_queries, num_kv_heads * groups, head_dim))
    positions = lengths[:, None] + np.arange(-num_queries, 0, dtype=np.int32)[None]
    nothing = np.zeros((0, 0, 0, 0))
    return Case(query.astype(np.float32), positions, pool, nothing, nothing)


def _other_pool(case, **fields):
    fields = {name: jnp.asarray(np.int32(value)) for name, value in fields.items()}
    return dataclasses.replace(case, pool=dataclasses.replace(case.pool, **fields))


def _check_wrong_ids(case):
    """Ids out of range read as unmapped ones do."""
    num_pages = case.pool.key["codes"].shape[0]
    strange = [-1, num_pages, num_pages + 1, 2**31 - 1, -(2**31), 1 << 20, -(1 << 20)]
    random, units = np.random.default_rng(5), np.asarray(case.pool.units)
    hit = random.random(units.shape) < 0.5
    wrong = _other_pool(case, units=np.where(hit, random.choice(strange, units.shape), units))
    unmapped = _other_pool(case, units=np.where(hit, num_pages, units))
    for one, other in zip(run(wrong), run(unmapped), strict=True):
        np.testing.assert_array_equal(one, other)


def main():
    """Wrong ids, lengths and positions in pools of every storage."""
    sizes = ((1, 6, 1), (7, 16, 7), (16, 64, 3), (128, 34, 2))  # page, head, group
    cases = [("float32", size) for size in sizes]
    cases += [(storage, sizes[1]) for storage in ("bfloat16", "int8")]
    cases += [(storage, sizes[3]) for storage in ("float8_e4m3fn", "int4")]
    for storage, size in cases:
        case = _any_bytes(storage, *size)
        _check_wrong_ids(case)
        capacity = case.pool.units.shape[1] * size[0]
        for lengths in ([capacity] * 4, [capacity + 1, 2**31 - 1, -1, -(2**31)]):
            longer = _other_pool(case, lengths=lengths)
            for position in (capacity, 2**31 - 1, 2**31 - 2, -1, -(2**31)):
                positions = np.full_like(case.positions, position)
                for window in (None, 3):
                    valid = np.ones_like(positions, bool)
                    far = dataclasses.replace(longer, positions=positions)
                    run(far, window=window, query_valid=valid)
    print("nothing was read outside a pool")


if __name__ == "__main__":
    sys.exit(main())
