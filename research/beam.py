"""Beam search: the likeliest whole continuations of prompts, found several beams at a time.

Axes: B sequences (slots), V vocabulary, G prompts side by side, c candidates of a prompt.

The rules are those of transformers 5.24 (`GenerationMixin._beam_search`), for each prompt on its
own: of all continuations of its beams by one token the best c are candidates, at least as many as
beams can go on whatever ends; a candidate ends at a stop token or at the limit, and is kept if it
is among the best `num_beams` candidates; the best that do not end are the next beams. A score is
the sum of log-probabilities over length ** length_penalty, where length counts the new tokens, a
stop token too. ("Google's Neural Machine Translation System", arXiv 1609.08144, section 7, has
another penalty and prunes.)
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np

from kvlab.research.generation import FinishReason, check_prompts
from kvlab.research.prompts import Prompt
from kvlab.research.session import Session

_MAX_PENALTY = 40  # a million tokens to that power are a float64 still
Candidate = tuple[float, int, int]  # log-probability with the token; the beam it continues; token


@dataclasses.dataclass(frozen=True)
class BeamOptions:
    """How beams are searched; the defaults are those of transformers.

    Args:
      num_beams: continuations of a prompt that are kept at each step.
      max_tokens: most new tokens of a beam.
      length_penalty: the power of the length that a sum of log-probabilities is divided by: above
        0 favours long beams, below 0 short ones, 0 compares the sums.
      early_stopping: when a prompt with `num_beams` ended beams is done. True: at once. False:
        when the best beam that goes on would not be among them, were it to end at its present
        length. "never": when it would not even at the length that suits it best, which is the
        longest for a penalty above 0.
      num_return: beams to give back for each prompt, the best.
      stop_ids: token ids that end a beam.

    Raises:
      ValueError: a field outside its range; the message names field, value and range.
    """

    num_beams: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return: int = 1
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Validates every field."""
        self._require(self.num_beams >= 1, "num_beams", "1 or more")
        self._require(self.max_tokens >= 1, "max_tokens", "1 or more")
        bounded = abs(self.length_penalty) <= _MAX_PENALTY  # which a NaN is not
        self._require(bounded, "length_penalty", f"from {-_MAX_PENALTY} to {_MAX_PENALTY}")
        known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        self._require(known, "early_stopping", "True, False or 'never'")
        within = 1 <= self.num_return <= self.num_beams
        self._require(within, "num_return", f"from 1 to num_beams={self.num_beams}")

    def _require(self, holds: bool, field: str, legal: str) -> None:
        if not holds:
            raise ValueError(f"{field}={getattr(self, field)!r} given: it must be {legal}")

    @property
    def num_candidates(self) -> int:
        """Continuations to look at each step: each beam may end with each stop token."""
        return self.num_beams * max(2, 1 + len(self.stop_ids))


@dataclasses.dataclass(frozen=True)
class Beam:
    """One ended beam.

    Attributes:
      tokens: the new token ids; a stop token is the last.
      score: what beams are compared by: `log_prob` over the penalised length.
      log_prob: of all the tokens, natural.
      finish_reason: `stop`, `length` (max_tokens) or `max_length` (of the session).
    """

    tokens: tuple[int, ...]
    score: float
    log_prob: float
    finish_reason: FinishReason


def beam_search(
    session: Session,
    prompts: Sequence[Prompt],
    options: BeamOptions,
    watch: Callable[[Session], None] | None = None,
) -> Iterator[list[Beam]]:
    """Searches the likeliest continuations of prompts, as many side by side as slots allow.

    A prompt is computed once; its beams share the pages of all that they have in common. What a
    prompt gets does not depend on the others.

    Args:
      session: an empty session; it is left empty, after an error too.
      prompts: what to continue.
      options: how.
      watch: is called after each step, to look at the session.

    Yields:
      For each prompt, in order, its `num_return` best beams, best first.

    Raises:
      ValueError: a prompt that is empty, too long, or has ids out of range; more beams than slots,
        or candidates than the vocabulary has; a session in use; too few pages.
    """
    slots, beams = session.config.slots, options.num_beams
    check_prompts(prompts, session.config)
    if beams > slots:
        raise ValueError(
            f"num_beams={beams} needs as many slots and the session has slots={slots}; use "
            "fewer beams or more slots"
        )
    vocab_size = session.config.model.vocab_size
    if options.num_candidates > vocab_size:
        raise ValueError(
            f"num_beams={beams} with {len(options.stop_ids)} stop ids looks at "
            f"{options.num_candidates} tokens and the vocabulary has {vocab_size}; use fewer beams"
        )
    if session.lengths.any():
        raise ValueError("the session holds sequences; release them before a beam search")
    together = slots // beams
    for first in range(0, len(prompts), together):
        yield from _run_wave(session, prompts[first : first + together], options, watch)


class _Search:
    """The beams of one prompt as they grow.

    Attributes:
      running: beams that go on, best first: their tokens and log-probability; none when done.
      ended: the best `num_beams` that have ended, best first.
    """

    def __init__(self, prompt: Prompt, options: BeamOptions, max_length: int) -> None:
        self._options = options
        self._limit = min(options.max_tokens, max_length - len(prompt.ids))
        self.running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        self.ended: list[Beam] = []

    def advance(self, candidates: Iterable[Candidate]) -> list[tuple[int, int]]:
        """Takes the candidates of one step, best first.

        Returns:
          Of each beam that goes on, the one that it continues and its new token.
        """
        options = self._options
        length = len(self.running[0][0]) + 1
        running, ended, steps = [], list(self.ended), []
        for rank, (log_prob, parent, token) in enumerate(candidates):
            tokens = (*self.running[parent][0], token)
            reason = self._finish_reason(token, length)
            if reason is None:
                running.append((tokens, log_prob))
                steps.append((parent, token))
            elif rank < options.num_beams:
                score = log_prob / length**options.length_penalty
                ended.append(Beam(tokens, score, log_prob, reason))
        ended.sort(key=lambda beam: -beam.score)
        self.ended = ended[: options.num_beams]
        self.running = running[: options.num_beams]
        if self._is_done(length):
            self.running = []
        return steps[: len(self.running)]

    def _finish_reason(self, token: int, length: int) -> FinishReason | None:
        if token in self._options.stop_ids:
            return "stop"
        if length < self._limit:
            return None
        return "length" if self._limit == self._options.max_tokens else "max_length"

    def _is_done(self, length: int) -> bool:
        options = self._options
        if length == self._limit:
            return True
        if len(self.ended) < options.num_beams:
            return False
        if options.early_stopping is True:
            return True
        hopes_to_grow = options.early_stopping == "never" and options.length_penalty > 0
        best_length = self._limit if hopes_to_grow else length
        _, log_prob = self.running[0]
        return log_prob / best_length**options.length_penalty <= self.ended[-1].score


def _run_wave(
    session: Session,
    prompts: Sequence[Prompt],
    options: BeamOptions,
    watch: Callable[[Session], None] | None,
) -> list[list[Beam]]:
    """Searches prompts side by side; prompt i has the slots from i * num_beams on."""
    searches = [_Search(prompt, options, session.config.max_length) for prompt in prompts]
    try:
        by_slot = {i * options.num_beams: prompt.ids for i, prompt in enumerate(prompts)}
        session.prefill(by_slot, hidden=False)
        while any(search.running for search in searches):
            _step(session, searches, options)
            if watch is not None and session.lengths.any():
                watch(session)
    finally:
        session.release()
    return [search.ended[: options.num_return] for search in searches]


def _step(session: Session, searches: Sequence[_Search], options: BeamOptions) -> None:
    """Gives every running search its next token; slots whose search is done become empty."""
    slots, beams = session.config.slots, options.num_beams
    log_probs = np.full(slots, -np.inf, np.float32)
    for index, search in enumerate(searches):
        log_probs[index * beams :][: len(search.running)] = [p for _, p in search.running]
    best = _candidates(session.logits, log_probs, beams, options.num_candidates)
    of_prompts = zip(*(array.tolist() for array in jax.device_get(best)), strict=True)
    parents, tokens = np.full(slots, slots), {}
    for index, (search, columns) in enumerate(zip(searches, of_prompts, strict=False)):
        if search.running:
            steps = search.advance(zip(*columns, strict=True))
            for slot, (parent, token) in enumerate(steps, index * beams):
                parents[slot], tokens[slot] = index * beams + parent, [token]
    if not tokens:
        return
    if np.any(parents != np.where(session.lengths > 0, np.arange(slots), slots)):
        session.reorder(parents.tolist())
    results = session.decode(dict.fromkeys(tokens, 1), forced=tokens)
    stalled = [slot for slot, result in results.items() if result.stalled]
    if stalled:
        raise ValueError(
            f"{len(stalled)} of {len(tokens)} beams found no free page for their next token; give "
            "more num_pages, or use fewer beams or max_tokens"
        )


@functools.partial(jax.jit, static_argnames=("num_beams", "count"))
def _candidates(
    logits: jax.Array, log_probs: jax.Array, num_beams: int, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The best continuations of each prompt's beams by one token.

    Args:
      logits: [B, V] float32.
      log_probs: [B] float32, of each beam so far; -inf for a slot without one.
      num_beams: slots of a prompt.
      count: candidates of a prompt (c).

    Returns:
      Of each candidate, best first, among equals the first beam and lowest id: the log-probability
      [G, c] float32, which beam of the prompt it continues and the token, [G, c] int32.
    """
    slots, vocab_size = logits.shape
    prompts = slots // num_beams
    total = jax.nn.log_softmax(logits, axis=-1) + log_probs[:, None]
    of_prompts = total[: prompts * num_beams].reshape(prompts, num_beams * vocab_size)
    best, places = jax.lax.top_k(of_prompts, count)
    return best, places // vocab_size, places % vocab_size
