"""A model serves a trace of requests, in the time of their arrival, under a budget of KV memory.

Each cache variant gets as many pages (or whole rows) as fit the same bytes. Every request that ends
is a row of its own at once, so that an interrupted run loses none of them.
"""

import dataclasses
import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from kvlab.models.load import Model
from kvlab.ops.specs import CacheSpec, Paged, Recompute
from kvlab.research.arrivals import Workload, fitting, poisson, prompt_ids, scaled, taken
from kvlab.research.environment import device_bytes
from kvlab.research.experiment import Variant
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.progress import Progress, progress
from kvlab.research.request_metrics import Targets
from kvlab.research.requests import Request
from kvlab.research.results import RunFolder
from kvlab.research.rows import Row, RunFolderError, make_row, timestamp
from kvlab.research.served_variant import ServedVariant
from kvlab.research.tables import mebibytes, significant
from kvlab.research.workloads import is_trace, load_workload

MAX_SPAN_S = 24 * 3600
"""Seconds between the first arrival and the last: requests are served in the time of arrival."""

_QUIET_SPAN_S = 60
_REQUESTS_OF_TRACE = 64  # where no number is given


@dataclasses.dataclass(frozen=True)
class ServeStudy:
    """A trace, and the caches that serve it.

    Args:
      model: any form that `kvlab.models.load.load_model` takes.
      workload: a word that `load_workload` takes.
      caches: the variants.
      num_requests: of a drawn workload, or taken from a trace; None takes up to 64 of a trace.
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
      trace_sha256: what a trace's file holds, as `workloads.trace_sha256` gives it; None pins none.
      weights: format of the weights; None is as loaded.
    """

    model: str
    workload: str
    caches: tuple[CacheSpec, ...]
    num_requests: int | None
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
    trace_sha256: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        """Validates what does not depend on the model.

        Raises:
          ValueError: a cache that stores nothing, or a call that is larger than can be filled.
        """
        if any(cache.placement == Recompute() for cache in self.caches):
            raise ValueError(
                "placement=recompute stores nothing, so there is no memory to serve requests on; "
                "use placement=contiguous, paged or ring"
            )
        for name in ("chunk", "decode_steps"):
            if getattr(self, name) > self.max_length:
                raise ValueError(
                    f"{name}={getattr(self, name)} is past max_length={self.max_length}; use "
                    f"{name}={self.max_length} or less"
                )
        rows = self.slots * -(-self.max_length // self.chunk)
        if self.rows > rows:
            raise ValueError(
                f"rows={self.rows} given: slots={self.slots} sequences of max_length="
                f"{self.max_length} fill {rows} rows of chunk={self.chunk}; use {rows} or less"
            )

    def settings(self) -> dict[str, Any]:
        """What all points share, as their rows name it."""
        values = dataclasses.asdict(self)
        for name in ("caches", "seed", *(() if self.trace_sha256 else ("trace_sha256",))):
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

    def requests(self, vocab_size: int, workload: Workload) -> list[Request]:
        """The requests of `workload_in_time`, with prompts drawn from the seed."""
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
          ValueError: an unknown workload, a trace that cannot be read, has changed or is
            malformed, one of which no request fits or that holds too few, or arrivals that take
            more than a day.
        """
        count = None if is_trace(self.workload) else self.num_requests
        workload = load_workload(
            self.workload,
            num_requests=count,
            seed=self.seed,
            skip_bad_rows=self.skip_bad_rows,
            sha256=self.trace_sha256,
        )
        try:
            workload = scaled(workload, lengths=self.length_scale, rate=self.rate_scale)
        except ValueError as error:
            scales = f"length_scale={self.length_scale:g}, rate_scale={self.rate_scale:g}"
            raise ValueError(f"{scales}: {error}") from None
        workload = fitting(workload, self.max_length)
        if not workload.arrivals:
            raise ValueError(
                f"no request of {self.workload} fits max_length={self.max_length} at length_scale="
                f"{self.length_scale:g}; lower the scale or raise max_length"
            )
        held = len(workload.arrivals)
        if is_trace(self.workload):
            workload = taken(workload, self.num_requests or min(held, _REQUESTS_OF_TRACE))
        if self.rate is not None:
            workload = poisson(workload, self.rate, self.seed)
        self._require_a_day(workload)
        return workload

    def _require_a_day(self, workload: Workload) -> None:
        span_s = workload.arrivals[-1].arrival_s
        if span_s <= MAX_SPAN_S:
            return
        now = f"--rate_scale (now {self.rate_scale:g})"
        if self.rate is not None:
            now = f"--rate (now {self.rate:g})"
        raise ValueError(
            f"the {len(workload.arrivals)} requests of {self.workload} arrive over "
            f"{_duration(span_s)}, and are served in that time; the limit is "
            f"{MAX_SPAN_S // 3600} hours: raise {now}"
        )


def time_to_serve(workload: Workload) -> str | None:
    """Says how long the arrivals take, where that is more than a minute.

    Args:
      workload: from `ServeStudy.workload_in_time`.
    """
    span_s = workload.arrivals[-1].arrival_s
    if span_s <= _QUIET_SPAN_S:
        return None
    return (
        f"the {len(workload.arrivals)} requests arrive over {_duration(span_s)}, and each cache "
        "serves them in that time or longer"
    )


def _duration(seconds: float) -> str:
    units = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86_400, "years": 365.25 * 86_400}
    unit = next((name for name in reversed(units) if seconds >= 2 * units[name]), "seconds")
    return f"{significant(seconds / units[unit])} {unit}"


def check_variants(study: ServeStudy, model: Model) -> None:
    """Finds out whether the model can serve with a cache, before anything is written.

    Raises:
      ValueError: what is asked for does not fit the device's memory, or no variant is possible.
    """
    logits = study.slots * model.config.vocab_size * 4
    asked, there = study.kv_mib * 2**20 + logits, device_bytes()
    if asked > there:
        raise ValueError(
            f"kv_mib={study.kv_mib:g} and the logits of slots={study.slots} take "
            f"{significant(asked / 2**30)} GiB, and the device has {significant(there / 2**30)} "
            "GiB; give less of either"
        )
    errors = []
    for cache in study.caches:
        try:
            budgeted_config(study, model, cache)
        except ValueError as error:
            errors.append(error)
    if len(errors) == len(study.caches):
        raise errors[0]


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
            f"{mebibytes(one)} MiB; give more, or a smaller max_length"
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

    Raises:
      RunFolderError: a row cannot be written.
    """
    workload = study.workload_in_time()
    requests = study.requests(model.config.vocab_size, workload)
    points = list(zip(study.points(), study.caches, strict=True))
    with progress(len(points) * len(requests), "serve_trace", unit="requests") as report:
        for settings, cache in points:
            known = folder.finished(settings, study.seed)
            if known is not None:
                report.advance(str(cache.placement), len(requests))
                if _is_checked(known, study.check):
                    continue
            _run_variant(study, model, cache, settings, folder, report, workload, requests, known)
            gc.collect()
    return folder.rows


def _is_checked(row: Row, check: int) -> bool:
    """Whether a variant's row has what was asked for beside its figures."""
    metrics = row["metrics"]
    return not check or "answers_checked" in metrics or not metrics.get("requests_ended")


def _run_variant(
    study: ServeStudy,
    model: Model,
    cache: CacheSpec,
    settings: Mapping[str, Any],
    folder: RunFolder,
    report: Progress,
    workload: Workload,
    requests: Sequence[Request],
    known: Row | None,
) -> None:
    """Serves and checks one variant; `known` is its row where only the check is missing."""
    started, began = timestamp(), time.perf_counter()
    metrics: dict[str, float] = {}
    series: Mapping[str, Sequence[Sequence[float]]] = {}

    def write(error: str | None = None) -> None:
        spent = time.perf_counter() - began + (0.0 if known is None else known["wall_s"])
        row = make_row(
            "serve_trace",
            settings,
            study.seed,
            metrics=metrics,
            started=started if known is None else known["started"],
            wall_s=spent,
            error=error,
            series=series,
        )
        folder.append(row)

    try:
        config = budgeted_config(study, model, cache)
        variant = ServedVariant(
            config,
            model,
            settings,
            folder,
            report,
            seed=study.seed,
            targets=Targets(study.ttft_target_s, study.tpot_target_s),
            reuse_prefixes=study.reuse_prefixes,
        )
        if known is None:
            metrics, series = variant.serve(requests, workload)
            if study.check:
                write()  # figures are safe before the checks, which may take longer than serving
        else:
            metrics, series = dict(known["metrics"]), known.get("series", {})
        metrics |= variant.check(requests, study.check)
        write()
    except RunFolderError:
        raise
    except Exception as exception:
        error = f"{type(exception).__name__}: {exception}"
        report.say(f"failed: {cache.placement}: {error}")
        write(error)
