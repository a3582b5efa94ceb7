"""Scores on the path that evicts: the first part of a text by prefill, the rest forced in decode.

Axes: B sequences (slots), T tokens of a text, F forced ones among them, D model width, V
vocabulary. A perplexity from one prefill never sees an eviction: policies of retention apply when a
prompt is complete, and at every decode step after that. So a text is fed in two parts, and only
what the model predicts after the forced tokens counts.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from kvlab.models.config import DecoderConfig
from kvlab.ops.specs import CacheSpec, Recompute
from kvlab.research.calls import Calls, Piece
from kvlab.research.inference import InferenceConfig, Params
from kvlab.research.scoring import Quality, compare_hidden, compare_logits, head_params
from kvlab.research.session import Session


@dataclasses.dataclass(frozen=True, eq=False)
class ForcedText:
    """A text whose first part is prefilled and whose rest is forced through decode.

    Attributes:
      tokens: [T] int32, all that is fed.
      prompt_length: how many of them go through prefill.
      targets: [F] int32, F = T - prompt_length: the token that follows each forced one.
    """

    tokens: np.ndarray
    prompt_length: int
    targets: np.ndarray

    @property
    def prompt(self) -> np.ndarray:
        """The tokens that go through prefill."""
        return self.tokens[: self.prompt_length]

    @property
    def forced(self) -> np.ndarray:
        """The tokens that go through decode, one a step."""
        return self.tokens[self.prompt_length :]


def windows(
    tokens: np.ndarray,
    window_tokens: int,
    forced_tokens: int,
    limit: int | None = None,
    bos_id: int | None = None,
) -> list[ForcedText]:
    """Cuts a text into windows whose forced parts follow each other without a gap.

    Each window begins `forced_tokens` after the one before, so windows overlap, a position is
    scored at most once, and every scored one has `window_tokens - forced_tokens` tokens or more
    before it. The last window may force fewer.

    Args:
      tokens: [T] int32, the text.
      window_tokens: of a window, its forced part included.
      forced_tokens: of a window; the rest is its prompt.
      limit: positions to score at most, over all windows; None is all that the text has.
      bos_id: begins every window, as one of its tokens, where the model expects it.

    Raises:
      ValueError: the text does not hold a whole window and a token after it.
    """
    first = [] if bos_id is None else [bos_id]
    held = window_tokens - len(first)  # of the text, in a window
    prompt = held - forced_tokens
    if len(tokens) <= held:
        raise ValueError(
            f"a text of {len(tokens)} tokens is too short for window_tokens={window_tokens} and a "
            f"token after them; lower window_tokens, or give a longer text"
        )
    end = len(tokens) - 1  # the last token has no successor to predict
    if limit is not None:
        end = min(end, prompt + limit)
    cuts = [(start, min(start + held, end)) for start in range(0, end - prompt, forced_tokens)]
    return [
        ForcedText(
            np.concatenate([first, tokens[start:stop]]).astype(np.int32),
            window_tokens - forced_tokens,
            tokens[start + prompt + 1 : stop + 1],
        )
        for start, stop in cuts
    ]


@dataclasses.dataclass(frozen=True)
class ForcedStep:
    """One decode step over several texts."""

    texts: Mapping[int, int]  # slot to the index of its text
    index: int  # which of their forced tokens was fed
    logits: jax.Array  # [B, V] float32: what follows it; used up by the next step


def forced_steps(session: Session, texts: Sequence[ForcedText]) -> Iterator[ForcedStep]:
    """Feeds texts side by side in all slots, as many at a time as there are slots.

    Args:
      session: it is emptied, before and after.
      texts: each with a prompt and one forced token at least.

    Yields:
      Each step, before the next one runs.

    Raises:
      ValueError: a text that the session has no room for.
    """
    slots = session.config.slots
    for first in range(0, len(texts), slots):
        wave = dict(enumerate(texts[first : first + slots]))
        session.release()
        session.prefill({slot: text.prompt for slot, text in wave.items()})
        for index in range(max(len(text.forced) for text in wave.values())):
            fed = {slot: it.forced[index : index + 1] for slot, it in wave.items()}
            fed = {slot: ids for slot, ids in fed.items() if len(ids)}
            results = session.decode(dict.fromkeys(fed, 1), forced=fed)
            stalled = [first + slot for slot, result in results.items() if result.stalled]
            if stalled:
                raise ValueError(
                    f"no room for forced token {index} of texts {stalled}; give the session a "
                    "larger max_length or num_pages, or shorter texts"
                )
            yield ForcedStep({slot: first + slot for slot in fed}, index, session.logits)
    session.release()


def recomputed_hidden(
    config: DecoderConfig,
    params: Params,
    texts: Sequence[ForcedText],
    length: int | None = None,
    implementation: str | None = None,
) -> list[np.ndarray]:
    """Computes texts whole, without a cache: the oracle, and the forced path of `recompute`.

    Args:
      config: the model.
      params: its parameters.
      texts: what to compute.
      length: tokens that one call computes; None is those of the longest text.
      implementation: of attention; None is the best available.

    Returns:
      Hidden states after the final norm, [T, D], of each text.
    """
    length = length or max(len(text.tokens) for text in texts)
    shapes = InferenceConfig(
        config,
        CacheSpec(Recompute()),
        slots=1,
        max_length=length,
        chunk=length,
        implementation=implementation,
    )
    calls, states = Calls(params, shapes), []
    for text in texts:
        # The base of dynamic NTK RoPE follows the prompt, in decode too.
        _, hidden = calls.prefill_call([Piece(0, text.tokens, text.prompt_length)])
        states.append(np.asarray(hidden)[0, : len(text.tokens)])
        calls.release()
    return states


def score_decoded(
    session: Session,
    texts: Sequence[ForcedText],
    oracle: Sequence[np.ndarray],
    config: DecoderConfig,
    params: Params,
    watch: Callable[[ForcedStep], None] | None = None,
) -> Quality:
    """Scores a variant by prefill and forced decode, step by step beside the oracle.

    Args:
      session: of the variant; see `forced_steps`.
      texts: what to feed.
      oracle: the oracle's hidden states [T, D] of each text.
      config: the oracle's model.
      params: parameters that hold its head.
      watch: told of each step before the next one runs.

    Returns:
      Quality over the forced tokens of all texts, text by text.
    """
    weights, slots = head_params(params), session.config.slots
    nll, kl, agrees = (
        [np.zeros(len(text.forced), dtype) for text in texts]
        for dtype in (np.float32, np.float32, bool)
    )
    for step in forced_steps(session, texts):
        if watch is not None:
            watch(step)
        hidden = np.zeros((slots, oracle[0].shape[1]), oracle[0].dtype)
        targets = np.zeros(slots, np.int32)
        for slot, number in step.texts.items():
            hidden[slot] = oracle[number][texts[number].prompt_length + step.index]
            targets[slot] = texts[number].targets[step.index]
        compared = jax.device_get(compare_logits(weights, config, hidden, step.logits, targets))
        for column, values in zip((nll, kl, agrees), compared, strict=True):
            for slot, number in step.texts.items():
                column[number][step.index] = values[slot]
    return Quality.of(*map(np.concatenate, (nll, kl, agrees)))


def score_recomputed(
    hidden: Sequence[np.ndarray],
    texts: Sequence[ForcedText],
    oracle: Sequence[np.ndarray],
    config: DecoderConfig,
    params: Params,
) -> Quality:
    """Scores a variant that has no cache, at the positions that `score_decoded` compares.

    Args:
      hidden: the variant's hidden states [T, D] of each text.
      texts: the texts.
      oracle: the oracle's, likewise.
      config: the oracle's model.
      params: parameters that hold its head.
    """
    ours, theirs = (
        np.concatenate([it[text.prompt_length :] for it, text in zip(side, texts, strict=True)])
        for side in (hidden, oracle)
    )
    targets = np.concatenate([text.targets for text in texts])
    return Quality.of(*compare_hidden(config, params, theirs, ours, targets))
