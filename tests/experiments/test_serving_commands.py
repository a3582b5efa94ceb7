"""The commands about requests: small runs to their end, their rows and reports, and bad input."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kvlab.research.results import read_manifest, read_rows

TINY = ("--model=random:tiny-gqa", "--num_requests=12", "--length_scale=0.1", "--rate=50")
# Tests that run in the background (`make test &`) have interrupts off, and so would their commands.
HEARING = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("kvlab.experiments.serve_trace", run_name="__main__", alter_sys=True)
"""


def page(folder):
    text = (folder / "report.html").read_text()
    assert "data:image/png;base64" in text
    return text


def azure(path, rows):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{second:02}.0000000,{i},{o}" for second, i, o in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_memory_waste_shows_published_figures_beside_its_own(kvlab, tmp_path):
    shown = kvlab("memory_waste", "--num_requests=250", f"--out={tmp_path}/run")
    assert shown.status == 0, shown.err
    rows = {row["config"]["allocator"]: row["metrics"] for row in read_rows(tmp_path / "run")}
    assert list(rows) == ["max", "pow2", "oracle", "paged"]
    for metrics in rows.values():
        parts = ("filled", "reserved", "internal", "free", "cached")
        assert sum(metrics[f"kv_{part}_waiting"] for part in parts) == pytest.approx(1)
    assert rows["paged"]["kv_filled_waiting"] > 2 * rows["max"]["kv_filled_waiting"]
    assert "20.4" in shown.out
    assert "96.3" in shown.out
    assert "Fig. 2" in page(tmp_path / "run")
    assert (tmp_path / "run" / "memory_waste_0.png").exists()


def test_a_study_goes_on_where_it_was_and_refuses_another_in_its_folder(kvlab, tmp_path):
    command = ("memory_waste", "--num_requests=20", f"--out={tmp_path}/run")
    assert kvlab(*command).status == 0
    before = (tmp_path / "run" / "results.jsonl").read_text()
    assert kvlab(*command).status == 0
    assert (tmp_path / "run" / "results.jsonl").read_text() == before
    other = kvlab(*command, "--seed=1")
    assert other.status == 1
    assert "holds another experiment" in other.error


def test_concurrency_has_a_row_for_each_rate_and_compares_with_the_paper(kvlab, tmp_path):
    shown = kvlab(
        *("concurrency", "--workload=sharegpt-like", "--rate=2,inf", "--num_requests=200"),
        *("--allocator=oracle,paged", f"--out={tmp_path}/run"),
    )
    assert shown.status == 0, shown.err
    rows = read_rows(tmp_path / "run")
    asked = [(row["config"]["allocator"], row["config"]["rate"]) for row in rows]
    assert asked == [("oracle", 2.0), ("oracle", None), ("paged", 2.0), ("paged", None)]
    assert "30.42" in shown.out
    assert "all waiting" in shown.out
    assert "published x2.2" in shown.out
    page(tmp_path / "run")


def test_page_size_runs_each_size(kvlab, tmp_path):
    shown = kvlab(
        *("page_size", "--page_size=4,16,256", "--workload=uniform", "--rate=5"),
        *("--num_requests=20", f"--out={tmp_path}/run"),
    )
    assert shown.status == 0, shown.err
    sizes = [row["config"]["page_size"] for row in read_rows(tmp_path / "run")]
    assert sizes == [4, 16, 256]
    page(tmp_path / "run")


def test_sharing_really_decodes_and_saves_what_the_prompt_takes(kvlab, tmp_path):
    shown = kvlab(
        *("sharing", "--model=random:tiny-gqa", "--num_prompts=2", "--count=2"),
        *("--max_length=64", f"--out={tmp_path}/run"),
    )
    assert shown.status == 0, shown.err
    saved = {row["config"]["method"]: row["metrics"] for row in read_rows(tmp_path / "run")}
    assert 0 <= saved["parallel"]["saved"] < 0.5
    assert 0 < saved["beam"]["saved"] <= 0.5
    assert "37.6" in shown.out
    page(tmp_path / "run")


def test_serve_trace_answers_all_as_if_alone_and_leaves_nothing(kvlab, tmp_path):
    trace = azure(tmp_path / "a.csv", [(s, 40 + 31 * s % 90, 5 + s) for s in range(12)])
    shown = kvlab(
        *("serve_trace", "--model=random:tiny-gqa", "--num_requests=12", "--length_scale=1"),
        *(f"--workload=azure:{trace}", "--rate_scale=40", "--kv_mib=1", "--max_length=160"),
        *("--check=12", f"--out={tmp_path}/run"),
    )
    assert shown.status == 0, shown.err
    rows = read_rows(tmp_path / "run")
    totals = {r["config"]["placement"]: r["metrics"] for r in rows if "request" not in r["config"]}
    assert list(totals) == ["contiguous", "paged"]
    for metrics in totals.values():
        assert metrics["requests_ended"] == metrics["answers_equal"] == 12
        assert metrics["tokens_left"] == 0
        assert metrics["kv_bytes_allocated"] <= 2**20
        assert metrics["ttft_p50_s"] <= metrics["ttft_p99_s"]
    assert totals["paged"]["pages_left"] == 0
    answers = {}
    for row in rows:
        if "request" in row["config"]:
            tokens = [token for _, token in row["series"]["answer"]]
            assert answers.setdefault(row["config"]["request"], tokens) == tokens
            assert len(tokens) == 5 + row["config"]["request"] == row["metrics"]["output_tokens"]
    assert "12 of 12 answers are those of the request served alone" in shown.out
    page(tmp_path / "run")


def test_requests_that_can_never_be_served_are_rows_with_their_reason(kvlab, tmp_path):
    trace = azure(tmp_path / "a.csv", [(0, 10, 5), (1, 100, 20), (2, 12, 5)])
    shown = kvlab(
        *("serve_trace", "--model=random:tiny-gqa", "--placement=paged", "--length_scale=1"),
        *(f"--workload=azure:{trace}", "--rate_scale=100", "--kv_mib=0.05", "--max_length=160"),
        f"--out={tmp_path}/run",
    )
    rows = read_rows(tmp_path / "run")
    failed = [row for row in rows if row["status"] == "failed"]
    assert [row["config"]["request"] for row in failed] == [1]
    assert "refused: it may need 8 pages and the pool has" in failed[0]["error"]
    (total,) = [row["metrics"] for row in rows if "request" not in row["config"]]
    assert (total["requests_ended"], total["requests_refused"]) == (2, 1)
    assert shown.status == 1


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_a_run_that_is_stopped_keeps_what_has_ended_and_goes_on(how, tmp_path):
    command = [sys.executable, "-c", HEARING, *TINY, "--rate=1.5"]
    command += ["--placement=paged", f"--out={tmp_path}/run"]
    results = tmp_path / "run" / "results.jsonl"
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        deadline = time.monotonic() + 600
        while not results.exists() or results.read_bytes().count(b"\n") < 3:
            assert running.poll() is None, running.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for _ in range(20):  # an interrupt may meet code that cannot raise it, as for a user
            os.kill(running.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(timeout=1)
                break
        _, error = running.communicate(timeout=600)
    assert running.returncode != 0
    if how == signal.SIGINT:
        assert b"interrupted" in error
        assert b"Traceback" not in error
    kept = [json.loads(line) for line in results.read_bytes().splitlines() if line.endswith(b"}")]
    assert len(kept) >= 3
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    rows = read_rows(tmp_path / "run")
    done = [row["config"]["request"] for row in rows if "request" in row["config"]]
    assert sorted(done) == list(range(len(done)))
    assert rows[: len(kept)] == kept
    (total,) = [row["metrics"] for row in rows if "request" not in row["config"]]
    assert total["requests_of_earlier_run"] == len(kept)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("memory_waste", "--allocator=slab"), "legal values: paged, max, pow2, oracle"),
        (("memory_waste", "--workload=sharegpt-lik", "--out=run"), "sharegpt-like"),
        (("concurrency", "--rate=0"), "requests a second are wanted"),
        (("concurrency", "--workload=uniform"), "--rate is missing"),
        (("page_size", "--page_size=0"), "a whole number, 1 or more"),
        (("serve_trace", "--length_scale=-1"), "a number above 0 is wanted"),
        (("serve_trace", *TINY, "--max_length=2", "--out=run"), "no request of sharegpt-like fits"),
        (("serve_trace", *TINY, "--attention=mqa"), "leave --attention out"),
        (("memory_waste", "--headroom_tokens=99999"), "headroom_tokens=99999 given, and the pool"),
        (("memory_waste", f"--headroom_tokens={10**30}"), "headroom_tokens=1000000000000000000000"),
        (("memory_waste", "--page_size=16,99999"), "page_size=99999 given, and the pool holds"),
        (
            ("memory_waste", "--allocator=max", "--page_size=8"),
            "--page_size is given, but no",
        ),
        (("concurrency", "--allocator=max", "--headroom_tokens=8"), "it needs --allocator=paged"),
        (("memory_waste", "--num_requests=99999999999"), "a whole number, 1,000,000 or less"),
        (("memory_waste", "--kv_slots=99999999999"), "a whole number, 10,000,000 or less"),
        (("memory_waste", "--max_length=99999999999"), "a whole number, 10,000,000 or less"),
        (("memory_waste", "--call_overhead_ms=1e300"), "milliseconds are wanted, from 0 to 1,000,"),
        (("concurrency", "--rate=1e-300"), "requests a second are wanted, from 0.001 to"),
        (("sharing", "--workload=uniform:5-9,5-9"), "write uniform[:LOW-HIGH/LOW-HIGH]"),
        (("sharing", "--method=greedy"), "legal values: parallel, beam"),
    ],
)
def test_bad_input_is_one_line_that_says_what_is_wanted(
    arguments, told, kvlab, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shown = kvlab(*arguments)
    assert shown.status != 0
    assert told in shown.error
    assert not list(tmp_path.iterdir())


def test_a_malformed_trace_names_its_line_and_can_be_read_without_it(kvlab, tmp_path):
    trace = azure(tmp_path / "a.csv", [(0, 30, 5), (1, 40, 6), (2, 50, 7)])
    lines = trace.read_text().splitlines()
    lines[2] = "2023-11-16 18:15:01.0000000,forty,6"
    trace.write_text("\n".join(lines))
    command = ("concurrency", f"--workload=azure:{trace}", "--rate=inf", "--allocator=paged")
    shown = kvlab(*command, f"--out={tmp_path}/bad")
    assert shown.status == 1
    assert "line 3" in shown.err
    good = kvlab(*command, "--skip_bad_rows", f"--out={tmp_path}/good")
    assert good.status == 0, good.err
    (row,) = read_rows(tmp_path / "good")
    assert (row["metrics"]["requests"], row["metrics"]["skipped_rows"]) == (2, 1)


def test_drawn_mixes_with_their_numbers_and_paths_with_commas(kvlab, tmp_path):
    trace = azure(tmp_path / "a,b.csv", [(0, 30, 5), (1, 40, 6)])
    words = ["uniform:5-9/5-9", "lognormal:20/30/0.5", f"azure:{trace}"]
    shown = kvlab(
        *("memory_waste", f"--workload={','.join(words)}", "--allocator=paged", "--page_size=4"),
        *("--num_requests=2", f"--out={tmp_path}/waste"),
    )
    assert shown.status == 0, shown.err
    rows = read_rows(tmp_path / "waste")
    assert [row["config"]["workload"] for row in rows] == words
    lengths = [row["metrics"]["prompt_tokens_mean"] for row in rows]
    assert 5 <= lengths[0] <= 9
    assert lengths[2] == 35


def test_two_traces_of_one_file_name_are_both_shown_though_nobody_waits(kvlab, tmp_path):
    for place, tokens in (("x", 30), ("y", 50)):
        (tmp_path / place).mkdir()
        azure(tmp_path / place / "w.csv", [(second, tokens, 5) for second in range(4)])
    words = ",".join(f"azure:{tmp_path}/{place}/w.csv" for place in "xy")
    command = ("memory_waste", f"--workload={words}", "--allocator=max,oracle")
    shown = kvlab(*command, f"--out={tmp_path}/run")
    assert shown.status == 0, shown.err
    tables = shown.out.partition("Findings")[0]
    assert tables.count("azure:x/w.csv") == tables.count("azure:y/w.csv") == 1
    assert tables.count("oracle") == tables.count("max") == 2
    assert shown.out.count("no request ever waited") == 2


def test_a_study_leaves_out_what_no_pool_of_its_holds_and_says_so(kvlab, tmp_path):
    trace = azure(tmp_path / "a.csv", [(0, 30, 5), (1, 400, 5), (2, 20, 5), (3, 900, 9)])
    shown = kvlab(
        *("memory_waste", f"--workload=azure:{trace}", "--allocator=oracle,paged"),
        *("--kv_slots=64", "--max_length=800", f"--out={tmp_path}/run"),
    )
    assert shown.status == 0, shown.err
    for row in read_rows(tmp_path / "run"):
        counts = ("requests", "requests_ended", "requests_refused", "requests_too_long")
        assert [row["metrics"][name] for name in counts] == [2, 2, 1, 1]
        assert row["metrics"]["prompt_tokens_mean"] == 25
    assert "with paged-16 1 of 3 requests had no room even alone" in shown.out
    assert "give more --kv_slots" in shown.out
    assert "1 request longer than max_length=800" in shown.out


def test_a_pool_that_holds_no_request_is_an_error_that_names_its_flag(kvlab, tmp_path):
    command = ("memory_waste", "--num_requests=3", "--workload=uniform", "--allocator=oracle,max")
    shown = kvlab(*command, "--kv_slots=3", f"--out={tmp_path}/run")
    assert shown.status == 1
    for row in read_rows(tmp_path / "run"):
        assert "none of 3 requests has room even alone: kv_slots=3" in row["error"]
        assert "give more --kv_slots" in row["error"]


def test_more_requests_than_a_trace_holds_are_an_error(kvlab, tmp_path):
    trace = azure(tmp_path / "a.csv", [(0, 30, 5), (1, 400, 5), (2, 20, 5)])
    shown = kvlab(
        *("concurrency", f"--workload=azure:{trace}", "--rate=1", "--num_requests=3"),
        *("--max_length=100", f"--out={tmp_path}/run"),
    )
    assert shown.status == 1
    assert "holds 2 requests, and 3 from number 0 on were asked for" in shown.error
    assert "1 too long were left out" in shown.error
    assert not (tmp_path / "run").exists()


SERVE = ("serve_trace", "--model=random:tiny-gqa", "--placement=paged", "--length_scale=1")
SERVE += ("--rate_scale=100", "--max_length=64", "--kv_mib=1", "--num_requests=2")


@pytest.mark.parametrize(
    "command",
    [
        ("memory_waste", "--allocator=max"),
        SERVE,
        ("sharing", "--model=random:tiny-gqa", "--method=parallel", "--count=2", "--num_prompts=2"),
    ],
    ids=lambda command: command[0],
)
def test_a_trace_that_changes_between_run_and_resume_is_noticed(command, kvlab, tmp_path):
    trace = azure(tmp_path / "a.csv", [(0, 30, 5), (1, 40, 6)])
    run = (*command, f"--workload=azure:{trace}", f"--out={tmp_path}/run")
    assert kvlab(*run).status == 0
    before = (tmp_path / "run" / "results.jsonl").read_text()
    azure(trace, [(0, 30, 5), (1, 41, 6)])
    shown = kvlab(*run)
    assert shown.status == 1
    assert "holds another experiment (trace_sha256 is" in shown.error
    assert (tmp_path / "run" / "results.jsonl").read_text() == before


def test_a_report_of_runs_of_two_commands_is_refused(kvlab, tmp_path):
    for command in ("memory_waste", "page_size"):
        run = (command, "--num_requests=5", "--workload=uniform", f"--out={tmp_path}/{command}")
        more = ("--rate=9", "--page_size=16") if command == "page_size" else ("--allocator=max",)
        assert kvlab(*run, *more).status == 0
        assert read_manifest(tmp_path / command)["command"] == command
    both = kvlab("report", f"{tmp_path}/memory_waste", f"{tmp_path}/page_size")
    assert both.status == 1
    assert "runs of different commands (memory_waste, page_size)" in both.error
    assert np.all([kvlab("report", f"{tmp_path}/{name}").status == 0 for name in ("page_size",)])
