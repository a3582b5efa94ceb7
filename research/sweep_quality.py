"""The quality of a sweep's variants: all of them on the same positions of the same texts.

The oracle is the unmodified model without a cache; what it computes is kept for every variant.
Texts are scored by one prefill each, or, where a variant evicts, by forced decode over windows
(`kvlab.research.forced_scoring`).
"""

import dataclasses
import functools
import hashlib

import numpy as np

from kvlab.models.config import DecoderConfig
from kvlab.models.load import Model
from kvlab.models.tokenizers import Tokenizer
from kvlab.research.evaluation_texts import read_texts
from kvlab.research.experiment import Sweep, Variant
from kvlab.research.forced_scoring import (
    ForcedStep,
    ForcedText,
    recomputed_hidden,
    score_decoded,
    score_recomputed,
    windows,
)
from kvlab.research.inference import Params
from kvlab.research.passkey import decoded_digits, passkey_texts, recomputed_digits
from kvlab.research.scoring import Quality, compare
from kvlab.research.session import Session

_MEANS = ("kl_vs_oracle", "top1_agreement")  # over positions
_TRACE_EVERY = 8  # steps
_FIGURES = ("perplexity", *_MEANS, "kl_vs_oracle_p99")


class SweepQuality:
    """Scores the variants of one sweep.

    Attributes:
      texts: token ids [T] int32 of the evaluation texts, by name; none where nothing is scored.
    """

    def __init__(self, sweep: Sweep, model: Model) -> None:
        """Encodes the texts.

        Args:
          sweep: says what is scored.
          model: the loaded `sweep.model`.

        Raises:
          ValueError: a text that cannot be read or is too short for a window, a passkey text
            without room for its key, a length past the model's context.
        """
        self._sweep, self._model = sweep, model
        self.texts: dict[str, np.ndarray] = {}
        self._groups: dict[str, list[ForcedText]] = {}
        self._passkeys: dict[int, list[ForcedText]] = {}
        if model.tokenizer is not None:
            if sweep.quality_tokens != 0:
                self._encode_texts(model.tokenizer)
            for length in sweep.passkey_tokens:
                self._check_context("passkey_tokens", length)
                self._passkeys[length] = passkey_texts(model.tokenizer, length)
        self._computed: dict[tuple[DecoderConfig, str | int], list[np.ndarray]] = {}
        self._scores: dict[tuple[str, bytes], Quality] = {}
        self._taken: list[tuple[float, float]] = []

    def _encode_texts(self, tokenizer: Tokenizer) -> None:
        sweep, context = self._sweep, self._model.config.max_length
        begins = tokenizer.adds_bos and not sweep.scores_windows
        for name, text in read_texts(sweep.texts).items():
            ids = np.asarray(tokenizer.encode(text, add_bos=begins), np.int32)
            if not sweep.scores_windows:
                ids = ids[: min(sweep.quality_tokens or len(ids), context)]
                self._groups[name] = [ForcedText(ids, len(ids), ids[:0])]
            self.texts[name] = ids
        if sweep.scores_windows:
            self._check_context("window_tokens", sweep.window_tokens)
            bos_id = tokenizer.special_tokens.bos_id if tokenizer.adds_bos else None
            sizes = sweep.window_tokens, sweep.forced_tokens, sweep.quality_tokens, bos_id
            self._groups = {name: windows(ids, *sizes) for name, ids in self.texts.items()}

    def _check_context(self, name: str, length: int) -> None:
        context = self._model.config.max_length
        if length > context:
            raise ValueError(
                f"{name}={length} is past the model's context of {context} tokens; lower {name}"
            )

    def notes(self) -> list[str]:
        """Paragraphs that the report needs beside the figures."""
        asked = self._sweep.quality_tokens != 0 or self._sweep.passkey_tokens
        if asked and self._model.tokenizer is None:
            return ["Quality was not scored: the model has no tokenizer to encode texts with."]
        notes = [
            f"Passkey retrieval at {length} tokens is not reported: with the full cache the model "
            f"itself finds {sum(found)} of {len(found)} keys."
            for length, found in self._found_by_the_oracle.items()
            if not all(found)
        ]
        if self._groups and self._sweep.scores_windows:
            scored = {
                name: sum(len(it.forced) for it in texts) for name, texts in self._groups.items()
            }
            counts = ", ".join(f"{count:,} ({name})" for name, count in scored.items())
            prompt = self._sweep.window_tokens - self._sweep.forced_tokens
            notes.append(
                "Quality was scored where evictions show: each window of a text went through "
                f"prefill for {prompt} tokens, retention was applied, and the next "
                f"{self._sweep.forced_tokens} tokens were forced through decode. Only the "
                f"predictions after these count, {counts} in all, for every variant alike."
            )
        return notes + self._never_evicting()

    def _never_evicting(self) -> list[str]:
        """Says where a window is too short for a policy to show."""
        sweep = self._sweep
        budgets = [
            policy.budget
            for variant in sweep.variants
            for policy in variant.policies
            if isinstance(policy.budget, int) and policy.budget >= sweep.window_tokens
        ]
        if not (budgets and sweep.scores_windows):
            return []
        return [
            f"A budget of {min(budgets)} tokens or more evicts nothing in windows of "
            f"{sweep.window_tokens}: raise window_tokens to see what it costs."
        ]

    def metrics(
        self, variant: Variant, session: Session, config: DecoderConfig, params: Params
    ) -> dict[str, float]:
        """Perplexity, KL and agreement on each text and over all, and passkey retrieval.

        Args:
          variant: what is scored.
          session: of the variant; it is emptied.
          config: the variant's model.
          params: its parameters.
        """
        self._taken = []
        metrics = self._text_metrics(variant, session, config, params)
        if self._taken:
            metrics["kv_bytes_window"] = self._taken[-1][1]
        return metrics | self._passkey_metrics(variant, session, config, params)

    def _text_metrics(
        self, variant: Variant, session: Session, config: DecoderConfig, params: Params
    ) -> dict[str, float]:
        score = self._windows_score if self._sweep.scores_windows else self._prefill_score
        scores = {name: score(name, variant, session, config, params) for name in self._groups}
        if not scores:
            return {}
        metrics = {
            f"{figure}_{name}": getattr(score, figure)
            for name, score in scores.items()
            for figure in _FIGURES
        }
        positions = [len(score.kl) for score in scores.values()]
        metrics["perplexity"] = float(np.exp(_joined(scores, "nll").mean()))
        for figure in _MEANS:
            values = [getattr(score, figure) for score in scores.values()]
            metrics[figure] = float(np.average(values, weights=positions))
        metrics["kl_vs_oracle_p99"] = float(np.quantile(_joined(scores, "kl"), 0.99))
        return metrics

    def _prefill_score(
        self,
        name: str,
        variant: Variant,
        session: Session,
        config: DecoderConfig,
        params: Params,
    ) -> Quality:
        """Scores a whole text by one prefill."""
        model, tokens = self._model, self.texts[name]
        longest = max(map(len, self.texts.values()))
        (oracle,) = self._recomputed(model.config, model.params, name, longest)
        if variant.recomputes:
            (hidden,) = self._recomputed(config, params, name, longest)
        else:
            hidden = _fitting(session, len(tokens)).prefill({0: tokens})[0]
        # Lossless variants often give the very bits of another one.
        key = (name, hashlib.sha256(hidden.tobytes()).digest())
        if key not in self._scores:
            self._scores[key] = compare(model.config, model.params, oracle, hidden, tokens)
        return self._scores[key]

    def _windows_score(
        self,
        name: str,
        variant: Variant,
        session: Session,
        config: DecoderConfig,
        params: Params,
    ) -> Quality:
        """Scores the windows of a text by forced decode."""
        model, texts = self._model, self._groups[name]
        oracle = self._recomputed(model.config, model.params, name)
        if variant.recomputes:
            hidden = self._recomputed(config, params, name)
            return score_recomputed(hidden, texts, oracle, model.config, model.params)
        watch = None
        if name == next(iter(self._groups)):
            self._taken = []
            watch = functools.partial(self._trace, session, texts)
        return score_decoded(session, texts, oracle, model.config, model.params, watch)

    def _trace(self, session: Session, texts: list[ForcedText], step: ForcedStep) -> None:
        """Notes the bytes that a sequence has taken, now and then, while the first text is fed."""
        last = step.index == self._sweep.forced_tokens - 1
        if 0 in step.texts.values() and (last or step.index % _TRACE_EVERY == 0):
            use = session.use()
            assert use is not None
            length = texts[0].prompt_length + step.index + 1
            self._taken.append((length, use.taken_bytes / len(step.texts)))

    @property
    def taken_bytes(self) -> list[tuple[float, float]]:
        """Tokens of text, and bytes a sequence has taken then, of the variant scored last."""
        return list(self._taken)

    def _passkey_metrics(
        self, variant: Variant, session: Session, config: DecoderConfig, params: Params
    ) -> dict[str, float]:
        """Shares of keys and of their tokens, at each length that the full cache answers."""
        right: dict[int, list[np.ndarray]] = {}
        for length, found in self._found_by_the_oracle.items():
            if all(found) and variant.recomputes:
                right[length] = self._recomputed_digits(config, params, length)
            elif all(found):
                right[length] = decoded_digits(session, self._passkeys[length])
        groups = {f"_{length}": digits for length, digits in right.items()}
        if groups:
            groups[""] = [digits for group in right.values() for digits in group]
        metrics = {}
        for suffix, digits in groups.items():
            metrics[f"passkey_accuracy{suffix}"] = float(np.mean([one.all() for one in digits]))
            metrics[f"passkey_digits{suffix}"] = float(np.concatenate(digits).mean())
        return metrics

    @functools.cached_property
    def _found_by_the_oracle(self) -> dict[int, list[bool]]:
        """Whether the unmodified model finds each key, by length."""
        model = self._model
        return {
            length: [
                bool(digits.all())
                for digits in self._recomputed_digits(model.config, model.params, length)
            ]
            for length in self._passkeys
        }

    def _recomputed_digits(
        self, config: DecoderConfig, params: Params, length: int
    ) -> list[np.ndarray]:
        texts = self._passkeys[length]
        hidden = self._recomputed(config, params, length)
        return recomputed_digits(hidden, texts, config, params)

    def _recomputed(
        self,
        config: DecoderConfig,
        params: Params,
        name: str | int,
        length: int | None = None,
    ) -> list[np.ndarray]:
        """Hidden states [T, D] of a group of texts without a cache, kept for later variants."""
        key = (config, name)
        if key not in self._computed:
            texts = self._passkeys[name] if isinstance(name, int) else self._groups[name]
            self._computed[key] = recomputed_hidden(
                config, params, texts, length, self._sweep.implementation
            )
        return self._computed[key]


def _joined(scores: dict[str, Quality], figure: str) -> np.ndarray:
    """A figure of every position of all texts."""
    return np.concatenate([getattr(score, figure) for score in scores.values()])


def _fitting(session: Session, length: int) -> Session:
    """The session, emptied, or one like it of one sequence that may grow to `length` tokens."""
    if session.config.max_length >= length:
        session.release()
        return session
    config = dataclasses.replace(session.config, slots=1, max_length=length)
    return Session(session.params, config)
