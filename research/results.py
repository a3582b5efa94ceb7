"""The run folder: what was asked, and the rows of results, safe against kills and full disks.

A run folder has `manifest.json` (what was asked, and on what), `results.jsonl` (one row per
point, appended and flushed one at a time), `run.lock`, and later figures and `report.html`. A
killed run resumes by opening its folder again: points with an "ok" row are not repeated, failed
ones are retried, and the newest row of a point is the one that counts.
"""

import fcntl
import json
import logging
import os
import pathlib
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kvlab.research.environment import PACKAGES, environment
from kvlab.research.rows import (
    Row,
    RunFolderError,
    config_hash,
    make_row,
    newest_rows,
    parse_rows,
    summarise,
    timestamp,
)

__all__ = [
    "Row",
    "RunFolder",
    "RunFolderError",
    "config_hash",
    "make_row",
    "newest_rows",
    "read_manifest",
    "read_rows",
    "summarise",
    "timestamp",
    "write_atomically",
]

MANIFEST_NAME = "manifest.json"
RESULTS_NAME = "results.jsonl"
LOCK_NAME = "run.lock"

_log = logging.getLogger(__name__)


def read_rows(folder: str | os.PathLike[str]) -> list[Row]:
    """Reads the newest row of every point in a run folder, also while a run is writing to it.

    Args:
        folder: the run folder.

    Returns:
        The rows; none where the run has not finished a point. A half-written last line is left
        out.

    Raises:
        RunFolderError: there is no run folder, or a line before the last is corrupt.
    """
    path = pathlib.Path(folder)
    if not (path / MANIFEST_NAME).is_file() and not (path / RESULTS_NAME).is_file():
        raise RunFolderError(f"{path} is not a run folder: it has no {MANIFEST_NAME}")
    rows, _ = parse_rows(_read(path / RESULTS_NAME), str(path / RESULTS_NAME))
    return newest_rows(rows)


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what a run was asked to do, and on what.

    Args:
        folder: the run folder.

    Returns:
        The manifest: `command, argv, config, config_hash, seeds, points, title, question, notes,
        started, git_revision, versions, device, resumed`.

    Raises:
        RunFolderError: there is no manifest, or it is corrupt.
    """
    path = pathlib.Path(folder) / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunFolderError(
            f"{path.parent} is not a run folder: it has no {MANIFEST_NAME}"
        ) from None
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RunFolderError(
            f"{path} is corrupt ({error}); restore it, or start again in another folder"
        ) from error
    wanted = {"command", "argv", "config", "config_hash", "seeds"}
    if not isinstance(manifest, dict) or not wanted <= manifest.keys():
        raise RunFolderError(f"{path} is not a manifest: it needs {', '.join(sorted(wanted))}")
    return manifest


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes a file whole or not at all.

    Args:
        path: the file; its folder must be there.
        content: the bytes of the file.

    Raises:
        RunFolderError: the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        if partial.is_file():
            partial.unlink()
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error


class RunFolder:
    """An open run folder: one process holds it, appends rows to it and closes it.

    Attributes:
        path: the folder.
        manifest: what `manifest.json` holds.
    """

    def __init__(self, path: pathlib.Path, lock: int, rows: list[Row]) -> None:
        """Use `RunFolder.open`."""
        self.path = path
        self.manifest: dict[str, Any] = {}
        self._lock = lock
        self._rows = rows

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        command: str,
        config: Mapping[str, Any],
        seeds: Sequence[int] = (0,),
        argv: Sequence[str] = (),
        points: int | None = None,
        title: str = "",
        question: str = "",
    ) -> Self:
        """Creates a run folder, or resumes the run that it holds.

        Args:
            path: the folder; it and its parents are made.
            command: the kvlab command, without "kvlab".
            config: the whole experiment (every axis and setting), JSON-ready.
            seeds: seeds of the experiment.
            argv: the arguments after the command, so that the run can be repeated.
            points: how many rows the whole run will have, where that is known.
            title: title of the report.
            question: the question that the experiment asks.

        Returns:
            The folder, locked for this process until `close` or the end of a `with` block.

        Raises:
            RunFolderError: the folder cannot be written, another process holds it, it holds
                another experiment, or a row before the last is corrupt.
        """
        folder = pathlib.Path(path)
        if folder.exists() and not folder.is_dir():
            raise RunFolderError(f"{folder} is a file, and a run needs a folder: name another")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunFolderError(
                f"cannot write the run folder {folder}: {error.strerror}"
            ) from error
        try:
            _take_lock(lock, folder)
            manifest = {
                "command": command,
                "argv": list(argv),
                "config": dict(config),
                "config_hash": config_hash(config),
                "seeds": [int(seed) for seed in seeds],
            }
            described = {"points": points, "title": title, "question": question}
            opened = cls(folder, lock, _mended(folder / RESULTS_NAME))
            opened._start(manifest, described)
        except BaseException:
            os.close(lock)
            raise
        return opened

    def _start(self, manifest: dict[str, Any], described: dict[str, Any]) -> None:
        here = environment()
        machine = {
            "started": timestamp(),
            "git_revision": here.pop("git_revision"),
            "versions": {name: here.pop(name) for name in ("python", *PACKAGES)},
            "device": here,
        }
        if (self.path / MANIFEST_NAME).exists():
            self.manifest = read_manifest(self.path)
            _require_same_experiment(self.path, self.manifest, manifest)
            self.manifest.setdefault("resumed", []).append(machine)
        elif (self.path / RESULTS_NAME).exists():
            raise RunFolderError(
                f"{self.path} holds {RESULTS_NAME} but no {MANIFEST_NAME}, so nothing says which "
                "experiment its rows are of; name another folder"
            )
        else:
            self.manifest = {**manifest, **described, "notes": [], **machine, "resumed": []}
        self._write_manifest()

    @property
    def rows(self) -> list[Row]:
        """The newest row of every point so far, failed ones included."""
        return newest_rows(self._rows)

    def finished(self, config: Mapping[str, Any], seed: int = 0) -> Row | None:
        """Finds the row of a point that needs no repeating.

        Args:
            config: the point's config.
            seed: the point's seed.

        Returns:
            The point's newest row where that is "ok", otherwise None: a failed point is retried.
        """
        wanted = (config_hash(config), seed)
        for row in reversed(self._rows):
            if (row["config_hash"], row["seed"]) == wanted:
                return row if row["status"] == "ok" else None
        return None

    def append(self, row: Row) -> None:
        """Adds one row and makes sure that it is on the disk.

        Args:
            row: the row, from `make_row`.

        Raises:
            RunFolderError: the row cannot be written (a full disk); the rows before it are kept.
        """
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        results = self.path / RESULTS_NAME
        try:
            target = os.open(results, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _write_whole_line(target, line)
            finally:
                os.close(target)
        except OSError as error:
            raise RunFolderError(
                f"cannot write {results}: {error.strerror}; the rows before it "
                f"({len(self._rows)}) are kept: mend that, and run the same command again to go on"
            ) from error
        self._rows.append(row)

    def describe(self, notes: Sequence[str]) -> None:
        """Stores paragraphs that the report shows beside the figures.

        Args:
            notes: paragraphs in plain words; they replace the earlier ones.

        Raises:
            RunFolderError: the manifest cannot be written.
        """
        self.manifest["notes"] = list(notes)
        self._write_manifest()

    def close(self) -> None:
        """Lets other processes have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        """Returns the folder itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the folder."""
        self.close()

    def _write_manifest(self) -> None:
        text = json.dumps(self.manifest, ensure_ascii=False, allow_nan=False, indent=2)
        write_atomically(self.path / MANIFEST_NAME, text.encode() + b"\n")


def _write_whole_line(target: int, line: bytes) -> None:
    before = os.fstat(target).st_size
    try:
        written = 0
        while written < len(line):
            written += os.write(target, line[written:])
        os.fsync(target)
    except OSError:
        os.ftruncate(target, before)
        raise


def _take_lock(lock: int, folder: pathlib.Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 1000).decode(errors="replace").strip() or "another process"
        raise RunFolderError(
            f"{folder} is held by {holder}; wait until that ends, or name another folder"
        ) from None
    except OSError as error:
        raise RunFolderError(f"cannot lock {folder}: {error.strerror}") from error
    try:
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        raise RunFolderError(f"cannot write {folder / LOCK_NAME}: {error.strerror}") from error


def _require_same_experiment(
    folder: pathlib.Path, held: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    names = ("command", "config_hash", "seeds")
    if all(held[name] == wanted[name] for name in names):
        return
    before, after = (
        {"command": it["command"], "seeds": it["seeds"], **it["config"]} for it in (held, wanted)
    )
    # Through JSON, so that a tuple asked for equals the list that was stored.
    after = json.loads(json.dumps(after))
    changed = [
        f"{name} is {before.get(name, 'absent')} there and {after.get(name, 'absent')} here"
        for name in {**before, **after}
        if name not in before or name not in after or before[name] != after[name]
    ]
    raise RunFolderError(
        f"{folder} holds another experiment ({'; '.join(changed)}); name another folder, or give "
        "the same settings to resume that one"
    )


def _mended(results: pathlib.Path) -> list[Row]:
    """Reads the rows, and cuts off a last line that a killed run left half-written."""
    content = _read(results)
    rows, good = parse_rows(content, str(results))
    try:
        if good < len(content):
            os.truncate(results, good)
            _log.warning(
                "%s: dropped a half-written last line (%d bytes) of an interrupted run; the %d "
                "rows before it are kept",
                results,
                len(content) - good,
                len(rows),
            )
        elif content and not content.endswith(b"\n"):
            with results.open("ab") as file:
                file.write(b"\n")
    except OSError as error:
        raise RunFolderError(f"cannot mend {results}: {error.strerror}") from error
    return rows


def _read(results: pathlib.Path) -> bytes:
    try:
        return results.read_bytes() if results.exists() else b""
    except OSError as error:
        raise RunFolderError(f"cannot read {results}: {error.strerror}") from error
