"""Runs a sweep: every variant at every batch size, one row each, speed and quality together."""

import contextlib
import dataclasses
import hashlib
import importlib.resources
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from kvlab.models.config import DecoderConfig
from kvlab.models.load import Model
from kvlab.ops.specs import CacheSpec, Recompute
from kvlab.research.cache import CacheUse
from kvlab.research.compilation import Compilations
from kvlab.research.experiment import Sweep, Variant
from kvlab.research.inference import InferenceConfig, Params
from kvlab.research.programs import compile_programs
from kvlab.research.progress import progress
from kvlab.research.results import Row, RunFolder, make_row, timestamp
from kvlab.research.scoring import Quality, compare
from kvlab.research.session import Session
from kvlab.research.variants import apply_attention, kv_heads

TEXTS = {"en": "english.txt", "tr": "turkish.txt"}

POOLING_NOTE = (
    "Why pooled heads are poor here: gqa and mqa variants with fewer KV heads than the model was "
    "trained with are made by averaging the key and value projections of heads that learned "
    "different things. The average of several heads is none of them, so every query head reads "
    "keys and values that it was never trained against, in every layer, and the text falls apart. "
    "The GQA paper (arXiv 2305.13245) starts from the same average, and then trains on for 5 % of "
    "the original steps, which repairs most of it; nothing here has been trained on. Read these "
    "rows for their speed and bytes, and their quality as the gap that uptraining has to close. "
    "Going the other way is free: repeating KV heads (mha) computes the same function."
)


def run_sweep(sweep: Sweep, model: Model, folder: RunFolder) -> list[Row]:
    """Runs every point that the folder has no finished row of.

    A point that fails becomes a row with its error, and the sweep goes on.

    Args:
      sweep: what to run.
      model: the loaded `sweep.model`.
      folder: an open run folder.

    Returns:
      The newest row of every point.
    """
    points = list(sweep_points(sweep))
    waiting = [point for point in points if folder.finished(point.settings, sweep.seed) is None]
    runner = _Runner(sweep, model)
    folder.describe(runner.notes())
    if waiting:
        done = len(points) - len(waiting)
        with progress(len(points), sweep.name, done=done) as report:
            for index, point in enumerate(waiting):
                row = _run_point(sweep, runner, point, waiting[index + 1 :])
                folder.append(row)
                if row["status"] == "failed":
                    report.say(f"failed: {point.label}: {row.get('error', '')}")
                report.advance(point.label)
    return folder.rows


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """One row of a sweep: a variant at a batch size."""

    variant: Variant
    batch_size: int
    decode_tokens: int
    scores_quality: bool
    settings: Mapping[str, Any]  # the row's config

    @property
    def label(self) -> str:
        """The point in a few words."""
        return point_label(self.settings)


def point_label(settings: Mapping[str, Any]) -> str:
    """A row's config in a few words; a storage is named where it is not float32."""
    names = ("attention", "placement", "page_size", "storage")
    parts = [str(settings[name]) for name in names if settings.get(name, "float32") != "float32"]
    return " ".join([*parts, f"batch {settings['batch_size']}"])


def sweep_points(sweep: Sweep) -> Iterator[Point]:
    """The points of a sweep, in the order they run.

    Quality does not depend on the batch size, so the largest one alone scores it: its prefill takes
    the most rows of a text at once.
    """
    largest = sweep.batch_sizes.index(max(sweep.batch_sizes))
    for variant in sweep.variants:
        steps = sweep.recompute_decode_tokens if variant.recomputes else sweep.decode_tokens
        for index, batch_size in enumerate(sweep.batch_sizes):
            scores = index == largest and sweep.quality_tokens != 0
            settings = {"model": sweep.model} | variant.settings()
            settings |= {
                "batch_size": batch_size,
                "prompt_tokens": sweep.prompt_tokens,
                "decode_tokens": steps,
            }
            if not variant.recomputes:
                settings |= {"max_length": sweep.max_length, "chunk": sweep.chunk}
            if scores:
                all_or_some = "all" if sweep.quality_tokens is None else sweep.quality_tokens
                settings["quality_tokens"] = all_or_some
            if sweep.implementation is not None:
                settings["implementation"] = sweep.implementation
            yield Point(variant, batch_size, steps, scores, settings)


def _run_point(sweep: Sweep, runner: "_Runner", point: Point, upcoming: Sequence[Point]) -> Row:
    """One row, of status failed where anything but an interrupt went wrong."""
    started, began = timestamp(), time.perf_counter()
    metrics: dict[str, float] = {}
    repeats: dict[str, list[float]] = {}
    error = None
    try:
        runner.measure(point, upcoming, metrics, repeats)
    except Exception as exception:
        error = f"{type(exception).__name__}: {exception}"
    return make_row(
        sweep.name,
        point.settings,
        sweep.seed,
        metrics=metrics,
        repeats=repeats,
        started=started,
        wall_s=time.perf_counter() - began,
        error=error,
    )


class _Runner:
    """What the points of one sweep share: the model, its texts, the oracle's hidden states."""

    def __init__(self, sweep: Sweep, model: Model) -> None:
        self._sweep = sweep
        self._model = model
        self._converted: tuple[str | tuple[str, ...], DecoderConfig, Params] | None = None
        self._texts = self._encoded_texts()
        self._recomputed: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        self._scores: dict[tuple[str, bytes], Quality] = {}
        self._compiling = ThreadPoolExecutor(1)
        self._compiled: dict[Point, Future[Compilations]] = {}

    def notes(self) -> list[str]:
        """Paragraphs that the report needs beside the figures."""
        notes = []
        if any(self._pools_heads(variant.attention) for variant in self._sweep.variants):
            notes.append(POOLING_NOTE)
        if self._sweep.quality_tokens != 0 and self._model.tokenizer is None:
            notes.append("Quality was not scored: the model has no tokenizer to encode texts with.")
        return notes

    def _pools_heads(self, attention: str | tuple[str, ...]) -> bool:
        """Whether a layer gets fewer KV heads than the model was trained with."""
        try:
            wanted = kv_heads(self._model.config, attention)
        except ValueError:
            return False  # its points become failed rows that say why
        return any(k < own for k, own in zip(wanted, self._model.config.kv_heads, strict=True))

    def measure(
        self,
        point: Point,
        upcoming: Sequence[Point],
        metrics: dict[str, float],
        repeats: dict[str, list[float]],
    ) -> None:
        """Fills in what was measured, as far as it got; `upcoming` points run after this one."""
        compiled = self._compile(point).result()
        config, params = self._with_attention(point.variant.attention)
        session = Session(params, self._inference_config(config, point))
        prompts = self._prompts(point.batch_size)
        if point.scores_quality and self._texts:
            with self._compiling_ahead(upcoming):
                metrics |= self._quality(point, session, config, params)
        # A program's first call is slower than the rest, so it is none of the timed ones.
        if not session.lengths.any():
            session.prefill(prompts[:1])
        session.decode(1)
        metrics["compile_count"] = compiled.count + session.compile_count
        metrics["compile_s"] = compiled.seconds + session.compile_s
        for _ in range(self._sweep.repeats):
            session.release()
            timings = _timed(session, prompts, point.decode_tokens)
            for name, value in timings.items():
                repeats.setdefault(name, []).append(value)
        metrics |= _bytes(session.use())

    def _compile(self, point: Point) -> "Future[Compilations]":
        """The point's programs, compiled on the one thread that does so; once for each point."""

        def compile_now() -> Compilations:
            config, params = self._with_attention(point.variant.attention)
            return compile_programs(params, self._inference_config(config, point))

        if point not in self._compiled:
            self._compiled[point] = self._compiling.submit(compile_now)
        return self._compiled[point]

    @contextlib.contextmanager
    def _compiling_ahead(self, upcoming: Sequence[Point]) -> Iterator[None]:
        """Compiles the points up to the next that scores quality, beside what the block does.

        The block must not be timed: compiling takes the cores that scoring leaves idle.
        """
        scoring = (index for index, point in enumerate(upcoming) if point.scores_quality)
        ahead = [self._compile(point) for point in upcoming[: next(scoring, 0) + 1]]
        try:
            yield
        finally:
            wait(ahead)

    def _with_attention(self, attention: str | tuple[str, ...]) -> tuple[DecoderConfig, Params]:
        """The model with another attention; the last one converted is kept."""
        if self._converted is None or self._converted[0] != attention:
            model = self._model
            self._converted = (attention, *apply_attention(model.config, model.params, attention))
        return self._converted[1:]

    def _inference_config(self, model: DecoderConfig, point: Point) -> InferenceConfig:
        sweep = self._sweep
        length = sweep.max_length
        if point.variant.recomputes:
            # A longer reservation would be computed at every step, and only slow the baseline.
            length = sweep.prompt_tokens + sweep.recompute_decode_tokens
        return InferenceConfig(
            model,
            point.variant.cache,
            slots=point.batch_size,
            max_length=length,
            rows=point.batch_size,
            chunk=length if point.variant.recomputes else sweep.chunk,
            decode_steps=max(sweep.decode_tokens, sweep.recompute_decode_tokens),
            implementation=sweep.implementation,
        )

    def _encoded_texts(self) -> dict[str, np.ndarray]:
        """Token ids of the evaluation texts, by language."""
        tokenizer = self._model.tokenizer
        if tokenizer is None or self._sweep.quality_tokens == 0:
            return {}
        folder = importlib.resources.files("kvlab.research") / "texts"
        context = self._model.config.max_length
        texts = {}
        for language, name in TEXTS.items():
            text = (folder / name).read_text("utf-8")
            ids = tokenizer.encode(text, add_bos=tokenizer.adds_bos)
            limit = min(self._sweep.quality_tokens or len(ids), context)
            texts[language] = np.asarray(ids[:limit], np.int32)
        return texts

    def _prompts(self, batch_size: int) -> list[np.ndarray]:
        """Timed prompts: pieces of the English text, or random ids without a tokenizer."""
        generator = np.random.default_rng(self._sweep.seed)
        length = self._sweep.prompt_tokens
        text = self._texts.get("en")
        if text is None or len(text) < length:
            vocab_size = self._model.config.vocab_size
            shape = (batch_size, length)
            return list(generator.integers(0, vocab_size, shape).astype(np.int32))
        starts = generator.integers(0, len(text) - length + 1, batch_size)
        return [text[start : start + length] for start in starts]

    def _quality(
        self, point: Point, session: Session, config: DecoderConfig, params: Params
    ) -> dict[str, float]:
        """Perplexity, KL and agreement on each text, and over both."""
        metrics: dict[str, float] = {}
        scores: list[Quality] = []
        model = self._model
        for language, tokens in self._texts.items():
            oracle = self._recompute("oracle", model.config, model.params, tokens)
            if point.variant.recomputes:
                hidden = self._recompute(str(point.variant.attention), config, params, tokens)
            else:
                session = _fitting(session, len(tokens))
                hidden = session.prefill({0: tokens})[0]
            # Lossless variants often give the very bits of another one.
            key = (language, hashlib.sha256(hidden.tobytes()).digest())
            if key not in self._scores:
                self._scores[key] = compare(model.config, model.params, oracle, hidden, tokens)
            score = self._scores[key]
            scores.append(score)
            metrics[f"perplexity_{language}"] = score.perplexity
            metrics[f"kl_vs_oracle_{language}"] = score.kl_vs_oracle
            metrics[f"top1_agreement_{language}"] = score.top1_agreement
        nll = np.concatenate([score.nll for score in scores])
        positions = [len(score.kl) for score in scores]
        metrics["perplexity"] = float(np.exp(nll.mean()))
        for name in ("kl_vs_oracle", "top1_agreement"):
            values = [getattr(score, name) for score in scores]
            metrics[name] = float(np.average(values, weights=positions))
        return metrics

    def _recompute(
        self, name: str, config: DecoderConfig, params: Params, tokens: np.ndarray
    ) -> np.ndarray:
        """Hidden states [T, D] of a text without a cache, kept for the variants that follow."""
        if config == self._model.config:
            name = "oracle"
        key = (name, tuple(tokens.tolist()))
        if key not in self._recomputed:
            length = max(len(text) for text in self._texts.values())
            session = Session(
                params,
                InferenceConfig(
                    config,
                    CacheSpec(Recompute()),
                    slots=1,
                    max_length=length,
                    chunk=length,
                    implementation=self._sweep.implementation,
                ),
            )
            self._recomputed[key] = session.prefill({0: tokens.tolist()})[0]
        return self._recomputed[key]


def _fitting(session: Session, length: int) -> Session:
    """The session, emptied, or one like it of one sequence that may grow to `length` tokens."""
    if session.config.max_length >= length:
        session.release()
        return session
    config = dataclasses.replace(session.config, slots=1, max_length=length)
    return Session(session.params, config)


def _timed(session: Session, prompts: Sequence[np.ndarray], decode_tokens: int) -> dict[str, float]:
    """Prefill of all prompts, then decode of all sequences, seconds and tokens per second.

    Time to first token ends when the first token of every sequence is known, so it holds the
    whole batch's prefill.
    """
    began = time.perf_counter()
    session.prefill(prompts)
    np.argmax(session.logits, axis=1)
    prefilled = time.perf_counter()
    results = session.decode(decode_tokens)
    decoded = time.perf_counter()
    tokens = sum(len(result.tokens) for result in results.values())
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    return {
        "ttft_s": prefilled - began,
        "tpot_s": (decoded - prefilled) / decode_tokens,
        "prefill_tokens_per_s": prompt_tokens / (prefilled - began),
        "decode_tokens_per_s": tokens / (decoded - prefilled),
    }


def _bytes(use: CacheUse | None) -> dict[str, float]:
    """What the cache takes after decode; a variant without one takes 0 bytes, truly."""
    if use is None:
        return {"kv_bytes_per_token": 0.0, "kv_bytes_allocated": 0.0, "kv_bytes_used": 0.0}
    return {
        "kv_bytes_per_token": use.bytes_per_token,
        "kv_bytes_allocated": use.allocated_bytes,
        "kv_bytes_used": use.used_bytes,
        "kv_waste": use.waste,
    }
