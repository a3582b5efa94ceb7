"""Hugging Face folders written: config.json, one model.safetensors, and the tokenizer's files."""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

import jax
from flax import traverse_util
from safetensors import SafetensorError
from safetensors.numpy import save_file

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.expressible import with_scale_offset
from kvlab.models.checkpoints.hf_export_config import config_to_huggingface
from kvlab.models.checkpoints.hf_tensors import tensors, with_prefix
from kvlab.models.checkpoints.tree import nest
from kvlab.models.checkpoints.writing import written_whole
from kvlab.models.config import DecoderConfig

_NORM_OFFSETS = {"gemma2": 1.0}  # of RMS norms, by family; 0 elsewhere


def save_huggingface(
    path: str | os.PathLike[str],
    config: DecoderConfig,
    params: dict,
    *,
    dtype: str | None = None,
    tokens: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a folder that transformers loads, and `load_huggingface` too.

    Args:
      path: the folder.
      config: the decoder.
      params: its parameters, in the tree of `kvlab.models.decoder`.
      dtype: of the tensors; None is the config's `param_dtype`.
      tokens: further fields of config.json, such as `eos_token_id`.
      files: the tokenizer's files by name.
      overwrite: whether a model that is there may be replaced.

    Raises:
      CheckpointError: what the format cannot say, parameters that are not the config's, a path
        that is taken or cannot be written.
    """
    flat: Any = traverse_util.flatten_dict(params, sep="/")
    nest(flat, config)
    config, flat = with_scale_offset(config, flat, _NORM_OFFSETS.get(config.family, 0.0))
    config = dataclasses.replace(config, param_dtype=dtype or config.param_dtype)
    mapping = config_to_huggingface(config) | dict(tokens or {})
    stored_dtype = jax.numpy.dtype(config.param_dtype)
    arrays = {
        with_prefix(tensor.name, config): tensor.join(flat, stored_dtype)
        for tensor in tensors(config)
    }
    nbytes = sum(array.nbytes for array in arrays.values())
    with written_whole(path, nbytes, overwrite) as folder:
        folder.mkdir()
        try:
            save_file(arrays, folder / "model.safetensors", {"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(f"cannot write {path}: {error}") from error
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
        text = json.dumps(mapping, indent=2, ensure_ascii=False) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        shutil.copymode(folder / "config.json", folder / "model.safetensors")  # 0600 by the writer
