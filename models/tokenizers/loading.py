"""Finds and loads the tokenizer of a path, whatever kind it is."""

import os
import pathlib

import tokenizers
from tokenizers import normalizers

from kvlab.models.tokenizers.base import SpecialTokens, Tokenizer, end_ids
from kvlab.models.tokenizers.byte_level import build_byte_level
from kvlab.models.tokenizers.folder_config import (
    FolderConfig,
    read_folder_config,
    read_json_object,
)
from kvlab.models.tokenizers.gguf_tokenizer import tokenizer_from_gguf
from kvlab.models.tokenizers.huggingface import HuggingFaceTokenizer, load_tokenizer_json
from kvlab.models.tokenizers.sentencepiece_tokenizer import (
    AddedToken,
    SentencePieceTokenizer,
)

GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
"""Pairs of vocabulary and merges, as OpenAI and as transformers name them."""

_PRE_BY_CLASS = {
    None: "gpt-2",
    "GPT2Tokenizer": "gpt-2",
    "GPT2TokenizerFast": "gpt-2",
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
}
_END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """Loads the tokenizer of a model.

    In a folder `tokenizer.json` comes first, then `tokenizer.model`, then GPT-2 files
    (`encoder.json` with `vocab.bpe`, `vocab.json` with `merges.txt`), and the folder's JSON files
    say what its special tokens are (see `folder_config`). A single file stands for itself: `.gguf`,
    a `tokenizer.json`, one of the GPT-2 files (its fellow must lie beside it), or else a
    SentencePiece model.

    Args:
      path: A folder or a file.

    Returns:
      The tokenizer; None for a folder or a GGUF file that holds none, whose model can still be
      given token ids.

    Raises:
      FileNotFoundError: There is nothing at the path.
      ValueError: The tokenizer cannot be read or needs something that is not supported.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return _from_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"no tokenizer at {path}: there is no such file or folder")
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(path)
    for pair in GPT2_FILES:
        if path.name in pair:
            return _from_gpt2_files(path.parent, pair, path.parent.name, None)
    if path.suffix == ".json":
        return HuggingFaceTokenizer(load_tokenizer_json(path), path.stem)
    return SentencePieceTokenizer(path.read_bytes(), path.name)


def _from_folder(folder: pathlib.Path) -> Tokenizer | None:
    name = folder.resolve().name
    config = read_folder_config(folder)
    tokenizer: Tokenizer
    if (folder / "tokenizer.json").exists():
        tokenizer = HuggingFaceTokenizer(load_tokenizer_json(folder / "tokenizer.json"), name)
    elif (folder / "tokenizer.model").exists():
        model = (folder / "tokenizer.model").read_bytes()
        tokenizer = SentencePieceTokenizer(model, name, added=config.added)
    else:
        pairs = [p for p in GPT2_FILES if all((folder / file).exists() for file in p)]
        if not pairs:
            return None
        tokenizer = _from_gpt2_files(folder, pairs[0], name, config)
    special = config.special_tokens(tokenizer.piece_to_id, tokenizer.special_tokens)
    return tokenizer.with_special_tokens(special)


def _from_gpt2_files(
    folder: pathlib.Path, pair: tuple[str, str], name: str, config: FolderConfig | None
) -> Tokenizer:
    vocab_path, merges_path = (folder / file for file in pair)
    for path in (vocab_path, merges_path):
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: {pair[0]} and {pair[1]} belong together")
    class_name = config.tokenizer_class if config else None
    if class_name not in _PRE_BY_CLASS:
        raise ValueError(
            f"{folder} has GPT-2 files for the class {class_name}; supported: "
            f"{', '.join(str(c) for c in _PRE_BY_CLASS if c)}, or a tokenizer.json"
        )
    if config and config.add_prefix_space:
        raise ValueError(f"{folder}: add_prefix_space is not supported with GPT-2 files")
    vocab = read_json_object(vocab_path)
    added = dict(config.added) if config else {}
    if _END_OF_TEXT in vocab:
        added.setdefault(vocab[_END_OF_TEXT], AddedToken(_END_OF_TEXT, special=True))
    tokenizer = build_byte_level(
        vocab,
        _read_merges(merges_path),
        _PRE_BY_CLASS[class_name],
        [
            tokenizers.AddedToken(token.piece, special=token.special, normalized=False)
            for _, token in sorted(added.items())
        ],
    )
    for token_id, token in added.items():
        if tokenizer.token_to_id(token.piece) != token_id:
            raise ValueError(
                f"{folder} adds {token.piece!r} as {token_id}, but the next free id is "
                f"{tokenizer.token_to_id(token.piece)}; a tokenizer.json can say so"
            )
    if _PRE_BY_CLASS[class_name] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    end = vocab.get(_END_OF_TEXT)
    special = SpecialTokens(bos_id=end, eos_ids=end_ids(tokenizer.token_to_id, [end]))
    return HuggingFaceTokenizer(tokenizer, name, special)


def _read_merges(path: pathlib.Path) -> list[tuple[str, str]]:
    """Reads "left right" lines; the first line may name a version."""
    merges = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        if not line.strip() or (number == 0 and line.startswith("#version")):
            continue
        left, space, right = line.partition(" ")
        if not space:
            raise ValueError(f"{path} line {number + 1} is not a merge: {line!r}")
        merges.append((left, right))
    return merges
