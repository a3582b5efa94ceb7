"""Simulated sequences in contiguous runs of slots, as systems before paging held them."""

from collections.abc import Sequence

import numpy as np

from kvlab.research.allocators import RESERVATIONS, BuddyAllocator
from kvlab.research.simulation import Simulated, SimulatedPages, SimulationConfig


class SimulatedRuns(Simulated):
    """Sequences in contiguous runs, reserved when they start and placed by a buddy allocator."""

    def __init__(self, config: SimulationConfig) -> None:
        """An empty pool."""
        super().__init__(config)
        self.prefix_obstacle: str | None = (
            f"allocator={config.allocator} has no pages to share; use allocator=paged"
        )
        self._reserve = RESERVATIONS[config.allocator]
        self._buddies = BuddyAllocator(config.kv_slots)
        self._starts: dict[int, int] = {}  # of each slot's run
        self._reserved = np.zeros(config.slots, int)

    def pages(self, tokens: int | np.ndarray) -> np.ndarray:
        """There are none."""
        return np.zeros((*np.shape(tokens), 0), int)

    shared_pages = pages

    def pool_pages(self) -> np.ndarray:
        """There are none."""
        return np.zeros(0, int)

    free_pages = pool_pages

    def claim(self, slot: int, prompt_tokens: int, most_tokens: int) -> bool:
        """See `Executor.claim`."""
        size = self._reserve(prompt_tokens, most_tokens, self.max_length)
        start = self._buddies.allocate(size)
        if start is not None:
            self._starts[slot], self._reserved[slot] = start, size
        return start is not None

    def obstacle(self, prompt_tokens: int, most_tokens: int, n: int) -> str | None:
        """See `Executor.obstacle`."""
        size = self._reserve(prompt_tokens, most_tokens, self.max_length)
        empty = BuddyAllocator(self._buddies.num_slots)
        if all(empty.allocate(size) is not None for _ in range(n)):
            return None
        return (
            f"allocator={self.config.allocator} reserves {size} slots for each of its {n} samples, "
            f"and the pool of {empty.num_slots} has no room for them; give more kv_slots"
        )

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Copies the tokens into the targets' own runs."""
        self.held[list(targets)] = self.held[source]

    def attach(self, slot: int, pages: Sequence[int], length: int, prompt_tokens: int) -> bool:
        """Nothing can be shared."""
        raise NotImplementedError(self.prefix_obstacle)

    def mapped_pages(self, slot: int, count: int) -> np.ndarray:
        """There are none."""
        raise NotImplementedError(self.prefix_obstacle)

    def repin(self, pinned: Sequence[int], unpinned: Sequence[int]) -> None:
        """There are no pages."""
        raise NotImplementedError(self.prefix_obstacle)

    def release(self, slots: Sequence[int]) -> None:
        """See `Executor.release`."""
        for slot in slots:
            self._buddies.free(self._starts.pop(slot))
            self.held[slot] = self._reserved[slot] = 0

    def taken(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """What was reserved. A run's rounding up to a power of two is nobody's: fragmentation."""
        del tokens
        return self._reserved[slots]

    def token_slots(self, taken: np.ndarray) -> tuple[int, int]:
        """See `Executor.token_slots`."""
        return self._buddies.num_slots, int(taken.sum())

    def has_room(self, slots: np.ndarray, steps: int) -> bool:
        """Runs were reserved whole."""
        del slots, steps
        return True

    def grow(self, wanted: np.ndarray, most: int) -> np.ndarray:
        """See `Simulated.grow`."""
        del most
        return self.held + wanted <= np.where(wanted > 0, self._reserved, self.max_length)


def simulated(config: SimulationConfig) -> SimulatedPages | SimulatedRuns:
    """The executor of a configuration."""
    return SimulatedPages(config) if config.allocator == "paged" else SimulatedRuns(config)
