"""Runs the points of a study into a run folder: one row each, resumed where it was stopped."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlab.research.progress import progress
from kvlab.research.results import RunFolder
from kvlab.research.rows import Row, make_row, timestamp

Measured = tuple[Mapping[str, float], Mapping[str, Sequence[tuple[float, float]]]]


def run_points(
    folder: RunFolder,
    points: Sequence[Mapping[str, Any]],
    seed: int,
    measure: Callable[[Mapping[str, Any], int], Measured],
    label: Callable[[Mapping[str, Any]], str],
) -> list[Row]:
    """Measures every point that has no finished row yet.

    Args:
      folder: open; a point that fails becomes a failed row, and the run goes on.
      points: configs, one for each row.
      seed: of every point.
      measure: from a config and the seed to metrics and series.
      label: a config in a few words.

    Returns:
      The newest row of each point.
    """
    name = folder.manifest["command"]
    left = [point for point in points if folder.finished(point, seed) is None]
    with progress(len(points), name, done=len(points) - len(left), unit="points") as report:
        for point in left:
            started, began = timestamp(), time.perf_counter()
            metrics: Mapping[str, float] = {}
            series: Mapping[str, Sequence[tuple[float, float]]] = {}
            error = None
            try:
                metrics, series = measure(point, seed)
            except Exception as exception:
                error = f"{type(exception).__name__}: {exception}"
            row = make_row(
                name,
                point,
                seed,
                metrics=metrics,
                started=started,
                wall_s=time.perf_counter() - began,
                error=error,
                series=series,
            )
            folder.append(row)
            if error is not None:
                report.say(f"failed: {label(point)}: {error}")
            report.advance(label(point))
    return folder.rows
