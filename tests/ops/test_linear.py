"""Matrix products: values, the dtype rule, the precision asked for, and token lookup."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.linear import embed, linear, linear_transposed, linears

D_IN, D_OUT, VOCAB = 11, 7, 13


def drawn(*shape, seed=0, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


def in_float64(*arrays):
    return [np.asarray(array.astype(jnp.float32), np.float64) for array in arrays]


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matches_numpy(leading, dtype):
    x, weight, bias = (
        drawn(*leading, D_IN, dtype=dtype),
        drawn(D_IN, D_OUT, seed=1, dtype=dtype),
        drawn(D_OUT, seed=2, dtype=dtype),
    )
    wide_x, wide_weight, wide_bias = in_float64(x, weight, bias)
    rounding = {jnp.float32: 1e-6, jnp.bfloat16: 2.0**-8}[dtype]
    for ours, wanted in (
        (linear(x, weight), wide_x @ wide_weight),
        (linear(x, weight, bias), wide_x @ wide_weight + wide_bias),
        (linear_transposed(x, weight.T), wide_x @ wide_weight),
    ):
        assert ours.dtype == dtype
        assert ours.shape == (*leading, D_OUT)
        (wide,) = in_float64(ours)
        np.testing.assert_allclose(wide, wanted, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_several_weights_give_the_bits_and_derivatives_of_each(dtype):
    x = drawn(2, 3, D_IN, dtype=dtype)
    weights = [drawn(D_IN, width, seed=width) for width in (D_OUT, 5, 1)]
    biases = [drawn(D_OUT), None, drawn(1)]

    def apart(x, weights):
        return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def summed(product):
        return lambda *given: sum((y.astype(jnp.float32) ** 2).sum() for y in product(*given))

    def together(x, weights):
        return linears(x, weights, biases)

    chex.assert_trees_all_equal(together(x, weights), apart(x, weights))
    gradients = [jax.grad(summed(product), (0, 1))(x, weights) for product in (together, apart)]
    chex.assert_trees_all_equal(*gradients)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("product", [linear, lambda x, w: linear_transposed(x, w.T)])
def test_sums_run_in_float32(dtype, product):
    # Counting in bfloat16 stops at 256, in float16 at 2,048.
    length = 4096
    total = product(jnp.ones((1, length), dtype), jnp.ones((length, 1), dtype))
    assert float(total[0, 0]) == length


def test_the_weight_is_cast_to_the_input_and_the_bias_is_added_before_rounding():
    x = jnp.array([[1.0, 1.0]], jnp.bfloat16)
    weight = jnp.array([[1 + 2.0**-12], [0.0]], jnp.float32)  # rounds to 1 in bfloat16
    assert linear(x, weight).dtype == jnp.bfloat16
    assert float(linear(x, weight, jnp.array([-1.0]))[0, 0]) == 0
    # 256 + 1 is 256 in bfloat16: adding -256 after rounding would give 0.
    sums = linear(x, jnp.array([[256.0], [1.0]]), jnp.array([-256.0]))
    assert float(sums[0, 0]) == 1
    wide = linear(x.astype(jnp.float32), weight.astype(jnp.bfloat16))
    assert wide.dtype == jnp.float32


@pytest.mark.parametrize("product", [linear, linear_transposed])
def test_float32_asks_for_the_highest_precision(product):
    def precision_of(dtype, **options):
        x, weight = drawn(3, 5, dtype=dtype), drawn(5, 5, dtype=dtype)
        jaxpr = jax.make_jaxpr(lambda x, w: product(x, w, **options))(x, weight)
        (dot,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
        return dot.params["precision"]

    highest, high = jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH
    assert precision_of(jnp.float32) == (highest, highest)
    assert precision_of(jnp.float32, precision=high) == (high, high)
    assert precision_of(jnp.bfloat16) is None


def test_a_row_has_the_same_bits_in_any_slot():
    order = np.random.default_rng(0).permutation(13)
    x, weight = drawn(13, 1, 97), drawn(97, 193, seed=1)
    for product in (jax.jit(linear), jax.jit(lambda x, w: linear_transposed(x, w.T))):
        straight, moved = product(x, weight), product(x[order], weight)
        np.testing.assert_array_equal(np.asarray(moved), np.asarray(straight)[order])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_embed_looks_rows_up(dtype):
    weight = drawn(VOCAB, D_IN, dtype=dtype)
    tokens = jnp.array([[0, VOCAB - 1, 5], [5, 1, 2]], jnp.int32)
    ours = embed(tokens, weight)
    assert ours.dtype == dtype
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(weight)[np.asarray(tokens)])


def test_embed_shows_ids_that_are_out_of_range():
    tokens = jnp.array([[-1, 3, VOCAB]], jnp.int32)
    rows = np.asarray(embed(tokens, drawn(VOCAB, D_IN)))
    assert np.isnan(rows).all(axis=-1).tolist() == [[True, False, True]]
