"""Rows as readers think of them: variants, each measured under one or more workloads.

A variant is what is compared (attention, placement and every other setting); a workload is what
it was given to do (batch size, prompt length). Quality is scored once per variant, so it is
looked up by variant, whatever row carries it.
"""

import collections
import dataclasses
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.research.rows import Row

WORKLOAD_KEYS = ("batch_size", "prompt_tokens")

# Neither what is compared nor what a figure is drawn for: recompute decodes fewer steps, and
# quality is asked for on one row of a variant only.
_NEITHER = re.compile(r"decode_tokens|quality.*|window_tokens|forced_tokens|passkey_tokens")
_ATTENTIONS = ("mha", "gqa", "mqa")
_PLACEMENTS = ("recompute", "contiguous", "paged", "ring")
_NAMED_FIRST = ("run", "model", "attention", "placement", "page_size")
_LONGEST_VALUE = 28


@dataclasses.dataclass(frozen=True)
class Measured:
    """A metric of one variant: its value, and the least and greatest sample behind it."""

    value: float
    low: float
    high: float

    @property
    def has_spread(self) -> bool:
        """Whether there is more than one sample."""
        return self.low < self.high

    def overlaps(self, other: "Measured") -> bool:
        """Whether the spreads of two measurements meet, so that they may be the same."""
        return self.low <= other.high and other.low <= self.high


@dataclasses.dataclass(frozen=True)
class Variant:
    """One thing that is compared.

    Attributes:
        key: the settings as canonical JSON, which tells variants apart.
        parts: the settings in words that a reader needs to tell the variants at hand apart.
    """

    key: str
    parts: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that make the variant."""
        return json.loads(self.key)

    @property
    def label(self) -> str:
        """The variant in a few words."""
        return " ".join(self.parts)

    def without(self, *names: str) -> str:
        """The settings but for some, to find variants that differ in those alone."""
        return _canonical({k: v for k, v in self.settings.items() if k not in names})


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a variant was given to do; `label` names what differs between the workloads at hand."""

    settings: tuple[tuple[str, Any], ...]
    label: str


class Points:
    """The points of one or more runs, by variant and workload.

    Attributes:
        rows: every row, failed ones included.
        variants: in the order to show them: by attention, then placement, then the rest.
        workloads: from light to heavy.
        varying: names of the config entries that differ between rows.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        """Groups rows; rows that differ in seed alone are samples of one point."""
        self.rows = list(rows)
        settings = {_canonical(_variant_settings(row)): _variant_settings(row) for row in rows}
        self.variants = _named_variants(settings)
        self.workloads = _named_workloads({_workload_settings(row) for row in rows})
        values: dict[str, set[str]] = collections.defaultdict(set)
        for row in rows:
            for name, value in row["config"].items():
                values[name].add(_canonical({name: value}))
        self.varying = {name for name, seen in values.items() if len(seen) > 1}
        self._found: dict[str, list[Row]] = collections.defaultdict(list)
        for row in rows:
            if row["status"] == "ok":
                self._found[_canonical(_variant_settings(row))].append(row)

    def measured(
        self, variant: Variant, metric: str, workload: Workload | None = None
    ) -> Measured | None:
        """Looks up a metric.

        Args:
            variant: of which variant.
            metric: its name.
            workload: under which workload; None takes the lightest that measured it, which is
                meant for metrics that no workload changes (quality, bytes per token).

        Returns:
            The median over seeds with the spread over all samples, or None where it was not
            measured.
        """
        for candidate in self.workloads if workload is None else [workload]:
            rows = [
                row
                for row in self._found[variant.key]
                if _workload_settings(row) == candidate.settings and metric in row["metrics"]
            ]
            if rows:
                values = [row["metrics"][metric] for row in rows]
                samples = [*values, *(s for row in rows for s in row["repeats"].get(metric, ()))]
                return Measured(statistics.median(values), min(samples), max(samples))
        return None

    def settings(self, variant: Variant, workload: Workload) -> dict[str, Any]:
        """The whole config of a point; empty where it has not finished."""
        for row in self._found[variant.key]:
            if _workload_settings(row) == workload.settings:
                return row["config"]
        return {}

    def held_fixed(self) -> dict[str, Any]:
        """The config entries that are the same in every row."""
        if not self.rows:
            return {}
        return {
            name: value
            for name, value in self.rows[0]["config"].items()
            if name not in self.varying and all(name in row["config"] for row in self.rows)
        }

    def metrics(self) -> list[str]:
        """The names of all metrics that some row measured, in the order they were first seen."""
        return list(dict.fromkeys(name for row in self.rows for name in row["metrics"]))

    def variant_of(self, row: Row) -> Variant:
        """The variant that a row belongs to."""
        key = _canonical(_variant_settings(row))
        return next(variant for variant in self.variants if variant.key == key)

    def workload_of(self, row: Row) -> Workload:
        """The workload that a row belongs to."""
        settings = _workload_settings(row)
        return next(workload for workload in self.workloads if workload.settings == settings)


def attention_rank(name: str) -> tuple[int, str]:
    """Sorts attention variants from most KV heads to fewest; names not known come last."""
    base = name.partition(":")[0]
    return (_ATTENTIONS.index(base) if base in _ATTENTIONS else len(_ATTENTIONS), name)


def placement_rank(name: str) -> tuple[int, str]:
    """Sorts placements: the baseline without a cache first; names not known come last."""
    return (_PLACEMENTS.index(name) if name in _PLACEMENTS else len(_PLACEMENTS), name)


def combined_label(variants: Sequence[Variant], limit: int = 8) -> str:
    """Names several variants at once: "mha/gqa paged" where they are a product, else one by one.

    Args:
        variants: the variants; at least one.
        limit: how many to spell out where they are no product.
    """
    lengths = {len(variant.parts) for variant in variants}
    if len(lengths) == 1:
        columns = [
            list(dict.fromkeys(column)) for column in zip(*(v.parts for v in variants), strict=True)
        ]
        if math.prod(map(len, columns)) == len(variants):
            return " ".join("/".join(column) for column in columns)
    labels = [variant.label for variant in variants]
    if len(labels) > limit:
        labels = [*labels[: limit - 1], f"{len(labels) - limit + 1} more"]
    return ", ".join(labels)


def _canonical(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, ensure_ascii=False)


def _variant_settings(row: Row) -> dict[str, Any]:
    return {
        name: value
        for name, value in row["config"].items()
        if name not in WORKLOAD_KEYS and not _NEITHER.fullmatch(name)
    }


def _workload_settings(row: Row) -> tuple[tuple[str, Any], ...]:
    return tuple((name, row["config"][name]) for name in WORKLOAD_KEYS if name in row["config"])


def _named_workloads(found: set[tuple[tuple[str, Any], ...]]) -> list[Workload]:
    varying = [
        name for name in WORKLOAD_KEYS if len({dict(settings).get(name) for settings in found}) > 1
    ]
    return [
        Workload(
            settings,
            ", ".join(
                f"{name.replace('_', ' ')} {value}" for name, value in settings if name in varying
            ),
        )
        for settings in sorted(found, key=_weight)
    ]


def _weight(settings: tuple[tuple[str, Any], ...]) -> list[tuple[str, float, str]]:
    return [
        (name, value if isinstance(value, int | float) else -1.0, str(value))
        for name, value in settings
    ]


def _named_variants(found: dict[str, dict[str, Any]]) -> list[Variant]:
    values: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for settings in found.values():
        for name, value in settings.items():
            values[name][_canonical({name: value})] = None
    varying = {name for name, seen in values.items() if len(seen) > 1}
    first = [name for name in _NAMED_FIRST if name in varying]
    shown = [*first, *(name for name in values if name in varying and name not in first)]
    shown = shown or [name for name in _NAMED_FIRST if name in values]
    # Values of other settings keep the order in which the experiment asked for them.
    asked = {name: list(seen) for name, seen in values.items()}
    variants = []
    seen: collections.Counter[tuple[str, ...]] = collections.Counter()
    for key, settings in sorted(found.items(), key=lambda item: _order(item, shown, asked)):
        parts = _parts(settings, shown)
        seen[parts] += 1
        if seen[parts] > 1:
            parts = (*parts, f"({seen[parts]})")
        variants.append(Variant(key, parts or ("all",)))
    return variants


def _parts(settings: dict[str, Any], shown: Sequence[str]) -> tuple[str, ...]:
    words = {name: _words(name, settings[name]) for name in shown if name in settings}
    if "page_size" in words and "placement" in words:
        words["placement"] += f" {settings['page_size']}"
        del words["page_size"]
    return tuple(text for text in words.values() if text)


def _order(
    item: tuple[str, dict[str, Any]], shown: Sequence[str], asked: Mapping[str, Sequence[str]]
) -> tuple[Any, ...]:
    key, settings = item
    ranks: list[Any] = []
    for name in shown:
        value = settings.get(name)
        if name == "attention":
            ranks.append(attention_rank(str(value)))
        elif name == "placement":
            ranks.append(placement_rank(str(value)))
        elif isinstance(value, int | float):
            ranks.append((0, value))
        else:
            ranks.append((1, asked[name].index(_canonical({name: value})) if value else -1))
    return (*ranks, key)


def _words(name: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return name.replace("_", " ") if value else f"no {name.replace('_', ' ')}"
    if isinstance(value, int | float):
        return f"{name.replace('_', ' ')} {value}"
    text = value if isinstance(value, str) else _canonical(value)
    if name in ("model", "run"):
        text = re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
