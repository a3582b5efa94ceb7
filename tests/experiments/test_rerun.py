"""`kvlab rerun`: the same experiment again, compared with the first."""

import jax
import pytest

SWEEP = [
    *("--model=random:tiny-gqa", "--attention=gqa", "--placement=contiguous", "--storage=int8"),
    *("--batch_sizes=2", "--prompt_tokens=5", "--decode_tokens=2", "--max_length=64", "--chunk=8"),
    *("--quality_tokens=9", "--repeats=1"),
]


@pytest.fixture
def first(kvlab, tmp_path):
    folder = tmp_path / "first"
    assert kvlab("sweep", *SWEEP, f"--out={folder}").status == 0
    jax.clear_caches()  # a rerun is another process, which compiles its programs anew
    return folder


def test_a_rerun_reproduces_all_but_the_times_and_then_says_that_it_is_done(kvlab, first):
    again = kvlab("rerun", str(first))
    assert again.status == 0
    assert f"0 of 1 rows differ from {first}" in again.out
    assert "timings, new over old: compile_s x" in again.out
    assert "finished already" not in again.out
    rows = first.with_name("first-rerun") / "results.jsonl"
    assert len(rows.read_text().splitlines()) == 1
    once_more = kvlab("rerun", str(first))
    assert "first-rerun is finished already, so nothing is measured; --out names" in once_more.out
    assert len(rows.read_text().splitlines()) == 1


def test_a_row_that_differs_is_named_and_the_status_says_so(kvlab, first, tmp_path):
    results = first / "results.jsonl"
    spoilt = results.read_text().replace('"perplexity_en": ', '"perplexity_en": 1')
    folder = tmp_path / "spoilt"
    folder.mkdir()
    (folder / "results.jsonl").write_text(spoilt)
    (folder / "manifest.json").write_text((first / "manifest.json").read_text())
    again = kvlab("rerun", str(folder))
    assert again.status == 1
    assert "gqa contiguous int8 batch 2: perplexity_en" in again.out
    assert f"1 of 1 rows differ from {folder}" in again.out


def test_what_is_no_run_folder_is_one_line(kvlab, tmp_path):
    assert "takes one run folder, 0 given" in kvlab("rerun").error
    assert kvlab("rerun", str(tmp_path / "absent")).status == 1
