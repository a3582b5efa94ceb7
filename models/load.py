"""The one way to get a model, whatever form it lies in."""

import dataclasses
import hashlib
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.gguf import load_gguf
from kvlab.models.checkpoints.huggingface import load_huggingface
from kvlab.models.checkpoints.orbax import (
    BYTE_TOKENIZER,
    GGUF_TOKENIZER,
    TokenizerFiles,
    is_checkpoint,
    load_checkpoint,
    save_checkpoint,
    tokenizer_files,
)
from kvlab.models.config import DecoderConfig
from kvlab.models.named import model_names, named_path
from kvlab.models.presets import preset
from kvlab.models.random_params import random_params
from kvlab.models.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

_RANDOM = "random:"
_RANDOM_SEED = 0
_DEFAULT_PARAM_DTYPE = "float32"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model ready to run.

    Attributes:
      name: as it was asked for.
      config: the decoder.
      params: its parameters, for `Decoder(config).apply({"params": params}, ...)`.
      tokenizer: its tokenizer; None where the model came without one, and token ids are the input.
      path: where it was loaded from; None for random weights.
    """

    name: str
    config: DecoderConfig
    params: dict
    tokenizer: Tokenizer | None
    path: pathlib.Path | None


def load_model(name: str, param_dtype: str | None = None, dtype: str | None = None) -> Model:
    """Loads a model.

    Args:
      name: of a fetched model or of one that comes with kvlab (`kvlab.models.named`), a Hugging
        Face folder, a `.gguf` file, a kvlab checkpoint, or `random:<preset>` (weights drawn with
        seed 0, byte tokenizer).
      param_dtype: dtype of the parameters; None is float32, or what a kvlab checkpoint has.
      dtype: dtype of the computation; None is the config's (float32 unless a kvlab checkpoint says
        otherwise).

    Raises:
      CheckpointError: nothing there, or not a model that kvlab reads.
      FetchError: a name that can be fetched and has not been.
      ValueError: an unknown preset or dtype, or a tokenizer that cannot be read.
    """
    if name.startswith(_RANDOM):
        config = preset(name.removeprefix(_RANDOM))
        config = _with_dtypes(config, param_dtype, dtype)
        params = random_params(config, _RANDOM_SEED)
        return Model(name, config, params, ByteTokenizer(config.vocab_size), None)
    path = named_path(name) or pathlib.Path(name)
    if path.is_dir() and is_checkpoint(path):
        stored, params = load_checkpoint(path)
        config = _with_dtypes(stored, param_dtype, dtype)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(config.param_dtype)), params)
        return Model(name, config, params, _checkpoint_tokenizer(path, config), path)
    if path.is_dir():
        config, params = load_huggingface(path, param_dtype or _DEFAULT_PARAM_DTYPE)
    elif path.is_file() and path.suffix == ".gguf":
        config, params = load_gguf(path, param_dtype or _DEFAULT_PARAM_DTYPE)
    else:
        raise CheckpointError(_not_a_model(name, path))
    return Model(name, _with_dtypes(config, None, dtype), params, load_tokenizer(path), path)


def save_model(path: str | os.PathLike[str], model: Model, overwrite: bool = False) -> None:
    """Writes a model as a kvlab checkpoint, with its tokenizer; see `save_checkpoint`."""
    save_checkpoint(path, model.config, model.params, tokenizer_of(model), overwrite=overwrite)


def params_sha256(params: dict) -> str:
    """What tells these parameters from others: a hash of their names and bytes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def tokenizer_of(model: Model) -> TokenizerFiles:
    """What `save_checkpoint` wants of a model's tokenizer."""
    if isinstance(model.tokenizer, ByteTokenizer):
        return "bytes"
    return [] if model.path is None else tokenizer_files(model.path)


def _with_dtypes(
    config: DecoderConfig, param_dtype: str | None, dtype: str | None
) -> DecoderConfig:
    return dataclasses.replace(
        config,
        param_dtype=param_dtype or config.param_dtype,
        dtype=dtype or config.dtype,
    )


def _checkpoint_tokenizer(path: pathlib.Path, config: DecoderConfig) -> Tokenizer | None:
    if (path / BYTE_TOKENIZER).exists():
        return ByteTokenizer(config.vocab_size)
    gguf = path / GGUF_TOKENIZER
    return load_tokenizer(gguf if gguf.exists() else path)


def _not_a_model(name: str, path: pathlib.Path) -> str:
    found = "is a file that is no .gguf" if path.exists() else "does not exist"
    return (
        f"model {name!r} {found}; give a name ({model_names()}), a Hugging Face folder, a .gguf "
        "file, a kvlab checkpoint or random:<preset> (random:tiny-gqa)"
    )
