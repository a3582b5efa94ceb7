"""Rows of results: one point of an experiment, its metrics, and what they were measured on.

A point is a config and a seed. Where a point has several rows (a failed one that was retried),
the newest counts.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired, TypedDict, cast

from kvlab.research.environment import environment

_HASH_DIGITS = 12


class RunFolderError(ValueError):
    """A run folder that cannot be used as asked; the message is one line and says the mend."""


class Row(TypedDict):
    """One point of an experiment. A metric that was not measured is absent, never 0."""

    experiment: str
    config: dict[str, Any]
    config_hash: str
    seed: int
    status: Literal["ok", "failed"]
    metrics: dict[str, float]  # a timing here is the median of its repeats
    repeats: dict[str, list[float]]  # the samples behind a metric
    environment: dict[str, Any]
    started: str  # ISO 8601, UTC
    wall_s: float  # the whole point, compiling and warm-up included
    error: NotRequired[str]  # where status is "failed"
    system_versions: NotRequired[dict[str, str]]  # of a system in another process
    non_finite: NotRequired[dict[str, str]]  # metric: "nan", "inf" or "-inf"
    series: NotRequired[dict[str, list[list[float]]]]  # (x, y) pairs of what was traced


def config_hash(config: Mapping[str, Any]) -> str:
    """Names a config by its content: the order of keys and the kind of sequence do not matter.

    Args:
        config: what defines a point; anything JSON can hold.

    Returns:
        The first 12 hexadecimal digits of the SHA-256 of the config's canonical JSON.

    Raises:
        ValueError: the config holds something that JSON cannot, or a number that is not finite.
    """
    try:
        canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config cannot be written as JSON: {error}; config: {config}") from error
    return hashlib.sha256(canonical.encode()).hexdigest()[:_HASH_DIGITS]


def timestamp() -> str:
    """The time now, as rows and manifests write it (ISO 8601, UTC, whole seconds)."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def summarise(samples: Sequence[float]) -> dict[str, float]:
    """Gives the middle and the spread of repeated measurements.

    Args:
        samples: one value per repeat, in the unit of the metric.

    Returns:
        `median`, `min`, `max` (same unit) and `count`.

    Raises:
        ValueError: there is no sample, or one is not finite.
    """
    values = [float(sample) for sample in samples]
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"a summary needs at least one sample, all finite; got {values}")
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def make_row(
    experiment: str,
    config: Mapping[str, Any],
    seed: int,
    *,
    metrics: Mapping[str, Any] | None = None,
    repeats: Mapping[str, Sequence[Any]] | None = None,
    started: str,
    wall_s: float,
    error: str | None = None,
    series: Mapping[str, Sequence[Sequence[float]]] | None = None,
) -> Row:
    """Builds a row; an `error` makes it a failed one.

    JSON has no NaN and no infinity, so a metric that is not finite leaves `metrics` and is named
    in `non_finite`: it reads as absent, and yet is not lost.

    Args:
        experiment: name of the experiment.
        config: the point; it is stored whole and hashed.
        seed: seed of the point.
        metrics: metric name to value; Python, NumPy or JAX scalars. Leave out what was not
            measured.
        repeats: metric name to samples; a metric that only has samples becomes their median.
        started: when the point began, from `timestamp()`.
        wall_s: seconds that the point took.
        error: why the point failed.
        series: curves that were traced, (x, y) pairs by name, all finite.

    Returns:
        The row, ready for `RunFolder.append`.

    Raises:
        ValueError: the config cannot be written as JSON, a metric is no number, or a metric is
            given both as a value and as samples with another median.
    """
    samples = {
        name: [_number(name, value) for value in values]
        for name, values in (repeats or {}).items()
        if len(values)
    }
    values = {name: _number(name, value) for name, value in (metrics or {}).items()}
    for name, repeated in samples.items():
        median = statistics.median(repeated)
        if math.isfinite(median) and not math.isclose(values.get(name, median), median):
            raise ValueError(
                f"metric {name} is {values[name]}, but the median of its samples is {median}; "
                "give the samples only"
            )
        values.setdefault(name, median)
        if not all(map(math.isfinite, repeated)):
            values[name] = math.nan
    non_finite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    row: Row = {
        "experiment": experiment,
        "config": dict(config),
        "config_hash": config_hash(config),
        "seed": int(seed),
        "status": "ok" if error is None else "failed",
        "metrics": {name: value for name, value in values.items() if name not in non_finite},
        "repeats": {name: value for name, value in samples.items() if name not in non_finite},
        "environment": environment(),
        "started": started,
        "wall_s": float(wall_s),
    }
    if error is not None:
        row["error"] = error
    if non_finite:
        row["non_finite"] = non_finite
    if series:
        row["series"] = {
            name: [[_number(name, value) for value in point] for point in points]
            for name, points in series.items()
        }
    return row


def newest_rows(rows: Iterable[Row]) -> list[Row]:
    """Keeps the newest row of each point (config and seed), in the order they were first seen."""
    newest: dict[tuple[str, int], Row] = {}
    for row in rows:
        newest[row["config_hash"], row["seed"]] = row
    return list(newest.values())


def parse_rows(content: bytes, name: str) -> tuple[list[Row], int]:
    """Reads the lines of a results file.

    Args:
        content: the bytes of the file.
        name: how an error should call the file.

    Returns:
        Every row, and how many bytes are good: fewer than there are where the last line was left
        half-written by a killed run.

    Raises:
        RunFolderError: a line before the last is corrupt, or a line is not a row.
    """
    rows: list[Row] = []
    good = 0
    lines = content.rstrip().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            if number == len(lines):
                return rows, good
            raise RunFolderError(
                f"{name} line {number} is corrupt ({error}); delete that line, and its point is "
                "measured again"
            ) from error
        missing = Row.__required_keys__ - (row.keys() if isinstance(row, dict) else set())
        if missing:
            raise RunFolderError(
                f"{name} line {number} is not a results row: it lacks "
                f"{', '.join(sorted(missing))}; delete that line, and its point is measured again"
            )
        rows.append(cast("Row", row))
        good += len(line)
    return rows, len(content)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool | int | float):
        return value
    try:
        number = value.item()
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"metric {name} is {value!r}, not a number; leave out what was not measured"
        ) from error
    return _number(name, number)
