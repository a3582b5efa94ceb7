"""What a report shows of kvlab beside other systems: tokens a second, ratios, what counts."""

import statistics
from collections.abc import Callable, Sequence

from kvlab.research.bar_chart import Bar, BarPanel, draw_bars
from kvlab.research.chart_style import COLOURS
from kvlab.research.presentation import Picture, Presentation, shared_settings
from kvlab.research.rows import Row
from kvlab.research.tables import Table, divergence, percent, significant

MOST_KL = 1.5  # times the peer's, or a faster figure is bought with quality
_PHASES = {"prefill_tokens_per_s": "prefill", "decode_tokens_per_s": "decode"}
_READING = (
    "The same weights, prompts and threads, one system after the other and all of them again; "
    "medians, with the range of the repeats in brackets. kvlab has pages of 64 tokens and prefills "
    "512 tokens a call, as llama.cpp does; the others are as they come. A ratio is the median over "
    "repeats of kvlab's tokens a second over the peer's in the same repeat."
)
_TERMS = {
    "prefill": "prompt tokens a second, of all sequences together.",
    "decode": "new tokens a second, of all sequences together, the logits of each included.",
    "same tokens": "float32: led along kvlab's greedy tokens, how many of them a system finds "
    "itself; where the two best logits lie within 0.001 either will do.",
    "KL": "fewer bits: from kvlab's float32 predictions on one text to the system's, in nats a "
    "token.",
    "kvlab-f32": "kvlab with bfloat16 weights, computing in float32 as llama.cpp does.",
    "llama.cpp-noflash": "llama.cpp without flash attention, which on CPU computes in less than "
    "float32.",
    "beside": "which of kvlab's rows the ratios are of: the first whose predictions count.",
    "counts": "float32: all greedy tokens are the same. Fewer bits: kvlab's KL is at most 1.5 "
    "times the peer's.",
}
_QUALITY: dict[str, tuple[str, Callable[[float], str]]] = {
    "greedy_agreement": ("same tokens %", percent),
    "kl_vs_float32": ("KL", divergence),
}


def present_peers(rows: Sequence[Row]) -> Presentation:
    """What a report shows of the rows of `peers`."""
    tables = _tables(rows)
    return Presentation(
        reading=_READING,
        terms=_TERMS,
        findings=_findings(rows),
        tables=tables,
        brief_tables=tables,
        pictures=_pictures(rows),
        labels=[
            f"{row['config']['system']}, {row['config']['precision']}, batch "
            f"{row['config']['batch']}"
            for row in rows
        ],
        held_fixed=shared_settings([row["config"] for row in rows]),
    )


def counts(kvlab: Row, peer: Row) -> bool:
    """Whether kvlab's figure may be held against a peer's: neither predicts something else."""
    ours, theirs = kvlab["metrics"], peer["metrics"]
    if kvlab["config"]["precision"] == "float32":
        return ours.get("greedy_agreement") == theirs.get("greedy_agreement") == 1.0
    if "kl_vs_float32" not in ours or "kl_vs_float32" not in theirs:
        return False
    return ours["kl_vs_float32"] <= MOST_KL * theirs["kl_vs_float32"]


def ratio(kvlab: Row, peer: Row, metric: str) -> float:
    """Median over repeats of kvlab's figure over a peer's of the same repeat."""
    pairs = zip(kvlab["repeats"][metric], peer["repeats"][metric], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def _groups(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["config"]["precision"], row["config"]["batch"]), []).append(row)
    return groups


def _beside(peer: Row, group: Sequence[Row]) -> Row | None:
    """The row of kvlab's that a peer's is held against: the first that counts, or the first."""
    if _is_ours(peer) or peer["status"] != "ok":
        return None
    ours = [row for row in group if _is_ours(row) and row["status"] == "ok"]
    return next((row for row in ours if counts(row, peer)), ours[0] if ours else None)


def _is_ours(row: Row) -> bool:
    name: str = row["config"]["system"]
    return name.startswith("kvlab")


def _tables(rows: Sequence[Row]) -> list[Table]:
    cells = []
    for (precision, batch), group in _groups(rows).items():
        for row in group:
            ours = _beside(row, group)
            metrics, name = row["metrics"], row["config"]["system"]
            shown = {"weights": precision, "batch": str(batch), "system": name}
            for metric, (heading, show) in _QUALITY.items():
                if metric in metrics:
                    shown[heading] = show(metrics[metric])
            for metric, heading in _PHASES.items():
                if row["status"] == "ok":
                    low, high = min(row["repeats"][metric]), max(row["repeats"][metric])
                    middle = significant(metrics[metric])
                    shown[f"{heading} tok/s"] = f"{middle} ({significant(low)}-{significant(high)})"
                if ours is not None:
                    shown[f"kvlab is, {heading}"] = f"x{ratio(ours, row, metric):.2f}"
            if ours is not None:
                shown["beside"] = ours["config"]["system"]
                shown["counts"] = "yes" if counts(ours, row) else "no"
            if row["status"] != "ok":
                shown["counts"] = "no figure"
            if versions := row.get("system_versions"):
                shown["version"] = ", ".join(f"{name} {one}" for name, one in versions.items())
            cells.append(shown)
    columns = ["weights", "batch", "system"]
    columns += [heading for heading, _ in _QUALITY.values() if any(heading in one for one in cells)]
    columns += [f"{phase} tok/s" for phase in _PHASES.values()]
    columns += [f"kvlab is, {phase}" for phase in _PHASES.values()] + ["beside", "counts"]
    columns += ["version"] if any("version" in one for one in cells) else []
    return [Table("Side by side", tuple(columns), tuple(cells))] if cells else []


def _findings(rows: Sequence[Row]) -> list[str]:
    found = []
    for (precision, batch), group in _groups(rows).items():
        for row in group:
            ours = _beside(row, group)
            name = row["config"]["system"]
            where = f"{precision} weights, batch {batch}"
            if row["status"] != "ok":
                found.append(f"{where}: {name} has no figure: {row.get('error', 'it failed')}.")
            elif ours is not None:
                parts = [
                    f"{phase} x{ratio(ours, row, metric):.2f}" for metric, phase in _PHASES.items()
                ]
                doubt = "" if counts(ours, row) else " (does not count: the predictions differ)"
                ourselves = ours["config"]["system"]
                found.append(f"{where}: {ourselves} is {', '.join(parts)} of {name}{doubt}.")
    return found


def _pictures(rows: Sequence[Row]) -> list[Picture]:
    done = [row for row in rows if row["status"] == "ok"]
    systems = list(dict.fromkeys(row["config"]["system"] for row in done))
    pictures = []
    for precision in dict.fromkeys(row["config"]["precision"] for row in done):
        panels = [
            BarPanel(
                f"{phase}, {precision} weights, batch {batch}",
                "tokens a second",
                tuple(_bar(row, metric, systems) for row in group),
            )
            for metric, phase in _PHASES.items()
            for (kind, batch), group in _groups(done).items()
            if kind == precision
        ]
        caption = (
            "Longer is better; the line at the end of a bar spans the repeats. Each phase and "
            "batch has an axis of its own."
        )
        title = f"Tokens a second, {precision} weights"
        image = draw_bars([[panel] for panel in panels], systems)
        pictures.append(Picture(f"peers_{precision}.png", title, caption, image))
    return pictures


def _bar(row: Row, metric: str, systems: Sequence[str]) -> Bar:
    name, samples = row["config"]["system"], row["repeats"][metric]
    colour = COLOURS[systems.index(name) % len(COLOURS)]
    return Bar(name, colour, row["metrics"][metric], min(samples), max(samples))
