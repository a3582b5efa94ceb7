"""What users of a serving system see: waiting, first token, time per token, throughput, goodput.

All times are in seconds by the engine's clock. A figure that cannot be formed (no second token, no
finished request) is absent, never 0.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvlab.research.cache_usage import Usage
from kvlab.research.requests import Burst, Times


@dataclasses.dataclass(frozen=True)
class RequestFigures:
    """One request that has ended.

    Attributes:
      queue_s: from its arrival to its first slot.
      ttft_s: from its arrival to its first token (time to first token).
      tpot_s: time per output token: after the first token of a sample, over the tokens after it;
        the mean of its samples. None where none has a second token.
      e2e_s: from its arrival to the end of its last sample.
      output_tokens: of all samples.
      preemptions: times it lost its pages.
    """

    queue_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    output_tokens: int
    preemptions: int

    @property
    def normalized_latency_s(self) -> float:
        """End-to-end latency over output tokens ("Orca", OSDI'22, section 6)."""
        return self.e2e_s / self.output_tokens


def request_figures(times: Times) -> RequestFigures | None:
    """The figures of a request; None where it has not ended, was cut short, or made no token."""
    if (
        times.cut_short
        or times.finished_s is None
        or times.first_token_s is None
        or times.admitted_s is None
    ):
        return None
    per_token = [seconds for seconds in map(_tpot, times.bursts) if seconds is not None]
    return RequestFigures(
        queue_s=times.admitted_s - times.arrival_s,
        ttft_s=times.first_token_s - times.arrival_s,
        tpot_s=float(np.mean(per_token)) if per_token else None,
        e2e_s=times.finished_s - times.arrival_s,
        output_tokens=sum(burst.tokens for bursts in times.bursts for burst in bursts),
        preemptions=times.preemptions,
    )


def _tpot(bursts: Sequence[Burst]) -> float | None:
    tokens = sum(burst.tokens for burst in bursts)
    return (bursts[-1].last_s - bursts[0].first_s) / (tokens - 1) if tokens > 1 else None


def inter_token_gaps(times: Iterable[Times]) -> tuple[np.ndarray, np.ndarray]:
    """Gaps between successive tokens of the samples of requests.

    Returns:
      Gaps in seconds [n] float, and how often each occurs [n] int.
    """
    gaps: list[float] = []
    counts: list[int] = []
    for bursts in (bursts for one in times for bursts in one.bursts):
        for number, burst in enumerate(bursts):
            if number:
                gaps.append(burst.first_s - bursts[number - 1].last_s)
                counts.append(1)
            if burst.tokens > 1:
                gaps.append((burst.last_s - burst.first_s) / (burst.tokens - 1))
                counts.append(burst.tokens - 1)
    return np.array(gaps, float), np.array(counts, int)


def weighted_percentile(values: np.ndarray, weights: np.ndarray, percent: float) -> float:
    """The smallest value that at least `percent` of the weight does not exceed.

    Args:
      values: [n], at least one.
      weights: [n], of each.
      percent: 0 to 100.
    """
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    place = np.searchsorted(100 * reached, percent * reached[-1])
    return float(values[order][min(place, len(values) - 1)])


@dataclasses.dataclass(frozen=True)
class Targets:
    """What a user calls good service; a request that meets both counts towards goodput.

    Source: "DistServe" (arXiv 2401.09670), section 2.

    Args:
      ttft_s: time to first token, at most.
      tpot_s: time per output token, at most.
    """

    ttft_s: float
    tpot_s: float

    def met_by(self, figures: RequestFigures) -> bool:
        """Whether a request was served well."""
        return figures.ttft_s <= self.ttft_s and (figures.tpot_s or 0.0) <= self.tpot_s


def serving_metrics(
    times: Mapping[str, Times], history: Sequence[Usage], targets: Targets | None = None
) -> dict[str, float]:
    """Figures of a whole run.

    Args:
      times: of its requests, by id.
      history: the use of the cache in its steps.
      targets: for goodput.

    Returns:
      By metric name: counts, medians and 99th percentiles in seconds, tokens and requests a second
      from the first arrival to the last token, and the averages of `usage_metrics` from the first
      arrival to the last (to the last token, where all arrived at once).
    """
    ended = [figures for figures in map(request_figures, times.values()) if figures is not None]
    metrics: dict[str, float] = {
        "requests": len(times),
        "requests_ended": len(ended),
        "preemptions": sum(one.preemptions for one in times.values()),
    }
    if not ended:
        return metrics
    began = min(one.arrival_s for one in times.values())
    bursts = [one for each in times.values() for of_one in each.bursts for one in of_one]
    last = max(burst.last_s for burst in bursts)
    metrics |= metrics_of_figures(ended, len(times), last - began, targets)
    gaps, counts = inter_token_gaps(times.values())
    if gaps.size:
        for percent in (50, 99):
            metrics[f"itl_p{percent}_s"] = weighted_percentile(gaps, counts, percent)
    # From the first arrival to the last, or while all that came at once was served.
    last_arrival = max(one.arrival_s for one in times.values())
    return metrics | usage_metrics(history, began, last_arrival if last_arrival > began else last)


def metrics_of_figures(
    ended: Sequence[RequestFigures],
    requests: int,
    duration_s: float,
    targets: Targets | None = None,
) -> dict[str, float]:
    """What of `serving_metrics` the figures of the requests alone tell.

    Args:
      ended: at least one.
      requests: that were taken in, ended or not.
      duration_s: from the first arrival to the last token.
      targets: for goodput.
    """
    tokens = sum(figures.output_tokens for figures in ended)
    metrics: dict[str, float] = {
        "output_tokens": tokens,
        "duration_s": duration_s,
        "output_tokens_per_s": tokens / duration_s,
        "requests_per_s": len(ended) / duration_s,
    }
    columns = {
        "queue": [figures.queue_s for figures in ended],
        "ttft": [figures.ttft_s for figures in ended],
        "tpot": [figures.tpot_s for figures in ended if figures.tpot_s is not None],
        "e2e": [figures.e2e_s for figures in ended],
        "normalized_latency": [figures.normalized_latency_s for figures in ended],
    }
    for name, values in columns.items():
        if values:
            metrics[f"{name}_p50_s"], metrics[f"{name}_p99_s"] = np.percentile(values, (50, 99))
            metrics[f"{name}_mean_s"] = float(np.mean(values))
    if targets is not None:
        good = sum(map(targets.met_by, ended))
        metrics["goodput_requests_per_s"] = good / duration_s
        metrics["goodput_share"] = good / requests
    return metrics


def usage_metrics(history: Sequence[Usage], began: float, ended: float) -> dict[str, float]:
    """Averages over time of how the cache was used.

    Args:
      history: one entry for each step.
      began: what was before does not count.
      ended: what comes later does not count.

    Returns:
      `running_mean`, `samples_mean`, `waiting_mean`, `running_max`; the shares of all token slots
      `kv_filled`, `kv_reserved`, `kv_internal`, `kv_cached`, `kv_free`; and the same with the
      suffix `_waiting`, over the steps in which a request waited, where free slots are such that
      it could not be given ("external fragmentation and other"). Between steps nothing runs.
    """
    columns = {name: np.array([getattr(u, name) for u in history]) for name in Usage._fields}
    starts = np.clip(columns["time_s"] - columns["step_s"], began, ended)
    seconds = np.clip(columns["time_s"], began, ended) - starts
    if not seconds.any():
        return {}
    waits = seconds * (columns["waiting"] > 0)
    metrics: dict[str, float] = {"running_max": int(columns["running"][seconds > 0].max())}
    for suffix, weights, span in (
        ("", seconds, ended - began),
        ("_waiting", waits, float(waits.sum())),
    ):
        if not span:
            continue
        for name in ("running", "samples", "waiting"):
            metrics[f"{name}_mean{suffix}"] = float(columns[name] @ weights / span)
        taken = 0.0
        for name in ("filled", "reserved", "internal", "cached"):
            share = float(columns[name] / columns["total"] @ weights / span)
            metrics[f"kv_{name}{suffix}"] = share
            taken += share
        metrics[f"kv_free{suffix}"] = 1.0 - taken
    metrics["waiting_share"] = float(waits.sum() / (ended - began))
    return metrics
