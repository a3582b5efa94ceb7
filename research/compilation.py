"""Counts compilations: how many programs XLA built, and for how long."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compilations:
    """Programs built inside a `count_compilations` block.

    A program that the persistent cache delivers counts too: it is a program of the session, only
    a quick one.
    """

    count: int = 0
    seconds: float = 0.0


_counting: list[Compilations] = []


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _EVENT:
        for compilations in _counting:
            compilations.count += 1
            compilations.seconds += duration_secs


# One listener for the process: JAX has no public way to take one back.
jax.monitoring.register_event_duration_secs_listener(_on_duration)


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts what is compiled inside the block, on any thread; blocks may nest."""
    compilations = Compilations()
    _counting.append(compilations)
    try:
        yield compilations
    finally:
        # By identity: two counters of equal value are still two.
        _counting[:] = [other for other in _counting if other is not compilations]
