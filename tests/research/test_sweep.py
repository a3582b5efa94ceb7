"""The sweep: points, rows, quality, failures, resuming; on a tiny random model."""

import dataclasses
import importlib
import json

import pytest

from kvlab.models.load import load_model
from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Recompute
from kvlab.research.experiment import Sweep, Variant, cross, load_experiment
from kvlab.research.results import RunFolder
from kvlab.research.sweep import POOLING_NOTE, run_sweep, sweep_points

SWEEP = Sweep(
    name="tiny",
    question="Does the sweep work?",
    model="random:tiny-gqa",
    variants=(
        Variant("gqa", CacheSpec(Recompute())),
        Variant("gqa", CacheSpec(Paged(8))),
        Variant("mqa", CacheSpec(Paged(8))),
        Variant("gqa:3", CacheSpec(Contiguous())),  # not a divisor: a failed row
    ),
    batch_sizes=(1, 2),
    prompt_tokens=13,
    decode_tokens=5,
    recompute_decode_tokens=2,
    repeats=2,
    quality_tokens=37,
    max_length=64,
    chunk=16,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "run"
    config = SWEEP.to_json()
    with RunFolder.open(path, command="sweep", config=config, seeds=(0,)) as folder:
        rows = run_sweep(SWEEP, load_model(SWEEP.model), folder)
        notes = folder.manifest["notes"]
    return path, rows, notes


def _row(rows, **wanted):
    (row,) = [r for r in rows if wanted.items() <= r["config"].items()]
    return row


def test_every_point_has_a_row_and_a_bad_one_fails_alone(run):
    _, rows, _ = run
    assert len(rows) == len(list(sweep_points(SWEEP))) == 8
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["config"]["attention"] for row in failed} == {"gqa:3"}
    assert "gqa:3" in failed[0]["error"]


def test_every_finished_row_has_speed_and_bytes(run):
    _, rows, _ = run
    for row in rows:
        if row["status"] == "ok":
            metrics = row["metrics"]
            assert metrics["compile_count"] == 2
            assert metrics["decode_tokens_per_s"] > 0
            assert len(row["repeats"]["tpot_s"]) == SWEEP.repeats
            assert ("kv_waste" in metrics) == (row["config"]["placement"] != "recompute")


def test_bytes_are_those_of_the_arrays(run):
    _, rows, _ = run
    config = load_model(SWEEP.model).config
    per_token = 4 * 2 * config.head_dim * sum(config.kv_heads)
    row = _row(rows, attention="gqa", placement="paged", batch_size=2)
    assert row["metrics"]["kv_bytes_per_token"] == per_token
    assert row["metrics"]["kv_bytes_allocated"] == per_token * 2 * SWEEP.max_length
    assert row["metrics"]["kv_bytes_used"] == per_token * 2 * (13 + 5)
    assert row["metrics"]["kv_waste"] == pytest.approx(1 - 18 / 24)


def test_quality_is_scored_once_per_variant_and_only_pooling_loses_any(run):
    _, rows, _ = run
    for row in rows:
        scored = row["status"] == "ok" and row["config"]["batch_size"] == 2
        assert ("perplexity" in row["metrics"]) == scored
    oracle = _row(rows, attention="gqa", placement="recompute", batch_size=2)["metrics"]
    paged = _row(rows, attention="gqa", placement="paged", batch_size=2)["metrics"]
    pooled = _row(rows, attention="mqa", placement="paged", batch_size=2)["metrics"]
    assert oracle["kl_vs_oracle"] == 0
    assert paged["kl_vs_oracle"] < 1e-6  # rounding; pooling gives 1e-3 and more
    assert paged["top1_agreement"] == 1
    assert paged["perplexity"] == pytest.approx(oracle["perplexity"], rel=1e-5)
    assert pooled["kl_vs_oracle"] > 1e-3


def test_recompute_says_how_many_steps_it_decoded(run):
    _, rows, _ = run
    assert _row(rows, placement="recompute", batch_size=1)["config"]["decode_tokens"] == 2


def test_report_notes_say_why_pooled_heads_are_poor(run):
    assert run[2] == [POOLING_NOTE]


def test_a_resumed_run_repeats_failed_rows_only(run):
    path, rows, _ = run
    before = (path / "results.jsonl").read_text().splitlines()
    with RunFolder.open(path, command="sweep", config=SWEEP.to_json(), seeds=(0,)) as folder:
        again = run_sweep(SWEEP, load_model(SWEEP.model), folder)
    after = (path / "results.jsonl").read_text().splitlines()
    assert after[: len(before)] == before
    assert {json.loads(line)["status"] for line in after[len(before) :]} == {"failed"}
    assert len(again) == len(rows)


def test_a_sweep_survives_json():
    sweep = load_experiment("per_layer")
    assert Sweep.from_json(json.loads(json.dumps(sweep.to_json()))) == sweep
    with pytest.raises(ValueError, match="nmae"):
        Sweep.from_json({"type": "Sweep", "nmae": "x"})


def test_per_layer_values_are_named_by_runs():
    variant = Variant(
        ("gqa", "gqa", "mqa"), (CacheSpec(Paged(8)), CacheSpec(Paged(8)), CacheSpec(Contiguous()))
    )
    assert variant.settings()["attention"] == "2*gqa+1*mqa"
    assert variant.settings()["placement"] == "2*paged:8+1*contiguous"


def test_cross_runs_equal_points_once():
    caches = (CacheSpec(Paged(8)), CacheSpec(Contiguous()), CacheSpec(Contiguous()))
    assert len(cross(("mha", "gqa"), caches)) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repeats", 0),
        ("batch_sizes", (0,)),
        ("batch_sizes", (0, 1)),
        ("quality_tokens", -1),
        ("quality_tokens", 1),
        ("prompt_tokens", 64),
        ("variants", ()),
    ],
)
def test_wrong_sizes_are_errors(field, value):

    with pytest.raises(ValueError, match=field.removesuffix("s")):
        dataclasses.replace(SWEEP, **{field: value})


def test_an_experiment_file_that_is_wrong_says_what_is_wanted(tmp_path):
    with pytest.raises(ValueError, match="attention_cache"):
        load_experiment("atention_cache")
    with pytest.raises(ValueError, match="does not exist"):
        load_experiment(str(tmp_path / "none.py"))
    broken = tmp_path / "broken.py"
    broken.write_text("CONFIG = 1 / 0\n")
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        load_experiment(str(broken))
    broken.write_text("raise SystemExit(0)\n")
    with pytest.raises(ValueError, match="SystemExit"):
        load_experiment(str(broken))
    broken.write_text("OTHER = 1\n")
    with pytest.raises(ValueError, match="must define CONFIG"):
        load_experiment(str(broken))


def test_shipped_experiments_are_lab_notes():

    for name in ("attention_cache", "per_layer", "shipped"):
        assert load_experiment(name).name == name
        note = importlib.import_module(f"kvlab.experiments.configs.{name}").__doc__ or ""
        for part in ("Question:", "Source:", "Expected:", f"Command: kvlab sweep --config={name}"):
            assert part in note
