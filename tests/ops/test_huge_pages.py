"""Memory in huge pages: copies that do not touch one another, and that JAX takes as they are."""

import itertools
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.cpu_kernels import huge_pages

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for"
)


def test_copies_are_equal_and_apart():
    rng = np.random.default_rng(0)
    shapes = [(3,), (5, 7), (1,), (1 << 20, 3), (64,), (9, 2, 2), (40 << 20,), (2,)]
    kinds = [np.int8, np.float32, np.uint8, np.float16, np.dtype(jnp.bfloat16)]
    arrays = [
        rng.integers(-100, 100, shape).astype(kinds[index % len(kinds)])
        for index, shape in enumerate(shapes)
    ]
    copies = [huge_pages.placed(array) for array in arrays]
    for array, copy in zip(arrays, copies, strict=True):
        assert copy.dtype == array.dtype
        assert copy.tobytes() == array.tobytes()
        assert copy.ctypes.data % 64 == 0
        assert not np.shares_memory(array, copy)
    begins = sorted((copy.ctypes.data, copy.nbytes) for copy in copies)
    for (begin, nbytes), (after, _) in itertools.pairwise(begins):
        assert begin + nbytes <= after


def test_arrays_larger_than_a_region_have_one_of_their_own():
    copy = huge_pages.placed(np.ones(65 << 20, np.int8))
    assert copy.all()


def test_nothing_stays_nothing():
    empty = np.zeros(0, np.float16)
    assert huge_pages.placed(empty) is empty


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have memory of their own")
def test_jax_takes_a_placed_array_without_a_copy():
    copy = huge_pages.placed(np.arange(1 << 16, dtype=np.float32))
    assert jax.device_put(copy).unsafe_buffer_pointer() == copy.ctypes.data
