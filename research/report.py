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

from kvlab.research.figures import Picture, draw_figures
from kvlab.research.findings import findings
from kvlab.research.grouping import Points
from kvlab.research.results import RunFolderError, read_manifest, read_rows, write_atomically
from kvlab.research.rows import Row
from kvlab.research.tables import format_table, quality_parts, result_tables

REPORT_NAME = "report.html"

# What a reader has to know, shown only where the report has the metric or the placement.
_GLOSSARY = {
    "decode_tokens": (
        "steps",
        "how many tokens were decoded to measure a time; where a step costs much, there are fewer.",
    ),
    "kv_bytes_window": (
        "KV a sequence",
        "the memory in pages (or whole rows) that a sequence had taken at the end of a scored "
        "window, over all layers.",
    ),
    "ttft_s": (
        "TTFT",
        "time to first token: from the start of the prompt to the first new token. It is the "
        "prefill, in which all tokens of the prompt are computed at once.",
    ),
    "tpot_s": (
        "TPOT",
        "time per output token: one step of decoding, in which every sequence of the batch gets "
        "one new token.",
    ),
    "decode_tokens_per_s": (
        "decode tok/s",
        "new tokens per second after the first, all sequences of the batch together.",
    ),
    "kv_bytes_per_token": (
        "KV B/token",
        "measured bytes of the key and value cache, with everything it needs to work, over the "
        "tokens that it can hold.",
    ),
    "kv_waste": (
        "KV waste",
        "the share of the memory taken by sequences (their pages, or whole reserved rows) that "
        "held no token.",
    ),
    "perplexity": (
        "perplexity",
        "how many tokens the model hesitates between at each position of a real text; lower is "
        "better. Only compare it within one text: a text with more tokens per word differs.",
    ),
    "kl_vs_oracle": (
        "KL",
        "how far the predictions are from those of the oracle, the unmodified model that "
        "recomputes the whole text at every step; 0 is no difference.",
    ),
    "kl_vs_oracle_p99": (
        "KL p99",
        "the same at the position that only one in a hundred exceeds: how bad the bad places are.",
    ),
    "top1_agreement": (
        "top-1",
        "how often the most likely next token is the oracle's.",
    ),
    "passkey_accuracy": (
        "passkey",
        "a number is hidden at several depths of a long text and asked for at its end: the share "
        "of numbers whose every digit is ranked first. Only lengths that the full cache answers.",
    ),
    "passkey_digits": (
        "passkey digits",
        "the share of the digits that are ranked first.",
    ),
}
_PLACEMENTS = {
    "recompute": "no cache: every step computes the whole text again. The baseline.",
    "contiguous": "one stretch of memory per sequence, as long as the longest text allowed.",
    "paged": "memory in pages of a few tokens, handed out as a sequence grows.",
    "ring": "only the last tokens of a sliding window are kept.",
}
_NAMED_AXES = ("placement", "storage", "retention")
_RETENTIONS = {
    "window": "only the newest tokens are kept.",
    "sinks": "the first tokens, which attention leans on, and the newest are kept (StreamingLLM).",
    "h2o": "the tokens that received most attention so far, and the newest, are kept.",
    "snapkv": "the tokens that the end of the prompt attends to are kept.",
    "random": "tokens are kept by lot: the control that a policy has to beat.",
    "kivi4": "keys in 4 bits by channel, values by token, the newest tokens in full (KIVI).",
}
_ATTENTIONS = {
    "mha": "multi-head attention: every query head has its own keys and values.",
    "gqa": "grouped-query attention: groups of query heads share keys and values.",
    "mqa": "multi-query attention: all query heads share one set of keys and values.",
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
    points = Points(_rows_of_all(runs))
    pictures = draw_figures(points)
    for picture in pictures:
        write_atomically(page.parent / picture.name, picture.png)
    write_atomically(page, _render(runs, points, pictures, notes).encode())
    return page


def results_text(rows: Sequence[Row]) -> str:
    """Writes the tables, failures and findings of a run for a terminal.

    Args:
        rows: the newest row of each point.

    Returns:
        Lines without a line end after the last.
    """
    points = Points(rows)
    blocks = [table.text() for table in result_tables(points, brief=True)]
    failed = _failures(points)
    if failed:
        blocks.append("Failed points\n\n" + format_table(failed, ["point", "error"]))
    sentences = findings(points)
    if sentences:
        blocks.append("Findings\n\n" + "\n".join(f"- {sentence}" for sentence in sentences))
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


def _failures(points: Points) -> list[dict[str, str]]:
    return [
        {"point": _point_name(points, row), "error": _first_line(row.get("error", ""))}
        for row in points.rows
        if row["status"] == "failed"
    ]


def _not_finite(points: Points) -> list[str]:
    return [
        f"{_point_name(points, row)}: {name} came out as {value}"
        for row in points.rows
        for name, value in row.get("non_finite", {}).items()
    ]


def _point_name(points: Points, row: Row) -> str:
    variant, workload = points.variant_of(row), points.workload_of(row)
    return f"{variant.label}, {workload.label}" if workload.label else variant.label


def _first_line(error: str) -> str:
    return next((line for line in error.splitlines() if line.strip()), "no error recorded")


def _terms(points: Points) -> dict[str, str]:
    """The words that this report uses, explained."""
    metrics = points.metrics()
    bases = {quality_parts(name)[0] or name for name in metrics}
    settings = [variant.settings for variant in points.variants]
    used = {str(it.get("attention", "")).partition(":")[0] for it in settings}
    used |= {str(it.get(axis, "")).partition(":")[0] for it in settings for axis in _NAMED_AXES}
    named = {**_ATTENTIONS, **_PLACEMENTS, **_RETENTIONS}
    return {
        **{name: text for name, text in named.items() if name in used},
        **{
            term: text
            for name, (term, text) in _GLOSSARY.items()
            if name in bases or name in points.varying
        },
    }


def _render(
    runs: Sequence[_Run], points: Points, pictures: Sequence[Picture], notes: Sequence[str]
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
        terms=_terms(points),
        findings=findings(points),
        notes=list(dict.fromkeys([*stored, *notes])),
        figures=[
            {
                "title": picture.title,
                "caption": picture.caption,
                "source": "data:image/png;base64," + base64.b64encode(picture.png).decode("ascii"),
            }
            for picture in pictures
        ],
        tables=result_tables(points),
        failures=_failures(points),
        not_finite=_not_finite(points),
        held_fixed=_shown_settings(points.held_fixed()),
        finished=any(row["status"] == "ok" for row in points.rows),
    )


def _shown_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    return {
        name.replace("_", " "): value if isinstance(value, str) else repr(value)
        for name, value in settings.items()
        if value is not None
    }
