"""Continuous batching: requests in, tokens out, over fixed slots and a fixed pool of pages.

A step of the engine admits waiting requests, prefills pieces of prompts up to a budget of tokens
("Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", arXiv 2403.02310, section
4: chunked prefill), decodes every running sample by some tokens in one call on the device ("Orca",
OSDI'22: requests come and go between calls, not between batches) and retires what has ended. When
pages run out the last request by the policy gives up all of its own and waits again; later its
prompt is prefilled again and the tokens that it had are replayed through decode, which gives the
same bits ("PagedAttention", arXiv 2309.06180, section 4.5: preemption by recomputation).

The engine drives an `Executor`: the model, or a simulation of it. What a request gets does not
depend on what else runs (WORKSPACE-notes.md, batch invariance).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from kvlab.research.cache_usage import Usage, measure
from kvlab.research.calls import Piece
from kvlab.research.executor import Executor, Turn, pages_of_samples, refusal
from kvlab.research.live_requests import LiveRequest, Policy, PolicyError, Queue, first_come
from kvlab.research.prefix_index import PrefixIndex
from kvlab.research.prefix_reuse import PrefixReuse
from kvlab.research.requests import (
    InterruptedEngineError,
    Outcome,
    Progress,
    RefusedError,
    Request,
    Times,
    whole_number,
)


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How an engine schedules.

    Args:
      prefill_tokens: most prompt tokens of a step, in whole prefill calls, at least one; None is
        one call.
      decode_steps: most tokens of a sample in a step; None is the executor's. Beside a prefill it
        is 1, so that a prompt does not wait for many tokens of others.
      reuse_prefixes: whether prompts start on pages that hold their first tokens already.
      headroom_tokens: by which every running sample can still grow when another request is
        admitted. 1 fills the pool and preempts more often (WORKSPACE-notes.md has the trade).
      policy: the order of requests.

    Raises:
      ValueError: a size that is no whole number from 1.
    """

    prefill_tokens: int | None = None
    decode_steps: int | None = None
    reuse_prefixes: bool = True
    headroom_tokens: int = 16
    policy: Policy = first_come

    def __post_init__(self) -> None:
        """Validates the sizes."""
        for name in ("prefill_tokens", "decode_steps", "headroom_tokens"):
            size = getattr(self, name)
            if size is not None and not (whole_number(size) and size >= 1):
                raise ValueError(f"{name}={size} given; it must be a whole number, 1 or more")


class Engine:
    """Serves requests; not thread-safe.

    Attributes:
      executor: the model and its cache.
      options: how it schedules.
      times: of every request that was taken in, by id.
      history: the use of the cache in each step, before its decode, with the time of its end.
      preemptions: how many there were.
    """

    def __init__(self, executor: Executor, options: EngineOptions | None = None) -> None:
        """An engine without requests.

        Args:
          executor: empty, and used by this engine alone.
          options: how to schedule.

        Raises:
          ValueError: prefixes are to be reused, and the executor's cache cannot share them.
        """
        self.executor = executor
        self.options = options or EngineOptions()
        self.times: dict[str, Times] = {}
        self.history: list[Usage] = []
        self.preemptions = 0
        self._prefixes = PrefixReuse(executor, self.options.reuse_prefixes)
        self._live: dict[str, LiveRequest] = {}
        self._waiting = Queue(self.options.policy)
        self._prefilling: list[LiveRequest] = []
        self._decoding: list[LiveRequest] = []
        self._slots = list(range(executor.slots))[::-1]  # the free ones, the next last
        self._stalled = False  # someone found no page, and none came free since
        self._interrupted: str | None = None  # by what, where a step ended in the middle
        self._progress: list[Progress] = []

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or progress has not been handed out."""
        return bool(self._live or self._progress)

    @property
    def index(self) -> PrefixIndex | None:
        """The known prefixes, with their hit rate; None where prefixes are not reused."""
        return self._prefixes.index

    def add(self, request: Request) -> None:
        """Takes a request in.

        Args:
          request: what is asked.

        Raises:
          RefusedError: it can never be served, or its id was used before.
          PolicyError: the policy could not rank it.
          InterruptedEngineError: see `step`.
        """
        self._require_whole()
        reason = refusal(self.executor, request)
        if request.id in self.times:
            reason = "its id was used before; give every request an id of its own"
        if reason is not None:
            raise RefusedError(request.id, reason)
        if self.executor.vocab_size:  # the caller may use the array again
            request = dataclasses.replace(request, prompt=np.array(request.prompt, np.int32))
        live = LiveRequest(request, len(self.times), self._prefixes.blocks_of(request))
        self._waiting.add(live)
        self._live[request.id] = live
        self.times[request.id] = live.times

    def cancel(self, request_id: str) -> None:
        """Ends a request; its pages are free at once.

        Args:
          request_id: of a request that waits or runs.

        Raises:
          KeyError: there is none.
          InterruptedEngineError: see `step`.
        """
        self._require_whole()
        live = self._live.get(request_id)
        if live is None:
            raise KeyError(f"no request {request_id!r} waits or runs; it ended, or was never added")
        self._waiting.remove(live)
        self._end(live, "cancelled")

    def step(self) -> list[Progress]:
        """Does one round of scheduling, prefill and decode.

        Returns:
          New tokens and endings, in no particular order of requests.

        Raises:
          PolicyError: the policy failed. Nothing is lost: what was made is handed out by the next
            step that succeeds.
          InterruptedEngineError: an earlier step was interrupted (Ctrl-C), or failed in another
            way, between the cache and the books; a new engine gives the same tokens again.
        """
        self._require_whole()
        try:
            return self._step()
        except PolicyError:
            raise
        except BaseException as error:
            self._interrupted = f"{type(error).__name__}: {error}".rstrip(": ")
            raise

    def _require_whole(self) -> None:
        if self._interrupted is not None:
            raise InterruptedEngineError(self._interrupted)

    def _step(self) -> list[Progress]:
        began = self.executor.now()
        if self._stalled:
            self._preempt()
        self._admit()
        prefilled = self._prefill()
        usage = self._measure()
        self._decode(beside_prefill=prefilled)
        ended, left = self.executor.now(), len(self._live)
        self.history.append(usage._replace(time_s=ended, step_s=ended - began, left=left))
        progress, self._progress = self._progress, []
        return progress

    def _measure(self) -> Usage:
        running, index = self._prefilling + self._decoding, self.index
        cached = 0 if index is None else index.num_idle * index.page_size
        return measure(self.executor, running, len(self._waiting), cached)

    # Coming and going.

    def _admit(self) -> None:
        """Starts waiting requests, in their order, while the first has room."""
        while self._waiting:
            live = self._waiting.first
            samples = live.open_samples
            if len(samples) > len(self._slots) or not self._has_pages(live):
                return
            slots = self._slots[: -len(samples) - 1 : -1]
            if not self._claim(live, slots):
                return
            self._waiting.remove(live)
            del self._slots[-len(samples) :]
            for sample, slot in zip(samples, slots, strict=True):
                sample.slot = slot
            if live.times.admitted_s is None:
                live.times.admitted_s = self.executor.now()
            self._prefilling.append(live)

    def _has_pages(self, live: LiveRequest) -> bool:
        """Whether the pool has what a request needs at first, beside what others will need next."""
        known, given_up = self._prefixes.pages_for(live)
        needed, free = self._first_pages(live) - known, self.executor.free_pages() + given_up
        for other in self._prefilling:
            outstanding = self._first_pages(other) - self.executor.pages(other.done)
            needed = needed + np.maximum(outstanding, 0)
        if np.any(needed > free):
            return False
        pages, headroom = self.executor.pages, self.options.headroom_tokens
        running = [(one, sample) for one in self._decoding for sample in one.open_samples]
        held = np.array([one.prompt_tokens + sample.fed for one, sample in running], int)
        needed = needed + (pages(held + headroom) - pages(held)).sum(axis=0)
        return bool(np.all(needed <= free))

    def _first_pages(self, live: LiveRequest) -> np.ndarray:
        """Pages until every sample has one more token than it ever had."""
        lengths = [live.prompt_tokens + len(sample.tokens) + 1 for sample in live.open_samples]
        return pages_of_samples(self.executor, live.prompt_tokens, lengths)

    def _claim(self, live: LiveRequest, slots: Sequence[int]) -> bool:
        most = live.prompt_tokens + live.request.max_tokens
        for number, slot in enumerate(slots):
            if not self.executor.claim(slot, live.prompt_tokens, most):
                self.executor.release(slots[:number])
                return False
        return True

    def _preempt(self) -> None:
        """Takes everything from the last of the running requests by the policy."""
        running = self._prefilling + self._decoding
        if len(running) == 1:
            self._end(running[0], "out_of_pages")
        else:
            live = self._waiting.last_of(running)
            self._waiting.add(live)
            self._leave(live)
            live.times.preemptions += 1
            self.preemptions += 1

    def _end(self, live: LiveRequest, outcome: Outcome) -> None:
        """Ends a request before its time."""
        for sample in live.open_samples:
            live.end(sample, outcome)
            self._progress.append(Progress(live.request.id, sample.index, (), (), outcome))
        live.times.cut_short = True
        self._retire(live, self.executor.now())

    def _retire(self, live: LiveRequest, now: float) -> None:
        """Lets a request go whose samples have all ended."""
        self._leave(live)
        live.times.finished_s = now
        del self._live[live.request.id]

    def _leave(self, live: LiveRequest) -> None:
        """Gives back the slots and pages of a request."""
        self._free(live.slots)
        self._prefixes.leave(live)
        for group in (self._prefilling, self._decoding):
            if live in group:
                group.remove(live)
        live.reset()

    def _free(self, slots: Sequence[int]) -> None:
        if slots:
            self.executor.release(slots)
            self._slots += reversed(slots)
            self._stalled = False  # pages came free since someone found none

    # Prefill.

    def _prefill(self) -> bool:
        """Runs prefill calls up to the budget; whether there was one."""
        executor, ran = self.executor, False
        call = executor.rows * executor.chunk
        for _ in range(max(1, (self.options.prefill_tokens or call) // call)):
            rows = self._rows()
            if not rows or self._stalled:
                break
            growth = [(live.done, live.done + _added(pieces)) for live, pieces in rows]
            self._make_room(growth)
            granted = iter(executor.prefill([piece for _, pieces in rows for piece in pieces]))
            ran = True
            for (live, pieces), (_, done) in zip(rows, growth, strict=True):
                if np.all(list(itertools.islice(granted, len(pieces)))):
                    live.done, live.prefilled = done, done == live.prompt_tokens
                else:
                    self._stalled = True
        for live in list(self._prefilling):
            if live.prefilled:
                self._begin_decode(live)
        return ran

    def _rows(self) -> list[tuple[LiveRequest, list[Piece]]]:
        """What the rows of the next prefill call take, in the order of admission."""
        executor, left = self.executor, self.executor.rows
        taken = []
        for live in self._prefilling:
            if not left:
                break
            if live.prefilled or not (live.started or self._prefixes.start(live)):
                continue
            prompt, slot, end = live.request.prompt, live.slots[0], live.prompt_tokens
            if live.done == end:  # all of it was known
                pieces = [Piece(slot, prompt[-1:], end, stored=True)]
            else:
                starts = range(live.done, end, executor.chunk)
                pieces = [
                    Piece(slot, prompt[start : start + executor.chunk], end)
                    for start in starts[: min(left, executor.rows_per_sequence)]
                ]
            left -= len(pieces)
            taken.append((live, pieces))
        return taken

    def _begin_decode(self, live: LiveRequest) -> None:
        """The prompt of a request is in the cache: others may share it, and it is forked."""
        first, *others = live.slots
        tokens = live.prompt_tokens
        forked = pages_of_samples(self.executor, tokens, [tokens] * len(live.slots))
        copies = forked - self.executor.pages(tokens)
        self._prefixes.make_room(int(np.sum(copies[:1])))
        if np.any(copies > self.executor.free_pages()):
            self._stalled = True
            return
        self._prefixes.publish(live)
        self.executor.prompt_done(first)
        if others:
            self.executor.fork(first, others)
        live.forked = True
        self._prefilling.remove(live)
        self._decoding.append(live)

    def _make_room(self, growth: Iterable[tuple[int, int]]) -> None:
        """Gives up known prefixes for sequences that are to grow from one length to another."""
        if self.index is not None and self.index.num_idle:
            size = self.index.page_size
            self._prefixes.make_room(sum(-(-new // size) - -(-old // size) for old, new in growth))

    # Decode.

    def _decode(self, beside_prefill: bool) -> None:
        """One decode call for every sample whose prompt is in the cache."""
        running = [(live, sample) for live in self._decoding for sample in live.open_samples]
        if not running:
            return
        most = self.executor.decode_steps
        steps = 1 if beside_prefill else min(most, self.options.decode_steps or most)
        if self._waiting:  # someone wants the slot of the first that ends
            left = [live.request.max_tokens - sample.fed for live, sample in running]
            steps = min(steps, *left)
        turns, growth = {}, []
        for live, sample in running:
            fed, held = sample.fed, live.prompt_tokens + sample.fed
            limit = min(steps, live.request.max_tokens - fed)
            forced = sample.tokens[fed : fed + limit]
            turns[sample.slot] = Turn(limit, forced, sample.sampling, live.request.stop_ids)
            growth.append((held, held + limit))
        self._make_room(growth)
        began = self.executor.now()
        decoded = self.executor.decode(turns)
        ended = self.executor.now()
        step_s = (ended - began) / max(1, int(np.max(decoded.num_tokens)))
        freed = []
        for live, sample in running:
            slot = sample.slot
            progress = live.take(sample, decoded, len(turns[slot].forced), began, step_s)
            self._stalled |= bool(decoded.stalled[slot])
            if progress is not None:
                self._progress.append(progress)
            if sample.outcome is not None:
                freed.append(slot)
        self._free(freed)
        for live in list(self._decoding):
            if not live.open_samples:
                self._retire(live, ended)


def _added(pieces: Sequence[Piece]) -> int:
    """Tokens that pieces add to their sequence."""
    return sum(0 if piece.stored else len(piece.ids) for piece in pieces)
