"""One cache variant that serves a trace: what it answers, how long that took, and the checks.

Every request that ends is a row at once, with its answer and the part of the run that served it: a
run that was stopped and goes on serves its trace in parts. What a trace takes in parts is not what
it takes in one run (the engine starts cold and idle in the middle of it), so such a variant has its
answers, counts and checks, and no times.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvlab.models.load import Model
from kvlab.research.arrivals import Workload
from kvlab.research.cache_usage import Usage, over_time
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.executor import ModelExecutor, refusal
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.progress import Progress
from kvlab.research.request_metrics import (
    RequestFigures,
    Targets,
    metrics_of_figures,
    request_figures,
    serving_metrics,
)
from kvlab.research.requests import Outcome, Request
from kvlab.research.results import RunFolder
from kvlab.research.rows import Row, make_row, timestamp
from kvlab.research.sequences import prefix_obstacle
from kvlab.research.serving import serve

Series = dict[str, list[tuple[float, float]]]


class ServedVariant:
    """One variant at work."""

    def __init__(
        self,
        config: InferenceConfig,
        model: Model,
        settings: Mapping[str, Any],
        folder: RunFolder,
        report: Progress,
        *,
        seed: int,
        targets: Targets,
        reuse_prefixes: bool,
    ) -> None:
        """Nothing is served yet.

        Args:
          config: of the model and the cache.
          model: that is loaded.
          settings: the config of the variant's row.
          folder: takes the rows of requests.
          report: takes their number.
          seed: of every row.
          targets: for goodput.
          reuse_prefixes: where the cache can.
        """
        self._config, self._model, self._settings = config, model, settings
        self._folder, self._report, self._seed, self._targets = folder, report, seed, targets
        shares = reuse_prefixes and prefix_obstacle(config) is None
        self._options = EngineOptions(reuse_prefixes=shares)
        self._part = len(folder.manifest["resumed"])
        self._compiled = 0, 0.0  # programs and their seconds, before the first request

    def serve(
        self, requests: Sequence[Request], workload: Workload
    ) -> tuple[dict[str, float], Series]:
        """Serves what has no row yet.

        Args:
          requests: all of the trace, in the order of their arrival.
          workload: that they are of.

        Returns:
          Metrics of all requests, and series of pages and requests over time. Where they were
          served in parts, `parts` is their number, and there is no time among the metrics; where
          they were all served in one earlier part, what their rows tell.
        """
        earlier = self._answered(requests)
        left = [one for one in requests if one.id not in earlier]
        self._report.advance(amount=len(earlier))
        metrics: dict[str, float] = {
            "skipped_rows": workload.skipped_rows,
            "requests_too_long": workload.too_long,
            "requests_of_earlier_run": len(earlier),
            "slots": self._config.slots,
            "kv_bytes_allocated": jax.eval_shape(self._config.init_cache).nbytes(),
        }
        if not left:
            return metrics | self._figures_on_disk(requests), {}
        self._warm_up()
        engine = self._engine()
        refused = self._serve(engine, left)
        metrics["requests_refused"] = len(refused)
        if earlier or not engine.times:
            served = [one for one in requests if one.id not in refused]
            metrics |= self._figures_on_disk(served, bool(engine.times))
            return metrics | self._state(engine), {}
        metrics |= serving_metrics(engine.times, engine.history, self._targets)
        return metrics | self._state(engine), _series(engine)

    def check(self, requests: Sequence[Request], most: int) -> dict[str, float]:
        """Generates answers again, each request alone in a cold engine, and compares tokens.

        Args:
          requests: all of the trace; those that were answered, now or earlier, are compared.
          most: of them to compare, the first ones.
        """
        answered = self._answered(requests)
        chosen = [one for one in requests if one.id in answered][:most]
        equal = 0
        for one in chosen:
            alone: list[int] = []
            for part in serve(self._engine(), [dataclasses.replace(one, arrival_s=0.0)]):
                alone += part.tokens
            answer = answered[one.id].get("series", {}).get("answer", [])
            equal += alone == [int(token) for _, token in answer]
        return {"answers_checked": len(chosen), "answers_equal": equal} if chosen else {}

    def _engine(self) -> Engine:
        return Engine(ModelExecutor(self._model.params, self._config), self._options)

    def _warm_up(self) -> None:
        """Compiles everything, in a cache that is thrown away; serves what fits that, twice."""
        executor = ModelExecutor(self._model.params, self._config)
        executor.warm_up()
        engine = Engine(executor, self._options)
        longest = min(self._config.max_length - 2, 3 * executor.page_size)
        for length in range(longest, 0, -1):
            one = Request("", np.zeros(length, np.int32), 2)
            if refusal(executor, one) is None:
                for number in range(2):
                    for _ in serve(engine, [dataclasses.replace(one, id=str(number))]):
                        pass
                break
        self._compiled = executor.calls.compile_count, executor.calls.compile_s

    def _serve(self, engine: Engine, requests: Sequence[Request]) -> dict[str, str]:
        """Serves requests, each one's row is written when it ends; why some were refused."""
        by_id = {one.id: one for one in requests}
        tokens: dict[str, list[int]] = {name: [] for name in by_id}
        refused: dict[str, str] = {}
        for part in serve(engine, requests, refused):
            tokens[part.request_id] += part.tokens
            if part.outcome is not None:
                answer = tokens[part.request_id]
                self._write(by_id[part.request_id], engine, answer, part.outcome)
        for name, reason in refused.items():
            self._append(by_id[name], {}, error=f"refused: {reason}")
        return refused

    def _write(self, one: Request, engine: Engine, answer: Sequence[int], outcome: Outcome) -> None:
        figures = request_figures(engine.times[one.id])
        metrics: dict[str, float] = {"prompt_tokens": len(one.prompt), "part": self._part}
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
        answer: Sequence[int] = (),
    ) -> None:
        row = make_row(
            "serve_trace",
            self._request_settings(one),
            self._seed,
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

    def _answered(self, requests: Sequence[Request]) -> dict[str, Row]:
        """The rows of requests that were answered, by request."""
        found = {
            one.id: self._folder.finished(self._request_settings(one), self._seed)
            for one in requests
        }
        return {name: row for name, row in found.items() if row is not None}

    def _figures_on_disk(
        self, requests: Sequence[Request], served_now: bool = False
    ) -> dict[str, float]:
        """What the rows of requests tell of all of them.

        Args:
          requests: that were not refused.
          served_now: whether one of them was served in this part of the run.
        """
        answered = self._answered(requests)
        rows = list(answered.values())
        metrics: dict[str, float] = {"requests": len(requests), "requests_ended": len(rows)}
        if not rows:
            return metrics
        parts = {row["metrics"].get("part", -1) for row in rows}
        if served_now:
            parts.add(self._part)
        if len(parts) > 1 or -1 in parts:
            metrics["output_tokens"] = sum(row["metrics"]["output_tokens"] for row in rows)
            return metrics | {"parts": max(2, len(parts))}
        figures = {name: _figures(row) for name, row in answered.items()}
        arrivals = {one.id: one.arrival_s for one in requests}
        last = max(arrivals[name] + one.e2e_s for name, one in figures.items())
        metrics["preemptions"] = sum(one.preemptions for one in figures.values())
        duration = last - min(arrivals.values())
        ended = list(figures.values())
        return metrics | metrics_of_figures(ended, len(requests), duration, self._targets)

    def _state(self, engine: Engine) -> dict[str, float]:
        """What is left at the end, and what the prefixes were."""
        executor = engine.executor
        assert isinstance(executor, ModelExecutor)
        calls, index = executor.calls, engine.index
        known = 0 if index is None else index.num_idle
        pool, free = executor.pool_pages(), executor.free_pages()
        metrics: dict[str, float] = {
            "compile_count": self._compiled[0] + calls.compile_count,
            "compile_s": self._compiled[1] + calls.compile_s,
            "tokens_left": int(calls.lengths.sum()),
        }
        if pool.size:
            metrics |= {"num_pages": int(pool[0]), "pages_left": int(np.sum(pool - free)) - known}
        if index is not None and index.asked_blocks:
            metrics["prefix_hit_rate"] = index.hit_blocks / index.asked_blocks
        return metrics


def _figures(row: Row) -> RequestFigures:
    """The figures of a request, as its row keeps them."""
    metrics = row["metrics"]
    return RequestFigures(
        queue_s=metrics["queue_s"],
        ttft_s=metrics["ttft_s"],
        tpot_s=metrics.get("tpot_s"),
        e2e_s=metrics["e2e_s"],
        output_tokens=int(metrics["output_tokens"]),
        preemptions=int(metrics["preemptions"]),
    )


def _series(engine: Engine) -> Series:
    """The use of the cache and the requests at once, over seconds since the first arrival."""
    began = min((times.arrival_s for times in engine.times.values()), default=0.0)
    curves: dict[str, Callable[[Usage], float]] = {
        "kv_filled": lambda use: use.filled / use.total,
        "kv_taken": lambda use: 1 - use.free / use.total,
        "running": lambda use: float(use.running),
    }
    return {name: over_time(engine.history, began, value) for name, value in curves.items()}
