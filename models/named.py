"""Models that go by a name: those that come with kvlab, and those that are fetched.

What comes with kvlab lies in `shipped/` as Hugging Face folders, in bfloat16; MODEL_CARD.md there
says what they are, how they were trained and by which commands.
"""

import pathlib

from kvlab.models.fetch import REMOTE_MODELS, fetched_path

MATCHED_MODELS = ("shakespeare-mha", "shakespeare-gqa4", "shakespeare-gqa2", "shakespeare-mqa")
"""Llamas of 0.8 million parameters, trained alike, that differ in their KV heads: 8, 4, 2 and 1 for
8 query heads."""

SHIPPED_MODELS = (*MATCHED_MODELS, *(f"{name}-uptrained" for name in MATCHED_MODELS[1:]))
"""Those, and `shakespeare-mha` with its heads pooled, trained on for a twentieth of the tokens."""

_FOLDER = pathlib.Path(__file__).parent / "shipped"


def named_path(name: str) -> pathlib.Path | None:
    """Where the model of a name lies; None where no model has that name.

    Args:
      name: a key of `REMOTE_MODELS`, or one of `SHIPPED_MODELS`.

    Raises:
      FetchError: a model that has not been fetched.
    """
    if name in REMOTE_MODELS:
        return fetched_path(name)
    return _FOLDER / name if name in SHIPPED_MODELS else None


def model_names() -> str:
    """All names, for messages."""
    return ", ".join([*sorted(REMOTE_MODELS), *SHIPPED_MODELS])
