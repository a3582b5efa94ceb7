"""serve_trace: what is said of a run that was stopped, of requests left out, and of bad input."""

import json

import pytest

from kvlab.research.results import RunFolder, RunFolderError, read_rows

TINY = ("--model=random:tiny-gqa", "--num_requests=12", "--length_scale=0.1", "--rate=50")


def azure(path, rows, day="2023-11-16"):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"{day} 18:15:{second:02}.0000000,{i},{o}" for second, i, o in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def totals_of(folder):
    rows = read_rows(folder)
    return {r["config"]["placement"]: r for r in rows if "request" not in r["config"]}


def keep_rows(folder, wanted):
    """Cuts a run folder back to some rows, as a run that was stopped leaves it."""
    results = folder / "results.jsonl"
    lines = [line for line in results.read_text().splitlines() if wanted(json.loads(line))]
    results.write_text("".join(f"{line}\n" for line in lines))


CHECKED = ("serve_trace", *TINY, "--kv_mib=1", "--max_length=128", "--slots=4", "--check=20")
TIMED = ("ttft_p50_s", "tpot_p50_s", "e2e_p99_s", "output_tokens_per_s", "goodput_share")


def test_a_run_stopped_before_its_checks_checks_all_and_keeps_its_figures(kvlab, tmp_path):
    command = (*CHECKED, f"--out={tmp_path}/run")
    assert kvlab(*command).status == 0
    before = totals_of(tmp_path / "run")
    # The figures are on the disk before the first check.
    keep_rows(tmp_path / "run", lambda row: "answers_checked" not in row["metrics"])
    for total in totals_of(tmp_path / "run").values():
        assert {*TIMED, "running_mean", "kv_filled"} <= total["metrics"].keys()
    again = kvlab(*command)
    assert again.status == 0, again.err
    after = totals_of(tmp_path / "run")
    for name, total in after.items():
        assert total["metrics"] == before[name]["metrics"]
        assert total["metrics"]["answers_equal"] == total["metrics"]["answers_checked"] == 12
    # Where they were lost, the rows of the requests have what they can tell.
    keep_rows(tmp_path / "run", lambda row: "request" in row["config"])
    again = kvlab(*command)
    assert again.status == 0, again.err
    for name, total in totals_of(tmp_path / "run").items():
        metrics = total["metrics"]
        assert metrics["answers_equal"] == metrics["answers_checked"] == 12
        assert metrics["requests_ended"] == metrics["requests_of_earlier_run"] == 12
        for figure in TIMED:
            assert metrics[figure] == pytest.approx(before[name]["metrics"][figure])
        assert not {"running_mean", "kv_filled", "itl_p99_s", "parts"} & metrics.keys()
    assert "memory and requests over time were lost" in again.out
    assert "12 of 12 answers" in again.out


def test_a_disk_that_is_full_ends_the_run_in_one_line_and_loses_nothing(
    kvlab, tmp_path, monkeypatch
):
    command = (*CHECKED, "--check=3", "--placement=paged", f"--out={tmp_path}/run")
    append = RunFolder.append

    def full(folder, row):
        if "request" not in row["config"]:
            raise RunFolderError("cannot write: No space left on device")
        append(folder, row)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", full)
        shown = kvlab(*command)
    assert shown.status == 1
    assert shown.err.splitlines()[-1].endswith("No space left on device")
    again = kvlab(*command)
    assert again.status == 0, again.err
    metrics = totals_of(tmp_path / "run")["paged"]["metrics"]
    assert metrics["answers_equal"] == metrics["answers_checked"] == 3
    assert metrics["requests_ended"] == 12
    assert "ttft_p50_s" in metrics


def test_a_variant_served_in_parts_says_so_and_has_no_times(kvlab, tmp_path):
    command = (*CHECKED, f"--out={tmp_path}/run")
    assert kvlab(*command).status == 0
    whole = totals_of(tmp_path / "run")["paged"]["metrics"]
    keep_rows(
        tmp_path / "run",
        lambda row: (
            row["config"]["placement"] == "contiguous" or row["config"].get("request") in (0, 5)
        ),
    )
    again = kvlab(*command)
    assert again.status == 0, again.err
    totals = totals_of(tmp_path / "run")
    assert "parts" not in totals["contiguous"]["metrics"]
    metrics = totals["paged"]["metrics"]
    assert (metrics["parts"], metrics["requests_of_earlier_run"]) == (2, 2)
    for count in ("requests", "requests_ended", "output_tokens", "answers_checked"):
        assert metrics[count] == whole[count]
    assert metrics["answers_equal"] == 12
    times = [name for name in metrics if name.endswith("_s") or name.startswith("running")]
    assert times == ["compile_s"]
    assert "in parts" in again.out
    assert "paged 16 was served in 2 parts" in again.out
    assert "A new --out measures them" in again.out
    assert "On the same memory" not in again.out
    assert not totals["paged"].get("series")


def test_a_pool_that_is_smaller_than_the_warm_up_serves_what_fits_it(kvlab, tmp_path):
    shown = kvlab(
        *("serve_trace", "--model=random:tiny-gqa", "--workload=uniform:5-9/3-5", "--rate=50"),
        *("--num_requests=4", "--length_scale=1", "--placement=paged", "--max_length=64"),
        *("--kv_mib=0.01", f"--out={tmp_path}/run"),
    )
    assert shown.status == 0, shown.err
    metrics = totals_of(tmp_path / "run")["paged"]["metrics"]
    assert metrics["num_pages"] < 4
    assert metrics["requests_ended"] == 4


def test_serve_trace_serves_a_drawn_mix_with_its_numbers(kvlab, tmp_path):
    shown = kvlab(
        *("serve_trace", "--model=random:tiny-gqa", "--workload=uniform:5-9/5-9", "--kv_mib=1"),
        *("--num_requests=6", "--length_scale=1", "--rate=50", "--placement=paged"),
        *("--max_length=64", f"--out={tmp_path}/run"),
    )
    assert shown.status == 0, shown.err
    rows = [row for row in read_rows(tmp_path / "run") if "request" in row["config"]]
    assert len(rows) == 6
    assert all(5 <= row["metrics"]["prompt_tokens"] <= 9 for row in rows)


def test_what_a_trace_holds_and_is_not_served_is_counted_and_said(kvlab, tmp_path):
    trace = azure(tmp_path / "a.csv", [(0, 10, 5), (1, 90, 20), (2, 12, 5), (3, 300, 5)])
    trace.write_text(trace.read_text() + "broken\n")
    serve = ("serve_trace", "--model=random:tiny-gqa", "--placement=paged", "--length_scale=1")
    command = (*serve, f"--workload=azure:{trace}", "--rate_scale=100", "--max_length=160")
    shown = kvlab(*command, "--kv_mib=0.05", "--skip_bad_rows", f"--out={tmp_path}/run")
    metrics = totals_of(tmp_path / "run")["paged"]["metrics"]
    counts = ("requests_ended", "requests_refused", "requests_too_long", "skipped_rows")
    assert [metrics[name] for name in counts] == [2, 1, 1, 1]
    assert "1 malformed row and 1 request longer than max_length=160" in shown.out
    assert "paged 16: 1 of 3 requests had no room even alone" in shown.out
    assert "give more --kv_mib" in shown.out
    more = kvlab(*command, "--num_requests=4", "--skip_bad_rows", f"--out={tmp_path}/more")
    assert more.status == 1
    assert "holds 3 requests, and 4 from number 0 on were asked for" in more.error
    assert "1 malformed were left out; 1 too long were left out" in more.error
    assert not (tmp_path / "more").exists()


def test_variants_that_answered_different_requests_are_not_compared(kvlab, tmp_path):
    trace = azure(tmp_path / "a.csv", [(0, 10, 5), (1, 120, 20), (2, 12, 5)])
    shown = kvlab(
        *("serve_trace", "--model=random:tiny-gqa", "--length_scale=1", "--rate_scale=100"),
        *(f"--workload=azure:{trace}", "--kv_mib=0.1", "--max_length=160"),
        *("--placement=contiguous,paged", "--page_size=128", f"--out={tmp_path}/run"),
    )
    totals = totals_of(tmp_path / "run")
    assert totals["contiguous"]["metrics"]["requests_ended"] == 3
    assert totals["paged"]["metrics"]["requests_ended"] == 2
    assert "paged 128 answered 2 requests and contiguous 3: they are not compared" in shown.out
    assert "On the same memory" not in shown.out


def test_variants_that_differ_in_a_parameter_of_retention_have_names_of_their_own(kvlab, tmp_path):
    shown = kvlab(
        *("serve_trace", *TINY, "--num_requests=2", "--placement=contiguous", "--max_length=128"),
        *("--retention=sinks", "--budget=16,32", f"--out={tmp_path}/run"),
    )
    assert shown.status == 0, shown.err
    assert "contiguous sinks, budget=16" in shown.out
    assert "contiguous sinks, budget=32" in shown.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--placement=recompute",), "placement=recompute stores nothing"),
        (("--placement=paged,recompute", "--chunk=128"), "use placement=contiguous, paged or ring"),
        (("--chunk=1000000", "--max_length=128"), "chunk=1000000 is past max_length=128; use"),
        (("--decode_steps=999", "--max_length=128"), "decode_steps=999 is past max_length=128"),
        (("--rows=1000000",), "rows=1000000 given: slots=16 sequences of max_length=512 fill 128"),
        (("--slots=99999999999",), "a whole number, 65,536 or less"),
        (("--num_requests=99999999999",), "a whole number, 1,000,000 or less"),
        (("--length_scale=1e300",), "a number from 1e-06 to 1,000,000"),
        (("--length_scale=1e6",), "no request of sharegpt-like fits max_length=512"),
        (("--length_scale=1e6", "--workload=uniform:9-9/5000-5000"), "length_scale=1e+06"),
        (("--kv_mib=1e300",), "a number from 1e-09 to 1,000,000,000"),
        (("--kv_mib=9e8",), "kv_mib=9e+08 and the logits of slots=16 take 878,906 GiB"),
        (("--kv_mib=0.001",), "holds not one of the sequences of contiguous, which take 0."),
        (("--max_length=99999",), "past the model's context of 1024 tokens"),
        (("--rate=1e-5",), "the limit is 24 hours: raise --rate (now 1e-05)"),
        (("--rate_scale=2",), "--rate_scale is given, but arrivals are drawn anew"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_anything_is_written(
    arguments, told, kvlab, tmp_path
):
    tiny = [flag for flag in TINY if flag.partition("=")[0] not in str(arguments)]
    shown = kvlab("serve_trace", *tiny, *arguments, f"--out={tmp_path}/run")
    assert shown.status != 0
    assert told in shown.error
    assert "0.0 MiB" not in shown.error
    assert not (tmp_path / "run").exists()


def test_arrivals_that_are_too_far_apart_are_refused_with_their_length(kvlab, tmp_path):
    trace = azure(tmp_path / "a.csv", [(0, 30, 5)])
    trace.write_text(trace.read_text() + "9999-12-31 18:15:00,30,5\n")
    command = ("serve_trace", "--model=random:tiny-gqa", "--length_scale=1", "--max_length=64")
    shown = kvlab(*command, f"--workload=azure:{trace}", f"--out={tmp_path}/run")
    assert shown.status == 1
    assert "arrive over 7,976 years" in shown.error
    assert "raise --rate_scale (now 1)" in shown.error
    assert not (tmp_path / "run").exists()


def test_a_sequence_shorter_than_the_usual_calls_is_served_by_shorter_ones(kvlab, tmp_path):
    shown = kvlab(
        *("serve_trace", "--model=random:tiny-gqa", "--workload=uniform:2-3/2-3", "--rate=50"),
        *("--num_requests=2", "--length_scale=1", "--placement=paged", "--max_length=7"),
        *("--slots=1", f"--out={tmp_path}/run"),
    )
    assert shown.status == 0, shown.err
    config = totals_of(tmp_path / "run")["paged"]["config"]
    assert (config["chunk"], config["rows"], config["decode_steps"]) == (7, 1, 7)
