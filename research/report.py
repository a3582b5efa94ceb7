"""The report of one or more run folders: figures, tables and what they say, in one HTML page.

The page is self-contained: figures are embedded, and nothing is fetched from elsewhere.
"""

import base64
import collections
import dataclasses
import importlib.resources
import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from kvlab.research.allocation_report import present_memory_waste, present_page_size
from kvlab.research.attention_quality_report import present_attention_quality
from kvlab.research.concurrency_report import present_concurrency
from kvlab.research.peer_report import present_peers
from kvlab.research.presentation import Presentation
from kvlab.research.results import RunFolderError, read_manifest, read_rows, write_atomically
from kvlab.research.roofline_report import present_roofline
from kvlab.research.rows import Row
from kvlab.research.serve_report import present_serve_trace
from kvlab.research.sharing_report import present_sharing
from kvlab.research.sweep_report import present_sweep
from kvlab.research.tables import format_table
from kvlab.research.training_report import present_train

REPORT_NAME = "report.html"

_PRESENTERS = {
    "sweep": present_sweep,
    "memory_waste": present_memory_waste,
    "concurrency": present_concurrency,
    "page_size": present_page_size,
    "serve_trace": present_serve_trace,
    "sharing": present_sharing,
    "peers": present_peers,
    "roofline": present_roofline,
    "train": present_train,
    "attention_quality": present_attention_quality,
}


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run folder, as the page shows it."""

    folder: pathlib.Path
    manifest: dict[str, Any]
    rows: list[Row]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def command(self) -> str:
        return shlex.join(["kvlab", self.manifest["command"], *self.manifest["argv"]])

    @property
    def progress(self) -> str:
        finished = sum(row["status"] == "ok" for row in self.rows)
        failed = len(self.rows) - finished
        wanted = self.manifest.get("points")
        count = f"{finished} of {wanted}" if wanted else f"{finished}"
        unit = "point" if (wanted or finished) == 1 else "points"
        return f"{count} {unit} finished" + (f", {failed} failed" if failed else "")

    @property
    def machine(self) -> dict[str, Any]:
        """Where it ran, as the manifest says."""
        return {
            "started": self.manifest.get("started"),
            "git revision": self.manifest.get("git_revision") or "not a checkout",
            **{k.replace("_", " "): v for k, v in self.manifest.get("device", {}).items()},
            **self.manifest.get("versions", {}),
        }


def write_report(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    notes: Sequence[str] = (),
) -> pathlib.Path:
    """Writes figures and one self-contained page about one or more runs.

    Args:
        folders: run folders; a run may be unfinished, or have no row yet.
        out: the page, or a folder for it; `report.html` in the first run folder by default. The
            figures are written beside it.
        notes: paragraphs to show besides those that the runs stored.

    Returns:
        The path of the page.

    Raises:
        RunFolderError: a folder is no run folder or is corrupt, or the page cannot be written.
    """
    if not folders:
        raise RunFolderError("a report needs at least one run folder; none was given")
    runs = [
        _Run(pathlib.Path(folder), read_manifest(folder), read_rows(folder)) for folder in folders
    ]
    page = pathlib.Path(folders[0]) / REPORT_NAME if out is None else pathlib.Path(out)
    if page.is_dir():
        page /= REPORT_NAME
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise RunFolderError(f"cannot write {page}: {page.parent} is a file") from None
    except OSError as error:
        raise RunFolderError(f"cannot write {page}: {error.strerror}") from error
    commands = {run.manifest["command"] for run in runs}
    if len(commands) > 1:
        raise RunFolderError(
            f"these are runs of different commands ({', '.join(sorted(commands))}); write a report "
            "of each"
        )
    rows = _rows_of_all(runs)
    shown = presentation(commands.pop(), rows)
    for picture in shown.pictures:
        write_atomically(page.parent / picture.name, picture.png)
    write_atomically(page, _render(runs, rows, shown, notes).encode())
    return page


def presentation(command: str, rows: Sequence[Row]) -> Presentation:
    """What a report shows of rows, by the command that made them."""
    return _PRESENTERS.get(command, present_sweep)(rows)


def results_text(rows: Sequence[Row], command: str = "sweep") -> str:
    """Writes the tables, failures and findings of a run for a terminal.

    Args:
        rows: the newest row of each point.
        command: that made them.

    Returns:
        Lines without a line end after the last.
    """
    shown = presentation(command, rows)
    blocks = [table.text() for table in shown.brief_tables]
    failed = _failures(rows, shown)
    if failed:
        blocks.append("Failed points\n\n" + format_table(failed, ["point", "error"]))
    if shown.findings:
        blocks.append("Findings\n\n" + "\n".join(f"- {sentence}" for sentence in shown.findings))
    return "\n\n".join(blocks) or "No point has finished yet."


def _rows_of_all(runs: Sequence[_Run]) -> list[Row]:
    """The rows of all runs; where two runs have a point in common, its rows name their run."""
    seen = collections.Counter(
        (row["config_hash"], row["seed"]) for run in runs for row in run.rows
    )
    if all(count == 1 for count in seen.values()):
        return [row for run in runs for row in run.rows]
    names = collections.Counter(run.name for run in runs)
    rows = []
    for run in runs:
        name = run.name if names[run.name] == 1 else str(run.folder)
        for row in run.rows:
            named = row.copy()
            named["config"] = {**row["config"], "run": name}
            rows.append(named)
    return rows


def _failures(rows: Sequence[Row], shown: Presentation) -> list[dict[str, str]]:
    return [
        {"point": label, "error": _first_line(row.get("error", ""))}
        for row, label in zip(rows, shown.labels, strict=True)
        if row["status"] == "failed"
    ]


def _not_finite(rows: Sequence[Row], shown: Presentation) -> list[str]:
    return [
        f"{label}: {name} came out as {value}"
        for row, label in zip(rows, shown.labels, strict=True)
        for name, value in row.get("non_finite", {}).items()
    ]


def _first_line(error: str) -> str:
    return next((line for line in error.splitlines() if line.strip()), "no error recorded")


def _render(
    runs: Sequence[_Run], rows: Sequence[Row], shown: Presentation, notes: Sequence[str]
) -> str:
    stored = [note for run in runs for note in run.manifest.get("notes", [])]
    titles = dict.fromkeys(run.manifest.get("title") or run.name for run in runs)
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(
        importlib.resources.files("kvlab.research").joinpath("report.html.j2").read_text("utf-8")
    )
    return template.render(
        title=" and ".join(titles),
        questions=dict.fromkeys(
            run.manifest["question"] for run in runs if run.manifest.get("question")
        ),
        runs=runs,
        reading=shown.reading,
        terms=shown.terms,
        findings=shown.findings,
        notes=list(dict.fromkeys([*stored, *notes])),
        figures=[
            {
                "title": picture.title,
                "caption": picture.caption,
                "source": "data:image/png;base64," + base64.b64encode(picture.png).decode("ascii"),
            }
            for picture in shown.pictures
        ],
        tables=shown.tables,
        failures=_failures(rows, shown),
        not_finite=_not_finite(rows, shown),
        held_fixed=_shown_settings(shown.held_fixed),
        finished=any(row["status"] == "ok" for row in rows),
    )


def _shown_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    return {
        name.replace("_", " "): value if isinstance(value, str) else repr(value)
        for name, value in settings.items()
        if value is not None
    }
