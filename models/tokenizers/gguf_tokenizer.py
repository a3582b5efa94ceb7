"""The tokenizer that a GGUF file carries in its metadata.

Two kinds, which are those of kvlab's model families: `gpt2` (byte-level BPE) and `llama`
(SentencePiece BPE, rebuilt as a model file). Token ids agree with llama.cpp, whose defaults for
absent keys are followed (llama.cpp, `src/llama-vocab.cpp`), but for a U+2581 in the text of a
`llama` vocabulary: llama.cpp makes a space of it. Keys: ggml's `docs/gguf.md`.
"""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tokenizers

from kvlab.models.checkpoints.gguf_file import open_gguf
from kvlab.models.tokenizers.base import SpecialTokens, Tokenizer, end_ids
from kvlab.models.tokenizers.byte_level import WHOLE_PIECES_FIRST, build_byte_level
from kvlab.models.tokenizers.huggingface import HuggingFaceTokenizer
from kvlab.models.tokenizers.sentencepiece_proto import PieceType, write_bpe_model
from kvlab.models.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

_KINDS = ("gpt2", "llama")
_READ_FROM_TEXT = frozenset(
    int(kind) for kind in (PieceType.CONTROL, PieceType.USER_DEFINED, PieceType.UNKNOWN)
)


def tokenizer_from_gguf(path: str | os.PathLike[str]) -> Tokenizer | None:
    """Takes the tokenizer out of a GGUF file.

    Args:
      path: The file.

    Returns:
      The tokenizer, or None where the file holds no tokens.

    Raises:
      ValueError: Not a GGUF file; a tokenizer model or a pre-tokenizer that is not supported; keys
        that are missing or contradict each other.
    """
    metadata = open_gguf(path).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    return tokenizer_from_metadata(metadata, pathlib.Path(path).stem)


def tokenizer_from_metadata(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """Builds a tokenizer from the metadata of a GGUF file.

    Args:
      metadata: Values by key, as `open_gguf` gives them.
      name: What to call the tokenizer.

    Returns:
      The tokenizer.

    Raises:
      ValueError: As `tokenizer_from_gguf`.
    """
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    fields["chat_template"] = metadata.get("tokenizer.chat_template")
    kind = fields.get("model")
    if kind not in _KINDS:
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} of {name} is not supported; "
            f"supported: {', '.join(_KINDS)}"
        )
    for key in ("scores", "token_type"):
        if key in fields and len(fields[key]) != len(fields["tokens"]):
            raise ValueError(
                f"{name} has {len(fields['tokens'])} tokens but {len(fields[key])} values of "
                f"tokenizer.ggml.{key}"
            )
    return _byte_level(fields, name) if kind == "gpt2" else _sentencepiece(fields, name)


def _byte_level(fields: Mapping[str, Any], name: str) -> Tokenizer:
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(fields["tokens"])]
    kinds = np.asarray(fields.get("token_type", [])).tolist()
    # A merge is "left right", and a piece may itself begin with a space.
    splits = [(merge, merge.find(" ", 1)) for merge in _needed(fields, "merges", name)]
    if bad := [merge for merge, at in splits if at < 0]:
        raise ValueError(f"merge {bad[0]!r} of {name} is not two pieces with a space between")
    merges = [(merge[:at], merge[at + 1 :]) for merge, at in splits]
    pre = fields.get("pre") or "default"
    vocab = {token: i for i, token in enumerate(tokens)}
    added = [
        tokenizers.AddedToken(tokens[i], special=kind != PieceType.USER_DEFINED, normalized=False)
        for i, kind in enumerate(kinds)
        if kind in _READ_FROM_TEXT
    ]
    tokenizer = build_byte_level(vocab, merges, pre, added)
    special = _special_tokens(fields, vocab.get, adds_bos=pre in WHOLE_PIECES_FIRST)
    return HuggingFaceTokenizer(tokenizer, name, special)


def _sentencepiece(fields: Mapping[str, Any], name: str) -> Tokenizer:
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(fields["tokens"])]
    scores = np.asarray(_needed(fields, "scores", name), np.float32).tolist()
    kinds = np.asarray(_needed(fields, "token_type", name)).tolist()
    model = write_bpe_model(
        zip(tokens, scores, kinds, strict=True),
        byte_fallback=int(PieceType.BYTE) in kinds,
        add_dummy_prefix=fields.get("add_space_prefix", True),
        remove_extra_whitespaces=fields.get("remove_extra_whitespaces", False),
        unk_id=fields.get("unknown_token_id", 0),
        bos_id=fields.get("bos_token_id", 1),
        eos_id=fields.get("eos_token_id", 2),
    )
    vocab = {token: i for i, token in enumerate(tokens)}
    defaults = {"bos_token_id": 1, "eos_token_id": 2}
    special = _special_tokens(defaults | dict(fields), vocab.get, adds_bos=True)
    return SentencePieceTokenizer(model, name, special)


def _special_tokens(
    fields: Mapping[str, Any], piece_to_id: Callable[[str], int | None], *, adds_bos: bool
) -> SpecialTokens:
    declared = [fields.get(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    bos = fields.get("bos_token_id")
    return SpecialTokens(
        bos_id=bos,
        eos_ids=end_ids(piece_to_id, declared),
        adds_bos=bos is not None and fields.get("add_bos_token", adds_bos),
        chat_template=fields["chat_template"],
    )


def _needed(fields: Mapping[str, Any], key: str, name: str) -> Any:
    if key not in fields:
        raise ValueError(f"{name} has tokens but no tokenizer.ggml.{key}, which its kind needs")
    return fields[key]
