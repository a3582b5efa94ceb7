"""Lays out a conversation with the model's own chat template.

Templates come with downloaded models, so they run in jinja2's sandbox: no attribute that starts
with an underscore, no change of the arguments. Whitespace and helper functions are those that
transformers gives to templates (its `apply_chat_template`).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from kvlab.models.tokenizers.base import Tokenizer


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
    **variables: Any,
) -> str:
    """Writes a conversation as the text that the model was trained on.

    Args:
      tokenizer: Gives the template and the spelling of its begin and end tokens.
      messages: Each with `role` and `content`, in order.
      add_generation_prompt: End with the opening of the assistant's next turn.
      template: Jinja source to use instead of the tokenizer's own.
      **variables: Further variables of the template (`tools`, `enable_thinking`).

    Returns:
      The text, special tokens written out: encode it with `parse_special=True` and no added
      begin token, as `encode_chat` does.

    Raises:
      ValueError: No template; a message without role or content; an error in the template, or
        one that it raises.
    """
    source = tokenizer.chat_template if template is None else template
    if source is None:
        raise ValueError(
            f"tokenizer {tokenizer.name} has no chat template; give one, or use a plain prompt"
        )
    for i, message in enumerate(messages):
        if "role" not in message or "content" not in message:
            raise ValueError(f"message {i} has {sorted(message)}; it needs role and content")
    context = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": _piece(tokenizer, tokenizer.bos_id),
        "eos_token": _piece(tokenizer, next(iter(tokenizer.eos_ids), None)),
    }
    try:
        return _environment().from_string(source).render(context | variables)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is wrong in line {error.lineno}: {error}") from error
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
    **variables: Any,
) -> list[int]:
    """Encodes a conversation; arguments and errors as `render_chat`.

    Special tokens are read from the whole text, so those written in a message count too, as in
    transformers: a service must look for them in what users send.

    Returns:
      Token ids. The template itself writes the begin-of-text token where the model wants one.
    """
    text = render_chat(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        template=template,
        **variables,
    )
    return tokenizer.encode(text, parse_special=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _piece(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.id_to_piece(token_id)
