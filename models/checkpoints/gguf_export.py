"""GGUF files written: `load_gguf` and llama.cpp read what is written here."""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import jax
import numpy as np
from flax import traverse_util

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.expressible import refuse_lost, with_scale_offset
from kvlab.models.checkpoints.gguf_config import read_config
from kvlab.models.checkpoints.gguf_export_config import config_to_gguf, gguf_config, rope_divisors
from kvlab.models.checkpoints.gguf_file import open_gguf
from kvlab.models.checkpoints.gguf_tensors import ROPE_DIVISORS, place_of
from kvlab.models.checkpoints.gguf_types import TYPES
from kvlab.models.checkpoints.tree import flat_shapes, nest
from kvlab.models.checkpoints.writing import written_whole
from kvlab.models.config import DecoderConfig

_ALWAYS_WIDE = "position_embd.weight"  # which llama.cpp adds to rows of float32
_NAMES = {
    str: gguf.GGUFValueType.STRING,
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
}


def save_gguf(
    path: str | os.PathLike[str],
    config: DecoderConfig,
    params: dict,
    *,
    dtype: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a GGUF file; matrices in `dtype`, vectors (norms, biases) in float32.

    Args:
      path: the file.
      config: the decoder.
      params: its parameters, in the tree of `kvlab.models.decoder`.
      dtype: float32, bfloat16 or float16; None is the config's `param_dtype`.
      metadata: further keys, such as those of the tokenizer: numbers, bools, strings, lists.
      overwrite: whether a model that is there may be replaced.

    Raises:
      CheckpointError: what the format cannot say, parameters that are not the config's, a path
        that is taken or cannot be written.
    """
    flat: Any = traverse_util.flatten_dict(params, sep="/")
    nest(flat, config)
    config, flat = with_scale_offset(gguf_config(config), flat, 0.0)
    kind, file_type = TYPES[dtype or config.param_dtype]
    keys = {
        "general.name": pathlib.Path(path).stem,
        "general.file_type": int(file_type),
        **{f"{config.family}.{key}": value for key, value in config_to_gguf(config).items()},
        **(metadata or {}),
    }
    tensors = list(_tensors(config, flat))
    nbytes = sum(_nbytes(values, _stored(name, values, kind)) for name, values in tensors)
    with written_whole(path, nbytes, overwrite) as target:
        writer = gguf.GGUFWriter(target, config.family)
        try:
            for key, value in keys.items():
                _add(writer, key, value)
            for name, values in tensors:
                stored = _stored(name, values, kind)
                size = _nbytes(values, stored)
                writer.add_tensor_info(name, values.shape, values.dtype, size, raw_dtype=stored)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            assert writer.fout is not None
            (file,) = writer.fout
            for name, values in tensors:
                coded = gguf.quantize(np.ascontiguousarray(values), _stored(name, values, kind))
                writer.write_padding(file, file.tell())
                file.write(coded.data)  # the package's own way loses the reason of a failure
            writer.write_padding(file, file.tell())
        finally:
            writer.close()
        refuse_lost(config, _read_back(target, config), "GGUF")


def _read_back(path: pathlib.Path, config: DecoderConfig) -> DecoderConfig:
    try:
        return read_config(open_gguf(path), config.param_dtype)
    except CheckpointError as error:
        reason = str(error).replace(str(path), "it")
        raise CheckpointError(f"GGUF cannot hold this {config.family}: {reason}") from error


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        kind = gguf.GGUFValueType.INT32 if isinstance(value[0], int) else _NAMES[type(value[0])]
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, kind)
    else:
        writer.add_key_value(key, value, _NAMES[type(value)])


def _tensors(
    config: DecoderConfig, flat: Mapping[str, jax.Array]
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a file by name, float32; most are views."""
    fused = config.family == "gpt2"
    places = {name: place_of(name, config, fused) for name in flat_shapes(config)}
    groups: dict[str, list[str]] = {}
    for name in sorted(places, key=lambda name: places[name].rows or (0, 0)):
        groups.setdefault(places[name].tensor, []).append(name)
    for tensor, names in sorted(groups.items()):
        parts = [places[name].values(np.asarray(flat[name], np.float32)) for name in names]
        yield tensor, parts[0] if len(parts) == 1 else np.concatenate(parts)
    divisors = rope_divisors(config.rope, config.head_dim)
    if divisors is not None:
        yield ROPE_DIVISORS, divisors


def _nbytes(values: np.ndarray, stored: gguf.GGMLQuantizationType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[stored]
    return values.size // block * size


def _stored(
    name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType
) -> gguf.GGMLQuantizationType:
    """How a tensor is stored, where matrices are stored as `kind`."""
    wide = values.ndim == 1 or name == _ALWAYS_WIDE
    return gguf.GGMLQuantizationType.F32 if wide else kind
