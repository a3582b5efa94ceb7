"""How an engine's requests use its cache, token slot by token slot."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvlab.research.executor import Executor
from kvlab.research.live_requests import LiveRequest


class Usage(NamedTuple):
    """Token slots of the KV cache (of its first pool) at one time, and who is there.

    `filled + reserved + internal + cached + free = total`, as Fig. 2 of "PagedAttention" (arXiv
    2309.06180) divides them: reserved slots are taken for tokens that their request may still
    make, internal ones for tokens that it never will; its external fragmentation is what is free
    while requests wait.
    """

    time_s: float  # the end of the step
    step_s: float  # how long it took
    running: int  # requests
    samples: int  # of those
    waiting: int  # requests
    left: int  # requests that wait or run at the end of the step
    total: int
    filled: int  # a slot that several samples share counts once
    reserved: int
    internal: int
    cached: int  # of prefixes that no request uses
    free: int


def over_time(
    history: Sequence[Usage], began: float, value: Callable[[Usage], float]
) -> list[tuple[float, float]]:
    """What steps used, as a curve whose values hold until the next; 0 while there is no request.

    Args:
      history: of an engine.
      began: the time that is 0.
      value: of a step.

    Returns:
      (seconds, value) pairs, some 400 of the steps.
    """
    points: list[tuple[float, float]] = []
    every = max(1, len(history) // 400)
    for number, use in enumerate(history):
        idle = number > 0 and history[number - 1].left == 0
        if idle:
            points.append((history[number - 1].time_s - began, 0.0))
        if idle or number % every == 0:
            points.append((use.time_s - use.step_s - began, value(use)))
    if history:
        points.append((history[-1].time_s - began, 0.0))
    return points


def measure(executor: Executor, running: Sequence[LiveRequest], waiting: int, cached: int) -> Usage:
    """Measures how the cache is used.

    Args:
      executor: whose cache.
      running: requests that have slots.
      waiting: how many have none.
      cached: token slots of prefixes that no request uses.
    """
    slots, held, most = [], [], []
    for live in running:
        first, limit = live.slots[0], live.prompt_tokens + live.request.max_tokens
        for sample in live.open_samples:
            has_prompt = sample.slot == first or live.forked
            slots.append(sample.slot)
            held.append(live.done + sample.fed if has_prompt else 0)
            most.append(limit)
    tokens = np.array(held, int)
    taken = executor.taken(np.array(slots, int), tokens)
    reserved = np.minimum(taken, np.maximum(np.array(most, int), tokens)) - tokens
    total, used = executor.token_slots(taken)
    unfilled = int(taken.sum() - tokens.sum())
    return Usage(
        time_s=executor.now(),
        step_s=0.0,
        running=len(running),
        samples=len(slots),
        waiting=waiting,
        left=len(running) + waiting,
        total=total,
        filled=used - cached - unfilled,
        reserved=int(reserved.sum()),
        internal=unfilled - int(reserved.sum()),
        cached=cached,
        free=total - used,
    )
