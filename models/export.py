"""The one way to write a model, in any form that `load_model` reads."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from kvlab.models.checkpoints.gguf_export import save_gguf
from kvlab.models.checkpoints.hf_export import save_huggingface
from kvlab.models.checkpoints.orbax import tokenizer_files
from kvlab.models.load import Model, save_model
from kvlab.models.tokenizers import ByteTokenizer, Tokenizer
from kvlab.models.tokenizers.folder_config import read_folder_config
from kvlab.models.tokenizers.gguf_export import tokenizer_to_gguf
from kvlab.models.tokenizers.huggingface import HuggingFaceTokenizer
from kvlab.models.tokenizers.huggingface_export import tokenizer_to_files
from kvlab.models.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

FORMATS = ("kvlab", "huggingface", "gguf")

_SENTENCEPIECE = "tokenizer.model"
_TOKENIZER_CONFIG = "tokenizer_config.json"


def export_model(
    path: str | os.PathLike[str],
    model: Model,
    form: str,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a model with its tokenizer; it is there whole or not at all.

    In float32 the parameters come back in bits. Gemma's norms lie around 1 in a Hugging Face folder
    and around 0 in GGUF, and come back so.

    Args:
      path: the folder, or for `gguf` the file.
      model: the model.
      form: one of `FORMATS`. In `gguf` the tokenizer of bytes has no counterpart: the file is one
        for token ids.
      dtype: of the parameters; None keeps theirs. In `gguf` vectors are always float32.
      overwrite: whether a model that is there may be replaced.

    Raises:
      CheckpointError: what the format cannot say, a path that is taken or cannot be written.
      ValueError: an unknown format, or a tokenizer that the format has no counterpart for.
    """
    match form:
        case "kvlab":
            save_model(path, _cast(model, dtype), overwrite)
        case "huggingface":
            save_huggingface(
                path,
                model.config,
                model.params,
                dtype=dtype,
                tokens=_token_ids(model.tokenizer),
                files=_folder_files(model),
                overwrite=overwrite,
            )
        case "gguf":
            metadata = tokenizer_to_gguf(_mergeable(model), model.config.vocab_size)
            save_gguf(
                path,
                model.config,
                model.params,
                dtype=dtype,
                metadata=metadata,
                overwrite=overwrite,
            )
        case _:
            raise ValueError(f"format {form!r} is not known; legal values: {', '.join(FORMATS)}")


def _cast(model: Model, dtype: str | None) -> Model:
    if dtype is None:
        return model
    config = dataclasses.replace(model.config, param_dtype=dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), model.params)
    return dataclasses.replace(model, config=config, params=params)


def _token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The fields of config.json that name the ids which begin and end a text."""
    if tokenizer is None:  # an absent field would mean ids of the family's own
        return {"bos_token_id": None, "eos_token_id": None}
    ends = list(tokenizer.eos_ids)
    eos = ends[0] if len(ends) == 1 else ends or None
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos}


def _folder_files(model: Model) -> dict[str, bytes]:
    """The tokenizer's files: those of the model where it has a whole set, else written anew."""
    if model.tokenizer is None:
        return {}
    sources = [] if model.path is None else tokenizer_files(model.path)
    if _TOKENIZER_CONFIG in (source.name for source in sources):
        return {source.name: source.read_bytes() for source in sources}
    return tokenizer_to_files(model.tokenizer, model.config.max_length)


def _mergeable(model: Model) -> Tokenizer | None:
    """The tokenizer in the kind that GGUF has; a `tokenizer.json` may have its model beside it."""
    tokenizer = model.tokenizer
    if isinstance(tokenizer, ByteTokenizer):
        return None
    folder = model.path or pathlib.Path()
    own = folder / _SENTENCEPIECE
    spelled = isinstance(tokenizer, HuggingFaceTokenizer) and not tokenizer.is_byte_level
    if tokenizer is None or model.path is None or not spelled or not own.is_file():
        return tokenizer
    added = read_folder_config(folder).added
    whole = SentencePieceTokenizer(
        own.read_bytes(), tokenizer.name, tokenizer.special_tokens, added
    )
    if whole.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"{own} has {whole.vocab_size} pieces and tokenizer.json {tokenizer.vocab_size}: "
            "which of them is meant cannot be told"
        )
    return whole
