"""The contract of a tokenizer: text to token ids, ids to bytes, and the model's special tokens.

Bytes come first. A token stands for bytes, not for characters (a Turkish letter or an emoji may
be spread over several tokens), so every tokenizer says which bytes an id adds to a text, and
text is what those bytes decode to.
"""

import abc
import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal

SPACE_SYMBOL = "\u2581"
"""The character that SentencePiece vocabularies write for a space."""

REPLACEMENT = "\ufffd".encode()
"""What an id without a piece decodes to (the padding rows of an embedding)."""

END_PIECES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<end_of_turn>",
)
"""Pieces that end a text or a turn in every model family that has them."""


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """What a model wants of its tokenizer beyond the vocabulary.

    Attributes:
      bos_id: Id of the token that begins a text, or None.
      eos_ids: Ids that end a text or a turn; the model's own end of text first.
      adds_bos: Whether the model was trained with `bos_id` before every text.
      chat_template: Jinja source that lays out a conversation, or None.
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    adds_bos: bool = False
    chat_template: str | None = None


class Tokenizer(abc.ABC):
    """Turns text into token ids and back.

    Attributes:
      name: What to call it in tables and messages.
      special_tokens: The tokens that steer the model; the properties below read it.
      leading_space: What decoding does with the space at the very start of a text: `keep` it;
        drop `one`, which encoding had put there; or drop `all` of them.
    """

    leading_space: Literal["keep", "one", "all"] = "keep"

    def __init__(self, name: str, special: SpecialTokens) -> None:
        """Names the tokenizer and takes its special tokens.

        Args:
          name: What to call it in tables and messages.
          special: Its special tokens.
        """
        self.name = name
        self.special_tokens = special
        self._known_bytes: dict[bool, dict[int, bytes]] = {False: {}, True: {}}

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text, or None."""
        return self.special_tokens.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text or a turn; the model's own end of text first."""
        return self.special_tokens.eos_ids

    @property
    def adds_bos(self) -> bool:
        """Whether the model expects `encode(..., add_bos=True)` at the start of a text."""
        return self.special_tokens.adds_bos

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the conversation layout, or None."""
        return self.special_tokens.chat_template

    def with_special_tokens(self, special: SpecialTokens) -> "Tokenizer":
        """Returns the same vocabulary with other special tokens."""
        changed = copy.copy(self)
        changed.special_tokens = special
        return changed

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id that has a piece."""

    @abc.abstractmethod
    def id_to_piece(self, token_id: int) -> str:
        """Returns the vocabulary's own spelling of a token (`Ġthe`, `▁the`, `<0x0A>`).

        Raises:
          ValueError: No piece has this id.
        """

    @abc.abstractmethod
    def piece_to_id(self, piece: str) -> int | None:
        """Returns the id of a piece as the vocabulary spells it, or None."""

    @abc.abstractmethod
    def is_special(self, token_id: int) -> bool:
        """Whether the token steers the model and is no part of the text."""

    @abc.abstractmethod
    def piece_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token of the vocabulary adds inside a text."""

    @abc.abstractmethod
    def encode_text(self, text: str, parse_special: bool) -> list[int]:
        """Encodes without adding anything; `encode` is the public form."""

    def encode(self, text: str, add_bos: bool = False, parse_special: bool = False) -> list[int]:
        """Encodes a text.

        Args:
          text: Any text that UTF-8 can hold.
          add_bos: Put `bos_id` first.
          parse_special: Read special tokens that are written out in the text (`<|im_end|>`) as
            those tokens. Leave it False for text from users, which must not steer the model.

        Returns:
          Token ids.

        Raises:
          ValueError: `add_bos` with a tokenizer that has no such token.
        """
        ids = self.encode_text(text, parse_special)
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise ValueError(f"tokenizer {self.name} has no begin-of-text token; use add_bos=False")
        return [self.bos_id, *ids]

    def decode_bytes(
        self, ids: Iterable[int], *, keep_special: bool = False, continued: bool = False
    ) -> bytes:
        """Decodes to bytes, which need not be whole UTF-8 characters.

        Args:
          ids: Token ids. Ids past the vocabulary give U+FFFD.
          keep_special: Write special tokens out instead of dropping them.
          continued: The ids continue a text, so a space at their start is part of it.

        Returns:
          The bytes of the text.

        Raises:
          ValueError: A negative id.
        """
        if continued:
            return b"".join(self._parts(map(int, ids), keep_special))
        return self.decode_start(ids, keep_special=keep_special)[0]

    def decode(
        self, ids: Iterable[int], *, keep_special: bool = False, continued: bool = False
    ) -> str:
        """Decodes to text; see `decode_bytes`. Bytes that are not UTF-8 become U+FFFD."""
        raw = self.decode_bytes(ids, keep_special=keep_special, continued=continued)
        return raw.decode("utf-8", errors="replace")

    def decode_start(self, ids: Iterable[int], *, keep_special: bool = False) -> tuple[bytes, bool]:
        """Decodes the first ids of a text, dropping of its leading space what is to be dropped.

        Args:
          ids: Token ids, perhaps the first few only.
          keep_special: Write special tokens out instead of dropping them.

        Returns:
          The bytes, and whether what follows is a continuation.
        """
        ids = list(map(int, ids))
        parts = self._parts(ids, keep_special)
        for i, (token_id, part) in enumerate(zip(ids, parts, strict=True)):
            if part:
                if self.leading_space == "keep" or not self._begins_with_space(token_id):
                    return b"".join(parts), True
                parts[i] = part.lstrip(b" ") if self.leading_space == "all" else part[1:]
                if parts[i] or self.leading_space == "one":
                    return b"".join(parts), True
        return b"", False

    def _begins_with_space(self, token_id: int) -> bool:
        """Whether the vocabulary spells the token with a space first; a byte 0x20 is none."""
        return token_id < self.vocab_size and self.id_to_piece(token_id).startswith(SPACE_SYMBOL)

    def _parts(self, ids: Iterable[int], keep_special: bool) -> list[bytes]:
        known = self._known_bytes[keep_special]
        parts = []
        for token_id in ids:
            if token_id not in known:
                known[token_id] = self._token_bytes(token_id, keep_special)
            parts.append(known[token_id])
        return parts

    def _token_bytes(self, token_id: int, keep_special: bool) -> bytes:
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative; ids start at 0")
        if token_id >= self.vocab_size:
            return REPLACEMENT
        if self.is_special(token_id):
            return self.id_to_piece(token_id).encode() if keep_special else b""
        return self.piece_bytes(token_id)

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(
                f"token id {token_id} has no piece: tokenizer {self.name} has ids 0 to "
                f"{self.vocab_size - 1}"
            )


def end_ids(
    piece_to_id: Callable[[str], int | None], declared: Iterable[int | None]
) -> tuple[int, ...]:
    """Collects the ids that end a text or a turn.

    Args:
      piece_to_id: The vocabulary.
      declared: Ids that the model's own files name, None where one is absent.

    Returns:
      The declared ids, then those of `END_PIECES`, each once.
    """
    found = [*declared, *(piece_to_id(piece) for piece in END_PIECES)]
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def encode_around_space_symbol(
    text: str,
    first: Callable[[str], list[int]],
    rest: Callable[[str], list[int]],
    symbol_ids: list[int],
) -> list[int]:
    """Encodes text in which U+2581 itself occurs, for a vocabulary that writes spaces so.

    Such a vocabulary cannot tell the character from a space: the only place where a tokenizer
    with byte fallback and no normalisation loses information. Spelling it as its three bytes
    keeps it.

    Args:
      text: The text.
      first: Encodes what comes before the first U+2581.
      rest: Encodes what follows one, without the space that starts a text.
      symbol_ids: The ids of the bytes of U+2581.

    Returns:
      Token ids.
    """
    head, *tail = text.split(SPACE_SYMBOL)
    ids = first(head)
    for part in tail:
        ids = [*ids, *symbol_ids, *rest(part)]
    return ids
