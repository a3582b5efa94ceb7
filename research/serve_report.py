"""What a report shows of served traces: totals by variant, and the cache and requests over time."""

from collections.abc import Callable, Sequence

from kvlab.research.line_chart import Line, LinePanel, draw_lines
from kvlab.research.presentation import Picture, Presentation, shared_settings
from kvlab.research.rows import Row
from kvlab.research.tables import Table, mebibytes, milliseconds, percent, significant, whole

_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "requests_ended": ("requests", whole),
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
    "pages_left": ("pages left", whole),
    "answers_equal": ("answers equal", whole),
    "answers_checked": ("of", whole),
}
_BRIEF = frozenset(
    {
        *("requests_ended", "slots", "running_mean", "running_max", "output_tokens_per_s"),
        *("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "preemptions", "answers_equal"),
        "answers_checked",
    }
)
_TERMS = {
    "at once": "requests that have a slot and memory, averaged over the time of arrivals.",
    "TTFT": "time to first token: from a request's arrival to its first token, waiting included.",
    "TPOT": "time per output token: of the tokens after a request's first one.",
    "ITL": "inter-token latency: between two tokens of a request; the steps of one call on the "
    "device are taken as equally long.",
    "within targets": "requests whose TTFT and TPOT both met their targets, of all (goodput).",
    "KV filled": "share of the memory for keys and values that holds tokens, over time.",
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


def _name(row: Row) -> str:
    config = row["config"]
    names = [str(config["placement"]), str(config.get("page_size", ""))]
    names += [str(config[axis]) for axis in ("storage", "retention")]
    return " ".join(name for name in names if name not in ("", "float32", "all"))


def present_serve_trace(rows: Sequence[Row]) -> Presentation:
    """What a report shows of the rows of `serve_trace`.

    Args:
      rows: of variants, and of requests.
    """
    totals = [row for row in rows if "request" not in row["config"]]
    done = [row for row in totals if row["status"] == "ok"]
    configs = [row["config"] for row in totals]
    labels = [
        _name(row) + (f", request {row['config']['request']}" if "request" in row["config"] else "")
        for row in rows
    ]
    tables, brief = (_table(done, names) for names in (tuple(_COLUMNS), tuple(_BRIEF)))
    return Presentation(
        reading=_READING,
        terms=_TERMS,
        findings=_findings(done),
        tables=tables,
        brief_tables=brief,
        pictures=_pictures(done),
        labels=labels,
        held_fixed=shared_settings(configs),
    )


def _table(rows: Sequence[Row], names: Sequence[str]) -> list[Table]:
    if not rows:
        return []
    shown = [name for name in _COLUMNS if name in names and any(name in r["metrics"] for r in rows)]
    cells = []
    for row in rows:
        known = {name: row["metrics"][name] for name in shown if name in row["metrics"]}
        values = {_COLUMNS[name][0]: _COLUMNS[name][1](value) for name, value in known.items()}
        cells.append({"cache": _name(row), **values})
    headings = tuple(_COLUMNS[name][0] for name in shown)
    return [Table("By cache", ("cache", *headings), tuple(cells))]


def _findings(rows: Sequence[Row]) -> list[str]:
    found = []
    by_name = {_name(row): row["metrics"] for row in rows}
    base = by_name.get("contiguous")
    for name, metrics in by_name.items():
        if "answers_checked" in metrics:
            equal, checked = metrics["answers_equal"], metrics["answers_checked"]
            found.append(
                f"{name}: {equal:.0f} of {checked:.0f} answers are those of the request served "
                "alone, token for token."
            )
        if base is None or metrics is base or not metrics.get("requests_ended"):
            continue
        words = {
            "running_mean": "the requests at once",
            "output_tokens_per_s": "the tokens a second",
            "ttft_p50_s": "the median time to first token",
        }
        ratios = [
            f"x{metrics[metric] / base[metric]:.2f} {what}"
            for metric, what in words.items()
            if metric in metrics and base.get(metric)
        ]
        if ratios:
            found.append(f"On the same memory {name} has, of contiguous, {', '.join(ratios)}.")
    return found


def _pictures(rows: Sequence[Row]) -> list[Picture]:
    panels = []
    for series, title, label in (
        ("kv_filled", "Memory that holds tokens", "share of all token slots"),
        ("running", "Requests at once", "requests"),
    ):
        lines = tuple(
            Line(_name(row), index, tuple((x, y) for x, y in points))
            for index, row in enumerate(rows)
            if (points := row.get("series", {}).get(series))
        )
        if lines:
            axes = title, "seconds since the first arrival", label
            panels.append(LinePanel(*axes, lines, stepped=True, from_zero=True))
    if not panels:
        return []
    caption = "Every variant has the same bytes; what differs is how they are handed out."
    title = "Memory and requests over time"
    return [Picture("serving_over_time.png", title, caption, draw_lines(panels))]
