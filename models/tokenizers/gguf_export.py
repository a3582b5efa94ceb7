"""The keys of a GGUF file that hold a tokenizer; `gguf_tokenizer` and llama.cpp read them.

Source: ggml's docs/gguf.md; of what llama.cpp makes of them, its `src/llama-vocab.cpp`.
"""

from collections.abc import Sequence
from typing import Any

from kvlab.models.tokenizers.base import Tokenizer
from kvlab.models.tokenizers.byte_level import name_of_cut
from kvlab.models.tokenizers.huggingface import HuggingFaceTokenizer
from kvlab.models.tokenizers.huggingface_export import check_plain_bpe
from kvlab.models.tokenizers.sentencepiece_proto import PieceType
from kvlab.models.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_PADDING_SCORE = -1000.0
_Piece = tuple[str, float, PieceType]


def tokenizer_to_gguf(tokenizer: Tokenizer | None, vocab_size: int) -> dict[str, Any]:
    """Writes a tokenizer as metadata of a GGUF file.

    NFC, which Qwen's `tokenizer.json` does before it encodes, is left out, as in every GGUF file.

    Args:
      tokenizer: The tokenizer; None gives a file for token ids alone.
      vocab_size: V of the model; ids without a piece get one that no text holds.

    Returns:
      Values by key.

    Raises:
      ValueError: More pieces than V, or a tokenizer that llama.cpp does not have.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} pieces, the model {vocab_size}"
        )
    match tokenizer:
        case HuggingFaceTokenizer(is_byte_level=True):
            keys, pieces = _byte_level(tokenizer)
        case SentencePieceTokenizer():
            keys, pieces = _sentencepiece(tokenizer)
        case _:
            raise ValueError(
                f"the tokenizer {tokenizer.name} has no counterpart in GGUF: byte-level BPE and "
                "the BPE of a SentencePiece model (tokenizer.model) have"
            )
    for token_id in range(len(pieces), vocab_size):
        pieces.append((f"[PAD{token_id}]", _PADDING_SCORE, PieceType.UNUSED))
    keys |= {
        "tokens": [piece for piece, _, _ in pieces],
        "token_type": [int(kind) for _, _, kind in pieces],
        "add_bos_token": tokenizer.adds_bos,
        **dict(zip(_ENDS, tokenizer.eos_ids, strict=False)),
    }
    if tokenizer.bos_id is not None:
        keys["bos_token_id"] = tokenizer.bos_id
    if "scores" in keys:
        keys["scores"] = [score for _, score, _ in pieces]
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if tokenizer.chat_template is not None:
        named["tokenizer.chat_template"] = tokenizer.chat_template
    return named


def _byte_level(tokenizer: HuggingFaceTokenizer) -> tuple[dict[str, Any], list[_Piece]]:
    spec = tokenizer.to_json()
    normalizer = spec["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
        raise ValueError(
            f"the tokenizer {tokenizer.name} normalises text ({normalizer['type']}), which GGUF "
            "cannot say"
        )
    merges = [_one_merge(merge) for merge in spec["model"]["merges"]]
    if not merges:
        raise ValueError(f"the tokenizer {tokenizer.name} has no merges, which GGUF needs")
    special = {token["id"]: token["special"] for token in spec["added_tokens"]}
    pieces = [
        (tokenizer.id_to_piece(token_id), 0.0, _kind(special.get(token_id)))
        for token_id in range(tokenizer.vocab_size)
    ]
    keys = {"model": "gpt2", "pre": name_of_cut(spec["pre_tokenizer"]), "merges": merges}
    return keys, pieces


def _one_merge(merge: str | Sequence[str]) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def _kind(special: bool | None) -> PieceType:
    """The kind of a piece that was added as special, added otherwise, or not added."""
    if special is None:
        return PieceType.NORMAL
    return PieceType.CONTROL if special else PieceType.USER_DEFINED


def _sentencepiece(tokenizer: SentencePieceTokenizer) -> tuple[dict[str, Any], list[_Piece]]:
    check_plain_bpe(tokenizer)
    pieces = tokenizer.pieces()
    keys = {
        "model": "llama",
        "pre": "default",
        "scores": [],
        "add_space_prefix": tokenizer.settings.add_dummy_prefix,
    }
    unknown = [i for i, (_, _, kind) in enumerate(pieces) if kind == PieceType.UNKNOWN]
    if unknown:
        keys["unknown_token_id"] = unknown[0]
    return keys, pieces
