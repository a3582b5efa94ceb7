"""GGUF checkpoints: llama (Mistral too), qwen2, qwen3, gemma2 and gpt2, of any quantisation.

The `gguf` package dequantises; `kvlab.models.checkpoints.gguf_file` reads the file around it.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.gguf_config import read_config
from kvlab.models.checkpoints.gguf_file import GgufFile, open_gguf
from kvlab.models.checkpoints.gguf_tensors import FUSED, ROPE_DIVISORS, Place, place_of
from kvlab.models.checkpoints.tree import flat_shapes, named
from kvlab.models.config import DecoderConfig

_READ_BY_CONFIG = frozenset({ROPE_DIVISORS})


def load_gguf(
    path: str | os.PathLike[str], param_dtype: str = "float32"
) -> tuple[DecoderConfig, dict]:
    """Reads a model out of a GGUF file.

    Args:
      path: the file.
      param_dtype: dtype of the parameters; values are dequantised in float32 and rounded once.

    Returns:
      The config, and parameters in the tree of `kvlab.models.decoder`.

    Raises:
      CheckpointError: not GGUF, truncated, an unknown architecture, a key or a quantisation that
        is not supported, a tensor that is missing, unknown or of another shape than the metadata
        says.
    """
    file = open_gguf(path)
    config = read_config(file, param_dtype)
    shapes = flat_shapes(config)
    fused = f"blk.0.{FUSED}.weight" in file.tensors
    places = {name: place_of(name, config, fused) for name in shapes}
    _check_tensors(file, places, shapes)
    flat = {name: jnp.asarray(_read(file, place, config)) for name, place in places.items()}
    return config, traverse_util.unflatten_dict(flat, sep="/")


def _check_tensors(
    file: GgufFile, places: dict[str, Place], shapes: dict[str, jax.ShapeDtypeStruct]
) -> None:
    """Compares the file's list of tensors with what the config asks for."""
    used = {place.tensor for place in places.values()}
    if missing := sorted(used - set(file.tensors)):
        raise CheckpointError(f"{file.path} lacks the tensors {named(missing)}")
    if extra := sorted(set(file.tensors) - used - _READ_BY_CONFIG):
        raise CheckpointError(
            f"{file.path} has tensors that no {file.metadata['general.architecture']} decoder "
            f"uses: {named(extra)}"
        )
    wanted: dict[str, tuple[int, ...]] = {}
    for name, place in places.items():
        shape = shapes[name].shape[::-1] if place.turned else shapes[name].shape
        rows = wanted.get(place.tensor, (0,))[0]
        wanted[place.tensor] = (rows + shape[0], *shape[1:])
    for tensor, shape in wanted.items():
        if file.tensors[tensor].shape != shape:
            raise CheckpointError(
                f"{file.path}: tensor {tensor} has shape {file.tensors[tensor].shape}; the "
                f"metadata asks for {shape}"
            )


def _read(file: GgufFile, place: Place, config: DecoderConfig) -> np.ndarray:
    """Reads one parameter; projections are [out, in] in the file and [in, out] here."""
    values = place.parameter(file.dequantized(place.tensor))
    return np.ascontiguousarray(values, dtype=jnp.dtype(config.param_dtype))
