"""A model serves a trace of requests, in the time of their arrival, under a budget of KV memory.

Each cache variant gets as many pages (or whole rows) as fit the same bytes. Every request that ends
is a row of its own at once, so that an interrupted run loses none of them.
"""

import dataclasses
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvlab.models.load import Model
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.arrivals import Workload, fitting, poisson, prompt_ids, scaled, taken
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.executor import ModelExecutor
from kvlab.research.experiment import Variant
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.progress import Progress, progress
from kvlab.research.request_metrics import Targets, request_figures, serving_metrics
from kvlab.research.requests import Outcome, Request
from kvlab.research.results import RunFolder
from kvlab.research.rows import Row, make_row, timestamp
from kvlab.research.sequences import prefix_obstacle
from kvlab.research.serving import serve
from kvlab.research.workloads import load_workload

Answer = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ServeStudy:
    """A trace, and the caches that serve it.

    Args:
      model: any form that `kvlab.models.load.load_model` takes.
      workload: a word that `load_workload` takes.
      caches: the variants.
      num_requests: of a drawn workload, or taken from a trace.
      length_scale: factor of all lengths, so that a trace fits a small model.
      rate_scale: factor of the arrival rate of a trace.
      rate: requests a second, drawn anew; None keeps the times of the trace.
      kv_mib: memory for keys and values, MiB; the same for every variant.
      slots: most sequences at once.
      max_length: longest sequence; longer requests are left out.
      rows: of a prefill call.
      chunk: tokens of such a row.
      decode_steps: most tokens of a sample in one decode call.
      reuse_prefixes: where the cache can.
      ttft_target_s: for goodput.
      tpot_target_s: for goodput.
      skip_bad_rows: leaves malformed rows of a trace out, and counts them.
      check: so many answers are generated again alone, in the same configuration, and compared.
      seed: of lengths, arrivals and prompts.
      weights: format of the weights; None is as loaded.
    """

    model: str
    workload: str
    caches: tuple[CacheSpec, ...]
    num_requests: int
    length_scale: float
    rate_scale: float
    rate: float | None
    kv_mib: float
    slots: int
    max_length: int
    rows: int
    chunk: int
    decode_steps: int
    reuse_prefixes: bool
    ttft_target_s: float
    tpot_target_s: float
    skip_bad_rows: bool
    check: int
    seed: int
    weights: str | None = None

    def settings(self) -> dict[str, Any]:
        """What all points share, as their rows name it."""
        values = dataclasses.asdict(self)
        for name in ("caches", "seed"):
            del values[name]
        if self.weights is None:
            del values["weights"]
        return values

    def to_json(self) -> dict[str, Any]:
        """The study as a manifest stores it."""
        return {**self.settings(), "seed": self.seed, "caches": [str(c) for c in self.points()]}

    def points(self) -> list[dict[str, Any]]:
        """The config of each variant's row."""
        return [
            {**self.settings(), **Variant(cache=cache).settings(), "attention": "own"}
            for cache in self.caches
        ]

    def requests(self, vocab_size: int) -> list[Request]:
        """The requests, with prompts drawn from the seed.

        Raises:
          ValueError: no request fits `max_length`.
        """
        workload = self.workload_in_time()
        return [
            Request(
                str(one.number),
                prompt_ids(one, workload.block_tokens, vocab_size, self.seed),
                one.output_tokens,
                arrival_s=one.arrival_s,
            )
            for one in workload.arrivals
        ]

    def workload_in_time(self) -> Workload:
        """The requests with their arrivals, scaled, without those that are too long.

        Raises:
          ValueError: an unknown workload, a trace that cannot be read or is malformed, or one of
            which no request fits.
        """
        drawn = ":" not in self.workload
        count = self.num_requests if drawn else None
        workload = load_workload(
            self.workload,
            num_requests=count,
            seed=self.seed,
            skip_bad_rows=self.skip_bad_rows,
        )
        workload = scaled(workload, lengths=self.length_scale, rate=self.rate_scale)
        workload = fitting(workload, self.max_length)
        if not workload.arrivals:
            raise ValueError(
                f"no request of {self.workload} fits max_length={self.max_length} at length_scale="
                f"{self.length_scale:g}; lower the scale or raise max_length"
            )
        workload = taken(workload, min(self.num_requests, len(workload.arrivals)))
        return workload if self.rate is None else poisson(workload, self.rate, self.seed)


def budgeted_config(study: ServeStudy, model: Model, cache: CacheSpec) -> InferenceConfig:
    """The configuration of a variant: as many pages, or rows, as fit the budget.

    Raises:
      ValueError: not even one sequence fits.
    """
    budget = study.kv_mib * 2**20
    paged = isinstance(cache.placement, Paged)

    def config(count: int) -> InferenceConfig:
        return InferenceConfig(
            model.config,
            cache,
            slots=study.slots if paged else count,
            max_length=study.max_length,
            rows=study.rows,
            chunk=study.chunk,
            num_pages=count if paged else None,
            decode_steps=study.decode_steps,
            weights=study.weights,
        )

    one, two = (jax.eval_shape(config(count).init_cache).nbytes() for count in (1, 2))
    most = int((budget - one) // (two - one)) + 1
    unit = "pages" if paged else "sequences"
    if most < 1:
        raise ValueError(
            f"kv_mib={study.kv_mib:g} holds not one of the {unit} of {cache.placement}, which take "
            f"{one / 2**20:.1f} MiB; give more, or a smaller max_length"
        )
    return config(most if paged else min(most, study.slots))


def run_serve_study(study: ServeStudy, model: Model, folder: RunFolder) -> list[Row]:
    """Serves the trace with every variant; rows of requests that have ended are not repeated.

    Args:
      study: what to do.
      model: the loaded model.
      folder: open; a variant that fails becomes a failed row, and the run goes on.

    Returns:
      The newest row of each request and each variant.
    """
    requests = study.requests(model.config.vocab_size)
    points = list(zip(study.points(), study.caches, strict=True))
    with progress(len(points) * len(requests), "serve_trace", unit="requests") as report:
        for settings, cache in points:
            if folder.finished(settings, study.seed) is not None:
                report.advance(str(cache.placement), len(requests))
                continue
            started, began = timestamp(), time.perf_counter()
            metrics: dict[str, float] = {}
            series: dict[str, list[tuple[float, float]]] = {}
            error = None
            try:
                point = _Point(study, model, cache, settings, folder, report)
                metrics, series = point.serve(requests)
            except Exception as exception:
                error = f"{type(exception).__name__}: {exception}"
                report.say(f"failed: {cache.placement}: {error}")
            folder.append(
                make_row(
                    "serve_trace",
                    settings,
                    study.seed,
                    metrics=metrics,
                    started=started,
                    wall_s=time.perf_counter() - began,
                    error=error,
                    series=series,
                )
            )
            gc.collect()
    return folder.rows


class _Point:
    """One variant at work."""

    def __init__(
        self,
        study: ServeStudy,
        model: Model,
        cache: CacheSpec,
        settings: Mapping[str, Any],
        folder: RunFolder,
        report: Progress,
    ) -> None:
        self._study, self._model, self._settings = study, model, settings
        self._folder, self._report = folder, report
        self._config = budgeted_config(study, model, cache)
        shares = study.reuse_prefixes and prefix_obstacle(self._config) is None
        self._options = EngineOptions(reuse_prefixes=shares)
        self._compiled = 0  # programs, before the first request

    def serve(
        self, requests: Sequence[Request]
    ) -> tuple[dict[str, float], dict[str, list[tuple[float, float]]]]:
        """Serves what has no row yet; metrics of all, and series of pages and requests."""
        left = [one for one in requests if self._finished(one) is None]
        self._report.advance(amount=len(requests) - len(left))
        self._warm_up()
        engine = self._engine()
        answers = dict(self._answers(engine, left))
        metrics = serving_metrics(
            engine.times,
            engine.history,
            Targets(self._study.ttft_target_s, self._study.tpot_target_s),
        )
        metrics["skipped_rows"] = self._study.workload_in_time().skipped_rows
        metrics["requests_refused"] = len(left) - len(engine.times)
        metrics["requests_of_earlier_run"] = len(requests) - len(left)
        metrics |= self._state(engine)
        metrics |= self._check(requests, answers)
        began = min((times.arrival_s for times in engine.times.values()), default=0.0)
        history = engine.history[:: max(1, len(engine.history) // 400)]
        series = {
            "kv_filled": [(use.time_s - began, use.filled / use.total) for use in history],
            "kv_taken": [(use.time_s - began, 1 - use.free / use.total) for use in history],
            "running": [(use.time_s - began, float(use.running)) for use in history],
        }
        return metrics, series

    def _engine(self) -> Engine:
        return Engine(ModelExecutor(self._model.params, self._config), self._options)

    def _warm_up(self) -> None:
        """Compiles everything, in a cache that is thrown away."""
        executor = ModelExecutor(self._model.params, self._config)
        executor.warm_up()
        engine = Engine(executor, self._options)
        prompt = np.zeros(min(self._config.max_length - 2, 3 * executor.page_size), np.int32)
        for number in range(2):
            for _ in serve(engine, [Request(str(number), prompt, 2)]):
                pass
        self._compiled = executor.calls.compile_count

    def _answers(self, engine: Engine, requests: Sequence[Request]) -> Iterator[tuple[str, Answer]]:
        """Serves requests; each one's row is written when it ends."""
        by_id = {one.id: one for one in requests}
        tokens: dict[str, list[int]] = {name: [] for name in by_id}
        refused: dict[str, str] = {}
        for part in serve(engine, requests, refused):
            tokens[part.request_id] += part.tokens
            if part.outcome is not None:
                answer = tuple(tokens[part.request_id])
                self._write(by_id[part.request_id], engine, answer, part.outcome)
                yield part.request_id, answer
        for name, reason in refused.items():
            self._append(by_id[name], {}, error=f"refused: {reason}")

    def _write(self, one: Request, engine: Engine, answer: Answer, outcome: Outcome) -> None:
        figures = request_figures(engine.times[one.id])
        metrics: dict[str, float] = {"prompt_tokens": len(one.prompt)}
        if figures is not None:
            values = dataclasses.asdict(figures)
            metrics |= {name: value for name, value in values.items() if value is not None}
        error = None if outcome in ("length", "stop") else f"ended: {outcome}"
        self._append(one, metrics, error=error, answer=answer)

    def _append(
        self,
        one: Request,
        metrics: Mapping[str, float],
        error: str | None = None,
        answer: Answer = (),
    ) -> None:
        row = make_row(
            "serve_trace",
            self._request_settings(one),
            self._study.seed,
            metrics=metrics,
            started=timestamp(),
            wall_s=metrics.get("e2e_s", 0.0),
            error=error,
            series={"answer": list(enumerate(answer))} if answer else None,
        )
        self._folder.append(row)
        self._report.advance(f"request {one.id}")

    def _request_settings(self, one: Request) -> dict[str, Any]:
        return {**self._settings, "request": int(one.id)}

    def _finished(self, one: Request) -> Row | None:
        return self._folder.finished(self._request_settings(one), self._study.seed)

    def _state(self, engine: Engine) -> dict[str, float]:
        """What is left at the end, and what the cache and the prefixes were."""
        executor = engine.executor
        assert isinstance(executor, ModelExecutor)
        calls, index = executor.calls, engine.index
        known = 0 if index is None else index.num_idle
        pool, free = executor.pool_pages(), executor.free_pages()
        metrics: dict[str, float] = {
            "slots": self._config.slots,
            "kv_bytes_allocated": calls.cache.nbytes(),
            "compile_count": self._compiled + calls.compile_count,
            "tokens_left": int(calls.lengths.sum()),
        }
        if pool.size:
            metrics |= {"num_pages": int(pool[0]), "pages_left": int(np.sum(pool - free)) - known}
        if index is not None and index.asked_blocks:
            metrics["prefix_hit_rate"] = index.hit_blocks / index.asked_blocks
        return metrics

    def _check(
        self, requests: Sequence[Request], answers: Mapping[str, Answer]
    ) -> dict[str, float]:
        """Generates answers again, each request alone in a cold engine, and compares tokens."""
        chosen = [one for one in requests if one.id in answers][: self._study.check]
        equal = 0
        for one in chosen:
            alone: list[int] = []
            for part in serve(self._engine(), [dataclasses.replace(one, arrival_s=0.0)]):
                alone += part.tokens
            equal += tuple(alone) == answers[one.id]
        return {"answers_checked": len(chosen), "answers_equal": equal} if chosen else {}
