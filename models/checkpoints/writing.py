"""Writing a checkpoint, file or folder, so that it is there whole or not at all."""

import contextlib
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator

from kvlab.models.checkpoints.errors import CheckpointError

_CONFIGS = ("kvlab.json", "config.json")
_MAGIC = b"GGUF"
_REMOVALS, _BETWEEN_REMOVALS_S = 40, 0.05


@contextlib.contextmanager
def written_whole(
    path: str | os.PathLike[str], nbytes: int, overwrite: bool = False
) -> Iterator[pathlib.Path]:
    """Gives a path beside the one wanted; what is written there is renamed at the end.

    An error, a full disk or an interrupt leaves nothing behind, and what was there before as it
    was. A folder that is replaced is moved away just before: for a moment nothing has its name.

    Args:
      path: the file or folder to make; its parents are made if need be.
      nbytes: what the parameters take at most; where that does not fit, nothing is begun.
      overwrite: whether it may replace a model that is there.

    Yields:
      The path to write to, in a folder of its own.

    Raises:
      CheckpointError: see `check_free`; there is no room, or something cannot be written.
    """
    check_free(path, overwrite)
    target = pathlib.Path(path).resolve()  # what a link points to is replaced, the link stays
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_room(path, target.parent, nbytes)
        scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        fresh = scratch / target.name
        try:
            yield fresh
            _exchange(fresh, target, scratch / f"{target.name}.replaced")
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(fresh), str(path))) from error
        finally:
            _remove(scratch)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.filename or path}: {error.strerror or error}"
        ) from error


def _remove(folder: pathlib.Path) -> None:
    """Removes a folder in which threads of a writer that has failed may still be at work.

    What cannot be removed stays: the reason why nothing was written is worth more.
    """
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_BETWEEN_REMOVALS_S)


def check_free(path: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Checks that a path can be given to a new model.

    Args:
      path: the file or folder.
      overwrite: whether a model that is there may go. Anything else that is there never may.

    Raises:
      CheckpointError: something is there.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return
    if not overwrite:
        raise CheckpointError(
            f"{path} exists already; give a new name, or allow it to be replaced (overwrite)"
        )
    if not _is_model(path):
        raise CheckpointError(
            f"{path} holds no model, so it is not overwritten; give a new name, or remove it first"
        )


def _check_room(path: str | os.PathLike[str], folder: pathlib.Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise CheckpointError(
            f"cannot write {path}: {nbytes / 1e6:.1f} MB are needed, and {folder} has "
            f"{free / 1e6:.1f} MB free"
        )


def _is_model(path: pathlib.Path) -> bool:
    """Whether a path is an empty folder, a model's folder or a GGUF file."""
    if path.is_dir():
        return not any(path.iterdir()) or any((path / name).is_file() for name in _CONFIGS)
    with path.open("rb") as file:
        return path.is_file() and file.read(len(_MAGIC)) == _MAGIC


def _exchange(fresh: pathlib.Path, target: pathlib.Path, aside: pathlib.Path) -> None:
    """Renames `fresh` to `target`; one file replaces another in one step, a folder cannot."""
    if target.exists() and (target.is_dir() or fresh.is_dir()):
        os.rename(target, aside)
    try:
        os.replace(fresh, target)
    except OSError:
        if aside.exists():
            os.rename(aside, target)
        raise
