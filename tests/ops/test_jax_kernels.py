"""The kernels that JAX ships, interpreted: against the formula, and what they refuse.

Nothing here runs on a GPU or TPU. Pallas kernels run step by step on CPU, and are lowered for TPU
as far as that goes without one; what cuDNN is given, XLA computes.
"""

import contextlib
import functools
import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops import jax_kernels
from kvlab.ops.attention import AttentionOptions, attention
from kvlab.ops.caches.head_major import HeadMajorPages
from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.caches.protocol import Step
from kvlab.ops.caches.reading import attend_stored
from kvlab.ops.implementations import jax_kernel, resolve_implementation
from kvlab.ops.jax_kernels import Pages, decode, interpreted, obstacle, prefill
from kvlab.ops.page_table import PageTable

LENGTHS = [37, 0, 16, 1, 50]  # pages of 16: ragged, an empty row, a full page
HEADS = {"mha": (2, 1), "gqa": (2, 3), "mqa": (1, 8)}  # K, G


def jax_deprecates_triton():
    return jax.__version_info__ >= (0, 11)


@pytest.fixture(scope="module", autouse=True)
def _deprecation():
    """JAX says at the first import that its Triton kernel is deprecated; here, and once."""
    sys.modules.pop(jax_kernels.PAGED["triton"], None)
    expected = contextlib.nullcontext()
    if jax_deprecates_triton():
        expected = pytest.warns(DeprecationWarning, match=r"gpu.paged_attention is deprecated")
    with expected:
        importlib.import_module(jax_kernels.PAGED["triton"])


@pytest.fixture(params=jax_kernels.PAGED)
def kernel(request):
    return request.param


def assert_close(actual, expected, rounds):
    """Compares by the largest output; `rounds` where something is rounded to bfloat16."""
    atol = (2**-6 if rounds else 5e-6) * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=atol)


def pages_of(case):
    """A case's pool in the order [K, P, p, H]; free slots of mapped pages hold 0, others NaN."""
    pool = case.pool
    units = np.asarray(pool.units)
    mapped = np.isin(np.arange(pool.key["codes"].shape[0]), units)[None, :, None, None]

    def moved(codes, axes):
        codes = jnp.asarray(codes).transpose(axes)
        return jnp.where(mapped & jnp.isnan(codes), jnp.zeros((), codes.dtype), codes)

    key, value = moved(pool.key["codes"], (1, 0, 3, 2)), moved(pool.value["codes"], (1, 0, 2, 3))
    return Pages(key, value, pool.units, pool.lengths)


def decoded(kernel, case, soft_cap=None):
    arrays = map(jnp.asarray, (case.query, case.positions, case.query_valid))
    with interpreted():
        return decode(kernel, *arrays, pages_of(case), 0.3, soft_cap)


class TestDecode:
    """Paged kernels from pages that lie anywhere, unmapped entries and pages of NaN among them.

    The one for TPUs rounds all that it reads to bfloat16.
    """

    @pytest.mark.parametrize(
        ("heads", "dtype"), [("gqa", "float32"), *((heads, "bfloat16") for heads in HEADS)]
    )
    def test_is_its_formula(self, kernel, heads, dtype, numpy_attention, stored_pools):
        shape = (1, *HEADS[heads], 16, 16)
        case = stored_pools.make_case(LENGTHS, *shape, dtype, jnp.dtype(dtype))
        output = decoded(kernel, case)
        assert output.dtype == dtype
        rounds = kernel == "tpu" or dtype == "bfloat16"
        assert_close(output, case.formula(numpy_attention, scale=0.3), rounds)
        assert not np.asarray(output)[1].any()

    def test_soft_cap(self, kernel, numpy_attention, stored_pools):
        case = stored_pools.make_case(LENGTHS, 1, 2, 3, 16, 16)
        expected = case.formula(numpy_attention, scale=0.3, soft_cap=3.0)
        assert_close(decoded(kernel, case, soft_cap=3.0), expected, kernel == "tpu")

    @pytest.mark.parametrize("page_size", [4, 128])
    def test_page_sizes(self, kernel, page_size, numpy_attention, stored_pools):
        case = stored_pools.make_case([37, 0, 9], 1, 2, 3, 16, page_size)
        expected = case.formula(numpy_attention, scale=0.3)
        assert_close(decoded(kernel, case), expected, kernel == "tpu")

    def test_no_row_has_a_key(self, kernel, stored_pools):
        case = stored_pools.make_case([0, 0], 1, 2, 3, 16, 16)
        assert not np.asarray(decoded(kernel, case)).any()


# Unoptimised, as in the conformance suite: it compiles sooner.
@functools.partial(
    jax.jit,
    static_argnames="implementation",
    compiler_options={"xla_backend_optimization_level": 0},
)
def attend(cache, table, query, key, value, counts, implementation):
    tokens = query.shape[1]
    places = jnp.arange(tokens, dtype=jnp.int32)[None]
    positions = table.lengths[:, None] + places
    valid = places < counts[:, None]
    table, _ = table.reserve(counts, tokens)
    options = AttentionOptions(query.shape[3] ** -0.5, implementation=implementation)
    step = Step(positions, valid, valid)
    output, cache = cache.attend(query, key, value, step, table, options)
    return output, cache, table


class TestPages:
    """A cache of head-major pages, its decode by the kernels and its prefill by XLA."""

    B, N, K, H, p, CHUNK = 3, 6, 2, 128, 16, 21

    def arguments(self, seed, tokens):
        random = np.random.default_rng(seed)
        shapes = [(self.B, tokens, heads, self.H) for heads in (self.N, self.K, self.K)]
        return [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]

    def run(self, pages, implementation, poison=0.0):
        """A prefill and three decode steps; the rows' counts differ, one stays empty a while."""
        cache = pages.init(14, self.p, self.K, self.H, "bfloat16")
        cache = jax.tree.map(lambda array: jnp.full_like(array, poison), cache)
        table = PageTable.init(self.B, 14, self.p, 4)
        outputs = []
        for seed, (tokens, counts) in enumerate(
            [(self.CHUNK, [21, 15, 0]), (1, [1, 1, 0]), (1, [1, 1, 1]), (1, [0, 1, 1])]
        ):
            arrays = (*self.arguments(seed, tokens), jnp.asarray(counts, jnp.int32))
            output, cache, table = attend(cache, table, *arrays, implementation)
            outputs.append(np.asarray(output, np.float32))
        return outputs, cache, table

    def test_steps_are_those_of_xla(self, kernel):
        expected, other, _ = self.run(PagedCache, "chunked")
        with interpreted():
            # What lies in pages before they are opened, NaN here, is never seen.
            outputs, cache, table = self.run(HeadMajorPages, kernel, np.nan)
        for actual, wanted in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=2**-6 * np.abs(wanted).max())
        for mine, theirs in zip(cache.gather(table), other.gather(table), strict=True):
            for row, length in enumerate(table.lengths.tolist()):
                np.testing.assert_array_equal(mine[row, :length], theirs[row, :length])

    def test_prefill_by_cudnn_is_that_of_xla(self, backend, monkeypatch):
        expected, _, _ = self.run(PagedCache, "chunked")
        backend("gpu")
        called = []

        def by_xla(*arguments):
            called.append(arguments[0].shape[1])
            return prefill(*arguments, implementation="xla")

        monkeypatch.setattr(jax_kernels, "prefill", by_xla)
        outputs, _, _ = self.run(PagedCache, "cudnn", np.nan)
        assert called == [self.CHUNK]  # and not for decode
        for actual, wanted in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=2**-6 * np.abs(wanted).max())

    def test_a_dense_step_and_other_pages_are_refused_by_name(self, kernel):
        query, key, value = self.arguments(0, 3)
        places = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (self.B, 3))
        real = jnp.ones((self.B, 3), bool)
        options = AttentionOptions(0.3, implementation=kernel)
        with interpreted(), pytest.raises(ValueError, match=r"pages that lie \[K, P, p, H\]"):
            attention(query, key, value, places, places, real, real, options)
        with interpreted(), pytest.raises(ValueError, match=r"pages that lie \[K, P, p, H\]"):
            self.run(PagedCache, kernel)

    def test_init_refuses_what_no_kernel_reads(self):
        for storage, notes in [("int8", ()), ("bfloat16", ("position",))]:
            with pytest.raises(ValueError, match="head-major pages hold float32 or bfloat16"):
                HeadMajorPages.init(3, 16, 2, 128, storage, notes)


class TestLowering:
    """As far as a TPU's program goes without a TPU."""

    @pytest.mark.parametrize("shape", [(2, 3, 128, 16), (8, 4, 128, 1), (1, 8, 256, 64)])
    def test_the_tpu_kernel_lowers(self, shape):
        num_kv_heads, groups, head_dim, page_size = shape

        def step(query, positions, valid, key, value, indices, lengths):
            pages = Pages(key, value, indices, lengths)
            return decode("tpu", query, positions, valid, pages, 0.3, 50.0)

        batch, num_pages = 3, 11
        pool = jax.ShapeDtypeStruct((num_kv_heads, num_pages, page_size, head_dim), jnp.bfloat16)
        query = jax.ShapeDtypeStruct((batch, 1, num_kv_heads * groups, head_dim), jnp.bfloat16)
        whole = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        valid = jax.ShapeDtypeStruct((batch, 1), jnp.bool)
        arrays = (query, whole((batch, 1)), valid, pool, pool, whole((batch, 7)), whole((batch,)))
        lowered = jax.jit(step).trace(*arrays).lower(lowering_platforms=("tpu",))
        assert "tpu_custom_call" in lowered.as_text()


def test_what_cudnn_is_given(numpy_attention, stored_pools):
    """XLA in its place: keys of any layout, chunks of a text, windows, rows without a key."""
    case = stored_pools.make_case(LENGTHS, 7, 2, 3, 16, 16)
    valid = case.query_valid
    places = np.broadcast_to(np.arange(case.keys.shape[1]), case.keys.shape[:2])
    age = case.positions[:, :, None] - places[:, None]
    mask = (age >= 0) & (age < 20) & case.key_valid[:, None] & valid[:, :, None]
    arrays = (case.query, case.keys.astype(np.float32), case.values.astype(np.float32), mask)
    output = prefill(*map(jnp.asarray, arrays), 0.3, implementation="xla")
    assert_close(output, case.formula(numpy_attention, scale=0.3, window=20), rounds=False)
    assert not np.asarray(output)[~valid].any()


@pytest.fixture
def backend(monkeypatch):
    """Says that another backend is the default; `jax.local_devices` says so too."""

    def pretend(name, capability="9.0", platform_version="cuda 13"):
        client = types.SimpleNamespace(platform_version=platform_version)
        device = types.SimpleNamespace(client=client, compute_capability=capability)
        monkeypatch.setattr(jax, "default_backend", lambda: name)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])

    return pretend


class TestChoice:
    """What None takes on other backends, and what a name says where it cannot serve."""

    @staticmethod
    def pages():
        pool, whole = jnp.zeros((2, 5, 16, 128), jnp.bfloat16), jnp.zeros((3, 2), jnp.int32)
        return Pages(pool, pool, whole, whole[:, 0])

    def chosen(self, phase, implementation=None, window=None, soft_cap=None, paged=True):
        query = jnp.zeros((3, 1 if phase == "decode" else 9, 6, 128), jnp.bfloat16)
        pool = self.pages() if paged else None
        return jax_kernel(implementation, window, soft_cap, query, pool)

    def test_on_a_tpu(self, backend):
        backend("tpu")
        assert resolve_implementation(None) == "tpu"
        assert self.chosen("decode") == "tpu"
        assert self.chosen("prefill") is None
        assert self.chosen("decode", window=7) is None
        assert self.chosen("decode", paged=False) is None
        assert self.chosen("decode", "chunked") is None
        with pytest.raises(ValueError, match=r"'cudnn' cannot serve: it needs the GPU backend"):
            self.chosen("prefill", "cudnn")

    def test_on_a_gpu(self, backend):
        backend("gpu")
        assert resolve_implementation(None) == "cudnn"
        assert self.chosen("prefill") == "cudnn"
        assert self.chosen("prefill", window=7, paged=False) == "cudnn"
        assert self.chosen("prefill", soft_cap=3.0) is None
        assert self.chosen("decode") is None
        assert self.chosen("decode", "triton") == "triton"
        assert self.chosen("prefill", "triton") is None

    def test_on_neither(self, backend):
        backend("metal")
        assert resolve_implementation(None) == "chunked"
        for name in jax_kernels.BACKENDS:
            with pytest.raises(ValueError, match=r"needs the .PU backend, and this is metal; use"):
                self.chosen("decode", name)

    @pytest.mark.parametrize(
        ("kernel", "fields", "reason"),
        [
            ("tpu", {"dtype": "float32"}, "it computes in bfloat16, and the queries are float32"),
            ("tpu", {"window": 9}, "it has no sliding window, and the layer has window=9"),
            ("tpu", {"head_dim": 64}, "heads of a multiple of 128, and head_dim=64"),
            ("tpu", {"page_size": None}, r"\[K, P, p, H\].* a page_size of a multiple of 8$"),
            ("tpu", {"page_size": 12}, "pages of a multiple of 8, and page_size=12"),
            ("triton", {"head_dim": 96}, "heads of a power of two, 16 or more, and head_dim=96"),
            ("triton", {"page_size": 48}, "pages of a power of two, and page_size=48"),
            ("cudnn", {"soft_cap": 5.0}, "it has no soft cap, and the layer has soft_cap=5.0"),
            ("cudnn", {"head_dim": 100}, "multiple of 8 up to 256 here, and head_dim=100"),
        ],
    )
    def test_obstacles(self, backend, kernel, fields, reason):
        backend(jax_kernels.BACKENDS[kernel])
        layer = {"dtype": "bfloat16", "head_dim": 128, "window": None, "soft_cap": None}
        layer |= {"page_size": 16}

        def asked(layer):
            return obstacle(kernel, **layer | {"dtype": jnp.dtype(layer["dtype"])})

        assert asked(layer) is None
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(asked(layer | fields))

    def test_older_gpus_and_other_makers(self, backend):
        layer = (jnp.dtype("bfloat16"), 256, None, None, None)
        backend("gpu", "8.0")
        assert "up to 128 here, and head_dim=256" in obstacle("cudnn", *layer)
        backend("gpu", None, "rocm 7")
        assert obstacle("cudnn", *layer) == "it needs CUDA"

    def test_a_jax_without_the_kernel(self, backend, monkeypatch):
        backend("gpu")
        monkeypatch.setitem(jax_kernels.PAGED, "triton", "jax.experimental.pallas.ops.gpu.gone")
        with pytest.raises(ValueError, match=r"cannot serve: jax .* has no .*gpu.gone .*'chunked'"):
            self.chosen("decode", "triton")

    def test_retention_asks_for_what_they_do_not_give(self):
        options = AttentionOptions(0.3, implementation="cudnn")
        query = jnp.zeros((3, 2, 6, 128), jnp.bfloat16)
        with pytest.raises(ValueError, match=r"'cudnn' cannot serve: .* retention asks for; use"):
            attend_stored(query, Step.of_none(3), 2, options, [])
