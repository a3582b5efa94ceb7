"""Reading and writing SentencePiece model files, which are protocol buffers.

The `sentencepiece` package ships generated classes, but they need one exact `protobuf` release.
kvlab needs few fields, so it goes by the wire format itself. Field numbers: `ModelProto` in
sentencepiece's `src/sentencepiece_model.proto`; wire format: protobuf.dev, "Encoding".
"""

import dataclasses
import enum
import struct
from collections.abc import Iterable, Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_ONE_BYTE = 0x7F
_PIECE, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_BPE = 2
_SETTINGS = {
    (_TRAINER, 3): "bpe",
    (_TRAINER, 24): "whitespace_is_suffix",
    (_TRAINER, 35): "byte_fallback",
    (_TRAINER, 44): "unk_surface",
    (_NORMALIZER, 2): "normalizes",
    (_NORMALIZER, 3): "add_dummy_prefix",
    (_NORMALIZER, 4): "remove_extra_whitespaces",
    (_NORMALIZER, 5): "escape_whitespaces",
    (_DENORMALIZER, 2): "denormalizes",
}

NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
"""Appended to a model it sets `normalizer_spec.add_dummy_prefix` to false: later fields win."""


class PieceType(enum.IntEnum):
    """Kinds of piece; GGUF files use the same numbers for `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The settings of a model file that decide how ids become text again.

    Attributes:
      add_dummy_prefix: Encoding puts a space before the text.
      remove_extra_whitespaces: Encoding drops spaces at both ends and repeated ones.
      escape_whitespaces: Spaces are written as U+2581 in pieces.
      whitespace_is_suffix: A word's space stands at its end.
      denormalizes: The model rewrites text after decoding.
      unk_surface: The text of an unknown piece.
      bpe: Pieces are built by merging; otherwise the model is a unigram one, or of words.
      byte_fallback: Characters outside the vocabulary are spelled in bytes.
      normalizes: The model rewrites text before encoding.
    """

    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    whitespace_is_suffix: bool = False
    denormalizes: bool = False
    unk_surface: str = " \u2047 "
    bpe: bool = False
    byte_fallback: bool = False
    normalizes: bool = False


def read_settings(model: bytes) -> ModelSettings:
    """Reads the settings of a model file.

    Args:
      model: The file's bytes.

    Returns:
      Its settings, defaults where the file is silent.

    Raises:
      ValueError: The bytes are not a protocol buffer of this kind.
    """
    changed: dict[str, bool | str] = {}
    for number, value in _fields(model):
        if number not in (_TRAINER, _NORMALIZER, _DENORMALIZER):
            continue
        if not isinstance(value, bytes):
            raise ValueError("not a SentencePiece model: a settings field is not a message")
        for inner, setting in _fields(value):
            name = _SETTINGS.get((number, inner))
            if name == "bpe":
                changed[name] = setting == _BPE
            elif name == "unk_surface" and isinstance(setting, bytes):
                changed[name] = setting.decode()
            elif name is not None:
                changed[name] = bool(setting)
    return dataclasses.replace(ModelSettings(), **changed)  # type: ignore[arg-type]


def read_pieces(model: bytes) -> list[tuple[str, float, PieceType]]:
    """Reads the vocabulary of a model file.

    Args:
      model: The file's bytes.

    Returns:
      Spelling, score and kind of every piece, in id order.

    Raises:
      ValueError: The bytes are not a protocol buffer of this kind.
    """
    pieces = []
    for number, value in _fields(model):
        if number == _PIECE and isinstance(value, bytes):
            text, score, kind = b"", b"\0\0\0\0", int(PieceType.NORMAL)
            for inner, field in _fields(value):
                if inner == 1 and isinstance(field, bytes):
                    text = field
                elif inner == 2 and isinstance(field, bytes):
                    score = field
                elif inner == 3 and isinstance(field, int):
                    kind = field
            pieces.append((text.decode(), struct.unpack("<f", score)[0], PieceType(kind)))
    return pieces


def write_bpe_model(
    pieces: Iterable[tuple[str, float, int]],
    *,
    byte_fallback: bool,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    unk_id: int,
    bos_id: int,
    eos_id: int,
) -> bytes:
    """Writes a BPE model that does not normalise.

    Args:
      pieces: Spelling, score and `PieceType` of every piece, in id order.
      byte_fallback: Characters outside the vocabulary are spelled in bytes.
      add_dummy_prefix: Encoding puts a space before the text.
      remove_extra_whitespaces: Encoding drops spaces at both ends and repeated ones.
      unk_id: Id of the unknown piece.
      bos_id: Id of the piece that begins a text, -1 for none.
      eos_id: Id of the piece that ends a text, -1 for none.

    Returns:
      The bytes of a `.model` file.
    """
    out = []
    for piece, score, kind in pieces:
        text = piece.encode()
        # Field 1, the text; 2, the score; 3, the kind. Most pieces need no long length.
        size = _varint(len(text)) if len(text) > _ONE_BYTE else bytes((len(text),))
        message = b"\x0a%b%b\x15%b\x18%c" % (size, text, struct.pack("<f", score), kind)
        size = _varint(len(message)) if len(message) > _ONE_BYTE else bytes((len(message),))
        out += [b"\x0a", size, message]
    trainer = (
        _int_field(3, _BPE)
        + _int_field(35, byte_fallback)
        + _int_field(40, unk_id)
        + _int_field(41, bos_id)
        + _int_field(42, eos_id)
    )
    normalizer = (
        _bytes_field(1, b"identity")
        + _int_field(3, add_dummy_prefix)
        + _int_field(4, remove_extra_whitespaces)
    )
    out += [_bytes_field(_TRAINER, trainer), _bytes_field(_NORMALIZER, normalizer)]
    return b"".join(out)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (field number, value); numbers as unsigned integers, anything else as bytes."""
    at = 0
    while at < len(message):
        key, at = message[at], at + 1
        if key > _ONE_BYTE:
            key, at = _read_varint(message, at - 1)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
            continue
        if wire == _BYTES and at < len(message) and message[at] <= _ONE_BYTE:
            size, at = message[at], at + 1
        elif wire == _BYTES:
            size, at = _read_varint(message, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"not a SentencePiece model: wire type {wire} at byte {at}")
        if at + size > len(message):
            raise ValueError("not a SentencePiece model, or a truncated one")
        yield number, message[at : at + size]
        at += size


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("not a SentencePiece model, or a truncated one")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > _ONE_BYTE:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(int(value))


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value
