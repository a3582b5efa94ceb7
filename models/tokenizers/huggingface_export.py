"""The files of a Hugging Face folder that hold a tokenizer; `load_tokenizer` reads them too.

`tokenizer.json` says everything, so transformers reads it as it stands (PreTrainedTokenizerFast).
Beside it a SentencePiece vocabulary keeps its `tokenizer.model`.
"""

import json
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from kvlab.models.tokenizers.base import SPACE_SYMBOL, Tokenizer
from kvlab.models.tokenizers.byte_level import build_byte_level, byte_alphabet
from kvlab.models.tokenizers.byte_tokenizer import BOS_ID, EOS_ID, ByteTokenizer
from kvlab.models.tokenizers.huggingface import HuggingFaceTokenizer
from kvlab.models.tokenizers.sentencepiece_proto import PieceType
from kvlab.models.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer


def tokenizer_to_files(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """Writes a tokenizer as the files of a Hugging Face folder.

    Ids are those of kvlab's tokenizer, but for U+2581 in a text of a SentencePiece vocabulary,
    which transformers takes for a space.

    Args:
      tokenizer: The tokenizer.
      max_length: Longest text of the model, in tokens.

    Returns:
      Contents by file name.

    Raises:
      ValueError: A SentencePiece model that `tokenizer.json` cannot say (see `check_plain_bpe`).
    """
    spec = _tokenizer_json(tokenizer)
    bos, unknown = tokenizer.bos_id, spec["model"].get("unk_token")
    if tokenizer.adds_bos and bos is not None and _adds_nothing(spec["post_processor"]):
        spec["post_processor"] = _begins_with(tokenizer.id_to_piece(bos), bos)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if bos is None else tokenizer.id_to_piece(bos),
        "eos_token": next(map(tokenizer.id_to_piece, tokenizer.eos_ids), None),
        "add_bos_token": tokenizer.adds_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if unknown is not None:
        config["unk_token"] = unknown
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    files = {"tokenizer.json": _json(spec), "tokenizer_config.json": _json(config)}
    if isinstance(tokenizer, SentencePieceTokenizer):
        files["tokenizer.model"] = tokenizer.model
    return files


def check_plain_bpe(tokenizer: SentencePieceTokenizer) -> None:
    """Checks that a SentencePiece model does no more than merge characters, bytes for the rest.

    Args:
      tokenizer: The tokenizer.

    Raises:
      ValueError: Another kind of model than BPE, one without byte fallback, one that changes text
        before encoding it, or one with pieces of the user's beside spaces, which others read
        otherwise.
    """
    settings = tokenizer.settings
    whole = [piece for piece, _, kind in tokenizer.pieces() if kind == PieceType.USER_DEFINED]
    spaced = any(" " in piece or SPACE_SYMBOL in piece for piece in whole)
    for fault, found in {
        "is no BPE model": not settings.bpe,
        "has no byte fallback": not settings.byte_fallback,
        "normalises text": settings.normalizes,
        "removes spaces": settings.remove_extra_whitespaces,
        "has pieces of the user's with spaces": spaced,
        "puts a space before a text, and has pieces of the user's": settings.add_dummy_prefix
        and bool(whole),
    }.items():
        if found:
            raise ValueError(f"the SentencePiece model of {tokenizer.name} {fault}")


def _tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    match tokenizer:
        case HuggingFaceTokenizer():
            return tokenizer.to_json()
        case SentencePieceTokenizer():
            return json.loads(_merging(tokenizer).to_str())
        case ByteTokenizer():
            vocab = dict(byte_alphabet())
            names = map(tokenizer.id_to_piece, (BOS_ID, EOS_ID))
            special = [tokenizers.AddedToken(name, special=True) for name in names]
            return json.loads(build_byte_level(vocab, [], "gpt-2", special).to_str())
    raise ValueError(f"the tokenizer {tokenizer.name} has no counterpart in a Hugging Face folder")


def _merging(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """A SentencePiece BPE as a tokenizer of the `tokenizers` library."""
    check_plain_bpe(tokenizer)
    pieces, prefix = tokenizer.pieces(), tokenizer.settings.add_dummy_prefix
    unknown = next((piece for piece, _, kind in pieces if kind == PieceType.UNKNOWN), None)
    built = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: token_id for token_id, (piece, _, _) in enumerate(pieces)},
            merges=_merges(pieces),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", SPACE_SYMBOL)
    built.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_SYMBOL), space]) if prefix else space
    )
    steps = [decoders.Replace(SPACE_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    for piece, _, kind in pieces:
        if kind in (PieceType.CONTROL, PieceType.UNKNOWN):
            built.add_special_tokens([tokenizers.AddedToken(piece, special=True, normalized=False)])
        elif kind == PieceType.USER_DEFINED:
            built.add_tokens([tokenizers.AddedToken(piece, special=False, normalized=False)])
    return built


def _merges(pieces: Sequence[tuple[str, float, PieceType]]) -> list[tuple[str, str]]:
    """Every way to build a piece of two, the piece of the highest score first.

    SentencePiece joins the neighbours whose union scores highest, the leftmost where unions are
    equal (Sennrich et al. 2016, arXiv 1508.07909, section 3.2, learned in the order of scores).
    """
    scores = {piece: score for piece, score, kind in pieces if kind == PieceType.NORMAL}
    ids = {piece: token_id for token_id, (piece, _, _) in enumerate(pieces)}
    pairs = [
        (piece[:at], piece[at:])
        for piece in scores
        for at in range(1, len(piece))
        if piece[:at] in scores and piece[at:] in scores
    ]
    return sorted(
        pairs, key=lambda pair: (-scores["".join(pair)], ids["".join(pair)], ids[pair[0]])
    )


def _adds_nothing(post_processor: dict[str, Any] | None) -> bool:
    return post_processor is None or post_processor["type"] == "ByteLevel"


def _begins_with(piece: str, token_id: int) -> dict[str, Any]:
    """A post-processor that puts a token before a text."""
    template = processors.TemplateProcessing(
        single=f"{piece} $A", pair=f"{piece} $A {piece}:1 $B:1", special_tokens=[(piece, token_id)]
    )
    return json.loads(template.__getstate__())


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
