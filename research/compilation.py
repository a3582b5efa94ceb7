"""Compilations: how many programs XLA built, for how long, and room for more."""

import contextlib
import dataclasses
import gc
import pathlib
import threading
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


class _Counting(threading.local):
    """The counters that are open on this thread."""

    def __init__(self) -> None:
        self.open: list[Compilations] = []


_counting = _Counting()


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _EVENT:
        for compilations in _counting.open:
            compilations.count += 1
            compilations.seconds += duration_secs


# One listener for the process: JAX has no public way to take one back.
jax.monitoring.register_event_duration_secs_listener(_on_duration)


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts what this thread compiles inside the block; blocks may nest."""
    compilations = Compilations()
    _counting.open.append(compilations)
    try:
        yield compilations
    finally:
        _counting.open.pop()


def make_room_for_programs(most_maps: int = 25_000) -> bool:
    """Frees all compiled programs where a process holds very many, so that more can be compiled.

    On CPU every program maps memory of its own, a hundred times over for a large model. Linux
    allows a process 65,530 maps, and XLA crashes where it gets no more.

    Args:
      most_maps: memory maps up to which nothing is done.

    Returns:
      Whether programs were freed; those still needed are compiled again when they are called.
    """
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") <= most_maps:
        return False
    jax.clear_caches()
    gc.collect()
    return True
