"""Tokenizers of the `tokenizers` library: `tokenizer.json` and byte-level BPE built from files.

Two spellings of bytes are known, which are those of all the model families of kvlab: byte-level
(GPT-2, Llama 3, Qwen, SmolLM) and U+2581 for spaces, with or without byte fallback (Llama 2,
Mistral, Gemma). Special tokens in text are read only on request. Tokens that a file adds without
calling them special are always read, as everywhere else.

What a file's normalizer changes stays changed (Qwen's NFC composes `e` + U+0301). Otherwise every
text comes back, which takes three cares:

- U+2581 in a text, with byte fallback: see `sentencepiece_tokenizer`.
- Metaspace puts its space before a text only where there is none, so that " a" and "a" would be
  one; here it is always put there, as SentencePiece does.
- A byte-level vocabulary may lack bytes (SmolLM2's lacks 0x04, 0x06, 0x13, 0x14, 0x16, 0x1D and the
  lead bytes of unassigned planes). The library drops them; here such a text is an error.
"""

import functools
import json
import os
import pathlib
from typing import Any

import tokenizers

from kvlab.models.tokenizers.base import (
    SPACE_SYMBOL,
    SpecialTokens,
    Tokenizer,
    encode_around_space_symbol,
    end_ids,
)
from kvlab.models.tokenizers.byte_level import byte_alphabet

_BYTES = byte_alphabet()
_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1} - frozenset(range(0xF5, 0x100))


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        name: str,
        special: SpecialTokens | None = None,
    ) -> None:
        """Wraps a tokenizer, which this object then owns.

        Args:
          tokenizer: The library's object.
          name: What to call it.
          special: Its special tokens; None takes the begin-of-text token from the file's
            post-processor and the end tokens from `END_PIECES`.

        Raises:
          ValueError: A decoder of another kind than those named above.
        """
        # A file may ask for truncation, padding or dropout of merges, which belong to training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not any(map(_restores_spaces, steps)):
            raise ValueError(
                f"tokenizer {name} decodes by {sorted(kinds) or 'nothing'}; supported are "
                f"ByteLevel, and Metaspace or Replace where {SPACE_SYMBOL!r} stands for a space"
            )
        if any(map(_drops_a_space, steps)):
            self.leading_space = "one"
        self._byte_ids: dict[int, int] = {}
        if "ByteFallback" in kinds:
            ids = [(tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256)]
            self._byte_ids = {token_id: byte for token_id, byte in ids if token_id is not None}
        id_of = {byte: token_id for token_id, byte in self._byte_ids.items()}
        self._symbol_ids = [id_of[byte] for byte in SPACE_SYMBOL.encode() if byte in id_of]
        self._spellable = _spellable_bytes(tokenizer) if self._byte_level else None
        self._prefix_may_be_absent = _adds_space_if_none(tokenizer)
        super().__init__(name, special or self._own_special_tokens())

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return self._vocab_size

    @property
    def is_byte_level(self) -> bool:
        """Whether pieces are spelled in the byte alphabet, not with U+2581 for spaces."""
        return self._byte_level

    def to_json(self) -> dict[str, Any]:
        """Returns the content of a `tokenizer.json`."""
        return json.loads(self._tokenizer.to_str())

    @property
    def starts_with(self) -> int | None:
        """The token that the file's post-processor puts before a text, or None."""
        with_special = self._tokenizer.encode("a", add_special_tokens=True).ids
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        return with_special[0] if with_special[:1] != plain[:1] else None

    def id_to_piece(self, token_id: int) -> str:
        """Returns the piece as the vocabulary spells it."""
        self._check_id(token_id)
        piece = self._tokenizer.id_to_token(token_id)
        return f"<unused_{token_id}>" if piece is None else piece

    def piece_to_id(self, piece: str) -> int | None:
        """Returns the id of a piece, or None."""
        return self._tokenizer.token_to_id(piece)

    def is_special(self, token_id: int) -> bool:
        """Whether the file calls the token special."""
        return token_id in self._added and self._added[token_id].special

    def piece_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a piece."""
        piece = self.id_to_piece(token_id)
        if token_id in self._added:
            return piece.encode()
        if token_id in self._byte_ids:
            return bytes([self._byte_ids[token_id]])
        if not self._byte_level:
            return piece.replace(SPACE_SYMBOL, " ").encode()
        # A vocabulary may hold pieces outside the alphabet (padding); they are plain text.
        spelled = [_BYTES.get(character) for character in piece]
        known = [byte for byte in spelled if byte is not None]
        return bytes(known) if len(known) == len(piece) else piece.encode()

    def encode_text(self, text: str, parse_special: bool) -> list[int]:
        """Encodes with the library.

        Raises:
          ValueError: A character has a byte that a byte-level vocabulary lacks.
        """
        spellable = self._spellable
        if spellable is not None and text.encode().translate(None, spellable):
            bad = next(c for c in text if c.encode().translate(None, spellable))
            raise ValueError(
                f"U+{ord(bad):04X} cannot be encoded: the vocabulary of {self.name} has no piece "
                f"for the byte 0x{bad.encode().translate(None, spellable)[0]:02X}"
            )
        if SPACE_SYMBOL not in text or len(self._symbol_ids) < 3:
            return self._encode_start(text, parse_special)
        return encode_around_space_symbol(
            text,
            lambda part: self._encode_start(part, parse_special),
            lambda part: _encode(self._continuation, part, parse_special),
            self._symbol_ids,
        )

    def _encode_start(self, text: str, parse_special: bool) -> list[int]:
        if self._prefix_may_be_absent and text.startswith(" "):
            return _encode(self._continuation, " " + text, parse_special)
        return _encode(self._tokenizer, text, parse_special)

    @functools.cached_property
    def _continuation(self) -> tokenizers.Tokenizer:
        """The tokenizer without the space that it puts before a text."""
        spec = json.loads(self._tokenizer.to_str())
        spec["normalizer"] = _without_prefix(spec["normalizer"])
        spec["pre_tokenizer"] = _without_prefix(spec["pre_tokenizer"])
        return tokenizers.Tokenizer.from_str(json.dumps(spec))

    def _own_special_tokens(self) -> SpecialTokens:
        bos = self.starts_with
        return SpecialTokens(
            bos_id=bos, eos_ids=end_ids(self.piece_to_id, []), adds_bos=bos is not None
        )


def load_tokenizer_json(path: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """Loads a `tokenizer.json` into the library's own object.

    Args:
      path: The file.

    Returns:
      The library's object.

    Raises:
      ValueError: The file is not such a tokenizer.
    """
    content = pathlib.Path(path).read_text(encoding="utf-8")
    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"{os.fspath(path)} is not a tokenizer.json: {error}") from error


def _encode(tokenizer: tokenizers.Tokenizer, text: str, parse_special: bool) -> list[int]:
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer.encode(text, add_special_tokens=False).ids


def _spellable_bytes(tokenizer: tokenizers.Tokenizer) -> bytes | None:
    """The bytes that a byte-level vocabulary can spell; None where that is all of UTF-8's."""
    spelled = {byte for piece, byte in _BYTES.items() if tokenizer.token_to_id(piece) is not None}
    return None if spelled >= _UTF8_BYTES else bytes(spelled)


def _adds_space_if_none(tokenizer: tokenizers.Tokenizer) -> bool:
    if tokenizer.pre_tokenizer is None:
        return False
    spec = json.loads(tokenizer.pre_tokenizer.__getstate__())
    steps = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    return any(s["type"] == "Metaspace" and s["prepend_scheme"] != "never" for s in steps)


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    spec = json.loads(tokenizer.decoder.__getstate__())
    return spec["decoders"] if spec["type"] == "Sequence" else [spec]


def _restores_spaces(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step["replacement"] == SPACE_SYMBOL
    return step["type"] == "Replace" and step["pattern"].get("String") == SPACE_SYMBOL


def _drops_a_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step["prepend_scheme"] != "never"
    return step["type"] == "Strip" and step["content"] == " " and step["start"] > 0


def _without_prefix(spec: dict[str, Any] | None) -> dict[str, Any] | None:
    """Drops the part of a normalizer or pre-tokenizer that puts a space before the text."""
    if spec is None or spec["type"] == "Prepend":
        return None
    if spec["type"] == "Metaspace":
        return {**spec, "prepend_scheme": "never"}
    if spec["type"] == "Sequence":
        key = "normalizers" if "normalizers" in spec else "pretokenizers"
        parts = [_without_prefix(part) for part in spec[key]]
        return {**spec, key: [part for part in parts if part is not None]}
    return spec
