"""The equivalence table: what variants of a model must share, and whether they do.

A `Property` is a claim about any variant, with the function that measures it; plans of variants and
their properties are in `kvlab.research.verify_plan`. Lossless variants are held against the model
computed without a cache. Every variant is held against itself: equal bits whatever shares its
batch, its slot, its pages and its calls; and, where another shape rounds differently, a bounded
difference. Every number comes from running.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvlab.models.load import Model
from kvlab.ops.caches.contiguous import ContiguousCache
from kvlab.ops.specs import Paged, Ring
from kvlab.research.equivalence import (
    SLOTS,
    STEPS,
    Bench,
    OwnRing,
    Seen,
    Variant,
    bit_difference,
    clear_positions,
    continued,
    decoded_in_one_call,
    largest,
    mean_kl,
    page_maps,
    prefilled_row_by_row,
    relative_difference,
    traced,
)
from kvlab.research.progress import Progress
from kvlab.research.tables import format_table, significant

FLOAT32_BOUND = 1e-4  # of the largest logit
KL_BOUND = 2.0  # times the mean KL of the variant from the oracle


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a property came to for one variant."""

    difference: float
    bound: float
    unit: str
    compared: str
    agrees: bool = True  # what is no number (tokens, pages) is as it should be

    @property
    def holds(self) -> bool:
        """Whether the property holds; a difference that is no number does not."""
        return self.agrees and self.difference <= self.bound


@dataclasses.dataclass(frozen=True)
class Property:
    """A claim about a variant.

    Attributes:
      name: in a word or two.
      measure: computes what it comes to.
      why: why bits cannot be equal; empty where they must be, or need not.
    """

    name: str
    measure: Callable[[Bench, Variant], Measured]
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One property of one variant. `holds` is None where the model cannot have the variant."""

    property: str
    variant: str
    holds: bool | None
    compared: str
    difference: float | None = None
    bound: float | None = None
    unit: str = ""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The row for `json.dumps`; a difference that is no finite number is its name."""
        row = dataclasses.asdict(self)
        if self.difference is not None and not math.isfinite(self.difference):
            row["difference"] = str(self.difference)
        return row


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to check: variants, each with its properties. `only` says what a part of it covers."""

    entries: tuple[tuple[Variant, tuple[Property, ...]], ...]
    only: str = ""

    @property
    def num_rows(self) -> int:
        """Rows of a model that can have every variant."""
        return sum(len(properties) for _, properties in self.entries)


def verify(model: Model, plan: Plan, seed: int, report: Progress) -> Iterator[Row]:
    """Checks a plan, variant by variant.

    What goes wrong in one property is its row, and the others are still checked.

    Args:
      model: the loaded model.
      plan: what to check.
      seed: of the choice of texts.
      report: is told of every row.

    Yields:
      A row for each property of each variant, and one for a variant that the model cannot have.

    Raises:
      ValueError: a model whose context is too short for any text.
    """
    bench = Bench(model, seed)
    for variant, properties in plan.entries:
        try:
            bench.config(variant).init_cache()
        except ValueError as error:
            yield Row("(left out)", str(variant), None, str(error))
            report.advance(str(variant), len(properties))
            continue
        for checked in properties:
            yield _row(bench, variant, checked)
            report.advance(f"{variant}: {checked.name}")
        bench.free_programs()


def _row(bench: Bench, variant: Variant, checked: Property) -> Row:
    try:
        measured = checked.measure(bench, variant)
    except Exception as error:  # the row says so, as a failed point of a sweep does
        told = f"{type(error).__name__}: {error}"
        return Row(checked.name, str(variant), False, told, why=checked.why)
    return Row(
        checked.name,
        str(variant),
        measured.holds,
        measured.compared,
        measured.difference,
        measured.bound,
        measured.unit,
        checked.why,
    )


# --- against the model without a cache ---


def _against_oracle(bench: Bench, variant: Variant) -> Measured:
    """Logits of every position, and greedy tokens where the oracle is clear about them."""
    placement = variant.placements[0]
    window = placement.window if isinstance(placement, Ring) else None
    differences, positions, clear, wrong = [], 0, 0, 0
    for prompt, seen in zip(bench.prompts, bench.base(variant).seen, strict=True):
        oracle = bench.logits(bench.oracle(window, np.append(prompt, seen.tokens)))
        differences.append(relative_difference(oracle, _all_logits(bench, seen)))
        decoded = oracle[len(prompt) - 1 : -1]
        is_clear = clear_positions(decoded, FLOAT32_BOUND)
        positions, clear = positions + len(oracle), clear + int(is_clear.sum())
        wrong += int((decoded.argmax(-1) != seen.tokens)[is_clear].sum())
    told = "recompute" if window is None else f"recompute with window {window}"
    told += f": {positions} positions; {clear - wrong} of {clear} clear tokens"
    told += _ring_sizes(bench, variant)
    return Measured(
        largest(differences), FLOAT32_BOUND, "of the largest logit", told, agrees=not wrong
    )


def _ring_sizes(bench: Bench, variant: Variant) -> str:
    """What a reader has to know of a variant's rings, if it has any."""
    if not any(isinstance(placement, Ring | OwnRing) for placement in variant.placements):
        return ""
    if OwnRing() in variant.placements and not any(bench.model.config.layer_windows):
        return "; no layer of the model is windowed: rings hold whole texts"
    layers = bench.session(variant).cache.layers
    slots = min(layer.capacity for layer in layers if isinstance(layer, ContiguousCache))
    longest = max(len(prompt) for prompt in bench.prompts) + STEPS
    return f"; rings of {slots} slots, texts of up to {longest} tokens"


# --- equal bits ---

Pair = tuple[Seen, Seen]


def _equal_bits(pairs: Sequence[Pair], compared: str, agrees: bool = True) -> Measured:
    worst = largest([bit_difference(one, other) for one, other in pairs])
    return Measured(worst, 0.0, "absolute", compared, agrees)


def _batch(bench: Bench, variant: Variant) -> Measured:
    """The longest prompt alone, and a short one beside strangers."""
    last, base = len(bench.prompts) - 1, bench.base(variant).seen
    alone = traced(bench.session(variant), {last: bench.prompts[last]})
    among = {0: bench.strangers[0], 1: bench.prompts[1], 3: bench.strangers[1]}
    beside = traced(bench.session(variant), among)
    pairs = [(base[last], alone[last]), (base[1], beside[1])]
    return _equal_bits(pairs, "alone and beside strangers, against the usual batch")


def _slot(bench: Bench, variant: Variant) -> Measured:
    """Every prompt in another slot, prefilled in another order."""
    base = bench.base(variant).seen
    home = {index: (index + 1) % SLOTS for index in reversed(range(SLOTS))}
    seen = traced(bench.session(variant), {home[i]: bench.prompts[i] for i in home})
    pairs = [(base[index], seen[slot]) for index, slot in home.items()]
    return _equal_bits(pairs, "other slots and another order")


def _pages(bench: Bench, variant: Variant) -> Measured:
    """The prompts where other sequences were: on other pages, over other keys."""
    base, session = bench.base(variant), bench.session(variant)
    tenants = {2: bench.strangers[0], 0: bench.prompts[2], 3: bench.strangers[1]}
    traced(session, tenants)
    for slot in tenants:  # pages come back in this order
        session.release([slot])
    seen = traced(session, dict(enumerate(bench.prompts)))
    pairs = [(base.seen[slot], seen[slot]) for slot in seen]
    maps = list(zip(base.pages, page_maps(session), strict=True))
    moved = sum(int((one != other).sum()) for one, other in maps)
    told = f"{moved} pages elsewhere, " if maps else ""
    return _equal_bits(pairs, f"{told}slots that held other texts", agrees=not maps or moved > 0)


def _fork(bench: Bench, variant: Variant) -> Measured:
    """Copies go on as the sequence itself does; one that turns off, as an independent one."""
    base, prompt = bench.base(variant).seen[2], bench.prompts[2]
    session = bench.session(variant)
    hidden = session.prefill({1: prompt, 2: prompt})
    session.fork(1, [0, 3])
    hidden |= {0: hidden[1], 3: hidden[1]}
    other = [(base.tokens[0] + 1) % bench.model.config.vocab_size]
    seen = continued(session, hidden, forced={0: other, 2: other})
    pairs = [(base, seen[1]), (base, seen[3]), (seen[2], seen[0])]
    return _equal_bits(pairs, "two copies, one with another token, against independent ones")


def _loop(bench: Bench, variant: Variant) -> Measured:
    """One call of the loop on the device against a call a token."""
    base, session = bench.base(variant).seen, bench.session(variant)
    seen = decoded_in_one_call(session, session.prefill(dict(enumerate(bench.prompts))))
    pairs = [(base[slot].ends, seen[slot]) for slot in seen]
    return _equal_bits(pairs, f"{STEPS} tokens in one device call, against one a call")


def _rows(bench: Bench, variant: Variant) -> Measured:
    """One piece of a prompt a prefill call against calls whose rows are full."""
    last, base, session = len(bench.prompts) - 1, bench.base(variant).seen, bench.session(variant)
    hidden = prefilled_row_by_row(session, last, bench.prompts[last])
    seen = continued(session, {last: hidden})[last]
    return _equal_bits([(base[last], seen)], "one row a prefill call, against full calls")


# --- against the oracle, of what rounds ---


def stored(most_kl: float) -> Property:
    """How far a storage is from the model without a cache, against what it may cost.

    The other rows compare a variant with itself: what is wrong throughout they would not see.

    Args:
      most_kl: nats, mean KL over all positions.
    """

    def measure(bench: Bench, variant: Variant) -> Measured:
        kl, positions = _own_kl(bench, variant)
        return Measured(kl, most_kl, "nats, mean KL", f"recompute: {positions} positions")

    return Property("storage", measure, "what is stored is rounded")


def _own_kl(bench: Bench, variant: Variant) -> tuple[float, int]:
    """Mean KL of a variant from the oracle on its own texts, and their positions."""
    base = bench.base(variant).seen
    texts = [np.append(p, seen.tokens) for p, seen in zip(bench.prompts, base, strict=True)]
    oracle = np.concatenate([bench.logits(bench.oracle(None, text)) for text in texts])
    own = np.concatenate([_all_logits(bench, seen) for seen in base])
    return mean_kl(oracle, own), len(own)


BATCH = Property("batch composition", _batch)
SLOT = Property("slot", _slot)
PAGES = Property("pages and their past", _pages)
FORK = Property("fork", _fork)
LOOP = Property("loop", _loop)
PACKING = Property("rows of a call", _rows)
BITS = (BATCH, SLOT, PAGES, FORK, LOOP, PACKING)
ORACLE = Property("oracle", _against_oracle)


def page_size(reference: int) -> Property:
    """Equal bits with another page size, where both divide the read block."""

    def measure(bench: Bench, variant: Variant) -> Measured:
        other = dataclasses.replace(variant, placements=(Paged(reference),))
        pairs = list(zip(bench.base(variant).seen, bench.base(other).seen, strict=True))
        return _equal_bits(pairs, f"pages of {reference} tokens")

    return Property("page size", measure)


# --- bounded differences ---


def _bounded(bench: Bench, variant: Variant, others: Sequence[Seen], compared: str) -> Measured:
    """How far others that were fed the tokens of the base are from it.

    Where a rounding, or a choice of tokens, hangs on the last bit, the measure is the KL. Two
    roundings of one number that have nothing in common are as far apart as the sum of what each
    is from the number, so twice the variant's own KL from the oracle is the bound.
    """
    reference = [_all_logits(bench, seen) for seen in bench.base(variant).seen]
    logits = [_all_logits(bench, seen) for seen in others]
    if variant.is_continuous:
        worst = largest(list(map(relative_difference, reference, logits)))
        return Measured(worst, FLOAT32_BOUND, "of the largest logit", compared)
    own, _ = _own_kl(bench, variant)
    kl = mean_kl(np.concatenate(reference), np.concatenate(logits))
    compared += f"; own KL from the oracle {significant(own)}"
    return Measured(kl, KL_BOUND * own, "nats, mean KL", compared)


def _all_logits(bench: Bench, seen: Seen) -> np.ndarray:
    """Logits of every position, [T + STEPS, V]."""
    return np.concatenate([bench.logits(seen.hidden[:-1]), seen.logits])


def altered(name: str, compared: str, why: str, **changes: Any) -> Property:
    """A bounded difference in sessions of other shapes.

    Args:
      name: of the property.
      compared: the shapes, in words.
      why: why bits cannot be equal.
      **changes: fields of `InferenceConfig`.
    """

    def measure(bench: Bench, variant: Variant) -> Measured:
        base, session = bench.base(variant).seen, bench.session(variant, **changes)
        others: list[Seen] = []
        for first in range(0, len(base), session.config.slots):
            wave = range(first, min(first + session.config.slots, len(base)))
            prompts = {index - first: bench.prompts[index] for index in wave}
            forced = {index - first: base[index].tokens for index in wave}
            others += traced(session, prompts, forced).values()
            session.release()
        return _bounded(bench, variant, others, compared)

    return Property(name, measure, why)


def large_page(reference: int) -> Property:
    """A bounded difference of pages above the read block from smaller ones."""

    def measure(bench: Bench, variant: Variant) -> Measured:
        other = dataclasses.replace(variant, placements=(Paged(reference),))
        return _bounded(bench, variant, bench.base(other).seen, f"pages of {reference} tokens")

    why = "XLA reads a page above the read block whole: other blocks, another order of sums"
    return Property("large page", measure, why)


# --- the table ---


def table_text(rows: Sequence[Row]) -> str:
    """The rows for a terminal, those that do not hold first, and how many there are of each."""
    marks = {False: "FAILS", True: "holds", None: "left out"}
    columns = ("", "property", "variant", "difference", "bound", "unit", "compared")
    cells = [
        {
            "": marks[row.holds],
            "property": row.property,
            "variant": row.variant,
            "difference": None if row.difference is None else significant(row.difference),
            "bound": None if row.bound is None else significant(row.bound),
            "unit": row.unit,
            "compared": f"{row.compared} ({row.why})" if row.why else row.compared,
        }
        for row in sorted(rows, key=lambda row: list(marks).index(row.holds))
    ]
    left_out = sum(row.holds is None for row in rows)
    failed, checked = sum(row.holds is False for row in rows), len(rows) - left_out
    result = f"{failed} of {checked} rows fail" if failed else f"all {checked} rows hold"
    result += f", {left_out} variants left out" if left_out else ""
    return f"{format_table(cells, columns)}\n\n{result}"
