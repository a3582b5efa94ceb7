"""`kvlab sweep`: flags of how quality is scored."""

from kvlab.experiments.sweep import FLAGS
from kvlab.research.results import read_manifest, read_rows

SMALL = [
    *("--model=random:tiny-gqa", "--attention=gqa", "--placement=paged", "--repeats=1"),
    *("--batch_sizes=2", "--prompt_tokens=5", "--decode_tokens=2", "--max_length=256"),
    *("--chunk=16", "--quality_tokens=9"),
]


def test_texts_windows_and_passkeys_are_flags(kvlab, tmp_path):
    text, folder = tmp_path / "mine.txt", tmp_path / "run"
    text.write_text("A text of one's own, long enough for a window of forty-one bytes.")
    flags = ["--retention=window", "--budget=11", "--window_tokens=41", "--forced_tokens=4"]
    flags += [f"--text={text}", "--passkey_tokens=240", f"--out={folder}"]
    outcome = kvlab("sweep", *SMALL, *flags)
    assert outcome.status == 0
    assert "perplexity mine" in outcome.out
    (row,) = read_rows(folder)
    assert row["config"]["quality_texts"].keys() == {"mine"}
    assert {"perplexity_mine", "kl_vs_oracle_p99_mine"} <= row["metrics"].keys()
    assert row["config"]["window_tokens"] == 41
    assert row["config"]["passkey_tokens"] == [240]
    assert row["metrics"]["kl_vs_oracle_mine"] > 1e-5
    assert not any(name.startswith("passkey") for name in row["metrics"])
    manifest = read_manifest(folder)
    assert any("Passkey retrieval at 240 tokens is not reported" in it for it in manifest["notes"])
    (named,) = manifest["config"]["texts"]
    assert named["path"] == str(text)
    assert row["config"]["quality_texts"]["mine"] == named["sha256"]
    page = (folder / "report.html").read_text()
    assert "KL p99" in page


def test_wrong_texts_and_lengths_are_one_line(kvlab, tmp_path):
    absent = kvlab("sweep", *SMALL, f"--text={tmp_path / 'none.txt'}")
    assert absent.status == 2
    assert "none.txt cannot be read" in absent.error
    assert "passkey_tokens=300 does not fit max_length=256" in (
        kvlab("sweep", *SMALL, "--passkey_tokens=300").error
    )
    parser = FLAGS["passkey_tokens"].parser
    assert [parser.parse(written) for written in ("", "512,1024")] == [(), (512, 1024)]
