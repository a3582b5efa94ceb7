"""Requests and when they arrive: what a serving run or a memory study is driven by.

A workload is host data: lengths in tokens, times in seconds, and no text. `prompt_ids` draws the
tokens, equal where prefixes are said to be equal. Everything drawn depends on its seed alone.
"""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

MAX_LENGTH = 2**31 - 1
"""Most tokens of a prompt or an output, so that lengths and positions are int32."""

_GAPS = 1  # what a seed is used for, beside the lengths of `workloads`


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request, without its text.

    Attributes:
      number: 0, 1, ... in order of arrival.
      arrival_s: when it arrives, in seconds on the workload's clock.
      prompt_tokens: of its prompt, at least 1.
      output_tokens: that it is answered with, at least 1.
      block_ids: one for each block of prompt tokens, the last of which may be part of a block; none
        where prefixes are not known. Requests that begin with the same ids begin with the same
        tokens.
    """

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Checks the lengths and the time.

        Raises:
          ValueError: a length out of 1 to `MAX_LENGTH`, or a time that is no number from 0.
        """
        for name in ("prompt_tokens", "output_tokens"):
            if not 1 <= getattr(self, name) <= MAX_LENGTH:
                raise ValueError(
                    f"request {self.number}: {name}={getattr(self, name)}, "
                    f"wanted 1 to {MAX_LENGTH:,}"
                )
        if not 0 <= self.arrival_s < math.inf:
            raise ValueError(
                f"request {self.number}: arrival_s={self.arrival_s}, wanted a time from 0"
            )

    @property
    def total_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    Attributes:
      name: where they come from; what is made of a workload keeps its name.
      arrivals: at least one.
      block_tokens: prompt tokens that a block id stands for; None where there are no block ids.
      skipped_rows: malformed rows that were left out of the file.
      too_long: requests that were left out since they do not fit a length.
    """

    name: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int | None
    skipped_rows: int
    too_long: int = 0

    def __post_init__(self) -> None:
        """Checks numbers, order and blocks.

        Raises:
          ValueError: no request, a block of no token, numbers other than 0, 1, ..., times that run
            backwards, or another number of block ids than the prompt has blocks.
        """
        if not self.arrivals:
            raise ValueError(f"workload {self.name} holds no request")
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ValueError(f"block_tokens={self.block_tokens}, wanted at least 1, or None")
        latest = 0.0
        for number, arrival in enumerate(self.arrivals):
            if arrival.number != number or arrival.arrival_s < latest:
                raise ValueError(
                    f"workload {self.name}: request {arrival.number} at {arrival.arrival_s} s "
                    f"comes as number {number} after {latest} s; use `in_order`"
                )
            latest = arrival.arrival_s
            wanted = blocks_of(arrival.prompt_tokens, self.block_tokens)
            if len(arrival.block_ids) != wanted:
                raise ValueError(
                    f"workload {self.name}: request {number} has {len(arrival.block_ids)} block "
                    f"ids, wanted {wanted} for {arrival.prompt_tokens} prompt tokens in blocks of "
                    f"{self.block_tokens}"
                )


def blocks_of(prompt_tokens: int, block_tokens: int | None) -> int:
    """How many blocks a prompt fills, the last perhaps in part; 0 where there are no blocks."""
    return 0 if block_tokens is None else -(-prompt_tokens // block_tokens)


def in_order(arrivals: Iterable[Arrival]) -> tuple[Arrival, ...]:
    """Sorts requests by arrival and numbers them; those of one time keep the order they came in."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.arrival_s)
    return tuple(dataclasses.replace(one, number=number) for number, one in enumerate(ordered))


def fitting(workload: Workload, max_length: int | None) -> Workload:
    """Leaves out the requests that do not fit; `too_long` of the result grows by their number.

    Args:
      workload: any.
      max_length: most tokens of prompt and output together; None leaves nothing out.

    Returns:
      The others, numbered anew, at the times they had.

    Raises:
      ValueError: none fits.
    """
    if max_length is None:
        return workload
    kept = [one for one in workload.arrivals if one.total_tokens <= max_length]
    if not kept:
        shortest = min(one.total_tokens for one in workload.arrivals)
        raise ValueError(
            f"no request of {workload.name} fits max_length={max_length}: the shortest has "
            f"{shortest} tokens of prompt and output; use more, or scale the lengths"
        )
    left_out = len(workload.arrivals) - len(kept)
    return dataclasses.replace(
        workload, arrivals=in_order(kept), too_long=workload.too_long + left_out
    )


def taken(workload: Workload, count: int, start: int = 0) -> Workload:
    """A slice of a workload.

    Args:
      workload: any.
      count: how many requests.
      start: the number of the first.

    Returns:
      The requests, numbered anew, their times from the first of them.

    Raises:
      ValueError: the workload does not hold so many.
    """
    held = len(workload.arrivals)
    if count < 1 or start < 0 or start + count > held:
        lost = {"malformed": workload.skipped_rows, "too long": workload.too_long}
        left_out = "".join(
            f"; {number} {why} were left out" for why, number in lost.items() if number
        )
        raise ValueError(
            f"{workload.name} holds {held} requests, and {count} from number {start} on were asked "
            f"for (num_requests); ask for at least 1, and for no more than there are{left_out}"
        )
    some = workload.arrivals[start : start + count]
    moved = (dataclasses.replace(one, arrival_s=one.arrival_s - some[0].arrival_s) for one in some)
    return dataclasses.replace(workload, arrivals=in_order(moved))


def poisson(workload: Workload, rate: float, seed: int) -> Workload:
    """The same requests in the same order, arriving as a Poisson process.

    Args:
      workload: any; its own times are dropped.
      rate: requests a second. The gap before the first request, from 0 s, is drawn like all others.
      seed: of the gaps, 0 to 2**32 - 1. Lengths drawn with the same seed are independent of them,
        and a longer workload begins with the times of a shorter one.

    Raises:
      ValueError: a rate that is not above 0, or a seed out of range.
    """
    _check_positive("rate", rate)
    gaps = generator(seed, _GAPS).exponential(1 / rate, len(workload.arrivals))
    timed = (
        dataclasses.replace(one, arrival_s=float(time))
        for one, time in zip(workload.arrivals, np.cumsum(gaps), strict=True)
    )
    return dataclasses.replace(workload, arrivals=in_order(timed))


def scaled(workload: Workload, *, lengths: float = 1.0, rate: float = 1.0) -> Workload:
    """Makes requests longer or shorter, and more or less frequent.

    With block ids the block is scaled to a whole number of tokens, and so is what fills the last
    block of a prompt. Every prompt keeps its ids, so equal prefixes stay equal and a prefix cache
    of unlimited size hits the same blocks. To keep the block and cut prompts to their first ones
    would keep what is shared most and raise the hit rate.

    Args:
      workload: any.
      lengths: factor of prompts and outputs. Products are rounded, to at least 1. With block ids
        prompts are multiplied by the new block over the old: 154 / 512 for lengths=0.3.
      rate: factor of requests a second; times are divided by it.

    Raises:
      ValueError: a factor that is not above 0, or a length above `MAX_LENGTH`.
    """
    _check_positive("lengths", lengths)
    _check_positive("rate", rate)
    old, new = workload.block_tokens, None
    if old is not None:
        new = _times(old, lengths)

    def prompt(tokens: int) -> int:
        if old is None or new is None:
            return _times(tokens, lengths)
        whole = blocks_of(tokens, old) - 1
        return whole * new + _times(tokens - whole * old, new / old)

    arrivals = tuple(
        dataclasses.replace(
            one,
            arrival_s=one.arrival_s / rate,
            prompt_tokens=prompt(one.prompt_tokens),
            output_tokens=_times(one.output_tokens, lengths),
        )
        for one in workload.arrivals
    )
    return dataclasses.replace(workload, arrivals=arrivals, block_tokens=new)


def prompt_ids(
    arrival: Arrival, block_tokens: int | None, vocab_size: int, seed: int, first_id: int = 0
) -> np.ndarray:
    """Draws the tokens of a prompt, uniformly.

    A block's tokens depend on the seed and its id alone; without block ids the prompt's depend on
    the seed and the request's number. NumPy's PCG64 gives the same on every platform.

    Args:
      arrival: a request.
      block_tokens: of its workload.
      vocab_size: tokens are below it.
      seed: 0 to 2**32 - 1.
      first_id: tokens are from here on, which leaves out special ones at the start.

    Returns:
      [prompt_tokens] int32.

    Raises:
      ValueError: no token to draw from, a seed out of range, or another number of block ids than
        blocks.
    """
    if not 0 <= first_id < vocab_size <= MAX_LENGTH:
        raise ValueError(
            f"tokens from first_id={first_id} to below vocab_size={vocab_size} are asked for; "
            f"wanted 0 <= first_id < vocab_size <= {MAX_LENGTH:,}"
        )
    _check_seed(seed)

    def drawn(number: int, count: int) -> np.ndarray:
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, number))))
        return random.integers(first_id, vocab_size, count, np.int32)

    if not arrival.block_ids:
        return drawn(arrival.number, arrival.prompt_tokens)
    wanted = blocks_of(arrival.prompt_tokens, block_tokens)
    if block_tokens is None or len(arrival.block_ids) != wanted:
        raise ValueError(
            f"request {arrival.number} has {len(arrival.block_ids)} block ids, and with "
            f"block_tokens={block_tokens} its prompt of {arrival.prompt_tokens} tokens has "
            f"{wanted} blocks; give the workload's own block_tokens"
        )
    blocks = [drawn(one, block_tokens) for one in arrival.block_ids]
    return np.concatenate(blocks)[: arrival.prompt_tokens]


def generator(seed: int, purpose: int) -> np.random.Generator:
    """Draws for one purpose of a seed: independent of the others, and of `prompt_ids`.

    Args:
      seed: 0 to 2**32 - 1.
      purpose: a number that no other use of a seed has.

    Raises:
      ValueError: a seed out of range.
    """
    _check_seed(seed)
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose,))
    return np.random.Generator(np.random.PCG64(sequence))


def _check_seed(seed: int) -> None:
    # Above 32 bits, a seed and a block id could stand for those of another pair.
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}, wanted 0 to {2**32 - 1:,}")


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value}, wanted a number above 0")


def _times(length: int, factor: float) -> int:
    return max(1, round(min(length * factor, MAX_LENGTH + 1)))
