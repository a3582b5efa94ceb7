"""The kernel for linear layers beside XLA's dot and the machine's limits.

    python benchmarks/cpu_linear.py [formats] [rows]
    python benchmarks/cpu_linear.py float32,int8 1,8,32,256,512

SmolLM2-135M's shapes, the weights of all its layers one after another, so that they come from
memory as in a model. A limit is bytes of weights over the measured bandwidth or operations over the
measured float32 peak, whichever takes longer. Medians with their range, interleaved.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.ops.cpu_kernels import library
from kvlab.ops.linear import linear
from kvlab.ops.packed_weight import pack

SHAPES = {  # [D_in, D_out] and how many of it the model has
    "query, output": (576, 576, 60),
    "key, value": (576, 192, 60),
    "gate, up": (576, 1536, 60),
    "down": (1536, 576, 30),
    "head": (576, 49152, 1),
}
SECONDS = 0.5  # for one way of a row, at least
ROUNDS = 5


@jax.jit
def products(x, weights):
    """Multiplies x by each weight."""
    return [linear(x, weight) for weight in weights]


def limits() -> tuple[float, float]:
    """Bytes and float32 operations a second of all cores, measured."""
    source = pathlib.Path(__file__).with_name("machine_limits.cc")
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/limits"
        kernels = pathlib.Path(library.__file__).parent  # vectors.h
        flags = ["-O3", "-march=native", "-std=c++17", "-pthread", f"-I{kernels}"]
        subprocess.run([os.environ.get("CXX", "c++"), *flags, source, "-o", program], check=True)
        cores = str(len(os.sched_getaffinity(0)))
        printed = subprocess.run([program, cores], check=True, capture_output=True, text=True)
    _, bandwidth, operations = map(float, printed.stdout.split())
    print(f"limits: {bandwidth:.1f} GB/s, {operations:.0f} GFLOP/s, {cores} cores")
    return bandwidth * 1e9, operations * 1e9


def measured(ways, x):
    """Seconds of each way, interleaved, in ROUNDS samples."""
    samples = {name: [] for name in ways}
    for weights in ways.values():
        jax.block_until_ready(products(x, weights))
    for _ in range(ROUNDS):
        for name, weights in ways.items():
            calls, began = 0, time.perf_counter()
            while (passed := time.perf_counter() - began) < SECONDS / ROUNDS or not calls:
                jax.block_until_ready(products(x, weights))
                calls += 1
            samples[name].append((time.perf_counter() - began) / calls)
            del passed
    return samples


def main() -> None:
    """Prints one line a shape, number of rows and way."""
    formats = (sys.argv[1] if len(sys.argv) > 1 else "float32").split(",")
    rows = (sys.argv[2] if len(sys.argv) > 2 else "1,8,32,256,512").split(",")
    bandwidth, peak = limits()
    generator = np.random.default_rng(0)
    totals: dict = {}
    for shape, (length, count, number) in SHAPES.items():
        plain = [
            jnp.asarray(generator.standard_normal((length, count), np.float32))
            for _ in range(number)
        ]
        ways: dict = {"XLA": plain}
        ways |= {name: [pack(weight, name) for weight in plain] for name in formats}
        for m in map(int, rows):
            x = jnp.asarray(generator.standard_normal((m, length), np.float32))
            for name, times in measured(ways, x).items():
                moved = sum(weight.nbytes for weight in ways[name])
                limit = max(moved / bandwidth, 2 * m * length * count * number / peak)
                line = [1e3 * statistics.median(times), 1e3 * limit]
                totals.setdefault((m, name), []).append(line)
                print(
                    f"{shape:14} m {m:4} {name:9} {line[0]:8.2f} ms "
                    f"[{1e3 * min(times):.2f}-{1e3 * max(times):.2f}], limit {line[1]:.2f}, "
                    f"{line[1] / line[0]:.0%}",
                    flush=True,
                )
    for (m, name), lines in totals.items():
        median, limit = map(sum, zip(*lines, strict=True))
        shares = f"limit {limit:.2f}, {limit / median:.0%}"
        print(f"{'all':14} m {m:4} {name:9} {median:8.2f} ms, {shares}")


if __name__ == "__main__":
    main()
