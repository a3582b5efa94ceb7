"""Contiguous allocation of KV slots as systems before paging did it.

"Efficient Memory Management for Large Language Model Serving with PagedAttention" (arXiv
2309.06180), section 6.1, compares paging with three versions of Orca: every request reserves one
contiguous run when it starts, and a buddy allocator places it.
"""

import bisect
from collections.abc import Callable

Reservation = Callable[[int, int, int], int]
"""Slots to reserve, from prompt tokens, tokens in all at the end, and the longest sequence."""


def reserve_max(prompt_tokens: int, most_tokens: int, max_length: int) -> int:
    """Orca (Max): room for the longest sequence, since nobody knows how long an output will be."""
    del prompt_tokens, most_tokens
    return max_length


def reserve_pow2(prompt_tokens: int, most_tokens: int, max_length: int) -> int:
    """Orca (Pow2): the output's true length, rounded up to a power of two."""
    output = most_tokens - prompt_tokens
    return min(prompt_tokens + (1 << max(output - 1, 0).bit_length()), max_length)


def reserve_oracle(prompt_tokens: int, most_tokens: int, max_length: int) -> int:
    """Orca (Oracle): the true length, which no real system knows."""
    del prompt_tokens, max_length
    return most_tokens


RESERVATIONS: dict[str, Reservation] = {
    "max": reserve_max,
    "pow2": reserve_pow2,
    "oracle": reserve_oracle,
}


class BuddyAllocator:
    """Runs of slots whose sizes are powers of two; a freed run joins its buddy if that is free.

    Source: Knowlton, "A Fast Storage Allocator", CACM 8(10), 1965. A pool whose size is no power
    of two starts as the runs of its binary digits.

    Attributes:
      num_slots: in the pool.
      used_slots: in the runs that are given out, whole runs.
    """

    def __init__(self, num_slots: int) -> None:
        """All slots are free.

        Args:
          num_slots: in the pool.

        Raises:
          ValueError: there is none.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots} given; a pool has at least 1")
        self.num_slots, self.used_slots = num_slots, 0
        self._free: list[list[int]] = [[] for _ in range(num_slots.bit_length())]
        self._orders: dict[int, int] = {}  # of the runs given out, by their start
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    def allocate(self, size: int) -> int | None:
        """Takes the lowest of the smallest free runs that are long enough.

        Args:
          size: slots wanted.

        Returns:
          The first slot of the run, or None where no run is long enough.

        Raises:
          ValueError: `size` is below 1.
        """
        if size < 1:
            raise ValueError(f"size={size} given; ask for at least one slot")
        wanted = (size - 1).bit_length()
        for order in range(wanted, len(self._free)):
            if self._free[order]:
                start = self._free[order].pop(0)
                for half in reversed(range(wanted, order)):
                    bisect.insort(self._free[half], start + (1 << half))
                self._orders[start] = wanted
                self.used_slots += 1 << wanted
                return start
        return None

    def free(self, start: int) -> None:
        """Gives a run back.

        Args:
          start: its first slot.

        Raises:
          ValueError: no run that is given out starts there.
        """
        order = self._orders.pop(start, None)
        if order is None:
            raise ValueError(f"slot {start} starts no run that is given out; it was freed already")
        self.used_slots -= 1 << order
        while order + 1 < len(self._free):
            buddy = start ^ 1 << order
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        bisect.insort(self._free[order], start)
