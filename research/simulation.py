"""An executor without a model: the page table is real, a step's time comes from a cost model.

So the engine's own scheduler and page table can be studied at the scale of a data centre's
accelerator on a laptop. Tokens have no values: a request makes exactly `max_tokens`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.ops.page_pool import unchecked
from kvlab.ops.page_table import PageTable
from kvlab.research.allocators import RESERVATIONS
from kvlab.research.calls import Piece
from kvlab.research.cost_model import StepCost
from kvlab.research.executor import Turn
from kvlab.research.inference import Decoded

ALLOCATORS = ("paged", *RESERVATIONS)
_ROWS, _CHUNK, _STEPS = 16, 128, 64  # of a call


@dataclasses.dataclass(frozen=True)
class SimulationConfig:
    """What is simulated.

    Args:
      cost: what steps take.
      allocator: `paged`, or one of Orca's: `max`, `pow2`, `oracle` (`kvlab.research.allocators`).
      page_size: tokens a page, where paged.
      kv_slots: token slots of the pool; a whole number of pages of them is used.
      slots: most sequences at once.
      max_length: longest sequence, prompt and output.
    """

    cost: StepCost
    allocator: str
    page_size: int
    kv_slots: int
    slots: int = 256
    max_length: int = 2048

    def __post_init__(self) -> None:
        """Validates every field."""
        if self.allocator not in ALLOCATORS:
            raise ValueError(f"allocator={self.allocator!r} given: use {', '.join(ALLOCATORS)}")
        for name in ("page_size", "kv_slots", "slots", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} given; it must be 1 or more")
        if self.kv_slots < self.page_size:
            raise ValueError(
                f"kv_slots={self.kv_slots} and page_size={self.page_size}: the pool holds no page; "
                "use smaller pages"
            )


class Simulated:
    """What simulated executors share: lengths of sequences, and time.

    Attributes:
      next_arrival_s: decode calls end there, so that a request does not wait for the steps of a
        call: the simulated system schedules after each step.
    """

    vocab_size = 0  # prompts are not looked at
    rows, rows_per_sequence, chunk, decode_steps = _ROWS, _ROWS, _CHUNK, _STEPS
    page_size = 1
    prefix_root: bytes | None = None
    prefix_obstacle: str | None = None

    def __init__(self, config: SimulationConfig) -> None:
        """Empty, at time 0."""
        self.config = config
        self.slots, self.max_length = config.slots, config.max_length
        self.next_arrival_s = math.inf
        self._now = 0.0
        self.held = np.zeros(config.slots, int)

    def now(self) -> float:
        """Simulated seconds."""
        return self._now

    def wait_until(self, time_s: float) -> None:
        """Lets time pass."""
        self._now = max(self._now, time_s)

    def prompt_done(self, slot: int) -> None:
        """There is nothing to do."""

    def obstacle(self, prompt_tokens: int, most_tokens: int, n: int) -> str | None:
        """There is none."""
        del prompt_tokens, most_tokens, n
        return None

    def prefill(self, pieces: Sequence[Piece]) -> np.ndarray:
        """See `Executor.prefill`."""
        slots = np.array([piece.slot for piece in pieces], int)
        counts = np.array([0 if piece.stored else len(piece.ids) for piece in pieces], int)
        wanted = np.zeros(self.slots, int)
        np.add.at(wanted, slots, counts)
        ok = self.grow(wanted, _ROWS * _CHUNK)
        grown = np.flatnonzero(wanted * ok)
        before, added = self.held[grown], wanted[grown]
        self.held[grown] += added
        pairs = float(np.sum(added * before + added * (added + 1) / 2))
        held = int(np.sum(self.held[np.unique(slots)]))
        self._now += float(self.config.cost.prefill_s(int(added.sum()), pairs, held))
        return ok[slots]

    def decode(self, turns: Mapping[int, Turn]) -> Decoded:
        """See `Executor.decode`; ends early where a sequence does, or a request arrives."""
        slots = np.fromiter(turns, int, len(turns))
        steps = min(turn.limit for turn in turns.values())
        held = int(self.held[slots].sum())
        totals = held + len(slots) * np.arange(1, steps + 1)
        ends = self._now + np.cumsum(self.config.cost.decode_s(len(slots), totals))
        steps = min(steps, int(np.searchsorted(ends, self.next_arrival_s)) + 1)
        while steps > 1 and not self.has_room(slots, steps):
            steps //= 2
        wanted = np.zeros(self.slots, int)
        wanted[slots] = steps
        ok = self.grow(wanted, _STEPS)
        made = wanted * ok
        self.held += made
        self._now = float(ends[steps - 1])
        none: Any = np.zeros((self.slots, steps), np.int8)  # tokens without values
        decoded: Any = none, none, made, np.zeros(self.slots, bool), ~ok
        return Decoded(*decoded)

    def has_room(self, slots: np.ndarray, steps: int) -> bool:
        """Whether sequences can grow by so many tokens each."""
        raise NotImplementedError

    def grow(self, wanted: np.ndarray, most: int) -> np.ndarray:
        """Makes room for tokens of every sequence, at most `most`; ok [B] bool."""
        raise NotImplementedError


class SimulatedPages(Simulated):
    """Sequences on pages of the engine's own page table."""

    def __init__(self, config: SimulationConfig) -> None:
        """An empty pool."""
        super().__init__(config)
        self.page_size = config.page_size
        self.prefix_root: bytes | None = b"simulated"
        num_pages = config.kv_slots // config.page_size
        per_sequence = -(-config.max_length // config.page_size)
        self._table = PageTable.init(config.slots, num_pages, config.page_size, per_sequence)
        self._free: int | None = num_pages  # None: to be asked
        self._shares = False  # pages have more than one holder
        self._leaving = np.zeros(config.slots, bool)  # released, and the table does not know yet

    def pages(self, tokens: int | np.ndarray) -> np.ndarray:
        """See `Executor.pages`."""
        return -(-np.expand_dims(tokens, -1) // self.page_size)

    def shared_pages(self, tokens: int) -> np.ndarray:
        """See `Executor.shared_pages`."""
        return np.array([tokens // self.page_size])

    def pool_pages(self) -> np.ndarray:
        """See `Executor.pool_pages`."""
        return np.array([self._table.num_pages])

    def free_pages(self) -> np.ndarray:
        """See `Executor.free_pages`."""
        if self._free is None:
            self._flush()
            self._free = int(self._table.num_free)
        return np.array([self._free])

    def claim(self, slot: int, prompt_tokens: int, most_tokens: int) -> bool:
        """Pages are taken as tokens come."""
        del slot, prompt_tokens, most_tokens
        return True

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """See `Executor.fork`."""
        self._flush()
        self._shares, self._free = True, None
        padded = np.full(self.slots, self.slots, np.int32)
        padded[: len(targets)] = targets
        sources = np.where(padded < self.slots, source, self.slots).astype(np.int32)
        self._table = _fork(self._table, sources, padded)
        self.held[list(targets)] = self.held[source]

    def attach(self, slot: int, pages: Sequence[int], length: int, prompt_tokens: int) -> bool:
        """See `Executor.attach`; prompts have no text, so no partial page is ever shared."""
        self._flush()
        self._shares, self._free = True, None
        del prompt_tokens
        padded = np.full(self._table.pages_per_sequence, self._table.num_pages, np.int32)
        padded[: len(pages)] = pages
        self._table = _attach(self._table, np.int32(slot), padded, np.int32(length))
        self.held[slot] = length
        return True

    def mapped_pages(self, slot: int, count: int) -> np.ndarray:
        """See `Executor.mapped_pages`."""
        self._flush()
        return np.asarray(self._table.page_indices[slot])[:count]

    def repin(self, pinned: Sequence[int], unpinned: Sequence[int]) -> None:
        """See `Executor.repin`."""
        self._flush()
        self._shares, self._free = True, None
        width = self._table.pages_per_sequence
        for start in range(0, max(len(pinned), len(unpinned)), width):
            both = np.full((2, width), self._table.num_pages, np.int32)
            for row, pages in zip(both, (pinned, unpinned), strict=True):
                part = pages[start : start + width]
                row[: len(part)] = part
            self._table = _repin(self._table, *both)

    def release(self, slots: Sequence[int]) -> None:
        """See `Executor.release`."""
        held = [slot for slot in slots if self.held[slot]]
        self._leaving[held] = True
        if self._shares:
            self._free = None
        elif self._free is not None:
            self._free += int(np.sum(-(-self.held[held] // self.page_size)))
        self.held[held] = 0

    def _flush(self) -> None:
        """Tells the table who was released."""
        leaving = np.flatnonzero(self._leaving)
        for start in range(0, len(leaving), _ROWS):
            self._table = _release(self._table, self._padded(leaving[start : start + _ROWS]))
        self._leaving[leaving] = False

    def _padded(self, slots: np.ndarray) -> np.ndarray:
        """Slots as the rows of a call, [_ROWS] int32."""
        padded = np.full(_ROWS, self.slots, np.int32)
        padded[: len(slots)] = slots
        return padded

    def taken(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """See `Executor.taken`."""
        del slots
        return -(-tokens // self.page_size) * self.page_size

    def token_slots(self, taken: np.ndarray) -> tuple[int, int]:
        """See `Executor.token_slots`."""
        del taken
        pages = self._table.num_pages
        return pages * self.page_size, (pages - int(self.free_pages()[0])) * self.page_size

    def _new_pages(self, slots: np.ndarray, wanted: np.ndarray | int) -> int:
        held, size = self.held[slots], self.page_size
        return int(np.sum(-(-(held + wanted) // size) - -(-held // size)))

    def has_room(self, slots: np.ndarray, steps: int) -> bool:
        """See `Simulated.has_room`."""
        return self._new_pages(slots, steps) <= int(self.free_pages()[0])

    def grow(self, wanted: np.ndarray, most: int) -> np.ndarray:
        """See `Simulated.grow`."""
        slots = np.flatnonzero(wanted)
        demand, free = self._new_pages(slots, wanted[slots]), int(self.free_pages()[0])
        self._flush()
        if len(slots) <= _ROWS:  # few rows may take many pages each
            rows = self._padded(slots)
            counts = np.zeros(_ROWS, np.int32)
            counts[: len(slots)] = wanted[slots]
            self._table, ok = _reserve_rows(self._table, rows, counts, most)
        else:
            self._table, ok = _reserve(self._table, wanted.astype(np.int32), most)
        if demand <= free:
            self._free = free - demand
            return np.ones(self.slots, bool)
        self._free = None
        granted = np.ones(self.slots, bool)
        rows_ok = np.asarray(ok)
        granted[slots] = rows_ok[: len(slots)] if len(slots) <= _ROWS else rows_ok[slots]
        return granted


@functools.partial(jax.jit, static_argnames="most", donate_argnames="table")
def _reserve(table: PageTable, wanted: jax.Array, most: int) -> tuple[PageTable, jax.Array]:
    with unchecked():
        return table.reserve(wanted, most)


@functools.partial(jax.jit, static_argnames="most", donate_argnames="table")
def _reserve_rows(
    table: PageTable, slots: jax.Array, wanted: jax.Array, most: int
) -> tuple[PageTable, jax.Array]:
    """Of distinct rows alone, in slot order: the work does not grow with the other rows."""
    with unchecked():
        rows, ok = table.rows(slots, jnp.zeros_like(slots)).reserve(wanted, most)
    return _with_rows(table, slots, rows), ok


@functools.partial(jax.jit, donate_argnames="table")
def _release(table: PageTable, slots: jax.Array) -> PageTable:
    """Of distinct rows alone."""
    rows = table.rows(slots, jnp.zeros_like(slots))
    with unchecked():
        return _with_rows(table, slots, rows.release(slots < table.num_sequences))


def _with_rows(table: PageTable, slots: jax.Array, rows: PageTable) -> PageTable:
    """A table whose pool is that of `rows`, which take the places of its rows `slots`."""
    return dataclasses.replace(
        rows,
        page_indices=table.page_indices.at[slots].set(rows.page_indices, mode="drop"),
        lengths=table.lengths.at[slots].set(rows.lengths, mode="drop"),
    )


@functools.partial(jax.jit, donate_argnames="table")
def _attach(table: PageTable, slot: jax.Array, pages: jax.Array, length: jax.Array) -> PageTable:
    return table.attach(slot[None], pages[None], length[None])


@functools.partial(jax.jit, donate_argnames="table")
def _fork(table: PageTable, source: jax.Array, target: jax.Array) -> PageTable:
    table, _, _ = table.fork(source, target).make_writable(jnp.ones(table.num_sequences, bool))
    return table


@functools.partial(jax.jit, donate_argnames="table")
def _repin(table: PageTable, pinned: jax.Array, unpinned: jax.Array) -> PageTable:
    return table.pin(pinned).unpin(unpinned)
