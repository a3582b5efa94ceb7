"""What the JSON files of a Hugging Face folder say about its tokenizer."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from kvlab.models.tokenizers.base import SpecialTokens, end_ids
from kvlab.models.tokenizers.sentencepiece_tokenizer import AddedToken


@dataclasses.dataclass(frozen=True)
class FolderConfig:
    """The settings of a folder, of all its files together.

    Attributes:
      names_bos: `tokenizer_config.json` decides about a begin-of-text token, be it with null.
      bos_token: Its piece, or None.
      eos_token: The piece that ends a text, or None.
      bos_id: Id of the begin-of-text token by the model's own files, or None.
      eos_ids: Ids that end generation by the model's own files.
      add_bos_token: Whether texts begin with it; None where the folder does not say.
      chat_template: Jinja source, or None.
      tokenizer_class: Name of the class that the folder was written for, or None.
      add_prefix_space: Text is encoded as if a space stood before it.
      added: Tokens added after training, by id.
    """

    names_bos: bool
    bos_token: str | None
    eos_token: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos_token: bool | None
    chat_template: str | None
    tokenizer_class: str | None
    add_prefix_space: bool
    added: dict[int, AddedToken]

    def special_tokens(
        self, piece_to_id: Callable[[str], int | None], own: SpecialTokens
    ) -> SpecialTokens:
        """Resolves the settings against a vocabulary.

        Args:
          piece_to_id: The vocabulary.
          own: What the tokenizer's own file says, for all that the folder leaves open.

        Returns:
          The special tokens.

        Raises:
          ValueError: The folder names a token that the vocabulary lacks.
        """
        if self.names_bos:
            bos = _lookup(self.bos_token, piece_to_id)
        else:
            bos = own.bos_id if self.bos_id is None else self.bos_id
        declared = [_lookup(self.eos_token, piece_to_id), *self.eos_ids, *own.eos_ids]
        wanted = own.adds_bos if self.add_bos_token is None else self.add_bos_token
        return SpecialTokens(
            bos_id=bos,
            eos_ids=end_ids(piece_to_id, declared),
            adds_bos=wanted and bos is not None,
            chat_template=self.chat_template or own.chat_template,
        )


def read_folder_config(folder: pathlib.Path) -> FolderConfig:
    """Reads the settings of a folder; every file may be absent.

    `tokenizer_config.json` comes first, then `special_tokens_map.json`, then the ids of
    `generation_config.json`, then those of `config.json`. `chat_template.jinja` comes before
    the template in `tokenizer_config.json`.

    Args:
      folder: The folder.

    Returns:
      Its settings.

    Raises:
      ValueError: A file that is not a JSON object.
    """
    config = _read(folder / "tokenizer_config.json")
    tokens = _read(folder / "special_tokens_map.json") | {
        key: config[key] for key in ("bos_token", "eos_token") if key in config
    }
    model = _read(folder / "config.json") | {
        key: value
        for key, value in _read(folder / "generation_config.json").items()
        if key in ("bos_token_id", "eos_token_id")
    }
    eos = model.get("eos_token_id")
    added = {i: AddedToken(p, True) for p, i in _read(folder / "added_tokens.json").items()}
    for token_id, token in config.get("added_tokens_decoder", {}).items():
        added[int(token_id)] = AddedToken(token["content"], bool(token.get("special", False)))
    return FolderConfig(
        names_bos="bos_token" in tokens,
        bos_token=_content(tokens.get("bos_token")),
        eos_token=_content(tokens.get("eos_token")),
        bos_id=model.get("bos_token_id"),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        add_bos_token=config.get("add_bos_token"),
        chat_template=_chat_template(folder, config),
        tokenizer_class=config.get("tokenizer_class"),
        add_prefix_space=bool(config.get("add_prefix_space", False)),
        added=added,
    )


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Args:
      path: The file.

    Returns:
      The object.

    Raises:
      ValueError: Not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def _read(path: pathlib.Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _content(token: str | dict[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _lookup(piece: str | None, piece_to_id: Callable[[str], int | None]) -> int | None:
    if piece is None:
        return None
    token_id = piece_to_id(piece)
    if token_id is None:
        raise ValueError(
            f"the folder names the token {piece!r}, which its vocabulary does not hold"
        )
    return token_id


def _chat_template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template
