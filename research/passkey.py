"""Passkey retrieval: a number is hidden at some depth of a long text and asked for at its end.

Axes: T tokens of a text, F of its key. The task is that of Landmark Attention (arXiv 2305.16300),
in words of our own and as a plain continuation, no chat: the text ends in "The pass key is", the
key's tokens are forced, and each counts that the model ranks first. The token before the key goes
through decode and all others through prefill, so policies of retention have seen the question, and
every token of the key is predicted from what they left.
"""

import bisect
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from kvlab.models.config import DecoderConfig
from kvlab.models.tokenizers import Tokenizer
from kvlab.research.forced_scoring import ForcedText, forced_steps
from kvlab.research.inference import Params, head
from kvlab.research.scoring import head_params
from kvlab.research.session import Session

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where the key stands, as a share of the filler before it."""

_OPENING = "Somewhere in this story there is a pass key. Remember it, you will be asked for it."
_FILLER = (
    "The baker opened the shop before sunrise and swept the floor.",
    "A cart rolled slowly over the old bridge.",
    "Two gulls argued about a crust of bread on the harbour wall.",
    "The clock on the town hall was a few minutes late again.",
    "Rain fell for an hour and then the clouds moved on.",
    "In the garden behind the school the beans had started to climb.",
    "Nobody was in a hurry, and the ferry waited for the last passenger.",
    "An old dog slept in the middle of the lane.",
)
_QUESTION = "What is the pass key? The pass key is"


def passkey_texts(
    tokenizer: Tokenizer, length: int, depths: Sequence[float] = DEPTHS
) -> list[ForcedText]:
    """Texts that hide a key, one for each depth.

    Args:
      tokenizer: the model's.
      length: most tokens of a text, key and answer included; a text is as long as whole sentences
        let it be.
      depths: where to hide the key, 0 (at the start) to 1 (at the end).

    Returns:
      Texts whose targets are the tokens of the key.

    Raises:
      ValueError: `length` has no room for the question.
    """
    return [_passkey_text(tokenizer, length, depth) for depth in depths]


def _passkey_text(tokenizer: Tokenizer, length: int, depth: float) -> ForcedText:
    """The longest text that fits, its key drawn from length and depth."""
    key = str(np.random.default_rng([length, round(1000 * depth)]).integers(10_000, 100_000))

    def ids(sentences: int, ending: str = f" {key}") -> list[int]:
        text = _story(sentences, depth, key) + ending
        return tokenizer.encode(text, add_bos=tokenizer.adds_bos)

    sentences = bisect.bisect_right(range(length), length, key=lambda n: len(ids(n))) - 1
    if sentences < 0:
        raise ValueError(
            f"passkey_tokens={length} is too short: the question and the key alone take "
            f"{len(ids(0))} tokens; use more"
        )
    tokens, asked = ids(sentences), ids(sentences, "")
    places = range(len(asked), len(tokens))  # a space may be a token of its own
    answer = next(place for place in places if _has_digit(tokenizer, tokens[place]))
    fed, key_tokens = (np.asarray(part, np.int32) for part in (tokens[:-1], tokens[answer:]))
    return ForcedText(fed, answer - 1, key_tokens)


def _has_digit(tokenizer: Tokenizer, token: int) -> bool:
    return any(character.isdigit() for character in tokenizer.decode([token]))


def _story(sentences: int, depth: float, key: str) -> str:
    """The text up to its last words, "The pass key is"."""
    filler = [_FILLER[number % len(_FILLER)] for number in range(sentences)]
    filler.insert(round(depth * sentences), f"The pass key is {key}. Remember it: {key}.")
    return " ".join([_OPENING, *filler, _QUESTION])


def decoded_digits(session: Session, texts: Sequence[ForcedText]) -> list[np.ndarray]:
    """Whether each token of a key is ranked first, by prefill and forced decode.

    Args:
      session: of the variant; see `forced_steps`.
      texts: what `passkey_texts` gave.

    Returns:
      [F] bool of each text.
    """
    right = [np.zeros(len(text.targets), bool) for text in texts]
    for step in forced_steps(session, texts):
        best = np.asarray(jnp.argmax(step.logits, axis=1))
        for slot, number in step.texts.items():
            right[number][step.index] = best[slot] == texts[number].targets[step.index]
    return right


def recomputed_digits(
    hidden: Sequence[np.ndarray],
    texts: Sequence[ForcedText],
    config: DecoderConfig,
    params: Params,
) -> list[np.ndarray]:
    """As `decoded_digits`, from hidden states [T, D] that `recomputed_hidden` gave."""
    weights, right = head_params(params), []
    for states, text in zip(hidden, texts, strict=True):
        logits = head(weights, config, states[text.prompt_length :])
        right.append(np.asarray(jnp.argmax(logits, axis=1)) == text.targets)
    return right
