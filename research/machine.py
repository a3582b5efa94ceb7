"""What this machine can do, measured through JAX: bytes read and products computed, a second.

A limit is what the fastest of several programs sustains, each named by what does the work. XLA's
`dot` need not be the best that a CPU can do; kvlab's own kernel for linear layers is measured
beside it where there is one (`KERNEL_PROBES`), and counts where it is faster.
"""

import dataclasses
import functools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.ops.cpu_kernels import library
from kvlab.ops.linear import linear
from kvlab.ops.packed_weight import PackedWeight, best_implementation, pack
from kvlab.research.devices import Device

NAME = "this machine"
BANDWIDTH = "bandwidth"
LIMITS = {
    BANDWIDTH: "reads of memory",
    "float32_flops": "float32 products",
    "flops": "bfloat16 products",
    "int8_flops": "int8 products",
}
"""What is measured, by the field of `Device`, in words."""

_READ_BYTES = 2**30  # far more than a last-level cache holds
_SHARE_OF_MEMORY = 16
_LEAST_CALL_S = 0.02  # a product is enlarged until it takes as long
_SAMPLE_S = 0.05
_SIZES = tuple(2**power for power in range(8, 15))
_KERNEL_SIZES = _SIZES[:3]  # as large as weights of a layer, which it is made for
_HIGHEST = jax.lax.Precision.HIGHEST
_CGROUP_LIMITS = (
    pathlib.Path("/sys/fs/cgroup/memory.max"),
    pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclasses.dataclass(frozen=True)
class Work:
    """A known amount of work, ready to run.

    Attributes:
      run: does it once; what it returns is waited for.
      amount: bytes read, or operations.
      size: rows of the (square) matrices, or bytes of the array.
    """

    run: Callable[[], Any]
    amount: float
    size: int


@dataclasses.dataclass(frozen=True)
class Probe:
    """One way to measure a limit.

    Attributes:
      limit: one of `LIMITS`.
      by: what does the work, in a few words.
      prepare: from bytes of memory to the work.
    """

    limit: str
    by: str
    prepare: Callable[[float], Work]


def _columns(memory: float, multiple: int = 1) -> int:
    """How many columns of 1,024 float32 the memory lets a matrix have; at least `multiple`."""
    nbytes = min(_READ_BYTES, int(memory) // _SHARE_OF_MEMORY)
    return max(nbytes // (4096 * multiple), 1) * multiple


def _array_of(memory: float) -> jax.Array:
    """Ones, [1024, n] float32, as large as the memory lets it be."""
    return jnp.ones((1024, _columns(memory)), jnp.float32)


def _row_sums(memory: float) -> Work:
    array = _array_of(memory)
    run = jax.jit(lambda x: x.sum(axis=1))
    return Work(lambda: run(array), array.nbytes, array.nbytes)


def _matrix_vector(memory: float) -> Work:
    array = _array_of(memory)
    vector = jnp.ones(array.shape[1], jnp.float32)
    run = jax.jit(lambda x, v: jnp.dot(x, v, precision=_HIGHEST))
    return Work(lambda: run(array, vector), array.nbytes, array.nbytes)


def _vector_matrix(memory: float) -> Work:
    array = _array_of(memory)
    vector = jnp.ones(array.shape[0], jnp.float32)
    run = jax.jit(lambda x, v: jnp.dot(v, x, precision=_HIGHEST))
    return Work(lambda: run(array, vector), array.nbytes, array.nbytes)


def _kernel_vector_matrix(memory: float) -> Work:
    """As `_vector_matrix`; the panels are made in place, for packing would copy them twice."""
    lanes = library.load().KvlabLanes()
    count = _columns(memory, lanes)
    panels = jnp.ones((count // lanes, 1024, lanes), jnp.float32)
    none = jnp.zeros(0, jnp.float16)
    weight = PackedWeight(panels, none, (1024, count), "float32", "cpu")
    vector = jnp.ones((1, 1024), jnp.float32)
    run = jax.jit(linear)
    return Work(lambda: run(vector, weight), panels.nbytes, panels.nbytes)


def _enlarged(
    product: Callable[[int], Callable[[], Any]], sizes: Sequence[int], memory: float
) -> Work:
    """Products of square matrices, enlarged until one takes long enough to be timed."""
    fitting = [n for n in sizes if 12 * n * n <= memory / _SHARE_OF_MEMORY]
    work = None
    for n in fitting or sizes[:1]:
        work = Work(product(n), 2.0 * n**3, n)
        jax.block_until_ready(work.run())
        if _seconds(work, 1) >= _LEAST_CALL_S:
            break
    assert work is not None
    return work


def _kernel_product(dtype: str) -> Callable[[float], Work]:
    run = jax.jit(linear)

    def product(n: int) -> Callable[[], Any]:
        weight = pack(np.ones((n, n), np.float32), dtype, "cpu")
        return functools.partial(run, jnp.ones((n, n), dtype), weight)

    return lambda memory: _enlarged(product, _KERNEL_SIZES, memory)


def _dot(stored: str, operands: str, sums: str) -> Callable[[float], Work]:
    @jax.jit
    def product(x: jax.Array) -> jax.Array:
        widened = x.astype(operands)
        precision = _HIGHEST if operands == "float32" else None
        return jnp.dot(
            widened, widened, precision=precision, preferred_element_type=jnp.dtype(sums)
        )

    def of_ones(n: int) -> Callable[[], Any]:
        return functools.partial(product, jnp.ones((n, n), stored))

    return lambda memory: _enlarged(of_ones, _SIZES, memory)


PROBES = (
    Probe(BANDWIDTH, "sums of a matrix's rows", _row_sums),
    Probe(BANDWIDTH, "a matrix times a vector", _matrix_vector),
    Probe(BANDWIDTH, "a vector times a matrix", _vector_matrix),
    Probe("float32_flops", "XLA's dot", _dot("float32", "float32", "float32")),
    Probe("flops", "XLA's dot", _dot("bfloat16", "bfloat16", "float32")),
    Probe("flops", "XLA's dot, widened to float32", _dot("bfloat16", "float32", "float32")),
    Probe("int8_flops", "XLA's dot", _dot("int8", "int8", "int32")),
)
"""Ways to measure a limit on any machine."""
KERNEL_PROBES = (
    Probe(BANDWIDTH, "a vector times packed weights, by kvlab's kernel", _kernel_vector_matrix),
    Probe("float32_flops", "kvlab's kernel", _kernel_product("float32")),
    Probe("flops", "kvlab's kernel", _kernel_product("bfloat16")),
)
"""More of them where kvlab's kernel for CPU serves."""


def probes() -> tuple[Probe, ...]:
    """Every way to measure a limit that this machine has."""
    return (*PROBES, *KERNEL_PROBES) if best_implementation() == "cpu" else PROBES


def measure(probe: Probe, memory: float, repeats: int) -> tuple[list[float], int]:
    """Runs a probe.

    Args:
      probe: what to run.
      memory: bytes that there are.
      repeats: samples to take, after a warm-up.

    Returns:
      Bytes or operations a second of each sample, and the size of the work.
    """
    work = probe.prepare(memory)
    jax.block_until_ready(work.run())
    calls = min(max(math.ceil(_SAMPLE_S / max(_seconds(work, 1), 1e-9)), 1), 64)
    return [calls * work.amount / _seconds(work, calls) for _ in range(repeats)], work.size


def _seconds(work: Work, calls: int) -> float:
    """Seconds of some calls, which wait on the device for each other."""
    began = time.perf_counter()
    result = None
    for _ in range(calls):
        result = work.run()
    jax.block_until_ready(result)
    return time.perf_counter() - began


def memory_bytes() -> float:
    """Memory that programs get: of the first device, or of the host where that is the CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for path in _CGROUP_LIMITS:
        written = path.read_text().strip() if path.exists() else "max"
        if written.isdigit():
            limits.append(float(written))
    return min(limits)


def machine(limits: Iterable[tuple[str, float]], memory: float) -> Device:
    """The machine as a device: of each limit the fastest probe.

    Args:
      limits: name of the limit, and bytes or operations a second; of a limit there may be several.
      memory: bytes.

    Raises:
      ValueError: no bandwidth or no peak was measured.
    """
    best: dict[str, float] = {}
    for name, value in limits:
        best[name] = max(value, best.get(name, 0.0))
    if BANDWIDTH not in best:
        raise ValueError("the bandwidth of this machine's memory could not be measured")
    return Device(
        NAME,
        best.get("flops"),
        best[BANDWIDTH],
        memory,
        best.get("float32_flops"),
        best.get("int8_flops"),
    )
