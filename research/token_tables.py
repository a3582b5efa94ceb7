"""What tokenizers make of texts, as tables and sentences for a reader.

Axes: n tokens of a text, V vocabulary, D model width.
"""

import collections
import importlib.resources
import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from kvlab.models.named import model_names, named_path
from kvlab.models.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from kvlab.research.tables import format_table
from kvlab.research.token_study import measure, nearest_neighbours, pieces

BYTES = "bytes"
CLAIM = 0.75  # English words per token, as the field likes to say


def named_tokenizer(name: str) -> tuple[str, Tokenizer]:
    """Loads a tokenizer for a table.

    Args:
      name: a model that has a name, a folder or file that `load_tokenizer` takes, or `bytes`.

    Returns:
      A short name to show, and the tokenizer.

    Raises:
      ValueError: nothing there, or a folder or file without a tokenizer.
      FetchError: a model that has not been fetched.
    """
    if name == BYTES:
        return name, ByteTokenizer()
    named = named_path(name)
    path = named or pathlib.Path(name)
    if not path.exists():
        raise ValueError(
            f"tokenizer {name!r} does not exist; give a folder, a file, {BYTES} or a name "
            f"({model_names()})"
        )
    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:
        raise ValueError(f"tokenizer {name}: {error}") from error
    if tokenizer is None:
        raise ValueError(f"there is no tokenizer in {name}")
    if named:
        return name, tokenizer
    path = path.resolve()
    return path.name if path.is_dir() else f"{path.parent.name}/{path.name}", tokenizer


def named_tokenizers(names: Sequence[str]) -> dict[str, Tokenizer]:
    """Loads tokenizers by their short names, or by those given where short ones repeat.

    Raises:
      ValueError, FetchError: as `named_tokenizer`.
    """
    loaded = {name: named_tokenizer(name) for name in names}
    short = collections.Counter(name for name, _ in loaded.values())
    return {
        name if short[name] == 1 else given: tokenizer
        for given, (name, tokenizer) in loaded.items()
    }


def read_texts(paths: Sequence[str]) -> dict[str, list[str]]:
    """Reads texts into lines, by file name, or by path where two have one name.

    Raises:
      OSError: a file cannot be read.
      ValueError: one is not UTF-8.
    """
    texts = {}
    names = collections.Counter(pathlib.Path(path).name for path in paths)
    for path in paths:
        name = pathlib.Path(path).name
        try:
            lines = pathlib.Path(path).read_bytes().decode().split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None
        texts[name if names[name] == 1 else path] = lines
    return texts


def project_texts() -> dict[str, list[str]]:
    """The evaluation texts of the project, by language, one string a line."""
    folder = importlib.resources.files("kvlab.research") / "texts"
    return {
        language: (folder / f"{language.lower()}.txt").read_text("utf-8").split("\n")
        for language in ("English", "Turkish")
    }


def count_table(tokenizers: Mapping[str, Tokenizer], texts: Mapping[str, Sequence[str]]) -> str:
    """Counts the words and tokens of texts, and says in words how many words a token is.

    Args:
      tokenizers: by the name to show.
      texts: lines by the name to show; each line is encoded alone.

    Returns:
      A table, and under it one sentence per tokenizer.

    Raises:
      ValueError: a text without a word; the message names it.
    """
    rows, sentences = [], []
    for name, tokenizer in tokenizers.items():
        shares = []
        for text, lines in texts.items():
            try:
                counts = measure(tokenizer, lines)
            except ValueError as error:
                raise ValueError(f"{text}: {error}") from None
            rows.append(
                {
                    "tokenizer": name,
                    "text": text,
                    "words": counts.words,
                    "tokens": counts.tokens,
                    "tokens/word": f"{counts.tokens_per_word:.3f}",
                    "words/token": f"{counts.words_per_token:.3f}",
                    "bytes/token": f"{counts.bytes_per_token:.2f}",
                }
            )
            shares.append(f"{counts.words_per_token:.2f} words of {text}")
        sentences.append(f"- {name}: 1 token is about {' and '.join(shares)}")
    head = f'The claim is "1 token is about {CLAIM} English words". Measured:'
    return "\n".join([format_table(rows, list(rows[0])), "", head, *sentences])


_SHOW = "--model=MODEL shows what they lie near"


def piece_table(
    name: str,
    tokenizer: Tokenizer,
    text: str,
    embedding: np.ndarray | None = None,
    neighbours: int = 5,
    width: int | None = None,
) -> str:
    """Shows how a text is cut, and what the vectors of its tokens lie near.

    Args:
      name: of the tokenizer, to show.
      tokenizer: the tokenizer.
      text: the text.
      embedding: [V, D] float, the model's token vectors; None shows pieces and ids alone.
      neighbours: nearest tokens to show for each.
      width: of the vectors, where it is known without them.

    Returns:
      A heading, a table with one row per token, and the shape of the vectors.

    Raises:
      ValueError: a text without a token.
    """
    found = pieces(tokenizer, text)
    if not found:
        raise ValueError("the text is empty: there is nothing to cut into tokens")
    rows = [
        {"piece": one.piece, "id": str(one.token_id), "adds": _quoted(one.raw)} for one in found
    ]
    if embedding is None:
        of = f"D] for a model of width D; {_SHOW}" if width is None else f"{width}]; {_SHOW}"
        shape = f"vectors: [{len(found)}, {of}"
    else:
        size, width = embedding.shape
        shape = (
            f"vectors: [{len(found)}, {width}], one row of the model's embedding [{size}, {width}] "
            "for each token; nearest by cosine"
        )
        ids = [one.token_id for one in found]
        nearest, cosines = nearest_neighbours(embedding, ids, neighbours)
        for row, near, cosine in zip(rows, nearest, cosines, strict=True):
            row["nearest"] = ", ".join(
                f"{_quoted(tokenizer.decode_bytes([token], continued=True, keep_special=True))} "
                f"{value:.2f}"
                for token, value in zip(near.tolist(), cosine, strict=True)
            )
    counts = {"token": len(found), "word": len(text.split()), "byte": len(text.encode())}
    told = (f"{count} {unit}{'' if count == 1 else 's'}" for unit, count in counts.items())
    head = f"{name}: {', '.join(told)}"
    return "\n".join([head, "", format_table(rows, list(rows[0])), "", shape])


def _quoted(raw: bytes) -> str:
    """Bytes as text in quotes; those that are no whole character as they are."""
    try:
        return json.dumps(raw.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        return " ".join(f"<0x{byte:02X}>" for byte in raw)
