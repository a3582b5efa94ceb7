"""Texts that quality is scored on: the project's own, or files of the user's."""

import dataclasses
import hashlib
import importlib.resources
import os
import pathlib
import re
from collections.abc import Sequence

PROJECT_TEXTS = {"en": "english.txt", "tr": "turkish.txt"}


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file, pinned to what it held when an experiment named it.

    Attributes:
      path: where it lies.
      sha256: of its bytes, hexadecimal.
    """

    path: str
    sha256: str

    @property
    def name(self) -> str:
        """How metrics name the text: the file's name without its ending, letters and digits."""
        return re.sub(r"[^0-9A-Za-z]+", "-", pathlib.Path(self.path).stem)

    def read(self) -> str:
        """The text.

        Raises:
          ValueError: it cannot be read, is no UTF-8, or has changed since it was named.
        """
        content = _bytes(self.path)
        if _sha256(content) != self.sha256:
            raise ValueError(
                f"text {self.path} has changed: its sha256 was {self.sha256[:12]}..., and is "
                f"{_sha256(content)[:12]}...; bring the old file back, or start a new run"
            )
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"text {self.path} is not UTF-8 (byte {error.start})") from None


def text_file(path: str | os.PathLike[str]) -> TextFile:
    """Names a file as an evaluation text.

    Args:
      path: a file in UTF-8.

    Raises:
      ValueError: it cannot be read.
    """
    return TextFile(str(path), _sha256(_bytes(path)))


def read_texts(files: Sequence[TextFile]) -> dict[str, str]:
    """Reads the texts to score, by the names that metrics give them.

    Args:
      files: the user's; none are the project's texts, by language.

    Raises:
      ValueError: as `TextFile.read`, two files of one name, or an empty one.
    """
    if not files:
        folder = importlib.resources.files("kvlab.research") / "texts"
        return {name: (folder / file).read_text("utf-8") for name, file in PROJECT_TEXTS.items()}
    texts: dict[str, str] = {}
    for file in files:
        if file.name in texts:
            raise ValueError(f"two texts are named {file.name!r}; rename one file, {file.path}")
        texts[file.name] = file.read()
        if not texts[file.name].strip():
            raise ValueError(f"text {file.path} is empty: there is nothing to score in it")
    return texts


def _bytes(path: str | os.PathLike[str]) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"text {path} cannot be read: {error.strerror}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
