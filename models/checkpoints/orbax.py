"""kvlab's own checkpoints: a folder with the config as JSON and the parameters in Orbax form.

kvlab.json       the config
files.json       size in bytes and CRC-32 of every other file: a copy cut short or damaged shows
params/          the parameters, in the tree of `kvlab.models.decoder`
training/        in a checkpoint of training, what it needs beside the parameters to go on
tokenizer.gguf   the metadata of the GGUF file that the tokenizer is from, or
tokenizer.bytes  an empty file: the tokenizer is bytes, or
...              the tokenizer's files of a Hugging Face folder, or none
"""

import contextlib
import json
import logging
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.gguf_file import copy_metadata
from kvlab.models.checkpoints.tree import flat_shapes, nest
from kvlab.models.checkpoints.writing import written_whole
from kvlab.models.config import DecoderConfig
from kvlab.models.config_json import config_from_json, config_to_json

CONFIG_FILE = "kvlab.json"
GGUF_TOKENIZER = "tokenizer.gguf"
BYTE_TOKENIZER = "tokenizer.bytes"
TokenizerFiles: TypeAlias = Sequence[str | os.PathLike[str]] | Literal["bytes"]
"""The files that `tokenizer_files` lists, or "bytes"."""

_FILES = "files.json"
_PARAMS = "params"
_TRAINING = "training"
_PIECE_BYTES = 2**24
_SPARE_BYTES = 2**20  # for what describes the arrays, and the tokenizer
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "encoder.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.bpe",
    "vocab.json",
)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a kvlab checkpoint rather than, say, a Hugging Face folder."""
    return (pathlib.Path(path) / CONFIG_FILE).is_file()


def tokenizer_files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Lists the files of a model, in any form that kvlab loads, that make up its tokenizer.

    Args:
      path: a Hugging Face folder, a kvlab checkpoint or a GGUF file.
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
        return [path]
    names = (*_TOKENIZER_FILES, GGUF_TOKENIZER, BYTE_TOKENIZER)
    return [path / name for name in names if (path / name).is_file()]


def save_checkpoint(
    path: str | os.PathLike[str],
    config: DecoderConfig,
    params: dict,
    tokenizer: TokenizerFiles = (),
    training: Mapping[str, jax.Array] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint; the folder appears under its name when it is complete.

    Whatever fails, a full disk too, leaves nothing of it and everything else as it was.

    Args:
      path: the folder.
      config: the decoder.
      params: its parameters, in `config.param_dtype`.
      tokenizer: the files that `tokenizer_files` lists, of which a GGUF file is kept without its
        tensors; or "bytes".
      training: arrays by name that training needs to go on; None where it has ended.
      overwrite: whether a model that is there may be replaced.

    Raises:
      CheckpointError: the path is taken or cannot be written, or the parameters are not the
        config's.
    """
    flat: Any = traverse_util.flatten_dict(params, sep="/")
    nest(flat, config)
    # Refused before Orbax writes: where a disk fills up, its threads print pages.
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves([params, training])) + _SPARE_BYTES
    with written_whole(path, nbytes, overwrite) as folder:
        folder.mkdir()
        _save_arrays(path, folder / _PARAMS, params)
        if training is not None:
            _save_arrays(path, folder / _TRAINING, dict(training))
        if tokenizer == "bytes":
            (folder / BYTE_TOKENIZER).touch()
        else:
            _copy_tokenizer(map(pathlib.Path, tokenizer), folder)
        files = json.dumps(_files(folder), indent=2)
        (folder / _FILES).write_text(files + "\n", encoding="utf-8")
        (folder / CONFIG_FILE).write_text(config_to_json(config), encoding="utf-8")


def _save_arrays(path: str | os.PathLike[str], folder: pathlib.Path, arrays: Any) -> None:
    """Writes a part of the checkpoint that will be `path`."""
    try:
        with _told_once(), ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, arrays)
    except OSError:
        raise
    except Exception as error:  # what Orbax raises for a full disk is a class of its own
        raise CheckpointError(f"cannot write {path}: {_reason(error)}") from error


@contextlib.contextmanager
def _told_once() -> Iterator[None]:
    """Keeps Orbax's threads from logging, in pages, what the checkpointer raises anyway."""
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _reason(error: Exception) -> str:
    """Why Orbax failed, in a line: in the system's words where it was the system."""
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return (str(error).splitlines() or [type(error).__name__])[0]


def _copy_tokenizer(sources: Iterable[pathlib.Path], folder: pathlib.Path) -> None:
    for source in sources:
        if source.suffix == ".gguf":
            copy_metadata(source, folder / GGUF_TOKENIZER)
        else:
            shutil.copyfile(source, folder / source.name)


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[DecoderConfig, dict]:
    """Reads a checkpoint.

    Args:
      path: the folder.

    Returns:
      The config, and parameters in the tree of `kvlab.models.decoder`.

    Raises:
      CheckpointError: no checkpoint there, a part of it missing or damaged, or parameters that are
        not the config's.
    """
    path = pathlib.Path(path).absolute()
    if not is_checkpoint(path):
        raise CheckpointError(f"{path} is no kvlab checkpoint: it holds no {CONFIG_FILE}")
    try:
        config = config_from_json((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path / CONFIG_FILE}: {error}") from error
    _check_complete(path)
    folder = path / _PARAMS
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored = checkpointer.metadata(folder).item_metadata.tree
            wanted = flat_shapes(config)
            flat: Any = traverse_util.flatten_dict(stored, sep="/")
            _check_stored(path, flat, wanted)
            params = checkpointer.restore(folder, traverse_util.unflatten_dict(wanted, sep="/"))
    except CheckpointError:
        raise
    except Exception as error:  # what Orbax raises for damaged values is a bare Exception
        raise CheckpointError(f"{folder} is damaged: {_reason(error)}") from error
    return config, params


def load_training(
    path: str | os.PathLike[str], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads what a checkpoint of training holds beside the parameters.

    Args:
      path: the folder, whose files `load_checkpoint` has checked.
      wanted: shape and dtype of every array, by name.

    Raises:
      CheckpointError: there is nothing of training, it is damaged, or other arrays are there.
    """
    folder = pathlib.Path(path).absolute() / _TRAINING
    if not folder.is_dir():
        raise CheckpointError(f"{path} holds parameters alone; training cannot go on from there")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored: Any = checkpointer.metadata(folder).item_metadata.tree
            _check_stored(folder, stored, wanted)
            arrays: dict[str, jax.Array] = checkpointer.restore(folder, dict(wanted))
    except CheckpointError:
        raise
    except Exception as error:  # as in `load_checkpoint`
        raise CheckpointError(f"{folder} is damaged: {_reason(error)}") from error
    return arrays


def _files(folder: pathlib.Path) -> dict[str, list[int]]:
    """Size in bytes and CRC-32 of every file of a folder, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _size_and_sum(path) for path in files}


def _size_and_sum(path: pathlib.Path) -> list[int]:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return [path.stat().st_size, checksum]


def _check_complete(folder: pathlib.Path) -> None:
    """Checks files before Orbax reads: it meets a short one with pages of tracebacks."""
    try:
        wanted = json.loads((folder / _FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not complete: {_FILES} is not readable") from error
    came = _files(folder)
    for name, written in wanted.items():
        # Before checksums there was the size alone.
        size, checksum = written if isinstance(written, list) else (written, None)
        if name not in came or came[name][0] != size:
            found = f"{came[name][0]} bytes" if name in came else "nothing"
            raise CheckpointError(
                f"{folder} is not complete: {name} should have {size} bytes and has {found}; "
                "copy it again"
            )
        if checksum not in (None, came[name][1]):
            raise CheckpointError(
                f"{folder} is damaged: {name} is not what was written; copy it again"
            )


def _check_stored(
    path: pathlib.Path,
    stored: Mapping[str, ocp.metadata.ArrayMetadata],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Compares what a checkpoint holds with what its config asks for."""
    for name in {**wanted, **stored}:
        came, want = (
            f"{leaf.dtype}{list(leaf.shape)}" if (leaf := side.get(name)) is not None else "nothing"
            for side in (stored, wanted)
        )
        if came != want:
            raise CheckpointError(
                f"{path} contradicts its config: {name} is {came} and should be {want}"
            )
