"""What the rows of `roofline` say, in sentences computed from them."""

import statistics
from collections.abc import Callable, Sequence

from kvlab.research.machine import BANDWIDTH
from kvlab.research.roofline_predictions import PHASES
from kvlab.research.rows import Row
from kvlab.research.tables import percent, significant, whole

PEAKS = {"float32": "float32_flops", "bfloat16": "flops", "float16": "flops", "int8": "int8_flops"}
"""The limit that is the peak of a dtype."""

_LIMIT_WORDS = {"compute": "matrix peak", "memory": "bandwidth limit"}
_NOT_VARIANT = frozenset(
    {
        *("kind", "phase", "batch_size", "prompt_tokens"),
        *("decode_tokens", "chunk", "repeats"),
    }
)


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows of a kind."""
    return [row for row in rows if row["config"]["kind"] == kind]


def runs_of(rows: Sequence[Row]) -> list[str]:
    """The runs that rows come from, in their order; one without a name where there is one."""
    return list(dict.fromkeys(row["config"].get("run", "") for row in rows))


def limits_of(rows: Sequence[Row], run: str = "") -> dict[str, float]:
    """The limits of a run's machine: of each the best that was measured (`rate_of`)."""
    best: dict[str, float] = {}
    for row in of_kind(rows, "limit"):
        if row["config"].get("run", "") == run:
            limit = row["config"]["limit"]
            best[limit] = max(rate_of(row), best.get(limit, 0.0))
    return best


def rate_of(row: Row) -> float:
    """What a limit was measured to be, bytes or operations a second: the best sample.

    A limit is what can be reached, and other load only lowers a sample; so STREAM reports it too.
    """
    return max(_samples(row))


def _samples(row: Row) -> list[float]:
    (samples,) = row["repeats"].values()
    return samples


def curve(row: Row, name: str) -> dict[float, float]:
    """A series of a row, y by x."""
    return {point[0]: point[1] for point in row.get("series", {}).get(name, ())}


def seconds_of(row: Row) -> float:
    """Median seconds of a phase: of the whole prefill, or of one decode step."""
    return row["metrics"]["ttft_s" if row["config"]["phase"] == "prefill" else "tpot_s"]


def bound(row: Row) -> str:
    """What limits a phase or an operator: `compute` or `memory`."""
    metrics = row["metrics"]
    return "compute" if metrics["arithmetic_intensity"] >= metrics["ridge"] else "memory"


def variant_namer(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Names variants by what differs between the phases of some rows.

    Attention is named always, and the weights where they are not as loaded.
    """
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row["config"].items():
            values.setdefault(name, set()).add(str(value))
    shown = [
        name
        for name, seen in values.items()
        if name not in _NOT_VARIANT and (name in ("attention", "weights") or len(seen) > 1)
    ]

    def name_of(row: Row) -> str:
        values = {name: row["config"][name] for name in shown if name in row["config"]}
        return " ".join(
            f"{value} weights" if name == "weights" else str(value)
            for name, value in values.items()
        )

    return name_of


def roofline_findings(rows: Sequence[Row]) -> list[str]:
    """Says in words which phase is bound by what, and how far it is from that limit.

    Args:
      rows: finished ones, of all kinds; any may be missing.

    Returns:
      One sentence per finding: the machine, each variant's phases, predictions, operators, others.
    """
    phases = of_kind(rows, "phase")
    found = [sentence for run in runs_of(rows) for sentence in _machine(rows, run)]
    name_of = variant_namer(phases)
    for variant in dict.fromkeys(map(name_of, phases)):
        own = [row for row in phases if name_of(row) == variant]
        for phase in PHASES:
            found += _phase(variant, phase, [r for r in own if r["config"]["phase"] == phase])
        found += _turning(variant, [r for r in own if r["config"]["phase"] == "decode"])
    return [*found, *_predictions(phases), *_operators(rows), *_linear(rows)]


def _machine(rows: Sequence[Row], run: str) -> list[str]:
    """Limits and ridge points of the dtypes that were run."""
    limits = limits_of(rows, run)
    if BANDWIDTH not in limits:
        return []
    here = f"The machine of {run}" if run else "This machine"
    dtypes = dict.fromkeys(
        row["config"]["dtype"]
        for row in of_kind(rows, "phase")
        if row["config"].get("run", "") == run
    )
    read = f"{here} reads {significant(limits[BANDWIDTH] / 1e9)} GB/s ({_by(rows, run, BANDWIDTH)})"
    found = []
    for dtype in dtypes:
        peak = PEAKS[dtype]
        ridge = limits[peak] / limits[BANDWIDTH]
        found.append(
            f"{read} and computes {significant(limits[peak] / 1e9)} GFLOP/s in {dtype} "
            f"({_by(rows, run, peak)}): its ridge is at {significant(ridge)} operations a byte."
        )
    return found


def _by(rows: Sequence[Row], run: str, limit: str) -> str:
    """What measured a limit: the fastest of its probes, and where its samples begin."""
    some = [
        row
        for row in of_kind(rows, "limit")
        if row["config"]["limit"] == limit and row["config"].get("run", "") == run
    ]
    by: str = max(some, key=rate_of)["config"]["by"]
    samples = [one for row in some if row["config"]["by"] == by for one in _samples(row)]
    low, high = significant(min(samples) / 1e9), significant(max(samples) / 1e9)
    return by if low == high else f"{by}; samples from {low}"


def _phase(variant: str, phase: str, rows: Sequence[Row]) -> list[str]:
    """What binds a variant's phase, and what share of that limit it reaches."""
    clauses = []
    for limit, words in _LIMIT_WORDS.items():
        some = [row for row in rows if bound(row) == limit]
        if not some:
            continue
        batches = sorted({row["config"]["batch_size"] for row in some})
        where = _where(some, rows) if len(some) < len(rows) else "every batch"
        intensities = [row["metrics"]["arithmetic_intensity"] for row in some]
        first, *rest = batches
        shares = [f"{_share(some, first)} of the {words} at batch {first}"]
        shares += [f"{_share(some, batch)} at batch {batch}" for batch in rest]
        clauses.append(
            f"{limit}-bound at {where} ({_range(intensities)} FLOP/byte, ridge "
            f"{significant(some[0]['metrics']['ridge'])}), reaching {', '.join(shares)}"
        )
    return [f"{variant}: {phase} is {'; '.join(clauses)}."] if clauses else []


def _where(some: Sequence[Row], rows: Sequence[Row]) -> str:
    """The batches of some of a phase's rows, with prompt lengths where only some are among them."""

    def lengths(of: Sequence[Row], batch: int) -> list[int]:
        found = {r["config"]["prompt_tokens"] for r in of if r["config"]["batch_size"] == batch}
        return sorted(found)

    batches = sorted({row["config"]["batch_size"] for row in some})
    whole_ones = [batch for batch in batches if lengths(some, batch) == lengths(rows, batch)]
    parts = [f"batch {_listed(whole_ones)}"] if whole_ones else []
    parts += [
        f"batch {batch} with prompts of {_listed(lengths(some, batch))}"
        for batch in batches
        if batch not in whole_ones
    ]
    return " and ".join(parts)


def _share(rows: Sequence[Row], batch: int) -> str:
    """The shares of the limit reached at a batch, over prompt lengths."""
    shares = [r["metrics"]["limit_share"] for r in rows if r["config"]["batch_size"] == batch]
    low, high = f"{min(shares):.2f}", f"{max(shares):.2f}"
    return low if low == high else f"{low} to {high}"


def _turning(variant: str, rows: Sequence[Row]) -> list[str]:
    """From which batch on decode is bound by compute, by prompt length."""
    batches = {
        row["config"]["prompt_tokens"]: row["metrics"].get("compute_bound_batch") for row in rows
    }
    if not batches:
        return []
    parts = []
    for tokens, batch in sorted(batches.items()):
        parts.append(f"from batch {whole(batch)} on" if batch else "at no batch")
        parts[-1] += f" at {tokens:,} tokens"
    if not all(batches.values()):
        parts[-1] += ", where keys and values of its own cost a sequence more time than operations"
    return [f"{variant}: decode turns compute-bound {'; '.join(parts)} (predicted)."]


def _predictions(rows: Sequence[Row]) -> list[str]:
    parts = []
    for phase in PHASES:
        ratios = [
            seconds_of(row) / row["metrics"]["predicted_s"]
            for row in rows
            if row["config"]["phase"] == phase
        ]
        if ratios:
            middle = statistics.median(ratios)
            parts.append(f"x{middle:.2f} for {phase} (x{min(ratios):.2f} to x{max(ratios):.2f})")
    if not parts:
        return []
    return [f"Measured over predicted times, median over all points: {', '.join(parts)}."]


def _operators(rows: Sequence[Row]) -> list[str]:
    """Where the bytes and the predicted time of the phases go."""
    found = []
    for phase in PHASES:
        some = [row for row in of_kind(rows, "operator") if row["config"]["phase"] == phase]
        moved = sum(row["metrics"]["layers"] * row["metrics"]["moved_bytes"] for row in some)
        seconds = sum(row["metrics"]["layers"] * row["metrics"]["predicted_s"] for row in some)
        if not seconds:
            continue
        shares = {
            name: sum(r["metrics"]["layers"] * r["metrics"][f"{name}_bytes"] for r in some) / moved
            for name in ("weight", "kv")
        }
        largest = max(some, key=lambda r: r["metrics"]["layers"] * r["metrics"]["predicted_s"])
        share = largest["metrics"]["layers"] * largest["metrics"]["predicted_s"] / seconds
        config = some[0]["config"]
        told = f"{config['weights']} " if "weights" in config else ""
        found.append(
            f"Of the bytes of {phase} at batch {config['batch_size']} and "
            f"{config['prompt_tokens']:,} tokens ({config['attention']}) {told}weights are "
            f"{percent(shares['weight'])} %, keys and values {percent(shares['kv'])} %; the most "
            f"predicted time is that of {largest['config']['operator']}, {percent(share)} %."
        )
    return found


def _linear(rows: Sequence[Row]) -> list[str]:
    """How well one efficiency tells the linear layers of another machine, and where it does not."""
    found = []
    for row in of_kind(rows, "linear_times"):
        metrics, last, biases = row["metrics"], curve(row, "last"), curve(row, "bias")
        first, bias = max(biases.items(), key=lambda one: abs(one[1]))
        found.append(
            f"Linear layers of {row['config']['device']}: with one efficiency of "
            f"{metrics['efficiency']:.3f} the median error of {whole(metrics['measurements'])} "
            f"predicted times is {percent(metrics['median_error'])} % (p90 "
            f"{percent(metrics['p90_error'])} %); it is furthest off from {first:,.0f} to "
            f"{last[first]:,.0f} tokens, where predictions are {percent(abs(bias))} % too "
            f"{'slow' if bias > 0 else 'fast'}."
        )
    return found


def _range(values: Sequence[float]) -> str:
    low, high = significant(min(values)), significant(max(values))
    return low if low == high else f"{low} to {high}"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(f"{value:,}" for value in values)
