"""`kvlab roofline`: to its end on a tiny model, resumed, and bad flags."""

import json

import pytest

from kvlab.research.machine import PROBES
from kvlab.research.results import read_manifest, read_rows

SMALL = (
    *("roofline", "--model=random:tiny-gqa", "--batch=1,3", "--prompt_tokens=5,19"),
    *("--decode_tokens=2", "--repeats=2", "--device=L4-24GB"),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Limits by small arrays: nothing here is about speed."""
    monkeypatch.setattr("kvlab.research.machine._READ_BYTES", 2**20)
    monkeypatch.setattr("kvlab.research.machine._LEAST_CALL_S", 0.0)
    monkeypatch.setattr("kvlab.research.machine._SAMPLE_S", 0.0)


def of_kind(rows, kind):
    return [row for row in rows if row["config"]["kind"] == kind]


def test_every_kind_of_row_and_a_report(kvlab, tmp_path):
    folder = tmp_path / "run"
    shown = kvlab(*SMALL, "--attention=gqa,mqa", f"--out={folder}")
    assert shown.status == 0, shown.err
    rows = read_rows(folder)
    assert all(row["status"] == "ok" for row in rows)
    assert read_manifest(folder)["points"] == len(rows)
    phases = of_kind(rows, "phase")
    assert len(phases) == 2 * 2 * 2 * 2
    for row in phases:
        config, metrics = row["config"], row["metrics"]
        time = "ttft_s" if config["phase"] == "prefill" else "tpot_s"
        assert len(row["repeats"][time]) == 2
        assert metrics["limit_share"] == pytest.approx(max(metrics["mfu"], metrics["mbu"]))
        seconds = metrics["flops"] / metrics["mfu"] / peak(rows)
        assert metrics[time] == pytest.approx(seconds)
        assert metrics["predicted_s"] > 0
        assert metrics["compile_count"] == 2
    step = {
        (row["config"]["attention"], row["config"]["batch_size"]): row["metrics"]
        for row in phases
        if row["config"]["phase"] == "decode" and row["config"]["prompt_tokens"] == 19
    }
    assert step["gqa", 1]["arithmetic_intensity"] < step["gqa", 3]["arithmetic_intensity"]
    assert step["mqa", 3]["moved_bytes"] < step["gqa", 3]["moved_bytes"]
    devices = [(r["config"]["device"], r["config"]["attention"]) for r in of_kind(rows, "device")]
    assert devices == [
        *(("this machine", "gqa"), ("L4-24GB", "gqa")),
        *(("this machine", "mqa"), ("L4-24GB", "mqa")),
    ]
    operators = {(r["config"]["phase"], r["config"]["operator"]) for r in of_kind(rows, "operator")}
    assert {("prefill", "attention"), ("decode", "head")} <= operators
    assert "gqa: decode is memory-bound at every batch" in shown.out
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64") == 3
    assert "Operators of decode: gqa, batch 1, 19 tokens" in page
    for name in ("roofline.png", "measured_predicted.png", "utilisation.png"):
        assert (folder / name).stat().st_size > 10_000


def peak(rows):
    """The fastest measured float32 products."""
    return max(
        max(row["repeats"]["flops_per_s"])
        for row in of_kind(rows, "limit")
        if row["config"]["limit"] == "float32_flops"
    )


@pytest.mark.parametrize(
    "placement", ["contiguous", pytest.param("recompute,contiguous", marks=pytest.mark.long)]
)
def test_a_stopped_run_goes_on_and_measures_nothing_twice(placement, kvlab, tmp_path):
    folder = tmp_path / "run"
    command = (*SMALL, "--attention=gqa", f"--placement={placement}", f"--out={folder}")
    assert kvlab(*command).status == 0
    results = folder / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not removed(json.loads(line)["config"])]
    assert len(read_rows(folder)) == read_manifest(folder)["points"]
    results.write_text("".join(kept))
    again = kvlab(*command)
    assert again.status == 0
    after = results.read_text().splitlines(keepends=True)
    assert after[: len(kept)] == kept
    assert len(after) == len(kept) + 3
    assert kvlab(*command).status == 0
    assert results.read_text().splitlines(keepends=True) == after
    other = kvlab(*command, "--repeats=1")
    assert other.status == 1
    assert "holds another experiment" in other.error


def removed(config):
    """Two rows that were measured together, and one that was not."""
    measured = config["kind"] == "phase" and config["batch_size"] == 3
    if config["kind"] == "operator":
        return (config["phase"], config["operator"]) == ("decode", "head")
    return measured and config["placement"] == "contiguous" and config["prompt_tokens"] == 19


def test_a_failed_group_is_rows_that_say_so_and_the_rest_goes_on(kvlab, tmp_path, monkeypatch):
    from kvlab.research import roofline_run

    make = roofline_run.PhaseTimer

    def fail(params, config, seed):
        if config.slots == 3:
            raise RuntimeError("three is too many")
        return make(params, config, seed)

    monkeypatch.setattr(roofline_run, "PhaseTimer", fail)
    shown = kvlab(*SMALL, "--attention=gqa", f"--out={tmp_path}/run")
    assert shown.status == 1
    failed = [row for row in read_rows(tmp_path / "run") if row["status"] == "failed"]
    assert {row["config"]["batch_size"] for row in failed} == {3}
    assert len(failed) == 4
    assert "three is too many" in shown.out


def test_a_product_that_the_backend_cannot_do_fails_alone(kvlab, tmp_path, monkeypatch):
    from kvlab.research import roofline_run

    def no_int8(probe, _memory, repeats):
        if probe.limit == "int8_flops":
            raise NotImplementedError("no int8 here")
        return [1e9] * repeats, 1

    monkeypatch.setattr(roofline_run, "measure", no_int8)
    small = ["--batch=1", "--prompt_tokens=5", "--attention=gqa"]
    shown = kvlab(*SMALL, *small, f"--out={tmp_path}/run")
    assert shown.status == 1
    (failed,) = [row for row in read_rows(tmp_path / "run") if row["status"] == "failed"]
    assert failed["config"]["limit"] == "int8_flops"
    assert "ridge is at 1.00 operations a byte" in shown.out


def test_phases_are_rated_by_the_best_limits_of_the_whole_run(kvlab, tmp_path, monkeypatch):
    from kvlab.research import roofline_run

    monkeypatch.setattr(roofline_run, "probes", lambda: PROBES)  # with and without a compiler
    rates = iter([1e9] * 7 + [4e9] * 8)
    monkeypatch.setattr(roofline_run, "measure", lambda *_: ([next(rates)] * 9, 1))
    small = [*SMALL, "--prompt_tokens=5", "--attention=gqa", f"--out={tmp_path}/run"]
    assert kvlab(*small).status == 0
    (early, *_), phases = (of_kind(read_rows(tmp_path / "run"), k) for k in ("limit", "phase"))
    assert early["metrics"]["bytes_per_s"] == 1e9
    assert len(phases) == 4
    for row in phases:
        metrics = row["metrics"]
        time = "ttft_s" if row["config"]["phase"] == "prefill" else "tpot_s"
        assert metrics["mbu"] * 4e9 * metrics[time] == pytest.approx(metrics["moved_bytes"])
        assert metrics["mfu"] * 4e9 * metrics[time] == pytest.approx(metrics["flops"])
    before = (tmp_path / "run" / "results.jsonl").read_text()
    assert len(before.splitlines()) == len(read_rows(tmp_path / "run")) + 2  # those of batch 1
    assert kvlab(*small).status == 0
    assert (tmp_path / "run" / "results.jsonl").read_text() == before


def test_packed_weights_are_run_counted_and_named(kvlab, tmp_path):
    small = (*SMALL, "--batch=1", "--prompt_tokens=5", "--attention=gqa")
    sizes = {}
    for flags in ((), ("--weights=int4",)):
        folder = tmp_path / f"run{len(flags)}"
        shown = kvlab(*small, *flags, f"--out={folder}")
        assert shown.status == 0, shown.err
        rows = read_rows(folder)
        named = [row for kind in ("phase", "operator", "device") for row in of_kind(rows, kind)]
        assert {row["config"].get("weights") for row in named} == {"int4" if flags else None}
        operators = {r["config"]["operator"]: r["metrics"] for r in of_kind(rows, "operator")}
        sizes[flags] = operators["head"]["weight_bytes"], operators["mlp_norm"]["weight_bytes"]
    (whole, norm), (packed, same) = sizes.values()
    assert packed == whole * 4.5 / 32
    assert norm == same
    assert "gqa int4 weights: decode is" in shown.out
    assert "(gqa) int4 weights are " in shown.out
    assert "gqa, int4 weights, batch 1" in (folder / "report.html").read_text()


def test_linear_times_of_another_machine_stand_beside(kvlab, tmp_path, data_path):
    path = data_path("measured/vidur/a100/meta-llama/Llama-2-7b-hf/mlp.csv")
    flag = f"--linear_times=A100-80GB:llama-2-7b:{path}"
    small = ["--batch=1", "--prompt_tokens=5", "--attention=gqa", "--device=measured"]
    shown = kvlab(*SMALL, *small, flag, f"--out={tmp_path}/run")
    assert shown.status == 0, shown.err
    (row,) = of_kind(read_rows(tmp_path / "run"), "linear_times")
    assert row["metrics"]["efficiency"] == pytest.approx(0.69, abs=0.02)
    assert "Linear layers of A100-80GB: with one efficiency of 0.6" in shown.out
    assert [r["config"]["device"] for r in of_kind(read_rows(tmp_path / "run"), "device")] == [
        "this machine"
    ]


@pytest.mark.parametrize(
    ("flag", "status", "told"),
    [
        ("--device=A1000", 2, "legal values: measured, A6000"),
        ("--linear_times=A100-80GB", 2, "DEVICE:MODEL:FILE is wanted"),
        ("--linear_times=A1:llama-2-7b:x.csv", 2, "device 'A1' is not known"),
        ("--linear_times=L4-24GB:llama-2:x.csv", 2, "llama-2"),
        ("--linear_times=L4-24GB:llama-2-7b:/none.csv", 1, "/none.csv: No such file"),
        ("--batch=0", 2, "a whole number, 1 or more"),
        ("--dtype=int8", 2, "legal values: float32, bfloat16, float16"),
        ("--weights=int3", 2, "legal values: float32, bfloat16, int8, int4"),
        ("--attention=gqa:5", 1, "is not possible with 6 query heads"),
        ("--prompt_tokens=1023", 1, "past the model's context of 1024"),
        ("--budget=5", 1, "no point uses it"),
        ("--model=random:none", 1, "none"),
    ],
)
def test_bad_flags_are_one_line_and_write_nothing(kvlab, tmp_path, flag, status, told):
    refused = kvlab(*SMALL, flag, f"--out={tmp_path}/run")
    assert refused.status == status
    assert told in refused.error
    assert not (tmp_path / "run").exists()
