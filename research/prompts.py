"""Prompts and token lists as users write them, checked."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence

from kvlab.models.tokenizers import Tokenizer, encode_chat

_FORM = "[[1, 2, 3], [4, 5]]"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, as token ids and, where it was text, as that."""

    ids: tuple[int, ...]
    text: str | None = None


def encode_prompts(
    texts: Sequence[str], tokenizer: Tokenizer | None, *, chat: bool = False
) -> list[Prompt]:
    """Encodes prompts that are texts.

    Args:
      texts: the prompts.
      tokenizer: the model's.
      chat: each text is a user's message, laid out by the model's own chat template. Otherwise a
        model that expects a begin-of-text token gets it.

    Raises:
      ValueError: no tokenizer, no chat template, or a text that is not Unicode.
    """
    if tokenizer is None and texts:
        raise ValueError("the model has no tokenizer; give prompts as token ids (--prompt_ids)")
    prompts = []
    for number, text in enumerate(texts, 1):
        assert tokenizer is not None
        check_unicode(text, f"prompt {number}")
        if chat:
            ids = encode_chat(tokenizer, [{"role": "user", "content": text}])
        else:
            ids = tokenizer.encode(text, add_bos=tokenizer.adds_bos)
        prompts.append(Prompt(tuple(ids), text))
    return prompts


def check_unicode(text: str, name: str) -> None:
    """Refuses a text of the command line whose bytes were not UTF-8.

    Raises:
      ValueError: it cannot be encoded; `name` says which text it is.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is not UTF-8 text; give it in UTF-8") from None


def read_prompt(path: str | os.PathLike[str]) -> str:
    """Reads a file as one prompt, without the line end that editors put last.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not UTF-8.
    """
    try:
        text = pathlib.Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None
    return text.removesuffix("\n").removesuffix("\r")


def parse_ids(written: str) -> list[Prompt]:
    """Reads prompts written as token ids.

    Args:
      written: `1,2,3`, a JSON list of ids, or a JSON list of such lists.

    Raises:
      ValueError: anything else, or an empty list.
    """
    shown = written if len(written) <= 40 else f"{written[:40]}..."
    form = written if written.lstrip().startswith("[") else f"[{written}]"
    try:
        value = _parsed(form, "prompt_ids")
    except ValueError:
        raise ValueError(
            f"prompt_ids={shown!r} is no list of token ids; write 1,2,3, or {_FORM} for several"
        ) from None
    if not (value and isinstance(value, list) and all(isinstance(one, list) for one in value)):
        value = [value]
    return [Prompt(ids) for ids in _token_lists(value, "prompt_ids")]


def read_token_lists(path: str | os.PathLike[str]) -> list[tuple[int, ...]]:
    """Reads token ids from a file that holds a JSON list of lists.

    Raises:
      OSError: it cannot be read.
      ValueError: no JSON, not a list of lists of whole numbers, or an empty list.
    """
    try:
        content = pathlib.Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON: byte {error.start} is not UTF-8") from None
    return _token_lists(_parsed(content, str(path)), str(path))


def check_token_ids(lists: Sequence[Sequence[int]], vocab_size: int, name: str) -> None:
    """Refuses token ids that a model does not have.

    Args:
      lists: token ids.
      vocab_size: the model's.
      name: what a list is, for the message.

    Raises:
      ValueError: an id outside 0 to vocab_size - 1.
    """
    for number, ids in enumerate(lists, 1):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name} {number} has token id {token}, which is out of range; the model's "
                    f"ids are 0 to {vocab_size - 1}"
                )


def _parsed(content: str, source: str) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not a list of token ids: {error}") from None


def _token_lists(value: object, source: str) -> list[tuple[int, ...]]:
    """The value as lists of whole numbers, or a ValueError that says where it is not."""
    if not isinstance(value, list):
        kind = type(value).__name__
        raise ValueError(f"{source} holds a {kind}; wanted is a list of lists, such as {_FORM}")
    if not value:
        raise ValueError(f"{source} holds no list of token ids; wanted is {_FORM}, for example")
    for number, ids in enumerate(value, 1):
        if not isinstance(ids, list):
            raise ValueError(
                f"{source}: entry {number} is {ids!r:.40}; wanted is a list of lists, such as "
                f"{_FORM}"
            )
        if not ids:
            raise ValueError(f"{source}: list {number} is empty; give at least one token id")
        wrong = [token for token in ids if type(token) is not int]
        if wrong:
            raise ValueError(
                f"{source}: list {number} has {json.dumps(wrong[0])[:40]}, which is no whole number"
            )
    return [tuple(ids) for ids in value]
