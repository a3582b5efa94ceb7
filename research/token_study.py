"""How tokenizers cut texts, and what the vectors of tokens lie near.

Answers the claim "one token is about 0.75 English words" per tokenizer and language.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from kvlab.models.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Sums over a set of sentences.

    Attributes:
      sentences: Number of sentences.
      words: Pieces between whitespace.
      tokens: Tokens, begin-of-text not among them.
      bytes: UTF-8 bytes, line ends not among them.
    """

    sentences: int
    words: int
    tokens: int
    bytes: int

    @property
    def tokens_per_word(self) -> float:
        """Tokens per word ("fertility")."""
        return self.tokens / self.words

    @property
    def words_per_token(self) -> float:
        """Words per token; the claim is 0.75 for English."""
        return self.words / self.tokens

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes per token."""
        return self.bytes / self.tokens


@dataclasses.dataclass(frozen=True)
class TokenPiece:
    """One token of a text.

    Attributes:
      token_id: Its id.
      piece: The vocabulary's spelling.
      raw: The bytes that it adds to the text.
    """

    token_id: int
    piece: str
    raw: bytes


def measure(tokenizer: Tokenizer, sentences: Iterable[str]) -> TokenCounts:
    """Counts words, tokens and bytes, every sentence encoded alone and without begin-of-text.

    Args:
      tokenizer: The tokenizer.
      sentences: One a string; surrounding whitespace and empty ones do not count.

    Returns:
      The sums.

    Raises:
      ValueError: No sentence has a word.
    """
    texts = [text for text in (sentence.strip() for sentence in sentences) if text]
    if not texts:
        raise ValueError("there are no words to count: every sentence is empty")
    return TokenCounts(
        sentences=len(texts),
        words=sum(len(text.split()) for text in texts),
        tokens=sum(len(tokenizer.encode(text)) for text in texts),
        bytes=sum(len(text.encode()) for text in texts),
    )


def pieces(tokenizer: Tokenizer, text: str) -> list[TokenPiece]:
    """Cuts a text into its tokens.

    Args:
      tokenizer: The tokenizer.
      text: The text.

    Returns:
      One entry a token, in order; the joined `raw` is the text, apart from a space that the
      tokenizer puts before it.
    """
    return [
        TokenPiece(i, tokenizer.id_to_piece(i), tokenizer.decode_bytes([i], continued=True))
        for i in tokenizer.encode(text)
    ]


def nearest_neighbours(
    embedding: np.ndarray, ids: Sequence[int] | np.ndarray, count: int, *, chunk: int = 8192
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the tokens whose vectors point the most alike.

    Args:
      embedding: [V, D] float. A row of zeros is at cosine 0 from everything.
      ids: [Q] tokens to find neighbours of.
      count: Neighbours of each.
      chunk: Rows of the embedding that are compared at a time.

    Returns:
      Neighbours [Q, count] int64, nearest first, the token itself not among them and equal ones
      in id order; and their cosines [Q, count] float32.

    Raises:
      ValueError: An id outside the embedding, or a count that it cannot give.
    """
    size = embedding.shape[0]
    wanted = np.asarray(ids, np.int64)
    if not 0 < count < size:
        raise ValueError(f"count {count} is not possible: {size} vectors give 1 to {size - 1}")
    if wanted.size and (wanted.min() < 0 or wanted.max() >= size):
        raise ValueError(f"ids {wanted.tolist()} must lie in 0 to {size - 1}")
    queries = _unit_rows(embedding[wanted])
    cosines = np.empty((wanted.size, size), np.float32)
    for start in range(0, size, chunk):
        rows = _unit_rows(embedding[start : start + chunk])
        cosines[:, start : start + len(rows)] = queries @ rows.T
    cosines[np.arange(wanted.size), wanted] = -np.inf
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
    return nearest, np.take_along_axis(cosines, nearest, axis=1)


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, np.float32(1))
