"""Requests, and what comes of them."""

import dataclasses
from typing import Literal, NamedTuple

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
      arrival_s: when it came, by the engine's clock.
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
