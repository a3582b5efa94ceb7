"""Norms against float64, in the dtypes and ranges where a careless one breaks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops import norms

rms_norm = jax.jit(norms.rms_norm, static_argnames=("epsilon", "scale_offset"))
layer_norm = jax.jit(norms.layer_norm, static_argnames="epsilon")

WIDTH = 37
EPSILON = 1e-5


def reference_rms(x, scale, epsilon, offset=0.0):
    x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * (offset + scale)


def reference_layer(x, scale, bias, epsilon):
    x, scale, bias = (np.asarray(a, np.float64) for a in (x, scale, bias))
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(centred**2, axis=-1, keepdims=True)
    return centred / np.sqrt(variance + epsilon) * scale + bias


def drawn(*shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values.astype(np.float32))


@pytest.mark.parametrize("shape", [(WIDTH,), (5, WIDTH), (2, 3, WIDTH), (2, 3, 5, WIDTH)])
def test_any_number_of_leading_axes(shape):
    x, scale, bias = 3 * drawn(*shape), drawn(WIDTH, seed=1), drawn(WIDTH, seed=2)
    np.testing.assert_allclose(
        rms_norm(x, scale, EPSILON), reference_rms(x, scale, EPSILON), rtol=2e-6, atol=1e-6
    )
    np.testing.assert_allclose(
        layer_norm(x, scale, bias, EPSILON),
        reference_layer(x, scale, bias, EPSILON),
        rtol=2e-6,
        atol=2e-6,
    )


def test_scale_offset_is_gemma_s():
    x, scale = drawn(5, WIDTH), 0.1 * drawn(WIDTH, seed=1)
    ours = rms_norm(x, scale, EPSILON, scale_offset=1.0)
    np.testing.assert_allclose(ours, reference_rms(x, scale, EPSILON, 1.0), rtol=2e-6, atol=1e-6)
    unscaled = rms_norm(x, jnp.zeros(WIDTH), EPSILON, scale_offset=1.0)
    assert np.mean(np.square(unscaled)) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_comes_back_rounded_once(dtype):
    x = (50 * drawn(5, 257)).astype(dtype)
    scale, bias = drawn(257, seed=1).astype(dtype), drawn(257, seed=2).astype(dtype)
    wide = [a.astype(jnp.float32) for a in (x, scale, bias)]
    ours = rms_norm(x, scale, EPSILON), layer_norm(x, scale, bias, EPSILON)
    wanted = rms_norm(*wide[:2], EPSILON), layer_norm(*wide, EPSILON)
    for half, single in zip(ours, wanted, strict=True):
        assert half.dtype == dtype
        np.testing.assert_array_equal(np.asarray(half), np.asarray(single.astype(dtype)))


def test_float16_squares_do_not_overflow():
    x = jnp.full((1, 3), 1000, jnp.float16)  # 1000 ** 2 is above the largest float16
    np.testing.assert_allclose(rms_norm(x, jnp.ones(3, jnp.float16), EPSILON), 1, rtol=1e-3)


def test_variance_survives_a_large_mean():
    x = 10_000 + drawn(3, WIDTH)
    ours = layer_norm(x, jnp.ones(WIDTH), jnp.zeros(WIDTH), EPSILON)
    wanted = reference_layer(x, np.ones(WIDTH), np.zeros(WIDTH), EPSILON)
    np.testing.assert_allclose(ours, wanted, atol=2e-3)


def test_epsilon_keeps_zeros_finite_and_counts():
    zeros = jnp.zeros((2, WIDTH))
    scale, bias = jnp.ones(WIDTH), drawn(WIDTH)
    np.testing.assert_array_equal(np.asarray(rms_norm(zeros, scale, EPSILON)), zeros)
    np.testing.assert_array_equal(
        np.asarray(layer_norm(zeros, scale, bias, EPSILON)), np.tile(bias, (2, 1))
    )
    ones = jnp.ones((1, WIDTH))
    np.testing.assert_allclose(rms_norm(ones, scale, 3.0), 0.5, rtol=1e-6)


def test_a_row_has_the_same_bits_in_any_slot():
    x, scale, bias = drawn(13, 3, 577), drawn(577, seed=1), drawn(577, seed=2)
    order = np.random.default_rng(0).permutation(13)
    for norm in (
        jax.jit(lambda x: rms_norm(x, scale, EPSILON)),
        jax.jit(lambda x: layer_norm(x, scale, bias, EPSILON)),
    ):
        np.testing.assert_array_equal(np.asarray(norm(x[order])), np.asarray(norm(x))[order])
