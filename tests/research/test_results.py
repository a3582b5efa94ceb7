"""Rows survive kills, full disks and second processes; a bad folder is a one-line error.

Over 400 lines, because each fault of a run folder is a test of its own and all share its fixtures.
"""

import errno
import json
import logging
import math
import os
import resource
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.research import environment, results, rows
from kvlab.research.comparison import compare_rows, is_timing
from kvlab.research.results import RunFolder, RunFolderError, read_manifest, read_rows

CONFIG = {"model": "tiny", "batch_sizes": (1, 7)}
STARTED = "2026-01-02T03:04:05+00:00"


def point(batch_size, **metrics):
    return results.make_row(
        "sweep",
        {"model": "tiny", "batch_size": batch_size},
        3,
        metrics=metrics,
        started=STARTED,
        wall_s=1.5,
    )


def failure(batch_size, error="ValueError: no"):
    return results.make_row(
        "sweep",
        {"model": "tiny", "batch_size": batch_size},
        3,
        started=STARTED,
        wall_s=0.5,
        error=error,
    )


def opened(path, **changes):
    settings = {"command": "sweep", "config": CONFIG, "seeds": [3], "argv": ["--model=tiny"]}
    return RunFolder.open(path, **{**settings, **changes})


class TestConfigHash:
    def test_ignores_key_order_and_kind_of_sequence(self):
        assert results.config_hash({"a": (1, 2), "b": 3}) == results.config_hash(
            {"b": 3, "a": [1, 2]}
        )

    def test_tells_values_apart(self):
        hashes = {results.config_hash({"a": a}) for a in (1, 2, "1", None, [1], {"b": 1}, True)}
        assert len(hashes) == 7

    def test_is_pinned(self):
        # Rows on disk are found by it: a change would orphan every run folder.
        assert results.config_hash({"batch_size": 8, "attention": "gqa"}) == "ae69f9495318"

    @pytest.mark.parametrize("value", [math.nan, math.inf, object(), np.float32(1)])
    def test_refuses_what_json_cannot_hold(self, value):
        with pytest.raises(ValueError, match="cannot be written as JSON"):
            results.config_hash({"a": value})


class TestMakeRow:
    def test_has_the_fields_of_the_design(self):
        row = point(1, tpot_s=0.25)
        assert set(row) == {
            *("experiment", "config", "config_hash", "seed", "status", "metrics"),
            *("repeats", "environment", "started", "wall_s"),
        }
        assert row["status"] == "ok"
        assert failure(1)["error"] == "ValueError: no"
        assert failure(1)["status"] == "failed"

    def test_samples_become_their_median(self):
        row = results.make_row(
            "e", {}, 0, repeats={"tpot_s": [0.3, 0.1, 0.2]}, started=STARTED, wall_s=1
        )
        assert row["metrics"] == {"tpot_s": 0.2}
        assert row["repeats"] == {"tpot_s": [0.3, 0.1, 0.2]}

    def test_value_that_contradicts_its_samples_is_an_error(self):
        with pytest.raises(ValueError, match=r"median of its samples is 0\.2"):
            results.make_row(
                "e",
                {},
                0,
                metrics={"tpot_s": 0.5},
                repeats={"tpot_s": [0.3, 0.1, 0.2]},
                started=STARTED,
                wall_s=1,
            )

    def test_numpy_and_jax_scalars_become_numbers(self):
        row = point(1, a=np.int64(3), b=jnp.float32(0.5), c=np.float32(0.25))
        assert row["metrics"] == {"a": 3, "b": 0.5, "c": 0.25}
        assert type(row["metrics"]["a"]) is int
        json.dumps(row)

    @pytest.mark.parametrize("value", [None, "fast", np.zeros(2)])
    def test_refuses_what_is_no_number(self, value):
        with pytest.raises(ValueError, match=r"metric perplexity is .*not a number"):
            point(1, perplexity=value)

    def test_what_is_not_finite_is_absent_and_named(self):
        row = results.make_row(
            "e",
            {},
            0,
            metrics={"perplexity": math.nan, "kl_vs_oracle": -math.inf, "kv_waste": 0.0},
            repeats={"tpot_s": [0.1, math.inf, 0.2]},
            started=STARTED,
            wall_s=1,
        )
        assert row["metrics"] == {"kv_waste": 0.0}
        assert row["repeats"] == {}
        assert row["non_finite"] == {"perplexity": "nan", "kl_vs_oracle": "-inf", "tpot_s": "nan"}
        json.dumps(row, allow_nan=False)


class TestSummarise:
    def test_gives_median_and_spread(self):
        assert results.summarise([5.0, 1.0, 2.0, 4.0]) == {
            "median": 3.0,
            "min": 1.0,
            "max": 5.0,
            "count": 4,
        }

    @pytest.mark.parametrize("samples", [[], [1.0, math.nan]])
    def test_refuses_nothing_and_nan(self, samples):
        with pytest.raises(ValueError, match="at least one sample"):
            results.summarise(samples)


class TestRunFolder:
    def test_manifest_says_what_was_asked_and_on_what(self, tmp_path):
        with opened(tmp_path / "a" / "run", points=2, title="T", question="Q?") as folder:
            folder.describe(["A note.", "İkinci not."])
        manifest = read_manifest(tmp_path / "a" / "run")
        assert manifest["command"] == "sweep"
        assert manifest["argv"] == ["--model=tiny"]
        assert manifest["config"] == {"model": "tiny", "batch_sizes": [1, 7]}
        assert manifest["config_hash"] == results.config_hash(CONFIG)
        assert manifest["seeds"] == [3]
        assert manifest["notes"] == ["A note.", "İkinci not."]
        assert manifest["points"] == 2
        assert manifest["git_revision"] == environment.git_revision()
        assert set(manifest["versions"]) == {"python", *environment.PACKAGES}
        assert manifest["device"]["device_kind"] == "cpu"
        assert manifest["resumed"] == []

    def test_resumed_run_knows_its_finished_points(self, tmp_path):
        with opened(tmp_path) as folder:
            folder.append(point(1, tpot_s=0.25))
            folder.append(failure(7))
        with opened(tmp_path) as folder:
            row = folder.finished({"model": "tiny", "batch_size": 1}, 3)
            assert row is not None
            assert row["metrics"] == {"tpot_s": 0.25}
            assert folder.finished({"model": "tiny", "batch_size": 1}, 5) is None
            assert folder.finished({"model": "tiny", "batch_size": 7}, 3) is None
            folder.append(point(7, tpot_s=0.5))
            assert folder.finished({"model": "tiny", "batch_size": 7}, 3) is not None
        assert [row["status"] for row in read_rows(tmp_path)] == ["ok", "ok"]
        assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3
        assert len(read_manifest(tmp_path)["resumed"]) == 1

    def test_a_row_is_on_disk_as_soon_as_it_is_appended(self, tmp_path):
        with opened(tmp_path) as folder:
            folder.append(point(1))
            assert [row["config"]["batch_size"] for row in read_rows(tmp_path)] == [1]

    @pytest.mark.parametrize("cut", [1, 20, 200])
    def test_half_written_last_line_is_mended(self, tmp_path, caplog, cut):
        with opened(tmp_path) as folder:
            folder.append(point(1))
            folder.append(point(7))
        file = tmp_path / "results.jsonl"
        whole = file.read_bytes()
        first = whole.index(b"\n") + 1
        file.write_bytes(whole[: first + cut])
        assert len(read_rows(tmp_path)) == 1
        assert file.stat().st_size == first + cut  # reading alone changes nothing
        with caplog.at_level(logging.WARNING), opened(tmp_path) as folder:
            assert [row["config"]["batch_size"] for row in folder.rows] == [1]
            assert f"dropped a half-written last line ({cut} bytes)" in caplog.text
            assert file.read_bytes() == whole[:first]
            folder.append(point(7))
        assert [row["config"]["batch_size"] for row in read_rows(tmp_path)] == [1, 7]

    def test_last_row_that_only_lacks_its_line_end_is_kept(self, tmp_path):
        with opened(tmp_path) as folder:
            folder.append(point(1))
        file = tmp_path / "results.jsonl"
        file.write_bytes(file.read_bytes().rstrip())
        with opened(tmp_path) as folder:
            folder.append(point(7))
        assert len(read_rows(tmp_path)) == 2

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"experiment": "sw', "line 2 is corrupt"),
            (b'{"experiment": "\xff"}', "line 2 is corrupt"),
            (b"[1, 2]", "line 2 is not a results row: it lacks config, config_hash"),
            (b'{"config": {}}', "line 2 is not a results row: it lacks config_hash"),
        ],
    )
    def test_corrupt_line_in_the_middle_is_named(self, tmp_path, line, message):
        with opened(tmp_path) as folder:
            folder.append(point(1))
        file = tmp_path / "results.jsonl"
        good = file.read_bytes()
        file.write_bytes(good + line + b"\n" + good)
        with pytest.raises(RunFolderError, match=message):
            opened(tmp_path)
        with pytest.raises(RunFolderError, match=message):
            read_rows(tmp_path)
        assert file.read_bytes() == good + line + b"\n" + good

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"config": {**CONFIG, "model": "other"}}, "model is tiny there and other here"),
            ({"config": {"model": "tiny"}}, r"batch_sizes is \[1, 7\] there and absent here"),
            ({"seeds": [3, 5]}, r"seeds is \[3\] there and \[3, 5\] here"),
            ({"command": "verify"}, "command is sweep there and verify here"),
        ],
    )
    def test_another_experiment_is_refused(self, tmp_path, changes, message):
        opened(tmp_path).close()
        with pytest.raises(RunFolderError, match=message) as caught:
            opened(tmp_path, **changes)
        assert "\n" not in str(caught.value)
        assert "name another folder" in str(caught.value)
        opened(tmp_path).close()  # the refusal let go of the lock

    def test_second_process_is_told_who_holds_the_folder(self, tmp_path):
        script = (
            "import sys; from kvlab.research.results import RunFolder\n"
            "folder = RunFolder.open(sys.argv[1], command='sweep', config={})\n"
            "print('held', flush=True); sys.stdin.readline()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(RunFolderError, match=f"is held by process {other.pid} on "):
                RunFolder.open(tmp_path, command="sweep", config={})
            other.kill()
        # A killed process holds nothing.
        RunFolder.open(tmp_path, command="sweep", config={}).close()

    def test_file_in_place_of_the_folder(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(RunFolderError, match="is a file, and a run needs a folder"):
            opened(tmp_path / "file")
        with pytest.raises(RunFolderError, match=r"cannot write the run folder .*Not a directory"):
            opened(tmp_path / "file" / "run")

    def test_unwritable_folder(self, tmp_path, monkeypatch):
        def refuse(*_, **__):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(results.pathlib.Path, "mkdir", refuse)
        with pytest.raises(
            RunFolderError, match=r"cannot write the run folder .*Permission denied"
        ):
            opened(tmp_path / "run")

    def test_rows_without_a_manifest_are_not_taken_over(self, tmp_path):
        (tmp_path / "results.jsonl").write_text("")
        with pytest.raises(RunFolderError, match=r"holds results.jsonl but no manifest.json"):
            opened(tmp_path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "is corrupt"), ("[]", "is not a manifest"), ("{}", "needs argv")],
    )
    def test_corrupt_manifest(self, tmp_path, text, message):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(RunFolderError, match=message):
            opened(tmp_path)

    def test_full_disk_keeps_the_rows_before(self, tmp_path):
        # A file-size limit makes the kernel cut a write short and then refuse it, as a full disk.
        with opened(tmp_path) as folder:
            folder.append(point(1))
            file = tmp_path / "results.jsonl"
            before = file.read_bytes()
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
            try:
                with pytest.raises(
                    RunFolderError, match=r"the rows before it \(1\) are kept"
                ) as caught:
                    folder.append(point(7))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert "\n" not in str(caught.value)
            assert file.read_bytes() == before
            assert folder.finished({"model": "tiny", "batch_size": 7}, 3) is None
            folder.append(point(7))
        assert len(read_rows(tmp_path)) == 2

    def test_no_space_is_named(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with opened(tmp_path) as folder:
            monkeypatch.setattr(results.os, "fsync", full)
            with pytest.raises(RunFolderError, match="No space left on device"):
                folder.append(point(1))
            with pytest.raises(RunFolderError, match=r"manifest.json: No space left on device"):
                folder.describe(["x"])
        assert read_rows(tmp_path) == []
        assert read_manifest(tmp_path)["notes"] == []
        assert not list(tmp_path.glob("*.partial"))

    @pytest.mark.parametrize("read", [read_rows, read_manifest])
    def test_reading_what_is_no_run_folder(self, tmp_path, read):
        with pytest.raises(RunFolderError, match=r"is not a run folder: it has no manifest.json"):
            read(tmp_path / "absent")


class TestCompareRows:
    def test_reproduced_run_differs_nowhere_and_times_are_ratios(self):
        old = [point(1, tpot_s=0.2, kv_bytes_per_token=4608, perplexity_en=17.5)]
        new = [point(1, tpot_s=0.3, kv_bytes_per_token=4608, perplexity_en=17.5 * (1 + 1e-9))]
        (compared,) = compare_rows(old, new)
        assert not compared.differs
        assert compared.describe() == ""
        assert compared.timing_ratios == {"tpot_s": pytest.approx(1.5)}

    def test_differences_are_named_with_both_values(self):
        old = [point(1, kv_bytes_allocated=10**12, perplexity=17.5, kl_vs_oracle=0.25)]
        new = [point(1, kv_bytes_allocated=10**12 + 1, perplexity=17.6)]
        (compared,) = compare_rows(old, new)
        assert compared.differences == {
            "kv_bytes_allocated": (10**12, 10**12 + 1),
            "perplexity": (17.5, 17.6),
            "kl_vs_oracle": (0.25, None),
        }
        assert "perplexity was 17.5, is 17.6" in compared.describe()
        assert "kl_vs_oracle was 0.25, is not measured" in compared.describe()

    def test_tolerance_is_the_callers(self):
        (compared,) = compare_rows([point(1, perplexity=17.5)], [point(1, perplexity=17.6)], 0.01)
        assert not compared.differs

    def test_absent_and_failed_points(self):
        old = [point(1), point(7), failure(11), failure(13)]
        new = [point(1), failure(7, "OOM"), failure(11, "another text"), point(17)]
        problems = {it.config["batch_size"]: it.problem for it in compare_rows(old, new)}
        assert problems == {
            1: "",
            7: "failed in the new run only: OOM",
            11: "",
            13: "only the old run has this point",
            17: "only the new run has this point",
        }

    @pytest.mark.parametrize(
        ("metric", "timing"),
        [
            *[(name, True) for name in ("tpot_s", "decode_tokens_per_s", "compile_s", "mfu")],
            *[(name, False) for name in ("compile_count", "kv_waste", "perplexity_tr")],
        ],
    )
    def test_timings_are_told_from_the_rest(self, metric, timing):
        assert is_timing(metric) is timing


class TestEnvironment:
    def test_says_where_a_row_was_measured(self):
        here = environment.environment()
        assert here["device_kind"] == "cpu"
        assert here["cores"] >= 1
        assert here["cpu"]
        assert here["jax"].count(".") >= 2
        json.dumps(here)

    def test_revision_of_a_checkout_and_of_none(self, tmp_path):
        revision = environment.git_revision.__wrapped__
        tracked = tmp_path / "tracked.py"
        tracked.write_text("x = 1\n")
        assert revision(tracked) is None
        git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@example.org"]
        subprocess.run([*git, "init", "-q"], check=True)
        assert revision(tracked) is None  # inside a checkout, but not of it
        subprocess.run([*git, "add", "tracked.py"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
        clean = revision(tracked)
        assert len(clean) == 40
        tracked.write_text("x = 2\n")
        assert revision(tracked) == f"{clean}-dirty"

    def test_no_git_and_no_package_never_fail(self, monkeypatch):
        def absent(*_, **__):
            raise FileNotFoundError("git")

        monkeypatch.setattr(environment.subprocess, "run", absent)
        assert environment.git_revision.__wrapped__() is None
        assert environment._version("no-such-package") == "not installed"


def test_newest_row_of_a_point_counts():
    old, new, other = point(1, a=1), point(1, a=2), point(7, a=3)
    assert [row["metrics"]["a"] for row in rows.newest_rows([old, other, new])] == [2, 3]
