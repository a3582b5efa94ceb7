"""Memory in huge pages, for arrays that a kernel reads from end to end in every step.

A decode step reads all weights once, and in pages of 4 KiB the processor looks up an address for
every 64 cache lines of them. Linux gives pages of 2 MiB where it is asked to (madvise(2),
MADV_HUGEPAGE); most weights are smaller, so they share regions.
"""

import contextlib
import mmap
import threading

import numpy as np

_REGION = 64 << 20
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64  # of a cache line; JAX takes such arrays of the host as they are, without a copy


class _Regions:
    """Gives pieces of memory, from the start of a region to its end, then of a new one.

    A region lives as long as an array in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """Zeros [nbytes] uint8, aligned to cache lines."""
        rounded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if rounded > self._left.size:
                self._left = _region(max(_REGION, rounded))
            taken, self._left = self._left[:nbytes], self._left[rounded:]
        return taken


def _region(nbytes: int) -> np.ndarray:
    """Fresh memory that begins with a huge page, at least nbytes of it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    return array[-array.ctypes.data % _HUGE_PAGE :]


_REGIONS = _Regions()


def placed(array: np.ndarray) -> np.ndarray:
    """A copy of an array in huge pages, or the array itself where the system has none."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or not array.nbytes:
        return array
    copy = _REGIONS.take(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
