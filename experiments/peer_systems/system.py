"""What `kvlab peers` asks of a system.

Axes: B sequences, T prompt tokens, n new ones, V vocabulary.
"""

import dataclasses
import pathlib
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a system is to run.

    Attributes:
      model: a GGUF file; its values are those of the precision.
      precision: float32, bfloat16 or int8, of the weights.
      batch: sequences at once (B).
      max_length: most tokens of a sequence.
      threads: of the processor.
    """

    model: pathlib.Path
    precision: str
    batch: int
    max_length: int
    threads: int


class System(Protocol):
    """A system with a model loaded; times include all that the system does for a call."""

    versions: dict[str, str]

    def __init__(self, setting: Setting) -> None:
        """Loads the model, with room for the setting's sequences.

        Raises:
          ImportError: the system is not installed.
          ValueError: it cannot run the setting; the message says why.
        """
        ...

    def prefill(self, ids: np.ndarray) -> None:
        """Forgets all sequences and takes in prompts [B, T] int; logits of the last alone."""
        ...

    def decode(self, steps: int) -> np.ndarray:
        """Continues all sequences greedily; the new tokens [B, n] int."""
        ...

    def forced(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Continues all sequences by given tokens [B, n] int.

        Returns:
          Before each of them, the two most likely tokens [B, n, 2] int, and by how much the logit
          of the first lies above the second's [B, n] float.
        """
        ...

    def log_probs(self, ids: np.ndarray) -> np.ndarray:
        """Natural log-probabilities [T, V] float32 after each token of one text [T] int."""
        ...


def two_best(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [..., 2] of the two largest logits [..., V], and how far these lie apart [...]."""
    tokens = []
    left = logits.copy()
    for _ in range(2):
        tokens.append(left.argmax(axis=-1))
        np.put_along_axis(left, tokens[-1][..., None], -np.inf, axis=-1)
    best = np.stack(tokens, axis=-1)
    values = np.take_along_axis(logits, best, axis=-1)
    return best, values[..., 0] - values[..., 1]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities of logits [..., V], float32, summed in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normaliser = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return (shifted - normaliser).astype(np.float32)
