"""SentencePiece models, BPE and unigram, with or without byte fallback.

Where SentencePiece loses information, and what happens here:

- U+2581 in the text is what it writes for a space. With byte fallback the character is spelled
  in bytes instead, so it comes back; without, it comes back as a space.
- A dummy prefix (a space before the text, `add_dummy_prefix`) is dropped again in decoding.
- `remove_extra_whitespaces` and normalisation (`nmt_nfkc`) change the text before encoding;
  that is the model's own wish and is kept.
- Without byte fallback a character outside the vocabulary decodes to " ⁇ ".

Nothing else is lost: for a model with byte fallback, identity normalisation and no removal of
spaces `decode(encode(text)) == text` for every text.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import sentencepiece

from kvlab.models.tokenizers.base import (
    SPACE_SYMBOL,
    SpecialTokens,
    Tokenizer,
    encode_around_space_symbol,
    end_ids,
)
from kvlab.models.tokenizers.sentencepiece_proto import (
    NO_DUMMY_PREFIX,
    ModelSettings,
    PieceType,
    read_pieces,
    read_settings,
)


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token that lies outside the trained vocabulary.

    Attributes:
      piece: How it is written.
      special: It steers the model, and is read from text only on request.
    """

    piece: str
    special: bool


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`."""

    def __init__(
        self,
        model: bytes,
        name: str,
        special: SpecialTokens | None = None,
        added: Mapping[int, AddedToken] | None = None,
    ) -> None:
        """Loads a model.

        Args:
          model: The bytes of the `.model` file.
          name: What to call it.
          special: Its special tokens; None takes them from the model, which is then expected to
            begin every text with its begin-of-text token, as Llama, Mistral and Gemma do.
          added: Tokens that were added after training, by id.

        Raises:
          ValueError: Not a SentencePiece model, or one with a setting that is not supported.
        """
        settings = read_settings(model)
        for field, unsupported in {
            "treat_whitespace_as_suffix": settings.whitespace_is_suffix,
            "escape_whitespaces = false": not settings.escape_whitespaces,
            "denormalizer_spec": settings.denormalizes,
        }.items():
            if unsupported:
                raise ValueError(f"SentencePiece model {name}: {field} is not supported")
        self._model = model
        self._settings = settings
        self._processor = _load(model, name)
        self._added = dict(added or {})
        size = int(self._processor.get_piece_size())
        self._vocab_size = max([size - 1, *self._added]) + 1
        self._trained_size = size
        self.leading_space: Literal["keep", "one", "all"] = "keep"
        if settings.remove_extra_whitespaces:
            self.leading_space = "all"
        elif settings.add_dummy_prefix:
            self.leading_space = "one"
        super().__init__(name, special or self._own_special_tokens())
        self._plain_pieces, self._special_pieces = self._pieces_in_text()
        self._plain_pattern = _any_of(self._plain_pieces)
        self._special_pattern = _any_of(self._special_pieces)
        fallback = [self.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SYMBOL.encode()]
        self._symbol_ids = [i for i in fallback if i is not None and self._processor.is_byte(i)]

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return self._vocab_size

    @property
    def model(self) -> bytes:
        """The bytes of the `.model` file, without tokens that were added after training."""
        return self._model

    @property
    def settings(self) -> ModelSettings:
        """What the model file says beside its pieces."""
        return self._settings

    def pieces(self) -> list[tuple[str, float, PieceType]]:
        """Returns spelling, score and kind of every id, added tokens included."""
        pieces = read_pieces(self._model)
        for token_id in range(len(pieces), self._vocab_size):
            pieces.append((self.id_to_piece(token_id), 0.0, PieceType.UNUSED))
        for token_id, token in self._added.items():
            _, score, kind = pieces[token_id]
            if kind in (PieceType.NORMAL, PieceType.UNUSED):
                kind = PieceType.CONTROL if token.special else PieceType.USER_DEFINED
            pieces[token_id] = (token.piece, score, kind)
        return pieces

    def id_to_piece(self, token_id: int) -> str:
        """Returns the piece, with U+2581 for a space."""
        self._check_id(token_id)
        if token_id in self._added:
            return self._added[token_id].piece
        if token_id >= self._trained_size:
            return f"<unused_{token_id}>"
        return str(self._processor.id_to_piece(token_id))

    def piece_to_id(self, piece: str) -> int | None:
        """Returns the id of a piece, or None."""
        for token_id, token in self._added.items():
            if token.piece == piece:
                return token_id
        token_id = int(self._processor.piece_to_id(piece))
        return token_id if self._processor.id_to_piece(token_id) == piece else None

    def is_special(self, token_id: int) -> bool:
        """Whether the model file or the model's configuration calls it a control token."""
        if token_id in self._added:
            return self._added[token_id].special
        return token_id < self._trained_size and bool(self._processor.is_control(token_id))

    def piece_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a piece: one for a byte piece, spaces for U+2581."""
        if token_id < self._trained_size and token_id not in self._added:
            if self._processor.is_byte(token_id):
                return bytes([int(self.id_to_piece(token_id)[1:-1], 16)])
            if self._processor.is_unknown(token_id):
                return self._settings.unk_surface.encode()
            return self.id_to_piece(token_id).replace(SPACE_SYMBOL, " ").encode()
        return self.id_to_piece(token_id).encode()

    def encode_text(self, text: str, parse_special: bool) -> list[int]:
        """Encodes; the text after a token that was read as such starts anew."""
        pieces = self._special_pieces if parse_special else self._plain_pieces
        if not pieces:
            return self._encode_fragment(text)
        pattern = self._special_pattern if parse_special else self._plain_pattern
        ids: list[int] = []
        for part in pattern.split(text):
            ids += [pieces[part]] if part in pieces else self._encode_fragment(part)
        return ids

    def _encode_fragment(self, text: str) -> list[int]:
        if SPACE_SYMBOL not in text or len(self._symbol_ids) < 3:
            return list(self._processor.encode(text))
        return encode_around_space_symbol(
            text, self._processor.encode, self._continuation.encode, self._symbol_ids
        )

    @functools.cached_property
    def _continuation(self) -> sentencepiece.SentencePieceProcessor:
        """The model without the space that it puts before a text."""
        return _load(self._model + NO_DUMMY_PREFIX, self.name)

    def _own_special_tokens(self) -> SpecialTokens:
        bos, eos = int(self._processor.bos_id()), int(self._processor.eos_id())
        return SpecialTokens(
            bos_id=bos if bos >= 0 else None,
            eos_ids=end_ids(self.piece_to_id, [eos if eos >= 0 else None]),
            adds_bos=bos >= 0,
        )

    def _pieces_in_text(self) -> tuple[dict[str, int], dict[str, int]]:
        """Pieces read from any text, and those read where special tokens are asked for."""
        plain = {t.piece: i for i, t in self._added.items() if not t.special}
        special = {t.piece: i for i, t in self._added.items() if t.special}
        ids = list(range(self._trained_size))
        control, unknown = self._processor.is_control(ids), self._processor.is_unknown(ids)
        for token_id in ids:
            if (control[token_id] or unknown[token_id]) and token_id not in self._added:
                special[self.id_to_piece(token_id)] = token_id
        return plain, plain | special


def _any_of(pieces: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the pieces, the longest one where several fit."""
    longest_first = sorted(pieces, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def _load(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except RuntimeError as error:
        raise ValueError(
            f"{name} is not a SentencePiece model that can be loaded: {error}"
        ) from error
    return processor
