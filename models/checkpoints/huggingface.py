"""Hugging Face folders: config.json and safetensors, in one file or in shards.

Everything is checked against config.json before the first tensor is read; then one tensor at a time
is read and converted, so that the peak is the parameters and one tensor.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.hf_config import config_from_huggingface
from kvlab.models.checkpoints.hf_tensors import Tensor, is_buffer, tensors, without_prefix
from kvlab.models.checkpoints.tree import named, nest
from kvlab.models.config import DecoderConfig

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".safetensors")
_HEAD = "lm_head.weight"
_STORED_DTYPES = ("F32", "BF16", "F16")


def load_huggingface(
    folder: str | pathlib.Path, param_dtype: str = "float32"
) -> tuple[DecoderConfig, dict]:
    """Loads a decoder from a Hugging Face folder.

    Args:
      folder: holds config.json, and model.safetensors or model.safetensors.index.json with the
        shards that it names.
      param_dtype: dtype of the parameters, whatever the files hold.

    Returns:
      The config, and the parameters that `Decoder(config).apply({"params": ...})` takes.

    Raises:
      CheckpointError: a file is absent, damaged or not what it says; config.json asks for what is
        not supported; a tensor is missing, unexpected, or contradicts config.json.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is no Hugging Face model folder")
    mapping = _read_json(config_path)
    try:
        config = config_from_huggingface(mapping)
    except CheckpointError as error:
        raise CheckpointError(f"{config_path}: {error}") from error
    config = dataclasses.replace(config, param_dtype=param_dtype)
    with _open_weights(folder) as weights:
        return config, nest(_read_parameters(weights, config), config)


class _Weights:
    """The tensors of a folder's safetensors files, by name without the model's prefix."""

    def __init__(self, source: pathlib.Path, files: Mapping[pathlib.Path, Any]) -> None:
        self.source = source  # the one file, or the index
        self._files = files
        self._places: dict[str, tuple[pathlib.Path, str]] = {}
        for path, file in files.items():
            for stored_name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                name = without_prefix(stored_name)
                if name in self._places:
                    raise CheckpointError(f"{self.where(name)} is also {path}: {stored_name}")
                self._places[name] = (path, stored_name)

    def names(self) -> list[str]:
        return list(self._places)

    def where(self, name: str) -> str:
        """File and stored name of a tensor, for errors."""
        path, stored_name = self._places[name]
        return f"{path}: tensor {stored_name}"

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """A tensor's shape, and its dtype as safetensors names it, without reading it."""
        path, stored_name = self._places[name]
        header = self._files[path].get_slice(stored_name)
        return tuple(header.get_shape()), header.get_dtype()

    def read(self, name: str) -> np.ndarray:
        """A tensor as it is stored."""
        path, stored_name = self._places[name]
        return self._files[path].get_tensor(stored_name)


@contextlib.contextmanager
def _open_weights(folder: pathlib.Path) -> Iterator[_Weights]:
    """Opens every weight file of a folder, and closes them at the end."""
    single, index = folder / _SINGLE, folder / _INDEX
    with contextlib.ExitStack() as stack:
        if single.exists():
            files = {single: stack.enter_context(_open(single))}
        elif index.exists():
            files = {}
            for path, names in _shards(index).items():
                files[path] = stack.enter_context(_open(path))
                astray = sorted(names ^ set(files[path].keys()))
                if astray:
                    raise CheckpointError(f"{path} and {index} disagree on {named(astray)}")
        else:
            others = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_FORMATS)
            found = f"; {named(others)} is not read: convert it to safetensors" if others else ""
            raise CheckpointError(f"{folder} has no {_SINGLE} and no {_INDEX}{found}")
        yield _Weights(single if single in files else index, files)


def _open(path: pathlib.Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged, perhaps an interrupted download: {error}"
        ) from error


def _shards(index: pathlib.Path) -> dict[pathlib.Path, set[str]]:
    """The shards that an index names, each with the tensors that it must hold."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensors to shards")
    shards: dict[pathlib.Path, set[str]] = {}
    for name, shard in weight_map.items():
        shards.setdefault(index.parent / str(shard), set()).add(name)
    absent = sorted(str(path) for path in shards if not path.is_file())
    if absent:
        raise CheckpointError(f"{index} names shards that are missing: {named(absent)}")
    return shards


def _read_json(path: pathlib.Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not JSON
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def _read_parameters(weights: _Weights, config: DecoderConfig) -> dict[str, jax.Array]:
    """Every parameter by flat name, after a check of all headers against the config."""
    wanted = tensors(config)
    _check_headers(weights, wanted, config)
    flat: dict[str, jax.Array] = {}
    dtype = jax.numpy.dtype(config.param_dtype)
    for tensor in wanted:
        flat |= tensor.split(weights.read(tensor.name), dtype)
    if config.tie_embeddings and _HEAD in weights.names():
        head = weights.read(_HEAD).astype(dtype)
        if not np.array_equal(head, np.asarray(flat["embed/weight"])):
            raise CheckpointError(
                f"{weights.where(_HEAD)} is not the embedding, but config.json ties them "
                "(tie_word_embeddings)"
            )
    return flat


def _check_headers(weights: _Weights, wanted: list[Tensor], config: DecoderConfig) -> None:
    shapes = {tensor.name: tensor.shape for tensor in wanted}
    if config.tie_embeddings and _HEAD in weights.names():
        shapes[_HEAD] = (config.vocab_size, config.embed_dim)
    names = [name for name in weights.names() if not is_buffer(name)]
    missing = [f"{name} {shape}" for name, shape in shapes.items() if name not in names]
    if missing:
        raise CheckpointError(f"{weights.source}: missing tensors: {named(missing)}")
    extra = [name for name in names if name not in shapes]
    if extra:
        raise CheckpointError(
            f"{weights.where(extra[0])} is unexpected: config.json describes a {config.family} "
            f"decoder without it ({len(extra)} such tensors)"
        )
    for name, shape in shapes.items():
        came, dtype = weights.header(name)
        if came != shape:
            raise CheckpointError(
                f"{weights.where(name)} has shape {came}, but config.json wants {shape}"
            )
        if dtype not in _STORED_DTYPES:
            raise CheckpointError(
                f"{weights.where(name)} is {dtype}; supported: {', '.join(_STORED_DTYPES)}"
            )
