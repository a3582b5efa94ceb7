"""`kvlab report`: tables, figures and a page from run folders."""

import pytest

from kvlab.research.results import RESULTS_NAME, RunFolder, make_row, timestamp


@pytest.fixture
def run_folder(tmp_path):
    """A run with one finished point."""

    def write(name: str = "run", decode: float = 100.0):
        settings = {"model": "m", "attention": "gqa", "placement": "contiguous", "batch_size": 1}
        with RunFolder.open(
            tmp_path / name, command="sweep", config={"a": 1}, seeds=(0,), argv=[], points=1
        ) as folder:
            folder.append(
                make_row(
                    "probe",
                    settings,
                    0,
                    metrics={"decode_tokens_per_s": decode, "kv_bytes_per_token": 448.0},
                    repeats={},
                    started=timestamp(),
                    wall_s=1.0,
                )
            )
        return tmp_path / name

    return write


def test_the_page_is_written_and_the_tables_are_printed(kvlab, run_folder):
    folder = run_folder()
    shown = kvlab("report", folder)
    assert (shown.status, shown.err) == (0, "")
    page = folder / "report.html"
    assert shown.out.endswith(f"report: {page}\n")
    assert "contiguous" in shown.out
    assert page.read_text().lower().startswith("<!doctype html>")
    assert list(folder.glob("*.png"))


def test_runs_are_shown_together_where_they_are_wanted(kvlab, run_folder, tmp_path):
    one, other = run_folder("one"), run_folder("other", 50.0)
    out = tmp_path / "both.html"
    shown = kvlab("report", one, other, f"--out={out}")
    assert shown.status == 0, shown.err
    assert f"{one}\n" in shown.out
    assert f"{other}\n" in shown.out
    assert out.exists()
    assert not (one / "report.html").exists()


def test_a_half_written_last_line_is_left_out(kvlab, run_folder):
    folder = run_folder()
    with (folder / RESULTS_NAME).open("ab") as file:
        file.write(b'{"experiment": "pro')
    assert kvlab("report", folder).status == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no run folder given"),
        (["absent"], "absent is not a run folder: it has no manifest.json"),
    ],
)
def test_what_is_no_run_is_one_line(kvlab, arguments, told):
    refused = kvlab("report", *arguments)
    assert refused.status == 1
    assert told in refused.error


def test_a_page_that_cannot_be_written_is_one_line(kvlab, run_folder, tmp_path):
    (tmp_path / "file").touch()
    refused = kvlab("report", run_folder(), f"--out={tmp_path / 'file' / 'page.html'}")
    assert refused.status == 1
    assert "cannot write" in refused.error
