"""Is attention right on this device, and how fast? Every implementation: first checked, then timed.

    python benchmarks/accelerator.py
    python benchmarks/accelerator.py --tokens 96 --batch 3 --chunk 32 --rounds 3  # small: a CPU

A case is decode (a query a row) or prefill (a chunk of queries a row) over ragged rows in pages,
the last one empty: MHA, GQA and MQA, several storages, a window, a soft cap. An implementation that
cannot serve a case says why; one that leaves this phase to XLA says so. Outputs are compared with
the formula in float32 on the numbers that the cache holds. Then whole steps (write, then attend)
are timed, the implementations interleaved: medians with their range. The limit is the larger of the
bytes of keys and values at the bandwidth and of the operations at the peak: the data sheet's where
`kvlab.research.devices` has the device, else measured here. Exits 1 when a check fails.

`--interpret` runs Pallas kernels step by step on any backend: a check of numbers, never of time.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.ops import jax_kernels
from kvlab.ops.attention import AttentionOptions
from kvlab.ops.caches.head_major import HeadMajorPages
from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.caches.protocol import Step
from kvlab.ops.cpu_kernels.library import UnavailableError
from kvlab.ops.implementations import IMPLEMENTATIONS
from kvlab.ops.page_table import PageTable
from kvlab.research.devices import DEVICES, Device
from kvlab.research.machine import PROBES, machine, measure, memory_bytes

HEADS = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}  # N, K
STORAGES = ("float32", "bfloat16", "int8")
PRESETS = {  # words of what JAX calls a device, in order
    "H200": "H200-141GB",
    "H100": "H100-80GB",
    "A100 SXM4 40GB": "A100-40GB",
    "A100 SXM4 80GB": "A100-80GB",
    "RTX A6000": "A6000",
    "L4": "L4-24GB",
    "TPU v5 lite": "TPU-v5e",
    "TPU v5e": "TPU-v5e",
    "TPU v5p": "TPU-v5p",
    "TPU v5": "TPU-v5p",
    "TPU v6 lite": "TPU-v6e",
    "TPU v6e": "TPU-v6e",
}
TOLERANCES = {"float32": 2e-5, "bfloat16": 2**-6}  # of the largest output


_MOST = 1 << 20  # of any size


@dataclasses.dataclass(frozen=True)
class Case:
    """One step of one layer.

    Attributes:
      heads: a name of `HEADS`.
      storage: of keys and values.
      dtype: of the queries.
      queries: a row (T).
      window: of attention.
      soft_cap: of attention.
    """

    heads: str
    storage: str
    dtype: str
    queries: int
    window: int | None = None
    soft_cap: float | None = None

    def __str__(self) -> str:
        phase = "decode" if self.queries == 1 else "prefill"
        extras = f" window {self.window}" if self.window else ""
        extras += f" soft cap {self.soft_cap:g}" if self.soft_cap else ""
        return f"{phase} {self.heads} {self.storage}/{self.dtype}{extras}"


def cases(chunk: int) -> list[Case]:
    """Both phases of every kind of heads and storage, and each feature once."""
    found = []
    for queries in (1, chunk):
        for storage in STORAGES:
            dtype = "float32" if storage == "float32" else "bfloat16"
            found += [Case(heads, storage, dtype, queries) for heads in HEADS]
        found.append(Case("gqa", "bfloat16", "bfloat16", queries, window=50))
        found.append(Case("gqa", "bfloat16", "bfloat16", queries, soft_cap=20.0))
    return found


@functools.partial(jax.jit, static_argnames="options", donate_argnames="cache")
def attend(arrays, step, cache, table, options):
    """One step of a layer: writes, then attends."""
    return cache.attend(*arrays, step, table, options)


@dataclasses.dataclass
class Layer:
    """A case's cache and step for one implementation; `run` is one step of it."""

    case: Case
    implementation: str
    sizes: argparse.Namespace

    def __post_init__(self) -> None:
        """Fills the cache with the same numbers whatever the implementation."""
        case, sizes = self.case, self.sizes
        _, num_kv_heads = HEADS[case.heads]
        per_row = -(-sizes.tokens // sizes.page_size)
        num_pages = sizes.batch * per_row + 1
        lengths = self.lengths()
        random = np.random.default_rng(0)
        pages = random.permutation(num_pages)[: sizes.batch * per_row].reshape(-1, per_row)
        mapped = np.arange(per_row)[None] * sizes.page_size < lengths[:, None]
        pages = np.where(mapped, pages, num_pages).astype(np.int32)
        table = PageTable.init(sizes.batch, num_pages, sizes.page_size, per_row)
        self.table = dataclasses.replace(
            table, page_indices=jnp.asarray(pages), lengths=jnp.asarray(lengths)
        )
        paged = self.implementation in jax_kernels.PAGED and case.storage == "bfloat16"
        kind = HeadMajorPages if paged else PagedCache
        cache = kind.init(num_pages, sizes.page_size, num_kv_heads, sizes.head_dim, case.storage)
        filling = self.step(np.minimum(lengths, sizes.tokens), sizes.tokens)
        self.cache = cache.write(*self.drawn(sizes.tokens, 1)[1:], filling, self.table)
        self.now = self.step(np.minimum(lengths, case.queries), case.queries)
        self.arrays = self.drawn(case.queries, 2)

    def lengths(self) -> np.ndarray:
        """Ragged rows: the longest first, the last one empty."""
        shares = np.linspace(1.0, 0.3, self.sizes.batch)
        lengths = np.maximum(self.sizes.tokens * shares, 1).astype(np.int32)
        lengths[-1] = 0 if self.sizes.batch > 1 else lengths[-1]
        return lengths

    def step(self, counts: np.ndarray, tokens: int) -> Step:
        """The last `counts` tokens of each row."""
        places = np.arange(tokens, dtype=np.int32)[None]
        valid = places < counts[:, None]
        positions = np.where(valid, (self.lengths() - counts)[:, None] + places, 0)
        return Step(jnp.asarray(positions, jnp.int32), jnp.asarray(valid), jnp.asarray(valid))

    def drawn(self, tokens: int, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value of some tokens."""
        num_heads, num_kv_heads = HEADS[self.case.heads]
        keys = jax.random.split(jax.random.key(seed), 3)
        query, key, value = (
            jax.random.normal(part, (self.sizes.batch, tokens, heads, self.sizes.head_dim))
            for part, heads in zip(keys, (num_heads, num_kv_heads, num_kv_heads), strict=True)
        )
        return tuple(array.astype(self.case.dtype) for array in (query, key, value))

    def run(self) -> jax.Array:
        """The output of the step; done again it writes the same and gives the same."""
        case = self.case
        scale = self.sizes.head_dim**-0.5
        options = AttentionOptions(scale, case.window, case.soft_cap, self.implementation)
        output, self.cache = attend(self.arrays, self.now, self.cache, self.table, options)
        return output

    def reference(self) -> np.ndarray:
        """The formula in float32, on what the cache holds."""
        options = AttentionOptions(
            self.sizes.head_dim**-0.5, self.case.window, self.case.soft_cap, "reference"
        )
        query, key, value = self.arrays
        arrays = (query.astype(jnp.float32), key, value)
        output, self.cache = attend(arrays, self.now, self.cache, self.table, options)
        return np.asarray(output, np.float64)

    def work(self) -> tuple[float, float]:
        """Bytes of keys and values that a step must read, and its operations."""
        queries, window = self.case.queries, self.case.window or self.sizes.tokens
        lengths = self.lengths().astype(np.int64)
        seen = [
            min(position + 1, window)
            for length in lengths
            for position in range(max(length - queries, 0), length)
        ]
        read = np.minimum(lengths, window + queries - 1).sum()
        stored = self.cache.nbytes() / self.cache.num_slots
        num_heads, _ = HEADS[self.case.heads]
        return float(stored * read), 4.0 * sum(seen) * num_heads * self.sizes.head_dim


def checked(case: Case, sizes: argparse.Namespace) -> Iterator[tuple[str, Layer | str, float]]:
    """Of each implementation its layer, or why it cannot serve; and the error, or infinity."""
    expected = Layer(case, "reference", sizes).reference()
    for name in IMPLEMENTATIONS:
        layer = Layer(case, name, sizes)
        try:
            output = np.asarray(layer.run(), np.float64)
        except (ValueError, UnavailableError) as reason:
            yield name, str(reason).partition("cannot serve: ")[2] or str(reason), float("nan")
            continue
        except Exception as failure:  # of a compiler or a device: the others are still to be seen
            yield name, f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}", math.inf
            continue
        error = np.abs(output - expected).max() / np.abs(expected).max()
        yield name, layer, float(error)


def timed(layers: dict[str, Layer], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each layer's step, interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():
            began = time.perf_counter()
            layer.run().block_until_ready()
            samples[name].append(1e3 * (time.perf_counter() - began))
    return samples


def this_device() -> tuple[str, Device]:
    """What the device is called, and its limits."""
    kind = jax.local_devices()[0].device_kind
    for part, preset in PRESETS.items():
        if f" {part} " in f" {kind.replace('-', ' ')} ":
            return f"{kind}, limits of the data sheet ({preset})", DEVICES[preset]
    memory = memory_bytes()
    limits = [(probe.limit, max(measure(probe, memory, 3)[0])) for probe in PROBES]
    return f"{kind}, limits measured here", machine(limits, memory)


def report(
    case: Case, sizes: argparse.Namespace, device: Device, refusals: dict[str, list[str]]
) -> bool:
    """Prints a case's rows and notes who cannot serve it; whether all that serve are right."""
    layers, rows = {}, {}
    for name, layer, error in checked(case, sizes):
        if isinstance(layer, str) and error == math.inf:
            rows[name] = f"WRONG {layer}"
            continue
        if isinstance(layer, str):
            refusals.setdefault(f"{name}: {layer}", []).append(str(case))
            continue
        verdict = "ok" if error <= TOLERANCES[case.dtype] else "WRONG"  # NaN is wrong
        rows[name] = f"{error:10.1e} {verdict:5}"
        layers[name] = layer
    moved, operations = layers["reference"].work()
    try:
        limit = 1e3 * device.seconds(operations, moved, case.dtype)
    except ValueError:  # no peak is known
        limit = float("nan")
    print(f"{case}: {moved / 1e6:.3g} MB, {operations / 1e9:.3g} GFLOP, limit {limit:.4f} ms")
    for name in rows.keys() - layers.keys():
        print(f"  {name:10}{rows[name]}")
    for name, times in timed(layers, sizes.rounds).items():
        low, middle, high = (f(times) for f in (min, statistics.median, max))
        spread = f"[{low:.3f}-{high:.3f}]"
        by_xla = name in jax_kernels.BACKENDS and (
            (case.queries == 1) != (name in jax_kernels.PAGED)
        )
        note = " by XLA" if by_xla else ""
        print(f"  {name:10}{rows[name]} {middle:9.3f} {spread:19}{limit / middle:8.3f}{note}")
    sys.stdout.flush()
    return not any("WRONG" in row for row in rows.values())


def _whole(written: str) -> int:
    number = int(written)
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"{written} given; want a whole number, 1 to {_MOST}")
    return number


def arguments() -> argparse.Namespace:
    """The sizes, from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value in (
        ("batch", 16),
        ("tokens", 2048),
        ("chunk", 256),
        ("head_dim", 128),
        ("page_size", 16),
        ("rounds", 15),
    ):
        parser.add_argument(f"--{name}", type=_whole, default=value)
    parser.add_argument("--interpret", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Prints what the device is, then every case."""
    sizes = arguments()
    name, device = this_device()
    print(
        f"{jax.default_backend()}: {name}; {device.bandwidth / 1e9:.0f} GB/s; jax {jax.__version__}"
    )
    print(", ".join(f"{key} {value}" for key, value in vars(sizes).items()))
    print("  by             error       median ms, range              of the limit")
    refusals: dict[str, list[str]] = {}
    with jax_kernels.interpreted() if sizes.interpret else contextlib.nullcontext():
        every = cases(sizes.chunk)
        wrong = [case for case in every if not report(case, sizes, device, refusals)]
    print("\ncannot serve")
    for reason, refused in refusals.items():
        where = "any case" if len(refused) == len(every) else ", ".join(refused)
        print(f"  {reason}\n    {where}")
    print(f"\n{'WRONG: ' + ', '.join(map(str, wrong)) if wrong else 'all right'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
