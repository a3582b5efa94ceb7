"""Requests, and what comes of them."""

import dataclasses
import math
import numbers
from collections.abc import Hashable
from typing import Literal, NamedTuple, TypeGuard

import numpy as np

from kvlab.ops.sampling import Sampling

Outcome = Literal["stop", "length", "cancelled", "out_of_pages"]


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What a user asks for.

    Args:
      id: names the request; no two in an engine may share it.
      prompt: [tokens] int32 token ids, at least one.
      max_tokens: most new tokens of a sample.
      sampling: how tokens are chosen, with the request's seed; sample i has `sample_index` i.
      stop_ids: token ids that end a sample, at most `inference.MAX_STOP_IDS`.
      n: samples; they share the pages of the prompt.
      arrival_s: when it came, by the clock of the engine's executor (`executor.now()`); times to
        the first token count from it.
      prompt_hashes: of the prompt's full pages, where a trace gives hashes and no text.
    """

    id: str
    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop_ids: tuple[int, ...] = ()
    n: int = 1
    arrival_s: float = 0.0
    prompt_hashes: tuple[int, ...] | None = None


def whole_number(value: object) -> TypeGuard[int]:
    """Whether something is a whole number, NumPy's or Python's; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def malformed(request: Request) -> str | None:
    """What of a request is not what its type says; None where all is."""
    prompt = np.asarray(request.prompt)
    hashes, stop_ids, arrival_s = request.prompt_hashes or (), request.stop_ids, request.arrival_s
    row = prompt.ndim == 1 and (prompt.dtype.kind in "iu" or not prompt.size)
    holds = {
        f"its prompt is {prompt.dtype} of shape {prompt.shape}; give token ids in a row": row,
        f"max_tokens={request.max_tokens!r} is no whole number of 32 bits": (
            _fits(request.max_tokens)
        ),
        f"n={request.n!r} is no whole number of 32 bits": _fits(request.n),
        f"stop_ids={stop_ids!r} are no token ids": all(_fits(one) and one >= 0 for one in stop_ids),
        f"sampling={request.sampling!r} is no Sampling": isinstance(request.sampling, Sampling),
        f"arrival_s={arrival_s!r} is no time in seconds": (
            isinstance(arrival_s, numbers.Real) and math.isfinite(arrival_s)
        ),
        "its prompt_hashes cannot be hashed": all(isinstance(one, Hashable) for one in hashes),
    }
    return next((reason for reason, held in holds.items() if not held), None)


def _fits(value: object) -> bool:
    return whole_number(value) and abs(value) <= np.iinfo(np.int32).max


class RefusedError(ValueError):
    """A request that the engine cannot serve; nothing of it is kept.

    Attributes:
      request_id: which.
      reason: why, and what would help.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        """Names the request and says why."""
        super().__init__(f"request {request_id!r} refused: {reason}")
        self.request_id, self.reason = request_id, reason


class InterruptedEngineError(RuntimeError):
    """A step of the engine ended in the middle, and what its cache holds is not known."""

    def __init__(self, cause: str) -> None:
        """Says by what, and what to do."""
        super().__init__(
            f"a step of this engine was interrupted ({cause}), and what its cache holds is not "
            "known; start a new engine, where the requests that had not ended get the same tokens"
        )


class Progress(NamedTuple):
    """What a step gave one sample of a request.

    Attributes:
      request_id: which request.
      sample: which of its samples.
      tokens: new token ids; a stop token is the last.
      log_probs: of each, natural, under the model without temperature or filters.
      outcome: how the sample ended, or None if it goes on. `out_of_pages`: nothing was left to
        preempt.
    """

    request_id: str
    sample: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    outcome: Outcome | None


class Burst(NamedTuple):
    """The new tokens that one decode call gave a sample, in seconds by the engine's clock.

    The steps of a call are taken as equally long; the host gets all its tokens at the end.
    """

    first_s: float  # its first token was made
    last_s: float
    tokens: int


@dataclasses.dataclass
class Times:
    """When things happened to a request, in seconds by the engine's clock.

    Attributes:
      arrival_s: it came.
      admitted_s: it first got a slot; None while it waits.
      first_token_s: its first token was made, of any sample.
      finished_s: its last sample ended.
      bursts: of each sample, one for each decode call that gave it new tokens.
      preemptions: times it had to give up its pages and start again.
      cut_short: it was cancelled, or ran out of pages.
    """

    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    bursts: list[list[Burst]] = dataclasses.field(default_factory=list)
    preemptions: int = 0
    cut_short: bool = False
