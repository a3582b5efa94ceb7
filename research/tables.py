"""Tables of results: aligned text for a terminal, and the same cells for a page.

A number is shown in the unit that its heading names; "–" stands for what was not measured.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlab.research.grouping import Measured, Points, Variant, Workload

DASH = "\N{EN DASH}"
ABSENT = DASH
LANGUAGES = {"en": "English", "tr": "Turkish"}

_NUMERIC = re.compile(r"[≤<+-]?\d")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table whose cells are text already.

    Attributes:
        title: what it shows.
        columns: the headings, from left to right.
        rows: heading to cell; a heading that a row lacks is shown as "–".
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers and are set to the right."""
        return tuple(_is_numeric(self.rows, column) for column in self.columns)

    def text(self) -> str:
        """The table for a terminal, with its title."""
        return f"{self.title}\n\n{format_table(self.rows, self.columns)}"


@dataclasses.dataclass(frozen=True)
class Metric:
    """How a metric is shown.

    Attributes:
        heading: its name and unit in a table.
        show: its value in that unit.
        spread: whether a table shows the range of its samples.
    """

    heading: str
    show: Callable[[float], str]
    spread: bool = False


def significant(value: float, digits: int = 3) -> str:
    """Writes a number with few digits, thousands separated: 1,234 or 12.3 or 0.00123 or 1.2e-09."""
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 2}e}"
    return f"{value:#.{digits}g}".rstrip(".")


def milliseconds(seconds: float) -> str:
    """Writes seconds as milliseconds."""
    return significant(seconds * 1e3)


def whole(value: float) -> str:
    """Writes a count with thousands separated."""
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """Writes a share as a percentage without its sign."""
    return f"{100 * share:.1f}"


def mebibytes(value: float) -> str:
    """Writes bytes in units of 2^20 bytes."""
    return significant(value / 2**20)


def divergence(nats: float) -> str:
    """Writes a KL divergence; below 1e-8 it is rounding, and may even come out negative."""
    return "≤1e-8" if nats <= 1e-8 else significant(nats)


METRICS = {
    "ttft_s": Metric("TTFT ms", milliseconds),
    "prefill_tokens_per_s": Metric("prefill tok/s", significant),
    "tpot_s": Metric("TPOT ms", milliseconds, spread=True),
    "itl_p50_s": Metric("ITL p50 ms", milliseconds),
    "itl_p99_s": Metric("ITL p99 ms", milliseconds),
    "decode_tokens_per_s": Metric("decode tok/s", significant),
    "compile_s": Metric("compile s", significant),
    "compile_count": Metric("programs", whole),
    "kv_bytes_per_token": Metric("KV B/token", whole),
    "kv_bytes_allocated": Metric("KV MiB", mebibytes),
    "kv_bytes_used": Metric("KV used MiB", mebibytes),
    "kv_bytes_window": Metric("KV a sequence MiB", mebibytes),
    "kv_waste": Metric("KV waste %", percent),
    "max_concurrent_sequences": Metric("max sequences", whole),
    "perplexity": Metric("perplexity", significant),
    "kl_vs_oracle": Metric("KL nats", divergence),
    "kl_vs_oracle_p99": Metric("KL p99 nats", divergence),
    "top1_agreement": Metric("top-1 %", percent),
    "passkey_accuracy": Metric("passkey %", percent),
    "passkey_digits": Metric("passkey digits %", percent),
    "mfu": Metric("MFU %", percent),
    "mbu": Metric("MBU %", percent),
    "arithmetic_intensity": Metric("FLOP/byte", significant),
}
QUALITY = (
    *("perplexity", "kl_vs_oracle", "kl_vs_oracle_p99", "top1_agreement"),
    *("passkey_accuracy", "passkey_digits"),
)

_WORKLOAD_HEADINGS = {"batch_size": "batch", "prompt_tokens": "prompt", "decode_tokens": "steps"}
_MEMORY = frozenset(
    {
        *("kv_bytes_per_token", "kv_bytes_allocated", "kv_bytes_used", "kv_bytes_window"),
        *("kv_waste", "max_concurrent_sequences"),
    }
)
_NOT_IN_BRIEF = frozenset(
    {
        *("itl_p50_s", "itl_p99_s", "compile_s", "compile_count"),
        *("kv_bytes_allocated", "kv_bytes_used", "kl_vs_oracle_p99", "passkey_digits"),
    }
)


def metric_format(name: str) -> Metric:
    """Says how to show a metric; quality of one text is shown as its mean is, and named by it."""
    if name in METRICS:
        return METRICS[name]
    base, text = quality_parts(name)
    if base:
        known = METRICS[base]
        return dataclasses.replace(known, heading=f"{known.heading} {text}")
    return Metric(name.replace("_", " "), significant)


def quality_parts(name: str) -> tuple[str, str]:
    """Splits the name of a quality metric: what it measures, and on which text ("" for all).

    A metric of another kind gives two empty strings.
    """
    for base in sorted(QUALITY, key=len, reverse=True):  # kl_vs_oracle_p99 is not of a text "p99"
        if name == base or name.startswith(f"{base}_"):
            return base, name.removeprefix(base).removeprefix("_")
    return "", ""


def is_quality(name: str) -> bool:
    """Whether a metric says how good the output is, on one text or on all."""
    return bool(quality_parts(name)[0])


def language_name(suffix: str) -> str:
    """Spells a language out."""
    return LANGUAGES.get(suffix, suffix)


def format_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Aligns rows as plain text.

    Args:
        rows: heading to cell; text is taken as it is, a number is written with few digits, and
            an absent or None cell is "–".
        columns: the headings to show, from left to right.

    Returns:
        A line of headings, a rule and one line per row, without a line end after the last.
    """
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [
        max([len(column), *(len(line[i]) for line in cells)]) for i, column in enumerate(columns)
    ]
    right = [_is_numeric(rows, column) for column in columns]

    def aligned(line: Sequence[str]) -> str:
        return "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()

    return "\n".join([aligned(columns), "  ".join("─" * w for w in widths), *map(aligned, cells)])


def result_tables(points: Points, brief: bool = False) -> list[Table]:
    """Makes the tables of a run: speed and memory by point, and quality by variant.

    Args:
        points: the points.
        brief: whether to leave out what a narrow terminal has no room for.

    Returns:
        The tables that have something to show.
    """
    names = points.metrics()
    cost = [name for name in METRICS if name in names and not is_quality(name)]
    cost += [name for name in names if name not in METRICS and not is_quality(name)]
    quality = quality_metrics(points)
    memory = [name for name in ("kv_bytes_per_token",) if name in names]
    if brief:
        shown = [name for name in cost if name not in _NOT_IN_BRIEF]
        tables = [_table("Speed and memory, by point", points, shown, points.workloads)]
    else:
        speed = [name for name in cost if name not in _MEMORY]
        held = [name for name in cost if name in _MEMORY]
        tables = [
            _table("Speed, by point", points, speed, points.workloads),
            _table("Memory, by point", points, held, points.workloads),
        ]
    if brief:
        quality = [name for name in quality if quality_parts(name)[0] not in _NOT_IN_BRIEF]
    if quality:
        tables.append(_table("Quality, by variant", points, [*memory, *quality], [None]))
    return [table for table in tables if table is not None]


def quality_metrics(points: Points) -> list[str]:
    """The quality metrics at hand: of each text where texts are told apart, else the mean."""
    names = points.metrics()
    chosen: list[str] = []
    for base in QUALITY:
        of_base = [name for name in names if quality_parts(name)[0] == base]
        by_text = [name for name in of_base if name != base]
        chosen += sorted(by_text, key=lambda name: (len(name), name)) or of_base  # 512 before 1024
    return chosen


def _table(
    title: str, points: Points, metrics: Sequence[str], workloads: Sequence[Workload | None]
) -> Table | None:
    columns = ["variant"]
    rows = []
    for variant in points.variants:
        for workload in workloads:
            cells = {"variant": variant.label}
            if workload is not None:
                cells |= _workload_cells(points, variant, workload)
            columns += [name for name in cells if name not in columns]
            measured = {}
            for name in metrics:
                found = points.measured(variant, name, workload)
                if found is not None:
                    measured[metric_format(name).heading] = _measured_cell(name, found)
            if measured:
                rows.append(cells | measured)
    headings = dict.fromkeys(metric_format(name).heading for name in metrics)
    return Table(title, (*columns, *headings), tuple(rows)) if rows else None


def _workload_cells(points: Points, variant: Variant, workload: Workload) -> dict[str, str]:
    # Recompute decodes fewer steps than the rest; whoever compares speeds should see how many.
    settings = points.settings(variant, workload)
    return {
        heading: str(settings[name])
        for name, heading in _WORKLOAD_HEADINGS.items()
        if name in points.varying and name in settings
    }


def _measured_cell(name: str, measured: Measured) -> str:
    known = metric_format(name)
    value = known.show(measured.value)
    if not (known.spread and measured.has_spread):
        return value
    return f"{value} [{known.show(measured.low)}{DASH}{known.show(measured.high)}]"


def _cell(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return whole(value) if isinstance(value, int) else significant(value)


def _is_numeric(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    cells = [_cell(row.get(column)) for row in rows]
    present = [cell for cell in cells if cell != ABSENT]
    return bool(present) and all(_NUMERIC.match(cell) for cell in present)
