"""kvlab's own checkpoints: a folder with the config as JSON and the parameters in Orbax form.

kvlab.json       the config
files.json       size of every other file in bytes: a copy that was cut short is noticed
params/          the parameters, in the tree of `kvlab.models.decoder`
tokenizer.gguf   the metadata of the GGUF file that the tokenizer is from, or
tokenizer.bytes  an empty file: the tokenizer is bytes, or
...              the tokenizer's files of a Hugging Face folder, or none
"""

import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.gguf_file import copy_metadata
from kvlab.models.checkpoints.tree import flat_shapes, nest
from kvlab.models.config import DecoderConfig
from kvlab.models.config_json import config_from_json, config_to_json

CONFIG_FILE = "kvlab.json"
GGUF_TOKENIZER = "tokenizer.gguf"
BYTE_TOKENIZER = "tokenizer.bytes"
_FILES = "files.json"
_PARAMS = "params"
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
    tokenizer: Iterable[str | os.PathLike[str]] | Literal["bytes"] = (),
) -> None:
    """Writes a checkpoint; the folder appears under its name when it is complete.

    Args:
      path: a folder that does not exist yet.
      config: the decoder.
      params: its parameters, in `config.param_dtype`.
      tokenizer: the files that `tokenizer_files` lists, of which a GGUF file is kept without its
        tensors; or "bytes".

    Raises:
      CheckpointError: the path exists or cannot be written, or the parameters are not the config's.
    """
    path = pathlib.Path(path).absolute()
    if path.exists():
        raise CheckpointError(f"{path} exists already; give a new name, or remove it first")
    flat: Any = traverse_util.flatten_dict(params, sep="/")
    nest(flat, config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
            folder = pathlib.Path(scratch) / path.name
            folder.mkdir()
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(folder / _PARAMS, params)
            if tokenizer == "bytes":
                (folder / BYTE_TOKENIZER).touch()
            else:
                _copy_tokenizer(map(pathlib.Path, tokenizer), folder)
            sizes = json.dumps(_sizes(folder), indent=2)
            (folder / _FILES).write_text(sizes + "\n", encoding="utf-8")
            (folder / CONFIG_FILE).write_text(config_to_json(config), encoding="utf-8")
            os.rename(folder, path)
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"cannot write {path}: {where}: {error.strerror}") from error


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
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{folder} is damaged: {reason}") from error
    return config, params


def _sizes(folder: pathlib.Path) -> dict[str, int]:
    """Size in bytes of every file of a folder, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _check_complete(folder: pathlib.Path) -> None:
    """Checks sizes before Orbax reads: it meets a short file with pages of tracebacks."""
    try:
        wanted = json.loads((folder / _FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not complete: {_FILES} is not readable") from error
    came = _sizes(folder)
    for name, size in wanted.items():
        if came.get(name) != size:
            found = f"{came[name]} bytes" if name in came else "nothing"
            raise CheckpointError(
                f"{folder} is not complete: {name} should have {size} bytes and has {found}; "
                "copy it again"
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
