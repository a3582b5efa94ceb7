"""The attention kernel for CPU: against the formula, in its bits, and given what is wrong."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import checkify

from kvlab.ops.attention import AttentionOptions, attention
from kvlab.ops.cpu_kernels import library
from kvlab.ops.cpu_kernels.attention import NOWHERE, Pool, attend, served_pool

HERE = pathlib.Path(__file__).parent
STORAGES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4")
FLOAT32 = 5e-6  # of the largest output; scores reach 20, and a last bit of 20 is 2e-6
LENGTHS = [131, 0, 64, 1, 65, 200]  # around a block of keys, and an empty sequence


@pytest.fixture(scope="class", autouse=True)
def _kernel(request):
    if request.cls is not TestWithoutCompiler and not library.available():
        pytest.skip("there is no C++ compiler")


def assert_close(actual, expected, tolerance=FLOAT32):
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def bits(array):
    return np.asarray(array).view(np.uint32)


def assert_same_bits(actual, expected, message=""):
    np.testing.assert_array_equal(bits(actual), bits(expected), err_msg=message)


# num_queries, num_kv_heads, groups, head_dim, page_size
SHAPES = [
    (1, 1, 1, 14, 1),
    (5, 2, 3, 22, 3),
    (1, 3, 3, 64, 16),
    (7, 3, 1, 10, 16),
    (37, 1, 8, 26, 64),
    (3, 2, 8, 74, 128),
    (1, 2, 3, 80, 48),
    (2, 1, 13, 128, 20),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_its_formula(shape, numpy_attention, stored_pools):
    case = stored_pools.make_case(LENGTHS, *shape)
    output, log_normaliser = stored_pools.run(case)
    assert output.dtype == np.float32
    expected = case.formula(numpy_attention, scale=0.3)
    assert_close(output, expected)
    assert not output[~case.query_valid].any()
    assert not output[1].any()  # no key

    num_queries, num_kv_heads, groups = shape[:3]
    for b, t, k, g in [(0, 0, 0, 0), (5, num_queries - 1, num_kv_heads - 1, groups - 1)]:
        seen = case.positions[b, t] + 1
        query = case.query[b, t, k * groups + g].astype(np.float64)
        scores = 0.3 * case.keys[b, :seen, k] @ query
        expected = np.log(np.sum(np.exp(scores)))
        np.testing.assert_allclose(log_normaliser[b, k, g, t], expected, rtol=1e-6, atol=1e-5)
    assert np.all(log_normaliser[1] < -1e20)


@pytest.mark.parametrize("shape", [(1, 3, 3, 64, 16), (5, 2, 3, 22, 3), (19, 2, 2, 34, 128)])
@pytest.mark.parametrize("storage", STORAGES)
def test_storages_are_read_as_they_decode(storage, shape, numpy_attention, stored_pools):
    case = stored_pools.make_case(LENGTHS, *shape, storage)
    output, _ = stored_pools.run(case)
    assert_close(output, case.formula(numpy_attention, scale=0.3))


def test_every_code_of_float8_reads_as_its_number(stored_pools):
    """All 256 as values: one key a sequence, so that its output is its value."""
    codes = np.arange(256, dtype=np.uint8)
    case = stored_pools.make_case([1] * 16, 1, 1, 1, 16, 16, "float8_e4m3fn")
    value = np.zeros(case.pool.value["codes"].shape, np.uint8)
    units = np.asarray(case.pool.units)[:, 0]
    value[units, 0, 0] = codes.reshape(16, 16)
    stored = {
        "codes": jnp.asarray(value.view(ml_dtypes.float8_e4m3fn)),
        "scale": jnp.ones_like(case.pool.value["scale"]),
    }
    key = {
        "codes": jnp.zeros_like(case.pool.key["codes"]),
        "scale": stored["scale"][:, :, None, :, 0],
    }
    pool = dataclasses.replace(case.pool, key=key, value=stored)
    output, _ = stored_pools.run(dataclasses.replace(case, pool=pool))
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(output.reshape(-1), expected)


@pytest.mark.parametrize(
    ("window", "soft_cap"),
    [(1, None), (5, 3.0), (64, None), (100, 50.0), (1000, None), (None, 3.0)],
)
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_windows_and_soft_caps(window, soft_cap, storage, numpy_attention, stored_pools):
    case = stored_pools.make_case(LENGTHS, 11, 2, 3, 22, 16, storage)
    fields = {"scale": 0.31, "window": window, "soft_cap": soft_cap}
    output, _ = stored_pools.run(case, **fields)
    assert_close(output, case.formula(numpy_attention, **fields))


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_bfloat16_queries(storage, numpy_attention, stored_pools):
    case = stored_pools.make_case(LENGTHS, 5, 2, 3, 26, 16, storage, jnp.bfloat16)
    output, _ = stored_pools.run(case)
    assert output.dtype == jnp.bfloat16
    # Only the output is rounded.
    assert_close(output, case.formula(numpy_attention, scale=0.3), tolerance=2**-8)


def test_queries_that_are_not_valid_give_0_and_change_no_other(stored_pools):
    case = stored_pools.make_case(LENGTHS, 13)
    whole, _ = stored_pools.run(case)
    valid = case.query_valid & (np.random.default_rng(3).random(case.positions.shape) < 0.5)
    part, _ = stored_pools.run(case, query_valid=valid)
    assert not part[~valid].any()
    assert_same_bits(part[valid], whole[valid])


@pytest.mark.parametrize("window", [None, 40])
def test_slots_in_any_order(window, numpy_attention, stored_pools):
    """Positions are told, some slots hold no key: what rings and evicting caches ask."""
    case = stored_pools.make_case([131, 77, 131], 3)
    random = np.random.default_rng(11)
    order = np.stack([random.permutation(131) for _ in range(3)]).astype(np.int32)
    held = random.random(order.shape) < 0.7
    held[0, :70] = False  # a whole block
    held &= case.key_valid
    positions = np.where(held, order, NOWHERE).astype(np.int32)
    query_positions = np.broadcast_to(np.int32([100, 129, 130]), case.positions.shape)
    pool = dataclasses.replace(case.pool, positions=jnp.asarray(positions))
    asked = dataclasses.replace(case, positions=query_positions, pool=pool)
    output, _ = stored_pools.run(asked, window=window)
    arrays = (case.query.astype(np.float64), case.keys, case.values)
    places = (query_positions, order, asked.query_valid, held)
    assert_close(output, numpy_attention(*arrays, *places, scale=0.3, window=window))


def test_nan_in_a_key_that_is_seen_is_not_hidden(stored_pools):
    case = stored_pools.make_case([77, 77], 1)
    keys = np.array(case.pool.key["codes"])
    keys[np.asarray(case.pool.units)[0, 1], 0, 0, 3] = np.nan
    pool = dataclasses.replace(case.pool, key={"codes": jnp.asarray(keys)})
    output, _ = stored_pools.run(dataclasses.replace(case, pool=pool))
    assert np.isnan(output[0, 0, :3]).all()
    assert np.isfinite(output[0, 0, 3:]).all()
    assert np.isfinite(output[1]).all()


class TestBits:
    """What batch invariance and the equality of placements rest on."""

    @pytest.mark.parametrize("storage", ["float32", "int8"])
    def test_page_sizes_agree(self, storage, stored_pools):
        run = functools.partial(stored_pools.make_case, LENGTHS, 5, 2, 3, 22, storage=storage)
        expected = stored_pools.run(run(page_size=64))
        for page_size in (1, 3, 8, 16, 20, 48, 128, 200, 256):
            actual = stored_pools.run(run(page_size=page_size))
            for one, other in zip(actual, expected, strict=True):
                assert_same_bits(one, other, f"page size {page_size}")

    def test_dense_arrays_agree_with_pages(self, stored_pools):
        case = stored_pools.make_case(LENGTHS, 5, head_dim=16)
        batch, most, _, _ = case.keys.shape
        places = np.broadcast_to(np.arange(most, dtype=np.int32), (batch, most))
        arrays = (case.query, case.keys.astype(np.float32), case.values.astype(np.float32))
        masks = (case.query_valid, case.key_valid)
        options = AttentionOptions(0.3, implementation="cpu")
        arguments = (*arrays, case.positions, places, *masks)
        dense = attention(*map(jnp.asarray, arguments), options)
        assert_same_bits(dense, stored_pools.run(case)[0])

    def test_rows_pages_and_neighbours_do_not_matter(self, stored_pools):
        case = stored_pools.make_case(LENGTHS, 5)
        output, _ = stored_pools.run(case)
        order = np.random.default_rng(2).permutation(len(LENGTHS))
        pool = case.pool
        # Other pages: the pool turned round.
        last = pool.key["codes"].shape[0] - 1
        units = np.asarray(pool.units)
        turned = Pool(
            {"codes": pool.key["codes"][::-1]},
            {"codes": pool.value["codes"][::-1]},
            pool.storage,
            jnp.asarray(np.where(units > last, units, last - units)[order]),
            pool.lengths[order],
        )
        other = dataclasses.replace(
            case, query=case.query[order], positions=case.positions[order], pool=turned
        )
        assert_same_bits(stored_pools.run(other)[0], output[order])
        for row in range(len(LENGTHS)):
            pool = dataclasses.replace(
                case.pool,
                units=case.pool.units[row : row + 1],
                lengths=case.pool.lengths[row, None],
            )
            query, positions = case.query[row : row + 1], case.positions[row : row + 1]
            alone = dataclasses.replace(case, query=query, positions=positions, pool=pool)
            assert_same_bits(stored_pools.run(alone)[0], output[row : row + 1])

    # Heads of one row and one vector: a chain of sums with no other beside it.
    @pytest.mark.parametrize("heads", [(), (1, 1, 24)])
    @pytest.mark.parametrize("window", [None, 50])
    def test_how_queries_are_cut_into_calls_does_not_matter(self, window, heads, stored_pools):
        case = stored_pools.make_case([200, 130], 97, *heads)
        output, _ = stored_pools.run(case, window=window)
        for begin, end in [(0, 1), (1, 2), (2, 31), (31, 96), (96, 97)]:
            query, positions = case.query[:, begin:end], case.positions[:, begin:end]
            # Keys that came later, as far as this call knows.
            lengths = jnp.asarray(positions[:, -1] + 1)
            pool = dataclasses.replace(case.pool, lengths=lengths)
            part = dataclasses.replace(case, query=query, positions=positions, pool=pool)
            assert_same_bits(stored_pools.run(part, window=window)[0], output[:, begin:end])

    def test_repeated_kv_heads_agree_with_shared_ones(self, stored_pools):
        case = stored_pools.make_case(LENGTHS, 3, 2, 7, 16)
        repeat = functools.partial(jnp.repeat, repeats=7, axis=1)
        key, value = (jax.tree.map(repeat, part) for part in (case.pool.key, case.pool.value))
        pool = dataclasses.replace(case.pool, key=key, value=value)
        repeated, _ = stored_pools.run(dataclasses.replace(case, pool=pool))
        assert_same_bits(repeated, stored_pools.run(case)[0])

    def test_the_number_of_threads_does_not_matter(self):
        script = (
            "import os, sys; sys.path.insert(0, sys.argv[1])\n"
            "if sys.argv[2] == 'one': os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
            "import hashlib, stored_pools\n"
            "output, _ = stored_pools.run(stored_pools.make_case([131, 0, 640, 65], 99))\n"
            "print(hashlib.sha256(output.tobytes()).hexdigest())\n"
        )
        if not hasattr(os, "sched_setaffinity"):
            pytest.skip("threads cannot be limited here")
        hashes = [ran(["-c", script, str(HERE), threads]).stdout for threads in ("one", "all")]
        assert hashes[0] == hashes[1]


def ran(arguments, check=True, **environment):
    """A run of this Python in another process."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr[-2000:]
    return done


class TestWithoutCompiler:
    def test_one_line_is_logged_and_xla_serves(self, tmp_path):
        script = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "import logging; logging.basicConfig()\n"
            "import numpy as np\n"
            "from kvlab.ops import attention\n"
            "from kvlab.ops.cpu_kernels.library import UnavailableError\n"
            "def run(name):\n"
            "    q = np.random.default_rng(0).standard_normal((1, 5, 2, 6)).astype(np.float32)\n"
            "    places, real = np.arange(5, dtype=np.int32)[None], np.ones((1, 5), bool)\n"
            "    options = attention.AttentionOptions(0.3, implementation=name)\n"
            "    return attention.attention(q, q, q, places, places, real, real, options)\n"
            "assert np.array_equal(run(None), run('chunked'))\n"
            "run(None)\n"
            "try: run('cpu')\n"
            "except UnavailableError as error: print(error)\n"
        )
        done = ran(["-c", script, str(HERE)], CXX="/nonexistent/c++", KVLAB_CACHE=str(tmp_path))
        assert done.stderr.count("CPU kernels are off, everything runs through XLA") == 1
        assert "no C++ compiler found (looked for /nonexistent/c++)" in done.stdout

    def test_nothing_is_compiled_before_attention_is_traced(self, tmp_path):
        script = (
            "from kvlab.ops.attention import AttentionOptions\n"
            "import kvlab.models.decoder\n"
            "AttentionOptions(0.3), AttentionOptions(0.3, implementation='cpu')\n"
        )
        ran(["-c", script], KVLAB_CACHE=str(tmp_path))
        assert not list(tmp_path.iterdir())


def test_a_name_that_cannot_serve_says_why():
    half = jnp.zeros((1, 3, 2, 6), jnp.float16)
    places, real = jnp.arange(3, dtype=jnp.int32)[None], jnp.ones((1, 3), bool)
    options = AttentionOptions(0.3, implementation="cpu")
    with pytest.raises(ValueError, match=r"'cpu' cannot serve: .* not float16; use 'chunked'"):
        attention(half, half, half, places, places, real, real, options)


@pytest.mark.parametrize("pools", [[None], [None, None]])
def test_keys_that_are_not_read_as_stored_go_through_xla(pools):
    assert served_pool(pools, jnp.dtype("float32"), must=False) is None
    with pytest.raises(ValueError, match=r"cannot serve: .* not kivi4, nor sinks"):
        served_pool(pools, jnp.dtype("float32"), must=True)


def test_under_checkify(stored_pools):
    case = stored_pools.make_case(LENGTHS, 3)
    arguments = map(jnp.asarray, (case.query, case.positions, case.query_valid))

    @jax.jit
    @checkify.checkify
    def checked(query, positions, valid):
        checkify.check(jnp.all(positions < 1000), "a position is out of range")
        return attend(query, positions, valid, case.pool, 0.3, None, None)[0]

    error, output = checked(*arguments)
    error.throw()
    assert_same_bits(output, stored_pools.run(case)[0])
