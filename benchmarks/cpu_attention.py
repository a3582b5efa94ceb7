"""How far is attention on CPU from the machine's limit? The kernel beside XLA, and both limits.

    python benchmarks/cpu_attention.py

SmolLM2-135M's shape (N 9, K 3, H 64), float32, pages of 16 and of 64. Decode: one query a row over
528 tokens, batch 1, 8 and 32. Prefill: one row of 256 queries over 512 tokens. A call runs as many
layers as make a working set of a model (30 at batch 1), each over a pool of its own, so that a
layer's keys are as cold as in a model; times are per layer, medians with their range, the
implementations interleaved. The limit of a step is the larger of its bytes of keys and values at
the bandwidth measured here (a sum over an array larger than the caches), and of its operations at
the peak measured here (a float32 matrix product).
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.ops.attention import AttentionOptions
from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.caches.protocol import Step
from kvlab.ops.caches.reading import attend_stored
from kvlab.ops.page_table import PageTable
from kvlab.ops.storage import encode

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
ROUNDS = 15
CASES = {"decode 1": (1, 1, 528), "decode 8": (8, 1, 528), "decode 32": (32, 1, 528)}
CASES |= {"prefill 256": (1, 256, 512)}  # rows, queries, tokens stored


@functools.partial(jax.jit, static_argnames="options")
def layers(query, caches, table, step, options):
    """Attention of one step in every layer, each fed by the one before."""
    for cache in caches:
        source = cache.blocks(step, table, table.lengths, options.window)
        output, _ = attend_stored(query, step, NUM_KV_HEADS, options, [source])
        query = query + 1e-3 * output
    return query


def case(
    rows: int, queries: int, tokens: int, page_size: int, storage: str
) -> dict[str, Callable[[], jax.Array]]:
    """Ready calls by implementation; each is one step of all layers."""
    generator = np.random.default_rng(0)
    per_sequence = -(-tokens // page_size)
    num_pages = rows * per_sequence
    pages = generator.permutation(num_pages).reshape(rows, -1).astype(np.int32)
    table = PageTable.init(rows, num_pages, page_size, per_sequence)
    table = jax.tree.map(jnp.asarray, table)
    fields = dict(table.__dict__, page_indices=jnp.asarray(pages))
    table = PageTable(**(fields | {"lengths": jnp.full(rows, tokens, jnp.int32)}))
    positions = np.broadcast_to(
        np.arange(tokens - queries, tokens, dtype=np.int32), (rows, queries)
    )
    valid = jnp.ones((rows, queries), bool)
    step = Step(jnp.asarray(positions), valid, ~valid)

    @jax.jit
    def filled(key):
        cache = PagedCache.init(num_pages, page_size, NUM_KV_HEADS, HEAD_DIM, storage)
        shape = (num_pages * page_size, NUM_KV_HEADS, HEAD_DIM)
        drawn = (jax.random.normal(part, shape) for part in jax.random.split(key))
        slots = jnp.arange(num_pages * page_size, dtype=jnp.int32)
        return cache.set(slots, *(encode(values, storage) for values in drawn))

    caches = [filled(jax.random.key(layer)) for layer in range(max(LAYERS // rows, 4))]
    query = jax.random.normal(jax.random.key(99), (rows, queries, NUM_HEADS, HEAD_DIM))
    calls = {}
    for name in ("cpu", "chunked"):
        options = AttentionOptions(HEAD_DIM**-0.5, implementation=name)
        calls[name] = functools.partial(layers, query, caches, table, step, options=options)
        calls[name]().block_until_ready()
    calls["layers"] = len(caches)
    return calls


def timed(calls: dict[str, Callable[[], jax.Array]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call().block_until_ready()
            samples[name].append(time.perf_counter() - began)
    return samples


def limits() -> tuple[float, float]:
    """Bytes and float32 operations a second of this machine, both threads, best of some."""
    large = jnp.ones((2, 1 << 26), jnp.float32)  # 512 MiB
    total = jax.jit(lambda a: a.sum(axis=1))
    matrix = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    calls = {"sum": functools.partial(total, large), "dot": functools.partial(product, matrix)}
    timed(calls, 2)
    best = {name: min(times) for name, times in timed(calls, 9).items()}
    return large.nbytes / best["sum"], 2 * 2048**3 / best["dot"]


def main() -> None:
    """Prints the limits, then a line for each case."""
    storage = sys.argv[1] if len(sys.argv) > 1 else "float32"
    bandwidth, peak = limits()
    print(f"{bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s; ms a layer, {storage}")
    for page_size in (16, 64):
        for name, (rows, queries, tokens) in CASES.items():
            calls = case(rows, queries, tokens, page_size, storage)
            count = calls.pop("layers")
            width = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "int4": 0.5}
            stored = 2 * rows * tokens * NUM_KV_HEADS * HEAD_DIM * width[storage]
            seen = rows * sum(range(tokens - queries + 1, tokens + 1))
            operations = 4 * seen * NUM_HEADS * HEAD_DIM
            limit = max(stored / bandwidth, operations / peak)
            parts = []
            for implementation, times in timed(calls, ROUNDS).items():
                low, middle, high = (1e3 * f(times) / count for f in (min, statistics.median, max))
                parts.append(f"{implementation} {middle:.3f} [{low:.3f}-{high:.3f}]")
            print(
                f"page {page_size} {name}: {', '.join(parts)}, limit {1e3 * limit:.3f}", flush=True
            )


if __name__ == "__main__":
    main()
