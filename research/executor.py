"""What an engine drives: the model over its cache, or a simulation of it.

Axes: B sequences (slots), R rows of a prefill call, n tokens of a decode call.
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from kvlab.ops.page_table import PageTable
from kvlab.ops.sampling import Sampling, SamplingParams
from kvlab.research import sequences
from kvlab.research.cache import unwrapped
from kvlab.research.calls import Calls, Piece
from kvlab.research.inference import MAX_STOP_IDS, Decoded, Params
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.requests import Request, malformed


class Turn(NamedTuple):
    """What a decode call is to do with one slot.

    Attributes:
      limit: most tokens, forced ones too.
      forced: token ids to feed first.
      sampling: how the others are chosen.
      stop_ids: token ids that end the sequence.
    """

    limit: int
    forced: Sequence[int]
    sampling: Sampling
    stop_ids: tuple[int, ...]


class Executor(Protocol):
    """Slots of sequences over pools of pages, and a clock.

    Attributes:
      slots: sequences (B).
      max_length: most tokens of one sequence.
      rows, chunk: of a prefill call; `rows_per_sequence` rows may be pieces of one sequence.
      decode_steps: most tokens of a decode call.
      vocab_size: token ids are below it; 0 where there are none.
      prefix_root: hashed with every block of a prompt: what wrote it. None, with `prefix_obstacle`
        saying why, where prefixes cannot be shared.
      page_size: tokens a page of the pool whose pages prefixes share.
      next_arrival_s: when the next request comes, by its clock; a simulation decodes no further.
    """

    slots: int
    max_length: int
    rows: int
    rows_per_sequence: int
    chunk: int
    decode_steps: int
    vocab_size: int
    page_size: int
    prefix_root: bytes | None
    prefix_obstacle: str | None
    next_arrival_s: float

    def now(self) -> float:
        """Seconds on its clock."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Does nothing until then."""
        ...

    def pages(self, tokens: int | np.ndarray) -> np.ndarray:
        """Pages that sequences of so many tokens [...] take from each pool, [..., pools] int."""
        ...

    def shared_pages(self, tokens: int) -> np.ndarray:
        """Pages that the forks of a sequence of so many tokens share, [pools] int."""
        ...

    def pool_pages(self) -> np.ndarray:
        """Pages of each pool, [pools] int."""
        ...

    def free_pages(self) -> np.ndarray:
        """Free pages of each pool, [pools] int."""
        ...

    def claim(self, slot: int, prompt_tokens: int, most_tokens: int) -> bool:
        """Whether a sequence may start; takes what must be taken before that."""
        ...

    def obstacle(self, prompt_tokens: int, most_tokens: int, n: int) -> str | None:
        """Why n sequences could never be claimed together, even alone; None where they could."""
        ...

    def prefill(self, pieces: Sequence[Piece]) -> np.ndarray:
        """One prefill call; whether there was room, [len(pieces)] bool."""
        ...

    def prompt_done(self, slot: int) -> None:
        """The last piece of a slot's prompt is in: policies of retention apply."""
        ...

    def decode(self, turns: dict[int, Turn]) -> Decoded:
        """One decode call; NumPy arrays by slot."""
        ...

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Copies a sequence into empty slots, sharing pages."""
        ...

    def attach(self, slot: int, pages: Sequence[int], length: int, prompt_tokens: int) -> bool:
        """Starts a sequence on pages that hold its first tokens; False where a page is missing."""
        ...

    def mapped_pages(self, slot: int, count: int) -> np.ndarray:
        """The first pages of a sequence, [count] int."""
        ...

    def repin(self, pinned: Sequence[int], unpinned: Sequence[int]) -> None:
        """Adds pins to pages and takes others away."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """Empties sequences; their pages are free at once."""
        ...

    def taken(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Token slots that sequences [n] of so many tokens [n] have taken, [n] int."""
        ...

    def token_slots(self, taken: np.ndarray) -> tuple[int, int]:
        """Token slots there are, and those in use, where sequences have `taken` [n] of them."""
        ...


def pages_of_samples(executor: Executor, prompt_tokens: int, lengths: Sequence[int]) -> np.ndarray:
    """Pages of samples of these lengths, [pools] int; they share the full pages of their prompt."""
    shared = executor.shared_pages(prompt_tokens)
    return executor.pages(np.array(lengths, int)).sum(axis=0) - shared * (len(lengths) - 1)


def refusal(executor: Executor, request: Request) -> str | None:
    """Why an executor could never serve a request, even alone; None where it could."""
    wrong_type = malformed(request)
    if wrong_type is not None:
        return wrong_type
    tokens, asked, slots = len(request.prompt), request.max_tokens, executor.slots
    most = tokens + asked
    ids = np.asarray(request.prompt)
    wrong = ids[(ids < 0) | (ids >= executor.vocab_size)][:1]
    reasons = {
        "its prompt is empty; give at least one token": not tokens,
        f"max_tokens={asked}; ask for at least one new token": asked < 1,
        f"n={request.n} samples; want 1 to the {slots} slots of the engine": not (
            1 <= request.n <= slots
        ),
        f"{len(request.stop_ids)} stop ids given; at most {MAX_STOP_IDS} fit": (
            len(request.stop_ids) > MAX_STOP_IDS
        ),
        f"{tokens} prompt tokens and max_tokens={asked} make {most}, and a sequence holds at most "
        f"{executor.max_length}; shorten one, or raise max_length": most > executor.max_length,
        f"token id {wrong} is out of range; ids are 0 to {executor.vocab_size - 1}": (
            executor.vocab_size > 0 and wrong.size > 0
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        return reason
    needed = pages_of_samples(executor, tokens, [most] * request.n)
    for pages, pool in zip(needed, executor.pool_pages(), strict=True):
        if pages > pool:
            return (
                f"it may need {pages} pages and the pool has {pool}; ask for fewer tokens or "
                "samples, or give more num_pages"
            )
    return executor.obstacle(tokens, most, request.n)


class ModelExecutor:
    """Runs a model; see `Executor`.

    Attributes:
      calls: the cache in use; `calls.compile_count` counts its programs.
    """

    def __init__(self, params: Params, config: InferenceConfig) -> None:
        """Builds an empty cache.

        Args:
          params: the decoder's parameters.
          config: the shapes.
        """
        self.calls = Calls(params, config)
        self.slots, self.max_length = config.slots, config.max_length
        self.rows, self.chunk, self.decode_steps = config.rows, config.chunk, config.decode_steps
        self.rows_per_sequence, self.vocab_size = config.rows_per_sequence, config.model.vocab_size
        self.prefix_obstacle = sequences.prefix_obstacle(config)
        self.prefix_root, self.next_arrival_s = None, math.inf
        self._pools = [
            (table.page_size, heads, table.num_pages)
            for table, heads in map(unwrapped, self.calls.cache.all_tables())
            if isinstance(table, PageTable)
        ]
        self.page_size = self._pools[0][0] if self._pools else 1
        if self.prefix_obstacle is None:
            wrote = jax.__version__, jax.default_backend(), config
            self.prefix_root = repr(wrote).encode()

    def warm_up(self) -> None:
        """Compiles prefill and decode before anything is timed."""
        self.calls.warm_up()

    def now(self) -> float:
        """Seconds, monotonic."""
        return time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        """Sleeps."""
        time.sleep(max(0.0, time_s - self.now()))

    def pages(self, tokens: int | np.ndarray) -> np.ndarray:
        """See `Executor.pages`; an upper bound where tokens are evicted."""
        pools = np.array([pool[:2] for pool in self._pools], int).reshape(-1, 2)
        return -(-np.expand_dims(tokens, -1) // pools[:, 0]) * pools[:, 1]

    def shared_pages(self, tokens: int) -> np.ndarray:
        """See `Executor.shared_pages`; where tokens are evicted a fork copies its pages."""
        evicts = self.calls.config.evicts
        return np.array([0 if evicts else tokens // size for size, _, _ in self._pools], int)

    def pool_pages(self) -> np.ndarray:
        """See `Executor.pool_pages`."""
        return np.array([num_pages for _, _, num_pages in self._pools], int)

    def free_pages(self) -> np.ndarray:
        """See `Executor.free_pages`."""
        tables = (table for table, _ in map(unwrapped, self.calls.cache.all_tables()))
        return np.array([int(t.num_free) for t in tables if isinstance(t, PageTable)], int)

    def claim(self, slot: int, prompt_tokens: int, most_tokens: int) -> bool:
        """Pages are taken as tokens come: nothing to do."""
        del slot, prompt_tokens, most_tokens
        return True

    def obstacle(self, prompt_tokens: int, most_tokens: int, n: int) -> str | None:
        """There is none."""
        del prompt_tokens, most_tokens, n
        return None

    def prefill(self, pieces: Sequence[Piece]) -> np.ndarray:
        """See `Executor.prefill`."""
        return self.calls.prefill_call(pieces)[0]

    def prompt_done(self, slot: int) -> None:
        """See `Executor.prompt_done`."""
        if self.calls.config.evicts:
            self.calls.evict([slot])

    def decode(self, turns: dict[int, Turn]) -> Decoded:
        """See `Executor.decode`."""
        config = self.calls.config
        idle = Turn(0, (), Sampling(), ())
        rows = [turns.get(slot, idle) for slot in range(config.slots)]
        forced = np.zeros((config.slots, config.decode_steps), np.int32)
        stops = [turn.stop_ids for turn in rows]
        for slot, turn in turns.items():
            forced[slot, : len(turn.forced)] = turn.forced
        return self.calls.decode_call(
            SamplingParams.from_requests([turn.sampling for turn in rows]),
            np.array([turn.limit for turn in rows], np.int32),
            stops,
            forced,
            np.array([len(turn.forced) for turn in rows], np.int32),
        )

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """See `Executor.fork`."""
        ok = self.calls.fork_call(source, targets)
        assert ok, "the engine makes room before it forks"

    def attach(self, slot: int, pages: Sequence[int], length: int, prompt_tokens: int) -> bool:
        """See `Executor.attach`."""
        return self.calls.attach(slot, pages, length, prompt_tokens)

    def mapped_pages(self, slot: int, count: int) -> np.ndarray:
        """See `Executor.mapped_pages`."""
        (table,) = self.calls.cache.tables
        assert isinstance(table, PageTable)
        return np.asarray(table.page_indices[slot])[:count]

    def repin(self, pinned: Sequence[int], unpinned: Sequence[int]) -> None:
        """See `Executor.repin`."""
        self.calls.repin(pinned, unpinned)

    def release(self, slots: Sequence[int]) -> None:
        """See `Executor.release`."""
        self.calls.release(slots)

    def taken(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """See `Executor.taken`: pages of the first pool, or whole rows where there is none."""
        del slots
        if self._pools:
            return -(-tokens // self.page_size) * self.page_size
        return np.where(tokens > 0, self.max_length, 0)

    def token_slots(self, taken: np.ndarray) -> tuple[int, int]:
        """See `Executor.token_slots`."""
        if self._pools:
            pages = self.pool_pages()[0]
            return int(pages) * self.page_size, int(pages - self.free_pages()[0]) * self.page_size
        return self.slots * self.max_length, int(taken.sum())
