"""What a report shows of served traces: totals by variant, and the cache and requests over time."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlab.research.left_out import left_out_of_workload, refused_by_pool
from kvlab.research.line_chart import Line, LinePanel, draw_lines
from kvlab.research.presentation import Picture, Presentation, shared_settings, told_apart
from kvlab.research.rows import Row
from kvlab.research.tables import Table, mebibytes, milliseconds, percent, significant, whole

_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "requests_ended": ("requests", whole),
    "parts": ("in parts", whole),
    "slots": ("slots", whole),
    "kv_bytes_allocated": ("KV MiB", mebibytes),
    "running_mean": ("at once, mean", significant),
    "running_max": ("at once, most", whole),
    "output_tokens_per_s": ("tok/s", significant),
    "ttft_p50_s": ("TTFT p50 ms", milliseconds),
    "ttft_p99_s": ("TTFT p99 ms", milliseconds),
    "tpot_p50_s": ("TPOT p50 ms", milliseconds),
    "itl_p99_s": ("ITL p99 ms", milliseconds),
    "goodput_share": ("within targets %", percent),
    "kv_filled": ("KV filled %", percent),
    "preemptions": ("preemptions", whole),
    "prefix_hit_rate": ("prefix hits %", percent),
    "compile_count": ("programs", whole),
    "compile_s": ("compile s", significant),
    "pages_left": ("pages left", whole),
    "answers_equal": ("answers equal", whole),
    "answers_checked": ("of", whole),
}
_BRIEF = frozenset(
    {
        *("requests_ended", "parts", "slots", "running_mean", "running_max", "output_tokens_per_s"),
        *("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "preemptions", "answers_equal"),
        "answers_checked",
    }
)
_TERMS = {
    "in parts": "the run was stopped and went on: so many parts served the requests between them.",
    "at once": "requests that have a slot and memory; mean and most are of the time from the first "
    "arrival to the last, so that the end, when nobody comes any more, does not count.",
    "TTFT": "time to first token: from a request's arrival to its first token, waiting included.",
    "TPOT": "time per output token: of the tokens after a request's first one.",
    "ITL": "inter-token latency: between two tokens of a request; the steps of one call on the "
    "device are taken as equally long.",
    "within targets": "requests whose TTFT and TPOT both met their targets, of all (goodput).",
    "KV filled": "share of the memory for keys and values that holds tokens, over the same time.",
    "preemptions": "times a request gave up its pages because they ran out, and was replayed.",
    "prefix hits": "full pages of prompts that were known from earlier requests.",
    "pages left": "pages that a request still holds at the end; 0 unless something leaks.",
    "answers equal": "answers that are token for token those of the same request served alone, of "
    "those that were generated again to see.",
}
_READING = (
    "Every variant serves the same requests, in the time of their arrival, on the same bytes of "
    "memory for keys and values. Compiling is done before the first request."
)


_ALIKE = 1.1  # sizes of caches that are a whole number of pages, or of rows
_PLACEMENT = ("placement", "page_size", "window")
_RATIOS = {
    "running_mean": "the requests at once",
    "output_tokens_per_s": "the tokens a second",
    "ttft_p50_s": "the median time to first token",
    "tpot_p50_s": "the median time per output token",
}


@dataclasses.dataclass(frozen=True)
class _Served:
    """A finished variant.

    Attributes:
      name: no other variant has it.
      row: of the variant.
      answered: numbers of the requests that it answered.
    """

    name: str
    row: Row
    answered: frozenset[int]

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.row["metrics"]


def _short_name(row: Row) -> str:
    config = row["config"]
    names = [str(config["placement"]), str(config.get("page_size", ""))]
    names += [str(config[axis]) for axis in ("storage", "retention")]
    return " ".join(name for name in names if name not in ("", "float32", "all"))


def _names(rows: Sequence[Row]) -> list[str]:
    """The name of each row's variant, which that of another variant never is."""
    configs = [{**_variant(row), "seed": row["seed"]} for row in rows]
    return told_apart([_short_name(row) for row in rows], configs)


def _variant(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row["config"].items() if name != "request"}


def present_serve_trace(rows: Sequence[Row]) -> Presentation:
    """What a report shows of the rows of `serve_trace`.

    Args:
      rows: of variants, and of requests.
    """
    names = _names(rows)
    answered: dict[str, set[int]] = collections.defaultdict(set)
    labels = []
    for name, row in zip(names, rows, strict=True):
        number = row["config"].get("request")
        labels.append(name if number is None else f"{name}, request {number}")
        if number is not None and row["status"] == "ok":
            answered[name].add(number)
    done = [
        _Served(name, row, frozenset(answered[name]))
        for name, row in zip(names, rows, strict=True)
        if "request" not in row["config"] and row["status"] == "ok"
    ]
    configs = [row["config"] for row in rows if "request" not in row["config"]]
    tables, brief = (_table(done, shown) for shown in (tuple(_COLUMNS), tuple(_BRIEF)))
    return Presentation(
        reading=_READING,
        terms=_TERMS,
        findings=[*_findings(done), *_left_out(done)],
        tables=tables,
        brief_tables=brief,
        pictures=_pictures(done),
        labels=labels,
        held_fixed=shared_settings(configs),
    )


def _table(variants: Sequence[_Served], names: Sequence[str]) -> list[Table]:
    if not variants:
        return []
    known = {name for one in variants for name in one.metrics}
    shown = [name for name in _COLUMNS if name in names and name in known]
    cells = []
    for one in variants:
        values = {
            _COLUMNS[name][0]: _COLUMNS[name][1](one.metrics[name])
            for name in shown
            if name in one.metrics
        }
        cells.append({"cache": one.name, **values})
    headings = tuple(_COLUMNS[name][0] for name in shown)
    return [Table("By cache", ("cache", *headings), tuple(cells))]


def _findings(variants: Sequence[_Served]) -> list[str]:
    found = []
    for one in variants:
        metrics = one.metrics
        if "answers_checked" in metrics:
            equal, checked = metrics["answers_equal"], metrics["answers_checked"]
            found.append(
                f"{one.name}: {equal:.0f} of {checked:.0f} answers are those of the request served "
                "alone, token for token."
            )
        found += _interrupted(one)
        found += _compared(one, variants)
    return found


def _interrupted(one: _Served) -> list[str]:
    """What a run that was stopped cannot tell of a variant."""
    if "parts" in one.metrics:
        return [
            f"{one.name} was served in {one.metrics['parts']:.0f} parts, since the run was "
            "stopped: the times of a cold start amid a trace are not those of one run, so latency, "
            "tokens a second and requests at once are left out and it is not compared. A new --out "
            "measures them."
        ]
    if one.metrics.get("requests_of_earlier_run"):
        return [
            f"{one.name}: the run was stopped when all was served, and the figures are those that "
            "the rows of its requests keep; memory and requests over time were lost. A new --out "
            "measures them."
        ]
    return []


def _compared(one: _Served, variants: Sequence[_Served]) -> list[str]:
    """One variant beside the contiguous one of its run, where both served the same in one go."""
    own = {name: value for name, value in _variant(one.row).items() if name not in _PLACEMENT}
    base = next(
        (
            other
            for other in variants
            if other.row["config"]["placement"] == "contiguous"
            and _short_name(other.row) == "contiguous"
            and other.row["seed"] == one.row["seed"]
            and all(
                own.get(name) == value
                for name, value in _variant(other.row).items()
                if name not in (*_PLACEMENT, "storage", "retention")
            )
        ),
        None,
    )
    if base is None or base is one or not one.answered:
        return []
    if "parts" in one.metrics or "parts" in base.metrics:
        return []
    if one.answered != base.answered:
        return [
            f"{one.name} answered {len(one.answered)} requests and {base.name} "
            f"{len(base.answered)}: they are not compared, for they did not serve the same."
        ]
    ratios = [
        f"x{one.metrics[metric] / base.metrics[metric]:.2f} {what}"
        for metric, what in _RATIOS.items()
        if metric in one.metrics and base.metrics.get(metric)
    ]
    if not ratios:
        return []
    if not (one.metrics.get("waiting_share") or base.metrics.get("waiting_share")):
        return [
            f"No request ever waited for {one.name} or {base.name}, so memory decided nothing: how "
            "many run at once tells only how long they take. Raise the rate, or lower --kv_mib."
        ]
    bytes_of = [served.metrics.get("kv_bytes_allocated", 0.0) for served in (one, base)]
    same = max(bytes_of) <= _ALIKE * min(bytes_of)
    sizes = " and ".join(f"{mebibytes(size)} MiB" for size in bytes_of)
    on = "On the same memory" if same else f"On {sizes} (slots bound what a cache can use)"
    return [f"{on} {one.name} has, of {base.name}, {', '.join(ratios)}."]


def _left_out(variants: Sequence[_Served]) -> list[str]:
    """Requests that were asked for and not served."""
    found: list[str] = []
    for one in variants:
        config = one.row["config"]
        said = left_out_of_workload(one.metrics, config["max_length"])
        found += [f"{config['workload']}: {said}."] if said else []
        said = refused_by_pool(one.metrics, "give more --kv_mib")
        found += [f"{one.name}: {said}."] if said else []
    return list(dict.fromkeys(found))


def _pictures(variants: Sequence[_Served]) -> list[Picture]:
    panels = []
    for series, title, label in (
        ("kv_filled", "Memory that holds tokens", "share of all token slots"),
        ("running", "Requests at once", "requests"),
    ):
        lines = tuple(
            Line(one.name, index, tuple((x, y) for x, y in points))
            for index, one in enumerate(variants)
            if (points := one.row.get("series", {}).get(series))
        )
        if lines:
            axes = title, "seconds since the first arrival", label
            panels.append(LinePanel(*axes, lines, stepped=True, from_zero=True))
    if not panels:
        return []
    caption = "Every variant has the same bytes; what differs is how they are handed out."
    title = "Memory and requests over time"
    return [Picture("serving_over_time.png", title, caption, draw_lines(panels))]
