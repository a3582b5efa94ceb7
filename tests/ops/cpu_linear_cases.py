"""Products over packed weights against float64, for any build of the kernels.

Run as a program it checks the build that the environment asks for (CXX, CXXFLAGS, NPROC) and prints
its lanes and a digest of all results.
"""

import hashlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvlab.ops.linear import embed, linear, linears
from kvlab.ops.packed_weight import FORMATS, GROUP, best_implementation, pack

ROWS = (1, 3, 8, 32)
MORE_ROWS = (2, 5, 13, 100)
WIDTHS = (83, 7, 16, 53, 3)  # of weights that share x: panels that are whole, that are not, and one
DTYPES = (jnp.float32, jnp.bfloat16)
# Rows, D_in, D_out: one row, tiles of every size, columns and rows of no whole panel or group.
SHAPES = [
    (1, 37, 17),
    (5, 32, 16),
    (11, 257, 47),
    (23, 521, 53),
    (131, 67, 33),
    (251, 300, 7),
]


def drawn(shape, seed=0, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jnp.asarray(values.astype(ml_dtypes.bfloat16) if dtype == jnp.bfloat16 else values)


def wide(array):
    return np.asarray(array).astype(np.float64)


def meant(packed):
    """The numbers a packed weight stands for, [D_in, D_out] float64."""
    panels = np.asarray(packed.panels)
    if packed.format == "bfloat16":
        panels = panels.swapaxes(2, 3)
    elif packed.format == "int4":
        panels = np.stack([panels & 15, panels >> 4], axis=2).astype(np.int8) - 8
    count, lanes = panels.shape[0], packed.panels.shape[2]
    values = panels.reshape(count, -1, lanes).astype(np.float64)
    if packed.scales.size:
        values *= wide(packed.scales).repeat(GROUP, axis=1)
    values = values.transpose(1, 0, 2).reshape(values.shape[1], -1)
    return values[: packed.shape[0], : packed.shape[1]]


def check(shape, weight_format, dtype, implementation=None):
    """Compares one product with float64; returns its bytes."""
    rows, length, count = shape
    x, bias = drawn((rows, length), 1, dtype), drawn(count, 2, dtype)
    packed = pack(np.asarray(drawn((length, count), 3)), weight_format, implementation)
    exact = wide(x) @ meant(packed) + wide(bias)
    scale = np.abs(wide(x)) @ np.abs(meant(packed)) + 1
    rounding = {jnp.float32: 2.0**-20, jnp.bfloat16: 2.0**-8}[dtype]
    ours = linear(x, packed, bias)
    assert ours.dtype == dtype
    assert ours.shape == (rows, count)
    assert (np.abs(wide(ours) - exact) <= rounding * scale).all(), (shape, weight_format)
    return np.asarray(ours).tobytes()


def check_together(length, weight_format, dtype, implementation=None, batches=ROWS):
    """Compares products of one x, made together, with the same made apart; returns their bytes."""
    weights = [
        pack(np.asarray(drawn((length, width), seed)), weight_format, implementation)
        for seed, width in enumerate(WIDTHS)
    ]
    biases = [drawn(width, seed) if seed % 2 else None for seed, width in enumerate(WIDTHS)]
    digest = hashlib.sha256()
    for rows in batches:
        x = drawn((rows, length), rows, dtype)
        for y, weight, bias in zip(linears(x, weights, biases), weights, biases, strict=True):
            assert y.dtype == dtype
            np.testing.assert_array_equal(y, linear(x, weight, bias))
            digest.update(np.asarray(y).tobytes())
    return digest.digest()


def check_embed(weight_format, implementation=None):
    """Compares the columns of a packed weight with what they stand for."""
    packed = pack(np.asarray(drawn((37, 21))), weight_format, implementation)
    tokens = jnp.arange(21, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(wide(embed(tokens, packed))[0], meant(packed).T)


def main() -> None:
    digest = hashlib.sha256()
    for shape in SHAPES:
        for weight_format in FORMATS:
            for dtype in DTYPES:
                digest.update(check(shape, weight_format, dtype))
    for weight_format in FORMATS:
        for dtype in DTYPES:
            digest.update(check_together(331, weight_format, dtype))
    lanes = pack(np.zeros((2, 2), np.float32), "float32").panels.shape[2]
    print(best_implementation(), lanes, digest.hexdigest())


if __name__ == "__main__":
    main()
