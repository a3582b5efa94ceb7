"""`kvlab verify`: the table, its JSON, and the exit status of what holds and what does not."""

import json

import jax.numpy as jnp
import pytest

from kvlab.ops.caches.contiguous import ContiguousCache
from kvlab.ops.specs import Contiguous
from kvlab.research import verify_plan
from kvlab.research.equivalence import Variant
from kvlab.research.verify import BITS, ORACLE, Plan


def test_a_sound_model_passes(kvlab, tiny_folder):
    shown = kvlab("verify", f"--model={tiny_folder}", "--plan=short", "--json")
    assert shown.status == 0, shown.err
    rows = [json.loads(line) for line in shown.out.splitlines()]
    checked = {(row["variant"], row["property"]): row for row in rows}
    assert len(checked) == len(rows) == verify_plan.PLANS["short"].num_rows
    assert all(row["holds"] is True for row in rows)
    for row in rows:
        if row["property"] == "oracle":
            assert 0 < row["difference"] <= row["bound"] == 1e-4
        elif row["property"] == "storage":
            assert 0 < row["difference"] <= row["bound"] == 5e-3
        elif row["property"] == "shape":
            assert row["unit"] == "nats, mean KL"
            assert row["difference"] <= row["bound"] < 0.1
            assert "an ulp can move a rounding" in row["why"]
        else:
            assert row["difference"] == row["bound"] == 0
    assert checked["paged:16", "oracle"]["compared"].startswith("recompute: 159 positions; ")
    total = len(rows)
    assert f"verify: {total}/{total}" in shown.err


def test_a_broken_cache_is_status_1_and_the_first_row(kvlab, tiny_folder, monkeypatch):
    """Rows of one slot hold another value: the slot matters, and how far a copy is from it."""
    write = ContiguousCache.write

    def uneven(self, key, value, step, table):
        rows = value.shape[0]
        row = jnp.arange(rows, dtype=jnp.int32) if step.slots is None else step.slots
        factor = jnp.where(row == 2, jnp.float32(2), jnp.float32(1))
        return write(self, key, value * factor[:, None, None, None], step, table)

    monkeypatch.setattr(ContiguousCache, "write", uneven)
    plan = Plan(((Variant((Contiguous(),)), (ORACLE, *BITS)),), "one variant")
    monkeypatch.setitem(verify_plan.PLANS, "short", plan)
    shown = kvlab("verify", f"--model={tiny_folder}", "--plan=short", "--seed=3")
    assert shown.status == 1
    lines = shown.out.splitlines()
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["FAILS", "oracle"],
        ["FAILS", "slot"],
        ["FAILS", "fork"],
        ["holds", "batch"],
    ]
    assert lines[-2] == "3 of 7 rows fail"
    assert lines[-1] == "checked only one variant; --plan=full checks the rest"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model=absent"], "model 'absent' does not exist"),
        (["--plan=long"], "legal values: full, short"),
        (["--budget=3"], "there is no flag --budget"),
    ],
)
def test_what_cannot_be_is_one_line(kvlab, arguments, told):
    refused = kvlab("verify", *arguments)
    assert refused.status in (1, 2)
    assert told in refused.error
