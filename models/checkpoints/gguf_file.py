"""GGUF files as a memory map: metadata, the list of tensors, and any tensor dequantised.

`gguf.GGUFReader` builds NumPy views for every element of every metadata array: 5 s for the
vocabulary of SmolLM2 (49,152 tokens), where one pass over the bytes takes 0.1 s. The package's
tables of block sizes and its dequantisers are used as they are.

Source: ggml's docs/gguf.md.
"""

import dataclasses
import math
import mmap
import os
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from kvlab.models.checkpoints.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
        6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
# Values dequantised at a time: temporaries stay in a core's cache. The package's own pieces of 16
# tensor rows (9,216 values in SmolLM2) are 5 times slower, whole tensors 4 times.
_PIECE = 1 << 17


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
      name: as the file has it (`blk.3.attn_q.weight`).
      quantisation: how its values are stored.
      shape: outermost axis first, so a projection is `[out, in]`.
      start: offset from the start of the file, in bytes.
      nbytes: stored size in bytes.
    """

    name: str
    quantisation: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An open GGUF file; its bytes are mapped, not read.

    Attributes:
      path: the file.
      metadata: values by key: Python numbers, bools and strings, lists of strings, NumPy arrays of
        numbers. float32 scalars come as the shortest decimal that names them (1e-05).
      tensors: by name.
      metadata_end: offset of the first byte behind the metadata.
      data: `[size] uint8`, the whole file.
    """

    path: pathlib.Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    metadata_end: int
    data: np.ndarray

    def dequantized(self, name: str) -> np.ndarray:
        """Returns a tensor as float32 in its own shape.

        Args:
          name: a key of `tensors`.

        Raises:
          CheckpointError: the file lacks the tensor, or the `gguf` package does not dequantise it.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} lacks the tensor {name}")
        tensor = self.tensors[name]
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[tensor.quantisation]
        raw = self.data[tensor.start : tensor.start + tensor.nbytes].reshape(-1, block_bytes)
        values = np.empty((len(raw), block_size), np.float32)
        blocks = max(_PIECE // block_size, 1)
        try:
            for at in range(0, len(raw), blocks):
                piece = raw[at : at + blocks].reshape(1, -1)
                dequantized = gguf.dequantize(piece, tensor.quantisation)
                values[at : at + blocks] = dequantized.reshape(-1, block_size)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {tensor.quantisation.name}, which the "
                "gguf package does not dequantise; convert the file to another quantisation "
                "(Q8_0 or F16, say)"
            ) from error
        return values.reshape(tensor.shape)


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Maps a GGUF file and reads everything in front of its tensors' values.

    Args:
      path: the file.

    Raises:
      CheckpointError: no such file, not GGUF, a version or an encoding that is not known, one part
        of a split model, or a file that ends before its tensors do.
    """
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it does not start with GGUF")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    cursor = _Cursor(mapped, path)
    try:
        metadata, metadata_end, tensors = cursor.read_header()
    except (struct.error, IndexError) as error:
        raise CheckpointError(f"{path} is truncated: it ends inside its header") from error
    parts = metadata.get("split.count", 0)
    if parts > 1:
        raise CheckpointError(
            f"{path} is one of {parts} parts of a model; merge them into one file first "
            "(llama.cpp's gguf-split --merge)"
        )
    end = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=0)
    if end > len(mapped):
        raise CheckpointError(
            f"{path} is truncated: its tensors end at byte {end}, the file at byte {len(mapped)}"
        )
    return GgufFile(path, metadata, tensors, metadata_end, np.frombuffer(mapped, np.uint8))


def copy_metadata(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Writes a GGUF file with the metadata of another (its tokenizer, say) and no tensors.

    Args:
      source: the file to copy from.
      target: the file to write.

    Raises:
      CheckpointError: see `open_gguf`.
      OSError: the target cannot be written.
    """
    file = open_gguf(source)
    count_start, count_end = len(_MAGIC) + 4, len(_MAGIC) + 12
    header = file.data[: file.metadata_end].copy()
    header[count_start:count_end] = 0
    pathlib.Path(target).write_bytes(header.tobytes())


class _Cursor:
    """Walks the header of one file."""

    def __init__(self, data: mmap.mmap, path: pathlib.Path) -> None:
        self._data = data
        self._path = path
        self._at = len(_MAGIC)

    def read_header(self) -> tuple[dict[str, Any], int, dict[str, GgufTensor]]:
        version = self._unpack("<I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path} is GGUF version {version}; versions 2 and 3 (little-endian) are read"
            )
        tensor_count, value_count = self._unpack("<Q"), self._unpack("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I"))
        metadata_end = self._at
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        tensors = [self._tensor() for _ in range(tensor_count)]
        begin = -(-self._at // alignment) * alignment
        return (
            metadata,
            metadata_end,
            {
                tensor.name: dataclasses.replace(tensor, start=begin + tensor.start)
                for tensor in tensors
            },
        )

    def _tensor(self) -> GgufTensor:
        """One entry of the list of tensors, its start still relative to the first value."""
        name = self._string()
        dimensions = self._unpack("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise CheckpointError(f"{self._path}: tensor {name} claims {dimensions} dimensions")
        shape = tuple(self._unpack("<Q") for _ in range(dimensions))[::-1]
        code, start = self._unpack("<I"), self._unpack("<Q")
        try:
            kind = gguf.GGMLQuantizationType(code)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path}: tensor {name} has the unknown quantisation {code}"
            ) from error
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row = shape[-1] if shape else 1
        if row % block_size:
            raise CheckpointError(
                f"{self._path}: tensor {name} has rows of {row} values, which {kind.name} blocks "
                f"of {block_size} do not fill"
            )
        return GgufTensor(name, kind, shape, start, math.prod(shape) // block_size * block_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            number = self._numbers(kind, 1)[0]
            return float(str(number)) if number.dtype == np.float32 else number.item()
        kind, length = self._unpack("<I"), self._unpack("<Q")
        if kind == _STRING:
            return self._strings(length)
        if kind == _ARRAY:
            return [self._value(kind) for _ in range(length)]
        return self._numbers(kind, length)

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path} has metadata of the unknown type {kind}")
        dtype = _SCALARS[kind]
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _strings(self, count: int) -> list[str]:
        """An array of strings: the vocabulary and the merges, 98,000 in SmolLM2."""
        data, at, strings = self._data, self._at, []
        for _ in range(count):
            begin = at + _LENGTH.size
            (size,) = _LENGTH.unpack_from(data, at)
            at = begin + size
            if at > len(data):
                raise IndexError(at)
            strings.append(data[begin:at].decode("utf-8", errors="surrogateescape"))
        self._at = at
        return strings

    def _string(self) -> str:
        return self._take(self._unpack("<Q")).decode("utf-8", errors="surrogateescape")

    def _unpack(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return int(value)

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise IndexError(end)
        taken = self._data[self._at : end]
        self._at = end
        return taken
