"""The architecture's part of a GGUF file's metadata."""

from typing import Any

import numpy as np

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.gguf_file import GgufFile

# Written by converters, and without effect on the numbers.
_WITHOUT_EFFECT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")


class GgufKeys:
    """The keys of the architecture (`llama.*`, ...), and which of them have been read.

    Every key must be understood, or the file is refused: a key that is not read is a number that
    would be wrong.
    """

    def __init__(self, file: GgufFile, architecture: str) -> None:
        """Begins with every key of the architecture unread."""
        self._file = file
        self.architecture = architecture
        self._unread = {key for key in file.metadata if key.startswith(f"{architecture}.")}

    def get(self, name: str, default: Any = None) -> Any:
        """Reads a key.

        Args:
          name: the key without the architecture.
          default: what its absence means in this format.
        """
        key = f"{self.architecture}.{name}"
        self._unread.discard(key)
        return self._file.metadata.get(key, default)

    def require(self, name: str) -> Any:
        """Reads a key that must be there; a CheckpointError says if it is not."""
        value = self.get(name)
        if value is None:
            raise self.error(f"lacks the key {self.architecture}.{name}")
        return value

    def one(self, name: str) -> int:
        """Reads a number that some files give per layer; layers that differ are refused."""
        value = self.require(name)
        if np.ndim(value) and len(set(value.tolist())) != 1:
            raise self.error(f"has {name} that differs between layers, which is not supported")
        return int(value[0]) if np.ndim(value) else value

    def refuse_unread(self) -> None:
        """Raises a CheckpointError that names the keys nobody has read."""
        for name in _WITHOUT_EFFECT:
            self.get(name)
        if self._unread:
            named = ", ".join(sorted(self._unread))
            raise self.error(f"has settings that are not supported: {named}")

    def error(self, message: str) -> CheckpointError:
        """An error about the file, whose name is the subject of `message`."""
        return CheckpointError(f"{self._file.path} {message}")
