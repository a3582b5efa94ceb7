"""Byte-level BPE (GPT-2 and its descendants), built from a vocabulary and merge rules.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
Families differ in how text is cut before merging; the cut is named as GGUF files name it
(`tokenizer.ggml.pre`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _llama3(digits: str) -> str:
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = (_llama3(r"\p{N}{1,3}"),)
_QWEN2 = (_llama3(r"\p{N}"),)

PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9]{3}"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""Regular expressions by name; each in turn cuts the pieces that the one before left."""

_SPELLINGS = {"(?i:'s|'t|'re|'ve|'m|'ll|'d)": _CONTRACTION}

WHOLE_PIECES_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})
"""Cuts whose words, where the vocabulary holds them whole, are not built by merging.

They are also the ones whose models begin every text with a begin-of-text token.
"""


def byte_alphabet() -> dict[str, int]:
    """Returns the character that stands for each byte in byte-level vocabularies.

    Printable bytes stand for themselves; the 68 others take the code points from 256 on.

    Returns:
      Byte by character, 256 entries.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def build_byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    pre: str,
    added: Iterable[tokenizers.AddedToken],
) -> tokenizers.Tokenizer:
    """Builds a byte-level BPE tokenizer.

    Args:
      vocab: Id by piece, spelled in the byte alphabet.
      merges: Pairs of pieces, the earliest merge first.
      pre: Name of the cut, a key of `PRE_TOKENIZERS`.
      added: Tokens that text is searched for before it is cut.

    Returns:
      The tokenizer.

    Raises:
      ValueError: An unknown cut; a merge whose pieces the vocabulary lacks.
    """
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    try:
        model = models.BPE(
            vocab=dict(vocab), merges=list(merges), ignore_merges=pre in WHOLE_PIECES_FIRST
        )
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"vocabulary and merges do not fit together: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(tokenizers.Regex(cut), "isolated") for cut in PRE_TOKENIZERS[pre]]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell])
    tokenizer.decoder = decoders.ByteLevel()
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


def name_of_cut(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """Finds the name of the cut that a `tokenizer.json` spells out.

    Args:
      pre_tokenizer: Its `pre_tokenizer`.

    Returns:
      A key of `PRE_TOKENIZERS`.

    Raises:
      ValueError: A cut that has no name there.
    """
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []
    cuts: list[str | None] = []
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
                cuts += [_GPT2] if use_regex else []
            case {"type": "Digits", "individual_digits": True}:
                cuts.append(r"\p{N}")
            case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}:
                for spelled, ours in _SPELLINGS.items():
                    regex = regex.replace(spelled, ours)
                cuts.append(regex)
            case _:
                cuts.append(None)
    for name, known in PRE_TOKENIZERS.items():
        if list(known) == cuts:
            return name
    raise ValueError(f"no name is known for its pre-tokenizer {json.dumps(pre_tokenizer)[:200]}")
