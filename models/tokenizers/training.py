"""Training of SentencePiece vocabularies whose tokens give every text back unchanged."""

import io
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import sentencepiece

from kvlab.models.tokenizers.base import SPACE_SYMBOL

_UNKNOWN_MARK = "\u2585"
_ERRORS_ONLY = 2
_MOST_PIECES = 2**31 - 1  # an int32


def train_sentencepiece(
    texts: Iterable[str | pathlib.Path],
    out_prefix: str | os.PathLike[str],
    vocab_size: int,
    model_type: Literal["bpe", "unigram"] = "bpe",
    *,
    byte_fallback: bool = True,
    character_coverage: float = 1.0,
    split_digits: bool = False,
    user_defined: Sequence[str] = (),
) -> pathlib.Path:
    r"""Trains a vocabulary on texts and writes `<out_prefix>.model`.

    Nothing of a text is normalised, no space is added and none removed; with `byte_fallback`
    every text, U+2581 and NUL included, decodes to itself. The same texts and options give
    the same bytes. Sources: BPE, Sennrich et al. 2016 (arXiv:1508.07909, section 3.2); unigram,
    Kudo 2018 (arXiv:1804.10959, section 3.2).

    Args:
      texts: Texts, and paths of UTF-8 text files. A vocabulary piece never crosses a line end.
      out_prefix: Path of the model without its `.model`; its folder is made if need be.
      vocab_size: Number of pieces: 3 special ones, 256 bytes with `byte_fallback`, every
        character that is kept, and what is learned.
      model_type: `bpe` or `unigram`.
      byte_fallback: Spell characters outside the vocabulary in bytes.
      character_coverage: Share of the text's characters that must have a piece of their own.
      split_digits: Keep every digit a piece of its own.
      user_defined: Pieces that are always kept whole.

    Returns:
      The path of the model.

    Raises:
      ValueError: No text; or a vocabulary size that the texts cannot fill or that is too small
        for their characters, with a size that works.
    """
    lines = list(_training_lines(texts))
    if not lines:
        raise ValueError("there is no text to train on: every text given is empty")
    if vocab_size > _MOST_PIECES:
        raise ValueError(f"vocab_size {vocab_size} is more than a model holds, {_MOST_PIECES}")
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=out,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=byte_fallback,
            character_coverage=character_coverage,
            split_digits=split_digits,
            user_defined_symbols=list(user_defined),
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            # Longer sentences would be left out without a word.
            max_sentence_length=max(len(line.encode()) for line in lines),
            # The number of threads changes the order of sums, hence the pieces.
            num_threads=1,
            minloglevel=_ERRORS_ONLY,
        )
    except RuntimeError as error:
        raise ValueError(_explain(str(error), vocab_size)) from error
    path = pathlib.Path(f"{os.fspath(out_prefix)}.model")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out.getvalue())
    return path


def _training_lines(texts: Iterable[str | pathlib.Path]) -> Iterator[str]:
    """Yields lines without the two characters that the trainer keeps for itself.

    It would learn U+2581 as a space, and leave out every line with a U+2585.
    """
    for text in texts:
        content = text.read_text(encoding="utf-8") if isinstance(text, pathlib.Path) else text
        parts = (re.split(f"[{SPACE_SYMBOL}{_UNKNOWN_MARK}]", line) for line in content.split("\n"))
        yield from (part for part in itertools.chain.from_iterable(parts) if part)


def _explain(message: str, vocab_size: int) -> str:
    if largest := re.search(r"value <= (\d+)", message):
        return (
            f"vocab_size {vocab_size} is more than these texts can fill; the largest that works "
            f"is {largest[1]}, or give more text"
        )
    if required := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"vocab_size {vocab_size} is too small for the special pieces, bytes and characters of "
            f"these texts; the smallest that works is {required[1]}"
        )
    return f"SentencePiece could not train {vocab_size} pieces: {message}"
