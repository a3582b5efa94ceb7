"""Requests while an engine serves them: what they hold, what they have got, and who goes first."""

import bisect
import dataclasses
import math
import numbers
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvlab.ops.sampling import Sampling
from kvlab.research.inference import Decoded
from kvlab.research.prefix_index import PromptBlocks
from kvlab.research.requests import Burst, Outcome, Progress, Request, Times


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What a policy knows of a request.

    Attributes:
      number: order of arrival in the engine: 0, 1, ...
      arrival_s: when it came, by the engine's clock.
      prompt_tokens: length of the prompt.
      max_tokens: most new tokens of a sample.
      n: samples.
      generated_tokens: of all samples so far; above 0 for a request that was preempted or runs.
    """

    number: int
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    n: int
    generated_tokens: int


Policy = Callable[[Candidate], Any]
"""Ranks requests: the lowest is admitted first, the highest preempted first.

A pure function; ranks are compared with `<`. It is asked when a request begins to wait (it arrives,
or was preempted), and of those running when one must be preempted.
"""


def first_come(candidate: Candidate) -> int:
    """First come, first served: nobody overtakes, the youngest is preempted, nobody starves."""
    return candidate.number


class PolicyError(RuntimeError):
    """A policy raised, or gave ranks that cannot be compared; the engine is as it was before.

    Attributes:
      request_id: the request that it was asked about.
    """

    def __init__(self, request_id: str, cause: Exception) -> None:
        """Names the request and the error, which is the `__cause__`."""
        super().__init__(
            f"the scheduling policy failed on request {request_id!r}: "
            f"{type(cause).__name__}: {cause}; mend the policy, nothing was changed"
        )
        self.request_id = request_id


class LiveSample:
    """One continuation of a request."""

    def __init__(self, index: int, sampling: Sampling) -> None:
        """Nothing of it is there yet."""
        self.index = index
        self.sampling = dataclasses.replace(sampling, sample_index=index)
        self.slot = -1  # none
        self.tokens: list[int] = []
        self.fed = 0  # tokens that the cache holds; fewer than there are after a preemption
        self.outcome: Outcome | None = None


class LiveRequest:
    """A request in an engine."""

    def __init__(self, request: Request, number: int, blocks: PromptBlocks | None) -> None:
        """It waits.

        Args:
          request: what is asked.
          number: order of arrival.
          blocks: of its prompt, where prefixes are reused.
        """
        self.request, self.number, self.blocks = request, number, blocks
        self.prompt_tokens = len(request.prompt)
        self.times = Times(request.arrival_s, bursts=[[] for _ in range(request.n)])
        self.samples = [LiveSample(index, request.sampling) for index in range(request.n)]
        self.open_samples = self.samples  # those that have not ended
        self.reset()

    def reset(self) -> None:
        """Nothing of it is in the cache."""
        self.done = 0  # prompt tokens in the cache
        self.started = False  # it has looked for its prefix
        self.prefilled = False  # what follows the prompt is known
        self.forked = False  # all of its samples hold the prompt
        self.hashes: list[Hashable] = []  # of the indexed blocks that it uses
        self.writing: tuple[Hashable, ...] = ()  # of the blocks that it is to add
        for sample in self.samples:
            sample.slot, sample.fed = -1, 0

    def end(self, sample: LiveSample, outcome: Outcome) -> None:
        """No more comes of one of its samples."""
        sample.outcome = outcome
        self.open_samples = [other for other in self.open_samples if other is not sample]

    @property
    def slots(self) -> list[int]:
        """Of its samples; the prompt is prefilled in the first."""
        return [sample.slot for sample in self.samples if sample.slot >= 0]

    def candidate(self) -> Candidate:
        """It, as a policy sees it."""
        request = self.request
        generated = sum(len(sample.tokens) for sample in self.samples)
        sizes = self.prompt_tokens, request.max_tokens, request.n, generated
        return Candidate(self.number, request.arrival_s, *sizes)

    def take(
        self, sample: LiveSample, decoded: Decoded, forced: int, began: float, step_s: float
    ) -> Progress | None:
        """Gives a sample what a decode call made of it.

        Args:
          sample: one of its own.
          decoded: of all slots.
          forced: tokens that were fed to the sample, not made.
          began: when the call did.
          step_s: seconds of each of its steps.

        Returns:
          What is new, if anything is. A sample that has ended has no slot any more.
        """
        slot, times = sample.slot, self.times
        count, stopped = int(decoded.num_tokens[slot]), bool(decoded.stopped[slot])
        sample.fed += count - stopped
        if count <= forced:
            return None
        tokens = decoded.tokens[slot, forced:count].tolist()
        log_probs = decoded.log_probs[slot, forced:count].tolist()
        sample.tokens += tokens
        if stopped or len(sample.tokens) == self.request.max_tokens:
            self.end(sample, "stop" if stopped else "length")
            sample.slot = -1
        burst = Burst(began + (forced + 1) * step_s, began + count * step_s, len(tokens))
        times.bursts[sample.index].append(burst)
        if times.first_token_s is None or burst.first_s < times.first_token_s:
            times.first_token_s = burst.first_s
        made = tuple(tokens), tuple(log_probs), sample.outcome
        return Progress(self.request.id, sample.index, *made)


class Queue:
    """Waiting requests in the order of a policy; among equals the older goes first."""

    def __init__(self, policy: Policy) -> None:
        """Nobody waits.

        Args:
          policy: ranks requests.
        """
        self._policy = policy
        self._entries: list[tuple[Any, int, LiveRequest]] = []

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._entries)

    @property
    def first(self) -> LiveRequest:
        """Who goes next."""
        return self._entries[0][2]

    def add(self, live: LiveRequest) -> None:
        """Lets a request wait.

        Raises:
          PolicyError: it could not be ranked.
        """
        rank = self._rank(live)
        try:
            bisect.insort(self._entries, (rank, live.number, live), key=lambda entry: entry[:2])
        except Exception as error:  # ranks that cannot be compared
            raise PolicyError(live.request.id, error) from error

    def remove(self, live: LiveRequest) -> None:
        """Takes a request out, if it is there; the first costs nothing to find."""
        for place, entry in enumerate(self._entries):
            if entry[2] is live:
                del self._entries[place]
                return

    def last_of(self, running: Sequence[LiveRequest]) -> LiveRequest:
        """Whom the policy would serve last.

        Raises:
          PolicyError: they could not be ranked.
        """
        ranked = [(self._rank(live), live.number, live) for live in running]
        try:
            return max(ranked, key=lambda entry: entry[:2])[2]
        except Exception as error:  # ranks that cannot be compared
            raise PolicyError(running[-1].request.id, error) from error

    def _rank(self, live: LiveRequest) -> Any:
        try:
            rank = self._policy(live.candidate())
            if _has_nan(rank):
                raise ValueError(f"the rank {rank!r} is not a number, and has no place in an order")
            return rank
        except Exception as error:
            raise PolicyError(live.request.id, error) from error


def _has_nan(rank: Any) -> bool:
    if isinstance(rank, tuple):
        return any(map(_has_nan, rank))
    return isinstance(rank, numbers.Real) and math.isnan(rank)
