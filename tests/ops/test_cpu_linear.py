"""Products over packed weights: values, bits, what quantisation costs, builds of the kernel."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.cpu_kernels import library
from kvlab.ops.linear import embed, linear, linears
from kvlab.ops.packed_weight import FORMATS, GROUP, PackedWeight, pack

CASES = pathlib.Path(__file__).with_name("cpu_linear_cases.py")
IMPLEMENTATIONS = ["xla", "cpu"] if library.available() else ["xla"]
_SPEC = importlib.util.spec_from_file_location("kvlab_cpu_linear_cases", CASES)
cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cases)
needs_kernel = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_matches_numpy(weight_format, dtype, implementation):
    for shape in cases.SHAPES:
        cases.check(shape, weight_format, dtype, implementation)
    cases.check_embed(weight_format, implementation)


@needs_kernel
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(
    "batches",
    [(*range(1, 34), 63, 64, 65, 99), pytest.param(range(1, 101), marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_a_row_has_the_same_bits_in_any_batch(batches, weight_format, dtype):
    # Its tile, its place there and its neighbours change with the number of rows.
    x = cases.drawn((100, 331), dtype=dtype)
    packed = pack(cases.drawn((331, 83), 1), weight_format, "cpu")
    whole, host = np.asarray(linear(x, packed)), np.asarray(x)
    for rows in batches:
        np.testing.assert_array_equal(linear(jnp.asarray(host[-rows:]), packed), whole[-rows:])
    order = np.random.default_rng(0).permutation(100)
    np.testing.assert_array_equal(linear(jnp.asarray(host[order]), packed), whole[order])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(
    "batches", [cases.ROWS, pytest.param(cases.MORE_ROWS, marks=pytest.mark.long)]
)
def test_weights_together_give_the_bits_of_each_alone(
    batches, weight_format, dtype, implementation
):
    for length in (37, 576):  # one block, and three
        cases.check_together(length, weight_format, dtype, implementation, batches)


def lowered(x, weights):
    """The program of products of one x."""
    return jax.jit(lambda x: linears(x, weights, [None] * len(weights))).lower(x).as_text()


@needs_kernel
def test_weights_of_one_format_are_one_call_of_the_kernel():
    x, weight = cases.drawn((2, 33)), cases.drawn((33, 5))
    whole, bytes_ = (pack(weight, name, "cpu") for name in ("float32", "int8"))
    for weights, calls in (
        ([whole, whole, whole], 1),
        ([bytes_, bytes_], 1),
        ([whole, bytes_], 2),
        ([weight, whole], 1),
        ([whole, pack(weight, "float32", "xla")], 1),
        ([weight, weight], 0),
    ):
        assert lowered(x, weights).count("@kvlab_linear(") == calls
        ours = linears(x, weights, [None] * len(weights))
        for y, alone in zip(ours, weights, strict=True):
            np.testing.assert_array_equal(y, linear(x, alone))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_together_over_leading_axes_and_under_vmap(implementation):
    weights = [pack(cases.drawn((11, width), width), "int8", implementation) for width in (7, 20)]
    biases = [cases.drawn(7), None]
    x = cases.drawn((2, 3, 11))
    ours = linears(x, weights, biases)
    assert [y.shape for y in ours] == [(2, 3, 7), (2, 3, 20)]
    assert [y.shape for y in linears(x[:0], weights, biases)] == [(0, 3, 7), (0, 3, 20)]
    mapped = jax.vmap(lambda row: linears(row, weights, biases))(x)
    half = linears(x.astype(jnp.float16), weights, biases)
    for y, rows, narrow in zip(ours, mapped, half, strict=True):
        np.testing.assert_allclose(rows, y, rtol=1e-6, atol=1e-6)
        assert narrow.dtype == jnp.float16
        np.testing.assert_allclose(narrow.astype(jnp.float32), y, atol=2e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_together_that_do_not_fit_are_refused(implementation):
    x, weight = jnp.ones((2, 4)), pack(np.ones((4, 3)), "float32", implementation)
    longer = pack(np.ones((5, 3)), "float32", implementation)
    with pytest.raises(ValueError, match="x has 4 values a row, and the packed weight wants 5"):
        linears(x, [weight, longer], [None, None])
    with pytest.raises(ValueError, match=r"a bias \(1,\) given, and the packed weight has 3"):
        linears(x, [weight, weight], [None, jnp.ones(1)])
    with pytest.raises(ValueError, match="2 weights and 1 biases given"):
        linears(x, [weight, weight], [None])
    with pytest.raises(ValueError, match="0 weights and 0 biases given"):
        linears(x, [], [])


@needs_kernel
@pytest.mark.parametrize("weight_format", ["int8", "int4", "bfloat16"])
def test_a_quantised_product_has_the_bits_of_the_numbers_it_stands_for(weight_format):
    x = cases.drawn((29, 576))
    packed = pack(cases.drawn((576, 67), 1), weight_format, "cpu")
    plain = pack(cases.meant(packed).astype(np.float32), "float32", "cpu")
    for rows in (1, 29):
        np.testing.assert_array_equal(linear(x[:rows], packed), linear(x[:rows], plain))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_what_is_not_finite_stays_in_its_row(weight_format, implementation):
    x = np.array(cases.drawn((30, 45)))
    x[3, 44], x[17, 0] = np.nan, np.inf
    packed = pack(cases.drawn((45, 19), 1), weight_format, implementation)
    finite = np.isfinite(linear(jnp.asarray(x), packed)).all(axis=1)
    assert np.flatnonzero(~finite).tolist() == [3, 17]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows_and_leading_axes(implementation):
    packed = pack(cases.drawn((11, 7), 1), "float32", implementation)
    x = cases.drawn((2, 3, 11))
    assert linear(x[:0], packed).shape == (0, 3, 7)
    ours = linear(x, packed)
    assert ours.shape == (2, 3, 7)
    np.testing.assert_array_equal(ours.reshape(6, 7), linear(x.reshape(6, 11), packed))
    mapped = jax.vmap(lambda row: linear(row, packed))(x)
    np.testing.assert_allclose(mapped, ours, rtol=1e-6, atol=1e-6)
    half = linear(x.astype(jnp.float16), packed)
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(half.astype(jnp.float32), ours, atol=2e-2)


def test_embed_shows_ids_that_are_out_of_range():
    for weight_format in FORMATS:
        packed = pack(cases.drawn((11, 13)), weight_format)
        rows = np.asarray(embed(jnp.array([[-1, 3, 13]], jnp.int32), packed))
        assert np.isnan(rows).all(axis=-1).tolist() == [[True, False, True]]


def test_quantisation_is_as_near_as_its_bits_allow():
    weight = cases.drawn((4 * GROUP, 50))
    exact = cases.wide(weight)
    largest = np.abs(exact.reshape(4, GROUP, 50)).max(axis=1).repeat(GROUP, axis=0)
    distance = np.abs(cases.meant(pack(weight, "int8")) - exact)
    # Half a step, and what float16 takes from a scale.
    assert (distance <= largest / 127 * (0.5 + 2.0**-4)).all()
    assert distance.std() < 0.005
    relative = np.square(cases.meant(pack(weight, "int4")) - exact).mean()
    assert relative < 0.0085  # of a variance of 1
    assert cases.meant(pack(jnp.zeros((40, 3)), "int8")).any() == np.False_
    assert cases.meant(pack(jnp.zeros((40, 3)), "int4")).any() == np.False_


def test_bytes_of_formats():
    weight = cases.drawn((320, 160))
    bits = {name: 8 * pack(weight, name).nbytes / weight.size for name in FORMATS}
    assert bits == {"float32": 32, "bfloat16": 16, "int8": 8.5, "int4": 4.5}


def test_what_cannot_be_packed_is_refused():
    weight = cases.drawn((33, 5))
    with pytest.raises(ValueError, match=r"int3.*legal values: float32, bfloat16, int8, int4"):
        pack(weight, "int3")
    with pytest.raises(ValueError, match="NaN or infinity"):
        pack(weight.at[3, 2].set(jnp.nan), "int8")
    with pytest.raises(ValueError, match="x has 32 values a row"):
        linear(cases.drawn((2, 32)), pack(weight, "float32"))


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
@pytest.mark.parametrize("size", [1e-6, 1e8])
def test_weights_beyond_float16_scales_are_refused(weight_format, size):
    with pytest.raises(ValueError, match=r"beyond float16 .* use weights=float32 or bfloat16"):
        pack(np.full((32, 3), size, np.float32), weight_format, "xla")
    # A group of small values beside others is no fault, nor are zeros alone.
    mixed = np.concatenate([np.full((32, 3), size * 1e-8), np.ones((32, 3))]).astype(np.float32)
    pack(mixed, weight_format, "xla")
    pack(np.zeros((32, 3), np.float32), weight_format, "xla")


def test_what_is_no_weight_is_refused():
    with pytest.raises(ValueError, match="implementation='gpu' is not known; legal values: cpu, x"):
        pack(np.ones((4, 4)), "float32", "gpu")
    for shape in ((4,), (2, 2, 2), (0, 4), (4, 0)):
        with pytest.raises(ValueError, match=r"a weight \(.*\) given; want \[D_in, D_out\]"):
            pack(np.ones(shape), "float32", "xla")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bias_of_another_size_is_refused(implementation):
    weight = pack(np.ones((4, 3)), "float32", implementation)
    with pytest.raises(ValueError, match=r"a bias \(1,\) given, and the packed weight has 3"):
        linear(jnp.ones((2, 4)), weight, jnp.ones(1))


@needs_kernel
def test_panels_of_other_sizes_are_refused():
    packed = pack(cases.drawn((33, 50)), "int8", "cpu")
    short = PackedWeight(packed.panels[:-1], packed.scales, packed.shape, "int8", "cpu")
    with pytest.raises(jax.errors.JaxRuntimeError, match="panels are not those of these sizes"):
        linear(cases.drawn((2, 33)), short)
    with pytest.raises(jax.errors.JaxRuntimeError, match="panels are not those of these sizes"):
        linears(cases.drawn((2, 33)), [packed, short], [None, None])


@needs_kernel
@pytest.mark.parametrize(
    ("count", "types", "said"),
    [
        (0, (), "each result wants panels, scales and a bias"),
        (2, ("float32",), "each result wants panels, scales and a bias"),
        (2, ("float32", "int8"), "panels of one call must have one type"),
        (1, ("float16",), "panels are not those of these sizes"),
    ],
)
def test_what_the_kernel_cannot_read_is_an_error(count, types, said):
    library.load()
    weights = [
        part
        for name in types
        for part in (jnp.ones((1, 4, library.load().KvlabLanes()), name), jnp.ones(0), jnp.ones(0))
    ]
    results = [jax.ShapeDtypeStruct((2, 3), jnp.float32)] * count
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        jax.ffi.ffi_call("kvlab_linear", results, has_side_effect=True)(jnp.ones((2, 4)), *weights)


def run_cases(**environment):
    """Runs the cases in a process of its own; what it prints and what it logs."""
    done = subprocess.run(
        [sys.executable, str(CASES)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split(), done.stderr


@needs_kernel
def test_bits_do_not_depend_on_threads():
    few, many = (run_cases(NPROC=count)[0] for count in ("1", "7"))
    assert few == many
    assert few[0] == "cpu"


@needs_kernel
@pytest.mark.parametrize(
    ("flags", "lanes"), [("-mno-avx512f", "8"), ("-mno-avx", "4")], ids=["avx2", "sse"]
)
def test_narrower_processors(flags, lanes):
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "avx512f" not in cpuinfo.read_text():
        pytest.skip("the processor has no wider vectors to leave out")
    printed, _ = run_cases(CXXFLAGS=flags)
    assert printed[:2] == ["cpu", lanes]


def test_without_a_compiler_products_run_through_xla():
    printed, said = run_cases(CXX="/nonexistent")
    assert printed[0] == "xla"
    assert said.count("CPU kernels are off") == 1
