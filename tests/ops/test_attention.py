"""All implementations against the formula, and the properties that batch invariance rests on."""

import functools
import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.attention import (
    QUERY_BLOCK,
    READ_BLOCK,
    AttentionOptions,
    Blocks,
    attend_blocks,
    attention,
    block_range,
    check_heads,
)
from kvlab.ops.cpu_kernels import library
from kvlab.ops.implementations import resolve_implementation

B, H = 2, 14
HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (5, 1)}  # N, K
FLOAT32 = 5e-6  # of the largest output; scores reach 20, and a last bit of 20 is 2e-6

attend = jax.jit(attention, static_argnames="options")
# Compiles twice as fast; for comparisons with the formula, not of bits.
unoptimised_attend = jax.jit(
    attention,
    static_argnames="options",
    compiler_options={"xla_backend_optimization_level": 0},
)


@pytest.fixture(params=["reference", "chunked", "cpu"])
def implementation(request):
    if request.param == "cpu" and not library.available():
        pytest.skip("there is no C++ compiler")
    return request.param


def options(**fields):
    return AttentionOptions(**{"scale": H**-0.5, **fields})


def draw(seed, num_queries, num_keys, num_heads, num_kv_heads, dtype=np.float32):
    """Arguments of `attention`: whole texts, the queries being the last positions."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float32).astype(dtype)

    places = np.broadcast_to(np.arange(num_keys, dtype=np.int32), (B, num_keys))
    return (
        2 * normal(B, num_queries, num_heads, H),
        2 * normal(B, num_keys, num_kv_heads, H),
        normal(B, num_keys, num_kv_heads, H),
        places[:, num_keys - num_queries :],
        places,
        np.ones((B, num_queries), bool),
        np.ones((B, num_keys), bool),
    )


def assert_close(actual, expected, tolerance=FLOAT32):
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def bits(array):
    return np.asarray(array).view(np.uint32)


@pytest.mark.parametrize(
    ("heads", "length"),
    [("mha", READ_BLOCK + 1), ("mqa", READ_BLOCK + 1)]
    + [("gqa", n) for n in (1, READ_BLOCK - 1, READ_BLOCK, READ_BLOCK + 1, QUERY_BLOCK + 1)],
)
def test_causal_attention_is_its_formula(heads, length, implementation, numpy_attention):
    arguments = draw(length, length, length, *HEADS[heads])
    output = attend(*arguments, options(implementation=implementation))
    assert output.dtype == jnp.float32
    assert_close(output, numpy_attention(*arguments, scale=H**-0.5))


@pytest.mark.parametrize(
    ("window", "soft_cap"),
    [(1, None), (5, 3.0), (READ_BLOCK, None), (1000, 3.0), (1000, None), (None, 3.0)],
)
def test_scales_windows_and_soft_caps(window, soft_cap, implementation, numpy_attention):
    arguments = draw(2, 139, 139, *HEADS["gqa"])
    fields = {"scale": 0.31, "window": window, "soft_cap": soft_cap}
    output = unoptimised_attend(*arguments, options(**fields, implementation=implementation))
    expected = numpy_attention(*arguments, **fields)
    assert_close(output, expected)
    whole = numpy_attention(*arguments, scale=0.31)
    assert (np.abs(expected - whole).max() > 0.1) == ((window, soft_cap) != (1000, None))


@pytest.mark.parametrize("window", [None, 67])
def test_padding_and_the_last_queries_of_a_text(window, implementation, numpy_attention):
    num_queries, num_keys = 11, 151
    query, key, value, query_positions, key_positions, query_valid, key_valid = draw(
        3, num_queries, num_keys, *HEADS["gqa"]
    )
    query_valid[0, 7:] = False
    key_valid[0, 130:] = False  # padding after the text
    key_valid[1, :71] = False  # and before it: more than a whole block
    key_positions = key_positions - np.array([[0], [71]], np.int32)
    query_positions = query_positions - np.array([[22], [71]], np.int32)
    arguments = (query, key, value, query_positions, key_positions, query_valid, key_valid)
    output = unoptimised_attend(*arguments, options(window=window, implementation=implementation))
    assert_close(output, numpy_attention(*arguments, scale=H**-0.5, window=window))
    assert not np.asarray(output)[~query_valid].any()


def test_a_query_that_sees_no_key_gives_0(implementation, numpy_attention):
    arguments = draw(5, 7, 131, *HEADS["gqa"])
    query_positions, key_valid = arguments[3].copy(), arguments[6]
    key_valid[0] = False  # no key at all
    key_valid[1, :3] = False
    query_positions[1, :2] = 2  # only padding there and before
    arguments = (*arguments[:3], query_positions, *arguments[4:])
    output = np.asarray(unoptimised_attend(*arguments, options(implementation=implementation)))
    assert not output[0].any()
    assert not output[1, :2].any()
    assert_close(output, numpy_attention(*arguments, scale=H**-0.5))


def test_bfloat16_is_as_exact_as_its_inputs(implementation, numpy_attention):
    arguments = draw(7, 73, 73, *HEADS["gqa"], dtype=jnp.bfloat16)
    output = unoptimised_attend(*arguments, options(implementation=implementation))
    assert output.dtype == jnp.bfloat16
    # Against the formula on the same rounded inputs. The scaled queries are rounded (2 ** -9 of
    # scores up to 20), then the weights and the output.
    assert_close(output, numpy_attention(*arguments, scale=H**-0.5), tolerance=2**-6)


def test_large_scores_do_not_overflow(implementation, numpy_attention):
    query, *rest = draw(13, 139, 139, *HEADS["gqa"])
    arguments = (query * np.float32(1000), *rest)
    output = unoptimised_attend(*arguments, options(implementation=implementation))
    # A score of 10,000 has an error of 1e-3 in float32, and so has the weight that it gives.
    assert_close(output, numpy_attention(*arguments, scale=H**-0.5), tolerance=5e-3)


def test_what_a_padded_key_holds_is_never_seen(implementation):
    arguments = draw(17, 7, 131, *HEADS["gqa"])
    arguments[6][:, 100:] = False
    arguments[6][:, :5] = False
    run = functools.partial(attend, options=options(implementation=implementation))
    clean = run(*arguments)
    key, value = arguments[1].copy(), arguments[2].copy()
    key[~arguments[6]], value[~arguments[6]] = np.nan, np.nan
    poisoned = run(arguments[0], key, value, *arguments[3:])
    np.testing.assert_array_equal(bits(poisoned), bits(clean))
    assert np.isfinite(np.asarray(clean)).all()


class TestBlocks:
    """`attend_blocks`, the loop that dense attention and every cache share."""

    NUM_BLOCKS, BLOCK, T = 7, 11, 3
    N, K = HEADS["gqa"]

    @functools.cached_property
    def arrays(self):
        random = np.random.default_rng(19)

        def normal(*shape):
            return random.standard_normal(shape).astype(np.float32)

        slots = self.NUM_BLOCKS * self.BLOCK
        return (
            normal(B, self.T, self.N, H),
            normal(B, self.K, H, slots),
            normal(B, self.K, slots, H),
        )

    @functools.partial(jax.jit, static_argnums=(0, 6))
    def run(self, query_positions, query_valid, key_valid, first, end, window):
        query, keys, values = map(jnp.asarray, self.arrays)
        places = jnp.arange(self.NUM_BLOCKS * self.BLOCK, dtype=jnp.int32)
        places = jnp.broadcast_to(places, (B, places.size))

        def read_block(index):
            def piece(array, axis):
                start = index * self.BLOCK
                return jax.lax.dynamic_slice_in_dim(array, start, self.BLOCK, axis)

            return piece(keys, 3), piece(values, 2), piece(places, 1), piece(key_valid, 1)

        return attend_blocks(
            query,
            query_positions,
            query_valid,
            self.K,
            [Blocks(read_block, first, end, self.NUM_BLOCKS)],
            options(window=window),
        )[0]

    def given(self, last_positions):
        last = np.asarray(last_positions, np.int32)[:, None]
        positions = last + np.arange(1 - self.T, 1, dtype=np.int32)[None]
        valid = np.ones((B, self.T), bool)
        return positions, valid, np.ones((B, self.NUM_BLOCKS * self.BLOCK), bool)

    def test_a_wholly_masked_block_changes_no_bit(self):
        positions, valid, key_valid = self.given([40, 35])  # blocks 1 to 3 with a window of 20
        exact = self.run(positions, valid, key_valid, 1, 4, 20)
        for first, end in [(0, 4), (1, 7), (0, 7), (1, 5)]:
            wider = self.run(positions, valid, key_valid, first, end, 20)
            np.testing.assert_array_equal(bits(wider), bits(exact), err_msg=f"{first} to {end}")
        assert np.any(bits(self.run(positions, valid, key_valid, 2, 4, 20)) != bits(exact))

    def test_a_row_keeps_its_bits_beside_a_longer_one(self):
        positions, valid, key_valid = self.given([12, 8])
        alone = self.run(positions, valid, key_valid, 0, 2, None)
        positions[1] = [70, 71, 72]
        beside = self.run(positions, valid, key_valid, 0, 7, None)
        np.testing.assert_array_equal(bits(beside[0]), bits(alone[0]))
        assert np.any(bits(beside[1]) != bits(alone[1]))

    def test_an_empty_range_gives_0(self):
        positions, valid, key_valid = self.given([12, 8])
        assert not np.asarray(self.run(positions, ~valid, key_valid, 0, 0, None)).any()

    @pytest.mark.parametrize("window", [None, 1, 20, 100])
    def test_the_range_holds_every_block_that_a_query_sees_and_is_tight(self, window):
        random = np.random.default_rng(23)
        for _ in range(50):
            positions, valid, _ = self.given(random.integers(self.T - 1, 77, B))
            valid[random.random(valid.shape) < 0.4] = False
            age = positions[valid][:, None] - np.arange(77)[None]
            seen = (age >= 0) & (age < (window or 77))
            blocks = np.flatnonzero(seen.any(0).reshape(self.NUM_BLOCKS, self.BLOCK).any(1))
            first, end = block_range(jnp.asarray(positions), jnp.asarray(valid), window, self.BLOCK)
            if blocks.size:
                assert (int(first), int(end)) == (blocks[0], blocks[-1] + 1)
            else:
                assert int(first) == int(end)


def intermediates(jaxpr):
    """Sizes, in elements, of everything that a program computes, inside its loops too."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield math.prod(variable.aval.shape)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from intermediates(inner)


class TestMemory:
    """Chunked attention never holds scores of [T, S]; the reference does."""

    @staticmethod
    def program(implementation, length):
        normal = jnp.zeros((1, length, 1, 2), jnp.float32)
        positions = jnp.zeros((1, length), jnp.int32)
        valid = jnp.ones((1, length), bool)
        arguments = (normal, normal, normal, positions, positions, valid, valid)
        return attend.trace(*arguments, options(implementation=implementation))

    def largest(self, implementation, length):
        return max(intermediates(self.program(implementation, length).jaxpr.jaxpr))

    def test_the_largest_array_of_the_chunked_program_is_linear(self):
        lengths = [1024, 2048, 4096]
        sizes = [self.largest("chunked", length) for length in lengths]
        assert max(sizes) <= max(QUERY_BLOCK * READ_BLOCK, 2 * 4096)
        assert [self.largest("reference", length) for length in lengths] == [
            length**2 for length in lengths
        ]

    def test_compiled_memory_is_linear(self):
        def temporary(length):
            compiled = self.program("chunked", length).lower().compile()
            return compiled.memory_analysis().temp_size_in_bytes

        short, long = temporary(1024), temporary(2048)
        assert long <= 2 * short
        assert long < 4 * 2048**2 / 20  # of what float32 scores would take


class TestErrors:
    def test_an_unknown_implementation_lists_the_legal_ones(self):
        with pytest.raises(ValueError, match=r"'flash' is not known; .*: reference, chunked, cpu"):
            resolve_implementation("flash")
        with pytest.raises(ValueError, match="'flash' is not known"):
            options(implementation="flash")
        assert resolve_implementation(None) == ("cpu" if library.available() else "chunked")
        assert [resolve_implementation(name) for name in ("reference", "chunked")] == [
            "reference",
            "chunked",
        ]

    def test_a_window_holds_a_position(self):
        with pytest.raises(ValueError, match=r"window=0 given: .* at least 1"):
            options(window=0)

    @pytest.mark.parametrize("soft_cap", [0.0, -1.0])
    def test_a_soft_cap_is_above_0(self, soft_cap):
        with pytest.raises(ValueError, match=f"soft_cap={soft_cap} given: it must be above 0"):
            options(soft_cap=soft_cap)

    @pytest.mark.parametrize("num_kv_heads", [0, 4, 12])
    def test_kv_heads_that_do_not_divide_name_those_that_do(self, num_kv_heads):
        with pytest.raises(ValueError, match=f"num_kv_heads={num_kv_heads} .*: 1, 2, 3, 6$"):
            check_heads(6, num_kv_heads)

    def test_attention_itself_refuses_heads_that_do_not_divide(self):
        with pytest.raises(ValueError, match="num_kv_heads=2 does not divide num_heads=5"):
            attend(*draw(0, 3, 3, 5, 2), options())
