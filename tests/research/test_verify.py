"""The equivalence table of a tiny model: what holds, and that broken caches fail where they must.

Each test that compiles has a model of its own context, so that no program is one that another test
compiled from other code.
"""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.load import Model
from kvlab.models.tokenizers import ByteTokenizer
from kvlab.ops.caches.contiguous import ContiguousCache
from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.page_table import PageTable
from kvlab.ops.specs import Contiguous, Kivi4, Paged, Recompute, Ring
from kvlab.research import equivalence
from kvlab.research.equivalence import Bench, OwnRing, Seen, Variant
from kvlab.research.verify import (
    BITS,
    ORACLE,
    Measured,
    Plan,
    Property,
    Row,
    page_size,
    table_text,
    verify,
)
from kvlab.research.verify_plan import OTHER_CHUNK, PLANS

PAGED, CONTIGUOUS = Variant((Paged(8),)), Variant((Contiguous(),))
EQUAL_BITS = {checked.name for checked in BITS}


class Heard:
    """A progress that remembers."""

    def __init__(self):
        self.amount = 0

    def advance(self, note="", amount=1):
        self.amount += amount


def model_of(tiny, context, **changes) -> Model:
    """One layer, 2 KV heads of 6, and no tokenizer."""
    fields = {"num_layers": 1, "num_kv_heads": 2, "windows": None, "max_length": context}
    config = dataclasses.replace(tiny.model("gqa"), **(fields | changes))
    params = {name: tiny.params("gqa")[name] for name in tiny.params("gqa") if name[-1] != "1"}
    return Model("tiny", config, params, None, None)


def rows_of(model, *entries, seed=0):
    """Rows by variant and property."""
    rows = list(verify(model, Plan(entries), seed, Heard()))
    found = {(row.variant, row.property): row for row in rows}
    assert len(found) == len(rows)
    return found


def failed(rows):
    return {key for key, row in rows.items() if not row.holds}


class TestBrokenCaches:
    """Exactly the rows fail that the fault breaks."""

    def test_a_cache_that_reads_one_token_too_few(self, tiny, monkeypatch):
        blocks = PagedCache.blocks

        def short(self, step, table, lengths, window):
            return blocks(self, step, table, lengths - 1, window)

        monkeypatch.setattr(PagedCache, "blocks", short)
        rows = rows_of(
            model_of(tiny, 101),
            (PAGED, (ORACLE, *BITS, page_size(16), OTHER_CHUNK)),
            (CONTIGUOUS, (ORACLE,)),
        )
        # The last token of every chunk does not see itself, so where chunks end matters.
        assert failed(rows) == {("paged:8", "oracle"), ("paged:8", "chunk")}
        assert rows["paged:8", "oracle"].difference > 1e-2
        assert rows["contiguous", "oracle"].difference < 1e-5
        assert all(rows["paged:8", name].difference == 0 for name in (*EQUAL_BITS, "page size"))

    def test_a_cache_that_does_not_follow_its_pages(self, tiny, monkeypatch):
        """Tokens are written and read where a table without sharing could have put them."""
        rows_of_table = PageTable.rows

        def own_pages(table, sequences):
            columns = jnp.arange(table.pages_per_sequence, dtype=jnp.int32)[None]
            return sequences[:, None] * table.pages_per_sequence + columns

        def rows(self, slots, later):
            view = rows_of_table(self, slots, later)
            return dataclasses.replace(view, page_indices=own_pages(self, slots))

        def followed(method):
            def wrapper(self, step, table, *arguments):
                if step.slots is None:
                    every = jnp.arange(table.num_sequences, dtype=jnp.int32)
                    table = dataclasses.replace(table, page_indices=own_pages(table, every))
                return method(self, step, table, *arguments)

            return wrapper

        monkeypatch.setattr(PageTable, "rows", rows)
        for name in ("slots", "reader", "units"):
            monkeypatch.setattr(PagedCache, name, followed(getattr(PagedCache, name)))
        found = rows_of(model_of(tiny, 103), (PAGED, (ORACLE, *BITS)))
        assert failed(found) == {("paged:8", "fork")}

    def test_a_cache_that_rounds_by_the_slot(self, tiny, monkeypatch):
        write = ContiguousCache.write

        def uneven(self, key, value, step, table):
            count = value.shape[0]
            row = jnp.arange(count, dtype=jnp.int32) if step.slots is None else step.slots
            factor = 1 + 2e-7 * row.astype(jnp.float32)
            return write(self, key, value * factor[:, None, None, None], step, table)

        monkeypatch.setattr(ContiguousCache, "write", uneven)
        rows = rows_of(model_of(tiny, 107), (Variant((Ring(24),)), (ORACLE, *BITS)))
        assert failed(rows) == {("ring:24", "slot"), ("ring:24", "fork")}
        assert 0 < rows["ring:24", "slot"].difference < 1e-4
        told = rows["ring:24", "oracle"].compared
        assert told.startswith("recompute with window 24: 177 positions; ")
        assert told.endswith("; rings of 64 slots, texts of up to 85 tokens")


def test_a_variant_that_the_model_cannot_have_is_left_out(tiny):
    """The others are checked; nothing is compiled here."""
    touched = Property("touched", lambda bench, variant: Measured(0.0, 0.0, "", str(variant)))
    mha = model_of(tiny, 109, num_kv_heads=6)
    report = Heard()
    plan = Plan(
        (
            (Variant((Contiguous(),), attention="mha"), (touched, touched)),
            (Variant((Contiguous(),), Kivi4(4)), (touched,)),
            (CONTIGUOUS, (touched,)),
        )
    )
    rows = list(verify(mha, plan, 0, report))
    assert [(row.variant, row.holds) for row in rows] == [
        ("mha contiguous", None),
        ("contiguous kivi4:4:0", None),
        ("contiguous", True),
    ]
    assert rows[0].compared == "the model's own attention is mha"
    assert "do not divide head_dim=10" in rows[1].compared
    assert report.amount == plan.num_rows == 4


def test_an_error_is_a_row_that_fails(tiny):
    def broken(bench, variant):
        raise FloatingPointError("lost")

    plan = Plan(((CONTIGUOUS, (Property("breaks", broken), Property("next", broken))),))
    rows = list(verify(model_of(tiny, 109), plan, 0, Heard()))
    assert [(row.property, row.holds, row.compared) for row in rows] == [
        ("breaks", False, "FloatingPointError: lost"),
        ("next", False, "FloatingPointError: lost"),
    ]


def test_texts_follow_the_seed_the_context_and_the_windows(tiny):
    bench, same, other = (Bench(model_of(tiny, 109), seed) for seed in (1, 1, 2))
    assert [len(prompt) for prompt in bench.prompts] == [1, 16, 63, 81]
    assert bench.max_length == 96
    for one, two in zip(bench.prompts, same.prompts, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(bench.prompts[3], other.prompts[3])
    short = Bench(model_of(tiny, 67), 0)
    assert [len(prompt) for prompt in short.prompts] == [1, 16, 63, 63]
    assert short.max_length == 67
    # A ring of 70 + 16 - 1 tokens has 128 slots.
    assert len(Bench(model_of(tiny, 601, windows=70), 0).prompts[3]) == 145
    assert len(Bench(model_of(tiny, 601, windows=400), 0).prompts[3]) == 81
    with pytest.raises(ValueError, match="context is 4 tokens; this needs 5 or more"):
        Bench(model_of(tiny, 4), 0)


def test_prompts_are_english_where_there_is_a_tokenizer(tiny):
    model = model_of(tiny, 109, vocab_size=259)
    tokenizer = ByteTokenizer(259)
    bench = Bench(dataclasses.replace(model, tokenizer=tokenizer), 3)
    said = tokenizer.decode(bench.prompts[3].tolist())
    assert said.isascii()
    assert " " in said


def test_rings_lie_where_layers_are_windowed(tiny):
    mixed = tiny.model("mixed")
    specs = Variant((OwnRing(),)).specs(mixed, 96)
    assert [spec.placement for spec in specs] == [Ring(13), Paged(16), Ring(71)]
    assert {spec.placement for spec in Variant((OwnRing(),)).specs(tiny.model("gqa"), 96)} == {
        Ring(96)
    }
    alternating = Variant((Contiguous(), Paged(8))).specs(mixed, 96)
    assert [str(spec.placement) for spec in alternating] == ["contiguous", "paged:8", "contiguous"]


class TestDifferences:
    ONE = Seen(np.ones((3, 2), np.float32), np.ones((2, 5), np.float32), (4, 2), (-1.0, -2.0))

    @pytest.mark.parametrize("field", ["hidden", "logits", "log_probs"])
    def test_every_number_counts_and_nan_is_never_equal(self, field):
        values = np.asarray(getattr(self.ONE, field), np.float32).copy()
        values.flat[1] += 0.25
        changed = dataclasses.replace(self.ONE, **{field: values})
        assert equivalence.bit_difference(self.ONE, changed) == 0.25
        values.flat[1] = np.nan
        assert math.isnan(equivalence.bit_difference(self.ONE, changed))
        assert not Measured(math.nan, 0.0, "", "").holds

    def test_other_tokens_are_the_largest_difference(self):
        other = dataclasses.replace(self.ONE, tokens=(4, 3))
        assert equivalence.bit_difference(self.ONE, other) == math.inf
        assert equivalence.bit_difference(self.ONE, self.ONE) == 0

    def test_relative_difference_kl_and_clear_positions(self):
        reference = np.asarray([[0.0, 1.0, -8.0], [2.0, 2.5, 2.0]], np.float32)
        logits = reference + np.asarray([[0, 0.5, 0], [0, 0, 0]], np.float32)
        assert equivalence.relative_difference(reference, logits) == 0.5 / 8
        assert equivalence.clear_positions(reference, 0.1).tolist() == [True, False]
        one, other = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (reference, logits))
        expected = np.mean(np.sum(one * np.log(one / other), axis=1))
        assert equivalence.mean_kl(reference, logits) == pytest.approx(expected, rel=1e-5)


def test_the_table_has_failures_first():
    rows = [
        Row("oracle", "paged:8", True, "recompute", 1.25e-6, 1e-4, "of the largest logit", ""),
        Row("(left out)", "mha paged:8", None, "the model's own attention is mha"),
        Row("chunk", "ring", False, "chunk 48", math.inf, 0.0, "absolute", "other sums"),
    ]
    lines = table_text(rows).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["FAILS", "holds", "left"]
    assert lines[2].split()[3:6] == ["inf", "0", "absolute"]
    assert lines[2].endswith("  chunk 48 (other sums)")
    assert lines[-1] == "1 of 2 rows fail, 1 variants left out"
    assert table_text(rows[:1]).endswith("all 1 rows hold")
    written = [json.loads(json.dumps(row.to_json(), allow_nan=False)) for row in rows]
    assert [row["difference"] for row in written] == [1.25e-6, None, "inf"]
    assert [row["holds"] for row in written] == [True, None, False]


def test_the_full_plan_has_every_axis_value_and_nothing_twice():
    variants = [variant for variant, _ in PLANS["full"].entries]
    assert len(set(variants)) == len(set(map(str, variants))) == len(variants)
    assert {str(v.storage).partition(":")[0] for v in variants} == {
        "float32", "bfloat16", "float8_e4m3fn", "int8", "int4", "kivi4"
    }  # fmt: skip
    kept = {v.retention.name for v in variants if v.retention is not None}
    assert kept == {"window", "sinks", "h2o", "snapkv", "random"}
    placements = {type(placement) for v in variants for placement in v.placements}
    assert placements == {Contiguous, Paged, Ring, OwnRing}
    assert Recompute not in placements
    own = {str(v) for v, checked in PLANS["full"].entries if ORACLE in checked}
    assert {f"mha {name}" for name in ("contiguous", "paged:1", "paged:64", "ring")} <= own
