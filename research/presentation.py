"""What a report shows of the rows of a run: words, tables and figures."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.research.tables import Table


@dataclasses.dataclass(frozen=True)
class Picture:
    """One finished figure.

    Attributes:
        name: its file name.
        title: what it shows.
        caption: how to read it, in words.
        png: the image.
    """

    name: str
    title: str
    caption: str
    png: bytes


@dataclasses.dataclass(frozen=True)
class Presentation:
    """The rows of one kind of run, as people read them.

    Attributes:
        reading: a paragraph on how to read the page.
        terms: the words used, explained.
        findings: sentences, the most important first.
        tables: for the page.
        brief_tables: for a terminal.
        pictures: in the order to show them.
        labels: the name of each row, in the order of the rows.
        held_fixed: settings that all rows share.
    """

    reading: str
    terms: Mapping[str, str]
    findings: Sequence[str]
    tables: Sequence[Table]
    brief_tables: Sequence[Table]
    pictures: Sequence[Picture]
    labels: Sequence[str]
    held_fixed: Mapping[str, Any]


def shared_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings, other than None, that all configs have alike."""
    first = configs[0] if configs else {}
    return {
        name: value
        for name, value in first.items()
        if value is not None and all(config.get(name) == value for config in configs)
    }


def told_apart(
    labels: Sequence[str], configs: Sequence[Mapping[str, Any]], beside: Sequence[str] = ()
) -> list[str]:
    """Labels, each with the settings by which its config differs from others of the same label.

    Args:
        labels: of each config, as short as one likes.
        configs: what is labelled.
        beside: settings that are shown beside the labels, and need not be in them.
    """
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for label, config in zip(labels, configs, strict=True):
        alike.setdefault(label, []).append(config)
    told = []
    for label, config in zip(labels, configs, strict=True):
        others = alike[label]
        names = dict.fromkeys(name for other in others for name in other if name not in beside)
        differing = [
            name for name in names if any(other.get(name) != config.get(name) for other in others)
        ]
        told.append(", ".join([label, *(f"{name}={config.get(name)}" for name in differing)]))
    return told
