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
          Before each of them, the most likely token [B, n] int, and by how much its logit lies
          above the next [B, n] float.
        """
        ...

    def log_probs(self, ids: np.ndarray) -> np.ndarray:
        """Natural log-probabilities [T, V] float32 after each token of one text [T] int."""
        ...


def best_and_margin(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest of logits [..., V], and how far it lies above the next."""
    best = logits.argmax(axis=-1)
    two = np.partition(logits, -2, axis=-1)[..., -2:]
    return best, two[..., 1] - two[..., 0]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities of logits [..., V], float32, summed in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normaliser = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return (shifted - normaliser).astype(np.float32)
