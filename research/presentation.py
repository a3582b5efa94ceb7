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
