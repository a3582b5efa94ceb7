"""Texts as rows of packed sequences: read, split, cut into tokens, laid out and shuffled.

Axes: R rows, T tokens that a row predicts (it holds one more), A passes of a step, B rows of a
pass.

A document becomes its tokens and the end-of-text token. One that is longer than a row is cut. Every
piece begins with the begin-of-text token, as a prompt does, so every token of a document is
predicted exactly once.
"""

import dataclasses
import hashlib
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.models.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece
from kvlab.ops.segments import PADDING
from kvlab.research.training import Packed
from kvlab.research.training_config import TrainingError


@dataclasses.dataclass(frozen=True)
class Text:
    """One file.

    Attributes:
      name: of the file, without its folder.
      content: all of it.
    """

    name: str
    content: str

    def to_json(self) -> dict[str, Any]:
        """What tells this text from others: its name, bytes and their SHA-256."""
        raw = self.content.encode()
        digest = hashlib.sha256(raw).hexdigest()
        return {"file": self.name, "bytes": len(raw), "sha256": digest}


def read_texts(paths: Sequence[str]) -> list[Text]:
    """Reads files of text.

    Raises:
      OSError: one cannot be read.
      TrainingError: one is empty or not UTF-8.
    """
    texts = []
    for path in map(pathlib.Path, paths):
        try:
            content = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise TrainingError(
                f"{path} is not UTF-8 text (byte {error.start}); convert it first"
            ) from None
        if not content.strip():
            raise TrainingError(f"{path} is empty; give a file of text to train on")
        texts.append(Text(path.name, content))
    return texts


def split_held_out(content: str, share: float) -> tuple[str, str]:
    """Cuts the end of a text off, at the end of a line where there is one.

    Args:
      content: the text.
      share: of its characters that is held out, above 0 and below 1.

    Returns:
      The part to train on and the part held out.
    """
    place = int(len(content) * (1 - share))
    line_end = content.rfind("\n", 0, place) + 1
    return content[: line_end or place], content[line_end or place :]


def documents(content: str, separator: str | None) -> list[str]:
    """What stands between the separators of a text, or all of it; blank documents are left out."""
    parts = [content] if separator is None else content.split(separator)
    return [part for part in parts if part.strip()]


def pack(texts: Iterable[Sequence[int]], length: int, bos_id: int) -> Packed:
    """Lays texts out in rows, in their order; one that fits into a row is never cut.

    Args:
      texts: token ids of each, without a begin-of-text token.
      length: T.
      bos_id: begins every piece.

    Returns:
      Rows [R, T + 1] int32.
    """
    rows: list[list[list[int]]] = []
    room = 0
    for piece in _pieces(texts, length, bos_id):
        if len(piece) > room:
            rows.append([])
            room = length + 1
        rows[-1].append(piece)
        room -= len(piece)
    tokens = np.zeros((len(rows), length + 1), np.int32)
    segments = np.full_like(tokens, PADDING)
    for row, pieces in enumerate(rows):
        end = 0
        for number, piece in enumerate(pieces, 1):
            begin, end = end, end + len(piece)
            tokens[row, begin:end], segments[row, begin:end] = piece, number
    return Packed(tokens, segments)


def _pieces(texts: Iterable[Sequence[int]], length: int, bos_id: int) -> Iterator[list[int]]:
    for ids in texts:
        for begin in range(0, len(ids), length):
            yield [bos_id, *ids[begin : begin + length]]


@dataclasses.dataclass(frozen=True)
class PackedTexts:
    """What models train on and are judged by.

    Attributes:
      rows: to train on.
      held_out: never trained on.
      tokens: of the documents to train on, their ends included.
      held_out_tokens: of the held-out ones.
      held_out_bytes: of the held-out text.
    """

    rows: Packed
    held_out: Packed
    tokens: int
    held_out_tokens: int
    held_out_bytes: int

    @property
    def filled(self) -> float:
        """Share of the places in rows that hold a token."""
        return float((self.rows.segments != PADDING).mean())


@dataclasses.dataclass(frozen=True)
class TrainingData(PackedTexts):
    """Texts packed by a tokenizer that was trained on them.

    Attributes:
      tokenizer_model: the bytes of the SentencePiece model.
    """

    tokenizer_model: bytes


def prepare(
    texts: Sequence[Text],
    *,
    vocab_size: int,
    length: int,
    held_out: float,
    separator: str | None = None,
) -> TrainingData:
    """Trains a tokenizer on the texts and packs them.

    The end of every text is held out, from the tokenizer too.

    Args:
      texts: what there is.
      vocab_size: pieces of the tokenizer.
      length: T.
      held_out: share of each text that is held out, above 0 and below 1.
      separator: stands between the documents of a text; None: a text is one document.

    Raises:
      ValueError: the texts cannot fill the vocabulary, or it is too small for their characters.
      TrainingError: fewer tokens than one row holds, or nothing held out.
    """
    train, _ = split_texts(texts, held_out)
    if not any(part.strip() for part in train):
        raise TrainingError(
            f"the texts leave nothing to train on where held_out={held_out} of each is held out; "
            "give more text, or a smaller share"
        )
    model, tokenizer = _trained_tokenizer(train, vocab_size)
    packed = pack_texts(texts, tokenizer, length=length, held_out=held_out, separator=separator)
    return TrainingData(**vars(packed), tokenizer_model=model)


def split_texts(texts: Sequence[Text], held_out: float) -> tuple[list[str], list[str]]:
    """Cuts the end of every text off (`split_held_out`).

    Returns:
      The parts to train on, and those held out.

    Raises:
      TrainingError: a share that is not above 0 and below 1.
    """
    if not 0 < held_out < 1:
        raise TrainingError(f"held_out={held_out} given; it must be above 0 and below 1, as 0.1")
    parts = [split_held_out(text.content, held_out) for text in texts]
    return [train for train, _ in parts], [other for _, other in parts]


def pack_texts(
    texts: Sequence[Text],
    tokenizer: Tokenizer,
    *,
    length: int,
    held_out: float,
    separator: str | None = None,
) -> PackedTexts:
    """Packs texts in the tokens of a tokenizer, the end of each held out.

    Args:
      texts: what there is.
      tokenizer: with a token that ends a text, which also begins one where no other does.
      length: T.
      held_out: share of each text that is held out, above 0 and below 1.
      separator: stands between the documents of a text; None: a text is one document.

    Raises:
      TrainingError: fewer tokens than one row holds, nothing held out, or no token that ends a
        text.
    """
    train, other = split_texts(texts, held_out)
    last = tokenizer.eos_ids[:1]
    if not last:
        raise TrainingError(
            f"the tokenizer {tokenizer.name} has no token that ends a text, so texts cannot be "
            "told apart; start from a model that has one"
        )

    def encoded(contents: Sequence[str]) -> list[list[int]]:
        whole = (one for content in contents for one in documents(content, separator))
        return [[*tokenizer.encode(one), *last] for one in whole]

    trained, judged = encoded(train), encoded(other)
    count, judged_count = sum(map(len, trained)), sum(map(len, judged))
    if count < length:
        raise TrainingError(
            f"the texts have {count} tokens to train on, and a sequence has {length}; give more "
            f"text, or a length of {count} or less"
        )
    if not judged_count:
        raise TrainingError(
            f"held_out={held_out} holds no text out; give more text, or a larger share"
        )
    begin = last[0] if tokenizer.bos_id is None else tokenizer.bos_id  # as GPT-2 and Qwen do
    return PackedTexts(
        rows=pack(trained, length, begin),
        held_out=pack(judged, length, begin),
        tokens=count,
        held_out_tokens=judged_count,
        held_out_bytes=sum(len(content.encode()) for content in other),
    )


def _trained_tokenizer(texts: Sequence[str], vocab_size: int) -> tuple[bytes, Tokenizer]:
    with tempfile.TemporaryDirectory() as scratch:
        path = train_sentencepiece(texts, pathlib.Path(scratch) / "tokenizer", vocab_size)
        tokenizer = load_tokenizer(path)
        assert tokenizer is not None
        return path.read_bytes(), tokenizer


class ShuffledRows:
    """Rows in an order that is new in every epoch and known from a key alone."""

    def __init__(self, rows: Packed, key: np.ndarray) -> None:
        """Takes the rows.

        Args:
          rows: [R, T + 1] each.
          key: [2] uint32, from `jax.random.key_data`.
        """
        self._rows = rows
        self._key = jax.random.wrap_key_data(jnp.asarray(key))
        self._orders: dict[int, np.ndarray] = {}

    def take(self, first: int, passes: int, batch: int) -> Packed:
        """The rows of one step, in the order of the epochs.

        Args:
          first: rows read before, over all epochs.
          passes: A.
          batch: B.

        Returns:
          [A, B, T + 1] each.
        """
        count = len(self._rows.tokens)
        places = range(first, first + passes * batch)
        chosen = np.array([self._order(place // count)[place % count] for place in places])
        tokens, segments = (array[chosen].reshape(passes, batch, -1) for array in self._rows)
        return Packed(tokens, segments)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            key = jax.random.fold_in(self._key, epoch)
            order = np.asarray(jax.random.permutation(key, len(self._rows.tokens)))
            self._orders = {epoch: order}
        return self._orders[epoch]


def batches_of(rows: Packed, batch: int) -> list[Packed]:
    """All rows in their order, [B, T + 1] each, the last filled up with padding."""
    missing = -len(rows.tokens) % batch
    tokens, segments = (np.pad(array, ((0, missing), (0, 0))) for array in rows)
    starts = range(0, len(tokens), batch)
    return [Packed(tokens[at : at + batch], segments[at : at + batch]) for at in starts]
