"""Text from prompts: sequences in the slots of a session, in waves, until each has ended.

What a sequence gets does not depend on the others: not on the wave, the slot or the order.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from kvlab.models.tokenizers import Detokenizer, StopStrings, Tokenizer
from kvlab.ops.sampling import Sampling
from kvlab.research.inference import InferenceConfig
from kvlab.research.prompts import Prompt, check_token_ids
from kvlab.research.session import Continuation, Session

FinishReason = Literal["stop", "length", "max_length", "out_of_pages"]
OnText = Callable[[int, str], None]
_STOP_STRING_STEPS = 8  # tokens a call: what is decoded past a stop string is thrown away


@dataclasses.dataclass(frozen=True)
class Options:
    """How sequences are continued.

    Args:
      max_tokens: most new tokens of a sequence.
      sampling: how tokens are chosen; sample i of a prompt has `sample_index` i.
      num_samples: continuations of each prompt.
      stop_ids: token ids that end a sequence.
      stop: strings that end a text, which is cut before them.
    """

    max_tokens: int = 64
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    num_samples: int = 1
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """One continuation of one prompt.

    Attributes:
      prompt_index: which prompt.
      sample_index: which of its samples.
      prompt: the prompt.
      tokens: new token ids; a stop token, or the token that completes a stop string, is the last.
      log_probs: of each token, natural, under the model without temperature or filters.
      text: what the tokens say, without stop token and stop string; None without a tokenizer.
      finish_reason: `stop` (token or string), `length` (max_tokens), `max_length` (the cache or
        the model's context is full), `out_of_pages` (the pool is).
      ttft_s: seconds from the start of its wave to its first token; None where there was none.
      tpot_s: seconds per token after the first; None where there is no second.
    """

    prompt_index: int
    sample_index: int
    prompt: Prompt
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str | None
    finish_reason: FinishReason
    ttft_s: float | None
    tpot_s: float | None


def generate(
    session: Session,
    prompts: Sequence[Prompt],
    options: Options,
    tokenizer: Tokenizer | None = None,
    on_text: OnText | None = None,
) -> Iterator[Completion]:
    """Continues prompts, as many side by side as the session has slots.

    A prompt with several samples in one wave is computed once and forked.

    Args:
      session: an empty session; it is left empty.
      prompts: what to continue.
      options: how.
      tokenizer: makes the text; None gives token ids alone.
      on_text: called with the index of a completion and new text of it, as it comes; the device
        then hands over every token.

    Yields:
      Completions, prompt by prompt and sample by sample.

    Raises:
      ValueError: a prompt that is empty, too long, or has ids out of range; stop strings without a
        tokenizer; an empty stop string.
    """
    check_prompts(prompts, session.config)
    if options.stop and tokenizer is None:
        raise ValueError("stop strings need text, and this model has no tokenizer; use stop ids")
    max_length, slots = session.config.max_length, session.config.slots
    waiting = [
        _Sequence(number, prompt, sample, options, max_length, tokenizer)
        for number, prompt in enumerate(prompts)
        for sample in range(options.num_samples)
    ]
    for first in range(0, len(waiting), slots):
        wave = dict(enumerate(waiting[first : first + slots]))
        _run_wave(session, wave, options, on_text)
        for sequence in wave.values():
            yield sequence.completion()


def check_prompts(prompts: Sequence[Prompt], config: InferenceConfig) -> None:
    """Refuses prompts that a session cannot continue.

    Args:
      prompts: all of them.
      config: the session's.

    Raises:
      ValueError: an empty prompt, one that leaves no room for a new token, ids out of range.
    """
    check_token_ids([prompt.ids for prompt in prompts], config.model.vocab_size, "prompt")
    for number, prompt in enumerate(prompts, 1):
        if not prompt.ids:
            raise ValueError(f"prompt {number} is empty; give at least one token")
        if len(prompt.ids) >= config.max_length:
            context = config.model.max_length
            limit = (
                f"the model's context is {context} tokens"
                if config.max_length == context
                else f"max_length={config.max_length} (the model's context is {context})"
            )
            raise ValueError(
                f"prompt {number} has {len(prompt.ids)} tokens and leaves no room for a new one: "
                f"{limit}; shorten it" + (" or raise max_length" if "=" in limit else "")
            )


def detokenizer(tokenizer: Tokenizer, prompt: Prompt) -> Detokenizer:
    """Decodes what follows a prompt: a space at its start counts if the prompt holds text."""
    steers = (token < tokenizer.vocab_size and tokenizer.is_special(token) for token in prompt.ids)
    return Detokenizer(tokenizer, continued=not all(steers))


def warm_up(session: Session, forks: bool) -> None:
    """Compiles what `generate` needs, so that timings hold no compilation.

    Args:
      session: an empty session; it is left empty.
      forks: whether prompts will be forked.
    """
    session.warm_up()
    session.prefill({0: [0]})
    if forks and session.config.slots > 1:
        session.fork(0, [1])
    session.release()


class _Sequence:
    """One continuation as it grows."""

    def __init__(
        self,
        prompt_index: int,
        prompt: Prompt,
        sample_index: int,
        options: Options,
        max_length: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = prompt_index * options.num_samples + sample_index
        self.prompt_index, self.sample_index, self.prompt = prompt_index, sample_index, prompt
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.ttft_s: float | None = None
        self.decode_s = 0.0  # after the first token
        room = max_length - len(prompt.ids)
        self.limit = min(options.max_tokens, room)
        self._context_is_limit = room < options.max_tokens
        self._stops = StopStrings(options.stop)
        self._pieces: list[str] = []
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = detokenizer(tokenizer, prompt)

    def extend(self, got: Continuation, seconds_per_token: float) -> str:
        """Takes what one decode call gave; returns the text that it completes."""
        began = len(self._pieces)
        for place, (token, log_prob) in enumerate(zip(got.tokens, got.log_probs, strict=True)):
            if self.tokens:
                self.decode_s += seconds_per_token
            self.tokens.append(token)
            self.log_probs.append(log_prob)
            ends = got.stopped and place == len(got.tokens) - 1
            if self._detokenizer is not None and not ends:
                self._pieces.append(self._stops.push(self._detokenizer.push([token])))
                if self._stops.stopped:
                    break
        return "".join(self._pieces[began:])

    def ended(self, got: Continuation) -> FinishReason | None:
        """Why the sequence has ended after these tokens, or None if it goes on."""
        if got.stopped or self._stops.stopped:
            return "stop"
        if got.stalled:
            return "out_of_pages"
        if len(self.tokens) < self.limit:
            return None
        return "max_length" if self._context_is_limit else "length"

    def finish(self, reason: FinishReason) -> str:
        """Ends the sequence; returns the text that was held back."""
        self.finish_reason = reason
        if self._detokenizer is None:
            return ""
        rest = self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        self._pieces.append(rest)
        return rest

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        after_first = len(self.tokens) - 1
        return Completion(
            self.prompt_index,
            self.sample_index,
            self.prompt,
            tuple(self.tokens),
            tuple(self.log_probs),
            None if self._detokenizer is None else "".join(self._pieces),
            self.finish_reason,
            self.ttft_s,
            self.decode_s / after_first if after_first > 0 else None,
        )


def _run_wave(
    session: Session, wave: dict[int, _Sequence], options: Options, on_text: OnText | None
) -> None:
    """Continues the sequences of one wave, by slot, until each has ended."""
    began = time.perf_counter()
    try:
        _prefill_wave(session, wave)
        sampling = {
            slot: dataclasses.replace(options.sampling, sample_index=sequence.sample_index)
            for slot, sequence in wave.items()
        }
        # Each sequence's first token has a call of its own: its time is a figure of its own.
        steps, later_steps = 1, _steps_per_call(session.config, options, on_text)
        running = dict(wave)
        while running:
            limits = {
                slot: min(steps, sequence.limit - len(sequence.tokens))
                for slot, sequence in running.items()
            }
            called = time.perf_counter()
            results = session.decode(limits, sampling=sampling, stop_ids=options.stop_ids)
            now = time.perf_counter()
            longest = max(len(got.tokens) for got in results.values())
            for slot, got in results.items():
                sequence = running[slot]
                if got.tokens and sequence.ttft_s is None:
                    sequence.ttft_s = now - began
                new_text = sequence.extend(got, (now - called) / max(longest, 1))
                reason = sequence.ended(got)
                if reason is not None:
                    new_text += sequence.finish(reason)
                    del running[slot]
                if on_text is not None and new_text:
                    on_text(sequence.index, new_text)
            steps = later_steps
    finally:
        session.release()


def _prefill_wave(session: Session, wave: dict[int, _Sequence]) -> None:
    """Computes each prompt of a wave once, and forks it for its further samples."""
    by_prompt: dict[int, list[int]] = {}
    for slot, sequence in wave.items():
        by_prompt.setdefault(sequence.prompt_index, []).append(slot)
    for first, *others in by_prompt.values():
        session.prefill({first: wave[first].prompt.ids}, hidden=False)
        if others:
            session.fork(first, others)


def _steps_per_call(config: InferenceConfig, options: Options, on_text: OnText | None) -> int:
    if on_text is not None:
        return 1
    return min(_STOP_STRING_STEPS, config.decode_steps) if options.stop else config.decode_steps
