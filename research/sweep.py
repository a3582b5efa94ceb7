"""Runs a sweep: every variant at every batch size, one row each, speed and quality together."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from kvlab.models.config import DecoderConfig
from kvlab.models.load import Model
from kvlab.research.cache import CacheUse
from kvlab.research.compilation import Compilations, make_room_for_programs
from kvlab.research.experiment import Sweep, Variant
from kvlab.research.inference import InferenceConfig, Params
from kvlab.research.programs import compile_programs
from kvlab.research.progress import progress
from kvlab.research.results import Row, RunFolder, make_row, timestamp
from kvlab.research.session import Session
from kvlab.research.sweep_quality import SweepQuality
from kvlab.research.variants import apply_attention, kv_heads

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
    if waiting:
        runner = _Runner(sweep, model)
        folder.describe(runner.notes())
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
    """A row's config in a few words, without what is the usual value of its axis."""
    usual = {"attention": "", "placement": "", "page_size": "", "storage": "float32"}
    usual |= {"retention": "all", "budget": ""}
    parts = [
        str(settings[name]) for name, value in usual.items() if settings.get(name, value) != value
    ]
    return " ".join([*parts, f"batch {settings['batch_size']}"])


def sweep_points(sweep: Sweep) -> Iterator[Point]:
    """The points of a sweep, in the order they run.

    Quality does not depend on the batch size, so the largest one alone scores it: its prefill takes
    the most rows of a text at once, its decode the most windows.
    """
    largest = sweep.batch_sizes.index(max(sweep.batch_sizes))
    for variant in sweep.variants:
        steps = sweep.recompute_decode_tokens if variant.recomputes else sweep.decode_tokens
        for index, batch_size in enumerate(sweep.batch_sizes):
            scores = index == largest and (sweep.quality_tokens != 0 or sweep.passkey_tokens)
            settings = {"model": sweep.model} | variant.settings()
            settings |= {
                "batch_size": batch_size,
                "prompt_tokens": sweep.prompt_tokens,
                "decode_tokens": steps,
            }
            if not variant.recomputes:
                settings |= {"max_length": sweep.max_length, "chunk": sweep.chunk}
            if scores:
                settings |= _quality_settings(sweep)
            if sweep.implementation is not None:
                settings["implementation"] = sweep.implementation
            yield Point(variant, batch_size, steps, bool(scores), settings)


def _quality_settings(sweep: Sweep) -> dict[str, Any]:
    """What a row's config says of how its quality was scored."""
    settings: dict[str, Any] = {}
    if sweep.quality_tokens != 0:
        settings["quality_tokens"] = sweep.quality_tokens or "all"
        if sweep.texts:
            settings["quality_texts"] = {file.name: file.sha256 for file in sweep.texts}
    if sweep.scores_windows:
        settings |= {"window_tokens": sweep.window_tokens, "forced_tokens": sweep.forced_tokens}
    if sweep.passkey_tokens:
        settings["passkey_tokens"] = list(sweep.passkey_tokens)
    return settings


def _run_point(sweep: Sweep, runner: "_Runner", point: Point, upcoming: Sequence[Point]) -> Row:
    """One row, of status failed where anything but an interrupt went wrong."""
    started, began = timestamp(), time.perf_counter()
    metrics: dict[str, float] = {}
    repeats: dict[str, list[float]] = {}
    series: dict[str, list[tuple[float, float]]] = {}
    error = None
    try:
        runner.measure(point, upcoming, metrics, repeats, series)
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
        series=series,
    )


class _Runner:
    """What the points of one sweep share: the model, what scores quality, compiled programs."""

    def __init__(self, sweep: Sweep, model: Model) -> None:
        self._sweep = sweep
        self._model = model
        self._converted: tuple[str | tuple[str, ...], DecoderConfig, Params] | None = None
        self._quality = SweepQuality(sweep, model)
        self._compiling = ThreadPoolExecutor(1)
        self._compiled: dict[Point, Future[Compilations]] = {}

    def notes(self) -> list[str]:
        """Paragraphs that the report needs beside the figures."""
        notes = []
        if any(self._pools_heads(variant.attention) for variant in self._sweep.variants):
            notes.append(POOLING_NOTE)
        return notes + self._quality.notes()

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
        series: dict[str, list[tuple[float, float]]],
    ) -> None:
        """Fills in what was measured, as far as it got; `upcoming` points run after this one."""
        if make_room_for_programs():
            self._compiled.clear()
        compiled = self._compile(point).result()
        config, params = self._with_attention(point.variant.attention)
        session = Session(params, self._inference_config(config, point))
        prompts = self._prompts(point.batch_size)
        if point.scores_quality:
            with self._compiling_ahead(upcoming):
                metrics |= self._quality.metrics(point.variant, session, config, params)
            if self._quality.taken_bytes:
                series["kv_bytes_taken"] = self._quality.taken_bytes
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

    def _prompts(self, batch_size: int) -> list[np.ndarray]:
        """Timed prompts: pieces of the first text, or random ids where none is scored."""
        generator = np.random.default_rng(self._sweep.seed)
        length = self._sweep.prompt_tokens
        text = next(iter(self._quality.texts.values()), None)
        if text is None or len(text) < length:
            vocab_size = self._model.config.vocab_size
            shape = (batch_size, length)
            return list(generator.integers(0, vocab_size, shape).astype(np.int32))
        starts = generator.integers(0, len(text) - length + 1, batch_size)
        return [text[start : start + length] for start in starts]


def _timed(session: Session, prompts: Sequence[np.ndarray], decode_tokens: int) -> dict[str, float]:
    """Prefill of all prompts, then decode of all sequences, seconds and tokens per second.

    Time to first token ends when the first token of every sequence is known, so it holds the
    whole batch's prefill.
    """
    began = time.perf_counter()
    session.prefill(prompts, hidden=False)
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
