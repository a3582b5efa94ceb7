"""Requests on their way through an engine, in the time of their arrival."""

import dataclasses
from collections.abc import Iterable, Iterator

from kvlab.research.engine import Engine
from kvlab.research.requests import Progress, RefusedError, Request


def serve(
    engine: Engine, requests: Iterable[Request], refused: dict[str, str] | None = None
) -> Iterator[Progress]:
    """Adds requests as they arrive and steps the engine until all have ended.

    Args:
      engine: an engine without requests.
      requests: in the order of arrival; `arrival_s` counts from the call.
      refused: takes the reason, by id, of each request that the engine could never serve. None
        lets the first such request raise.

    Yields:
      What each step gave, as it comes.

    Raises:
      RefusedError: see `refused`.
    """
    executor = engine.executor
    began = executor.now()
    waiting = iter(requests)
    coming = next(waiting, None)
    while coming is not None or engine.busy:
        while coming is not None and began + coming.arrival_s <= executor.now():
            try:
                engine.add(dataclasses.replace(coming, arrival_s=began + coming.arrival_s))
            except RefusedError as error:
                if refused is None:
                    raise
                refused[coming.id] = error.reason
            coming = next(waiting, None)
        executor.next_arrival_s = float("inf") if coming is None else began + coming.arrival_s
        if engine.busy:
            yield from engine.step()
        elif coming is not None:
            executor.wait_until(executor.next_arrival_s)
