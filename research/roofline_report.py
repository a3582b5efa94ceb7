"""What a report shows of `roofline`: limits, phases against them, operators, other devices."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlab.research.line_chart import Line, LinePanel, draw_lines
from kvlab.research.machine import LIMITS
from kvlab.research.presentation import Picture, Presentation, shared_settings
from kvlab.research.roofline_chart import (
    RooflinePanel,
    RooflinePoint,
    TimePair,
    draw_against,
    draw_rooflines,
)
from kvlab.research.roofline_findings import (
    PEAKS,
    bound,
    curve,
    limits_of,
    of_kind,
    roofline_findings,
    runs_of,
    seconds_of,
    variant_namer,
)
from kvlab.research.roofline_predictions import PHASES
from kvlab.research.roofline_study import row_label
from kvlab.research.rows import Row
from kvlab.research.tables import (
    DASH,
    Table,
    mebibytes,
    milliseconds,
    percent,
    significant,
    whole,
)

_READING = (
    "A phase does some operations (FLOP) and moves some bytes; their ratio is its arithmetic "
    "intensity. A machine gives at most its peak of operations, or its bandwidth times the "
    "intensity: from the ridge point on the first is less (compute-bound), before it the second "
    "(memory-bound). Operations and bytes are counted from the model's config, with every weight "
    "read once a call and scores kept on chip, so the prediction is what a perfect program would "
    "take; a weight of int8 is 8.5 bits and one of int4 4.5, its share of a scale included. Times "
    "are medians; at each batch the phases, prompt lengths and attentions take turns, after a "
    "warm-up and apart from compiling. A limit is the best sample of the fastest program "
    "that measures it (as in STREAM) before, between and after the phases; what else the machine "
    "does slows the phases down, and counts as distance from the limit."
)
_NOT_SETTINGS = ("kind", "phase")
_TERMS = {
    "fits": "weights, keys and values in the device's memory; a context is the model's at most.",
    "prefill": "all prompts of a batch, to the first token of each (TTFT).",
    "decode": "one step, which gives every sequence of the batch a token (TPOT).",
    "FLOP/byte": "arithmetic intensity: operations over bytes moved.",
    "ridge": "the intensity from which the peak, not the bandwidth, is the limit.",
    "MFU": "model FLOP utilisation: operations over what the peak gives in the measured time.",
    "MBU": "model bandwidth utilisation: bytes over what the bandwidth gives in that time.",
    "of the limit": "the larger of the two: time at the limit that binds, over the measured time.",
    "predicted": "operators one after the other, each at its own limit.",
    "operators": "of one layer; softmax and products of attention are one (fused).",
    "turns compute-bound": "the least batch at which a decode step as a whole reaches the ridge; "
    "none where each sequence's own keys and values need more time than its operations.",
}


def present_roofline(rows: Sequence[Row]) -> Presentation:
    """What a report shows of the rows of `roofline`.

    Args:
      rows: of all kinds, of one or more runs.
    """
    done = [row for row in rows if row["status"] == "ok"]
    phases = of_kind(done, "phase")
    limits, measured = _limits_table(done), _phase_table(phases)
    shared = shared_settings([row["config"] for row in phases])
    every = [limits, measured, _compile_table(phases), *_operator_tables(done)]
    every += [*_device_tables(done), *_linear_tables(done)]
    brief = [limits, measured]
    return Presentation(
        reading=_READING,
        terms=_TERMS,
        findings=roofline_findings(done),
        tables=[table for table in every if table.rows],
        brief_tables=[table for table in brief if table.rows],
        pictures=_pictures(done),
        labels=[row_label(row["config"]) for row in rows],
        held_fixed={name: value for name, value in shared.items() if name not in _NOT_SETTINGS},
    )


def _spread(samples: Sequence[float], show: Callable[[float], str]) -> str:
    return f"[{show(min(samples))}{DASH}{show(max(samples))}]" if len(set(samples)) > 1 else ""


def _rate(value: float, limit: str) -> str:
    unit = "GB/s" if limit == "bandwidth" else "GFLOP/s"
    return f"{significant(value / 1e9)} {unit}"


def _limits_table(rows: Sequence[Row]) -> Table:
    cells = []
    by_probe: dict[tuple[str, str, str], list[Row]] = {}
    for row in of_kind(rows, "limit"):
        config = row["config"]
        key = config.get("run", ""), config["limit"], config["by"]
        by_probe.setdefault(key, []).append(row)
    for (run, limit, by), some in by_probe.items():
        samples = [one for row in some for values in row["repeats"].values() for one in values]
        size = max(row["metrics"]["size"] for row in some)
        shape = f"{mebibytes(size)} MiB" if limit == "bandwidth" else f"{whole(size)} squared"
        cells.append(
            ({"run": run} if run else {})
            | {
                "limit": LIMITS[limit],
                "measured by": by,
                "size": shape,
                "best": _rate(max(samples), limit),
                "median": _rate(statistics.median(samples), limit),
                "spread": _spread(samples, lambda value: significant(value / 1e9)),
            }
        )
    columns = ("limit", "measured by", "size", "best", "median", "spread")
    named = ("run",) if any("run" in cell for cell in cells) else ()
    return Table("Limits of this machine", (*named, *columns), tuple(cells))


def _phase_table(rows: Sequence[Row]) -> Table:
    name_of = variant_namer(rows)
    cells = []
    variants = list(dict.fromkeys(map(name_of, rows)))

    def place(row: Row) -> tuple[int, int]:
        return PHASES.index(row["config"]["phase"]), variants.index(name_of(row))

    for row in sorted(rows, key=place):
        config, metrics = row["config"], row["metrics"]
        seconds = seconds_of(row)
        samples = row["repeats"]["ttft_s" if config["phase"] == "prefill" else "tpot_s"]
        rate = metrics[f"{config['phase']}_tokens_per_s"]
        cells.append(
            {
                "variant": name_of(row),
                "phase": config["phase"],
                "batch": whole(config["batch_size"]),
                "prompt": whole(config["prompt_tokens"]),
                "ms": f"{milliseconds(seconds)} {_spread(samples, milliseconds)}".rstrip(),
                "predicted ms": milliseconds(metrics["predicted_s"]),
                "ratio": f"{seconds / metrics['predicted_s']:.2f}",
                "tok/s": significant(rate),
                "FLOP/byte": significant(metrics["arithmetic_intensity"]),
                "bound": bound(row),
                "MFU %": percent(metrics["mfu"]),
                "MBU %": percent(metrics["mbu"]),
                "of the limit %": percent(metrics["limit_share"]),
            }
        )
    columns = tuple(cells[0]) if cells else ()
    return Table("Phases against the limits", columns, tuple(cells))


def _compile_table(rows: Sequence[Row]) -> Table:
    name_of = variant_namer(rows)
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        variant, batch = name_of(row), row["config"]["batch_size"]
        cells.setdefault(
            (variant, batch),
            {
                "variant": variant,
                "batch": whole(batch),
                "programs": whole(row["metrics"]["compile_count"]),
                "compile s": significant(row["metrics"]["compile_s"]),
            },
        )
    columns = ("variant", "batch", "programs", "compile s")
    return Table("Compiling, apart from the times", columns, tuple(cells.values()))


def _grouped(rows: Sequence[Row], kind: str, by: str) -> dict[tuple[str, str], list[Row]]:
    """Rows of a kind by (run, a setting); the run is empty where there is one alone."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in of_kind(rows, kind):
        groups.setdefault((row["config"].get("run", ""), row["config"][by]), []).append(row)
    return groups


def _table(run: str, title: str, cells: Sequence[dict[str, str]]) -> Table:
    """A table of one run; `title` begins with a small letter."""
    title = f"{run}: {title}" if run else title[0].upper() + title[1:]
    return Table(title, tuple(cells[0]), tuple(cells))


def _model(config: Mapping[str, Any]) -> str:
    """The attention of a row, and its weights where they are not as loaded."""
    weights = f", {config['weights']} weights" if "weights" in config else ""
    return f"{config['attention']}{weights}"


def _operator_tables(rows: Sequence[Row]) -> list[Table]:
    tables = []
    for (run, phase), some in _grouped(rows, "operator", "phase").items():
        cells = []
        for row in some:
            metrics = row["metrics"]
            intensity, seconds = metrics["arithmetic_intensity"], metrics["predicted_s"]
            cells.append(
                {
                    "operator": row["config"]["operator"],
                    "layers": whole(metrics["layers"]),
                    "MFLOP": significant(metrics["flops"] / 1e6),
                    "MB": significant(metrics["moved_bytes"] / 1e6),
                    "FLOP/byte": significant(intensity),
                    "at best GFLOP/s": significant(metrics["flops"] / seconds / 1e9),
                    "bound": bound(row),
                    "all layers ms": milliseconds(seconds * metrics["layers"]),
                }
            )
        config = some[0]["config"]
        title = (
            f"operators of {phase}: {_model(config)}, batch {config['batch_size']}, "
            f"{config['prompt_tokens']} tokens"
        )
        tables.append(_table(run, title, cells))
    return tables


def _device_tables(rows: Sequence[Row]) -> list[Table]:
    tables = []
    for (run, _), some in _grouped(rows, "device", "attention").items():
        cells = []
        for row in some:
            metrics = row["metrics"]
            turning = metrics.get("compute_bound_batch")
            fitting = metrics.get("largest_batch")
            cells.append(
                {
                    "device": row["config"]["device"],
                    "TTFT ms": milliseconds(metrics["predicted_ttft_s"]),
                    "TPOT ms": milliseconds(metrics["predicted_tpot_s"]),
                    "ridge FLOP/byte": significant(metrics["ridge"]),
                    "decode compute-bound from batch": whole(turning) if turning else "none",
                    "largest batch that fits": "any" if fitting is None else whole(fitting),
                    "longest context that fits": whole(metrics["largest_context"]),
                }
            )
        config = some[0]["config"]
        title = (
            f"predicted for {_model(config)}, batch {config['batch_size']}, "
            f"{config['prompt_tokens']} tokens: data sheets at bfloat16, this machine as it ran; "
            "prompts prefilled in one call"
        )
        tables.append(_table(run, title, cells))
    return tables


def _linear_tables(rows: Sequence[Row]) -> list[Table]:
    tables = []
    for row in of_kind(rows, "linear_times"):
        series = {name: curve(row, name) for name in row.get("series", {})}
        cells = [
            {
                "tokens": f"{first:,.0f} to {series['last'][first]:,.0f}",
                "measurements": whole(series["count"][first]),
                "bias %": f"{100 * series['bias'][first]:+.1f}",
                **{
                    f"{heading} %": percent(series[name][first])
                    for name, heading in (("median", "median"), ("p90", "p90"), ("largest", "most"))
                },
            }
            for first in series["last"]
        ]
        models = " and ".join(one["model"] for one in row["config"]["files"])
        title = (
            f"Predicted against measured linear layers, {models} on {row['config']['device']}, "
            f"one efficiency of {row['metrics']['efficiency']:.3f}"
        )
        tables.append(Table(title, tuple(cells[0]), tuple(cells)))
    return tables


def _pictures(rows: Sequence[Row]) -> list[Picture]:
    phases = of_kind(rows, "phase")
    if not phases:
        return []
    name_of = variant_namer(phases)
    panels = []
    for run in runs_of(phases):
        machine = limits_of(rows, run)
        for phase in PHASES:
            some = [
                row
                for row in phases
                if row["config"]["phase"] == phase and row["config"].get("run", "") == run
            ]
            if some and machine:
                title = f"{run}: {phase}" if run else phase.capitalize()
                peak = machine[PEAKS[some[0]["config"]["dtype"]]]
                points = tuple(_point(row, name_of) for row in some)
                panels.append(RooflinePanel(title, machine["bandwidth"], peak, points))
    pictures = []
    if panels:
        caption = (
            "The line is what the machine attains at an intensity at best. Filled marks are "
            "measured, hollow ones predicted; the thin line between them is what is lost."
        )
        png = draw_rooflines(panels)
        pictures.append(Picture("roofline.png", "The roofline", caption, png))
    pairs = [
        TimePair(
            name_of(row),
            row["config"]["phase"],
            row["metrics"]["predicted_s"],
            seconds_of(row),
        )
        for row in phases
    ]
    caption = "One mark per point: a whole prefill, or one decode step. Above the line is slower."
    title = "Measured against predicted times"
    pictures.append(Picture("measured_predicted.png", title, caption, draw_against(pairs)))
    return [*pictures, _utilisation(phases, name_of)]


def _point(row: Row, name_of: Callable[[Row], str]) -> RooflinePoint:
    metrics = row["metrics"]
    return RooflinePoint(
        name_of(row),
        f"batch {row['config']['batch_size']}",
        metrics["arithmetic_intensity"],
        metrics["flops"] / seconds_of(row),
        metrics["flops"] / metrics["predicted_s"],
    )


def _utilisation(rows: Sequence[Row], name_of: Callable[[Row], str]) -> Picture:
    """MFU and MBU by batch at the longest prompt, a panel for each phase."""
    longest = max(row["config"]["prompt_tokens"] for row in rows)
    variants = list(dict.fromkeys(map(name_of, rows)))
    panels = []
    for phase in PHASES:
        curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in rows:
            config = row["config"]
            if config["phase"] == phase and config["prompt_tokens"] == longest:
                for metric in ("mfu", "mbu"):
                    key = name_of(row), metric
                    share = 100 * row["metrics"][metric]
                    curves.setdefault(key, []).append((config["batch_size"], share))
        lines = tuple(
            Line(
                f"{variant}, {metric.upper()}",
                variants.index(variant),
                tuple(sorted(points)),
                dash=2 * (metric == "mbu"),
            )
            for (variant, metric), points in curves.items()
        )
        if lines:
            axes = f"{phase.capitalize()}, prompts of {longest:,} tokens", "batch", "percent"
            panels.append(LinePanel(*axes, lines, marked=True, from_zero=True, doubling=True))
    title = "MFU and MBU by phase"
    caption = "Solid: of the matrix peak (MFU). Dotted: of the memory's bandwidth (MBU)."
    return Picture("utilisation.png", title, caption, draw_lines(panels))
