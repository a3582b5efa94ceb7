"""Simulated serving of requests: how memory is used, how many run at once, how long they take.

The engine's scheduler and page table run for real; a cost model takes the place of the model. The
studies repeat those of "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (arXiv 2309.06180): OPT-13B on one A100-40GB, with 12 GB for keys and values.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvlab.research.arrivals import Workload, poisson, taken
from kvlab.research.cache_usage import over_time
from kvlab.research.cost_model import OPT_13B, StepCost
from kvlab.research.devices import DEVICES
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.request_metrics import serving_metrics
from kvlab.research.requests import Request
from kvlab.research.serving import serve
from kvlab.research.simulated_runs import simulated
from kvlab.research.simulation import SimulationConfig
from kvlab.research.workloads import MIXES, is_trace, load_workload

KV_BYTES = 12 * 2**30
"""Memory for keys and values of OPT-13B on an A100-40GB: PagedAttention, Table 1."""

_TOKENS = 400_000  # of a drawn workload, prompts and outputs, where no number of requests is given
_MOST_REQUESTS = 5000  # of a trace or an unnamed mix, likewise


@dataclasses.dataclass(frozen=True)
class AllocationStudy:
    """Requests served by allocators, at request rates.

    Args:
      command: that asks for it.
      workloads: words that `load_workload` takes.
      rates: requests a second of each workload, by its place in `workloads`; None has all
        requests wait from the start.
      allocators: `paged`, `max`, `pow2`, `oracle`.
      page_sizes: tokens a page, where paged.
      num_requests: of each workload; None is enough for 400,000 tokens of a named mix, or up to
        1,000 of another.
      skip_bad_rows: leaves malformed rows of a trace out, and counts them.
      seed: of lengths and arrivals.
      kv_slots: token slots of the pool.
      max_length: longest sequence; longer requests are left out.
      headroom_tokens: see `EngineOptions`.
      device: a name of `kvlab.research.devices.DEVICES`.
      call_overhead_s: see `StepCost`.
      sequence_overhead_s: see `StepCost`.
      trace_sha256: of each workload, what its file holds, as `workloads.trace_sha256` gives it;
        none pins no file.

    Raises:
      ValueError: an unknown device, rates for another number of workloads, or a pool that is
        smaller than a page or than the headroom.
    """

    command: str
    workloads: tuple[str, ...]
    rates: tuple[tuple[float | None, ...], ...]
    allocators: tuple[str, ...] = ("max", "pow2", "oracle", "paged")
    page_sizes: tuple[int, ...] = (16,)
    num_requests: int | None = None
    skip_bad_rows: bool = False
    seed: int = 0
    kv_slots: int = KV_BYTES // OPT_13B.kv_bytes_per_token
    max_length: int = 2048
    headroom_tokens: int = 1
    device: str = "A100-40GB"
    call_overhead_s: float = 0.0
    sequence_overhead_s: float = 0.0
    trace_sha256: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        """Validates."""
        if self.device not in DEVICES:
            raise ValueError(f"device={self.device!r} given: use {', '.join(DEVICES)}")
        if len(self.rates) != len(self.workloads):
            raise ValueError(
                f"{len(self.rates)} lists of rates given for {len(self.workloads)} workloads"
            )
        if "paged" in self.allocators:
            sizes = {"page_size": max(self.page_sizes), "headroom_tokens": self.headroom_tokens}
            for name, size in sizes.items():
                if size > self.kv_slots:
                    raise ValueError(
                        f"{name}={size} given, and the pool holds kv_slots={self.kv_slots} tokens; "
                        f"use a smaller {name}, or more kv_slots"
                    )

    def to_json(self) -> dict[str, Any]:
        """The study as a manifest stores it."""
        values = dataclasses.asdict(self)
        if not any(self.trace_sha256):
            del values["trace_sha256"]
        return values

    def points(self) -> Iterator[dict[str, Any]]:
        """The config of each row, in the order they run."""
        shared = {
            "model": OPT_13B.name,
            "device": self.device,
            "kv_slots": self.kv_slots,
            "max_length": self.max_length,
            "skip_bad_rows": self.skip_bad_rows,
            "headroom_tokens": self.headroom_tokens,
            "call_overhead_s": self.call_overhead_s,
            "sequence_overhead_s": self.sequence_overhead_s,
        }
        pins = self.trace_sha256 or (None,) * len(self.workloads)
        for workload, rates, sha256 in zip(self.workloads, self.rates, pins, strict=True):
            pinned = {} if sha256 is None else {"trace_sha256": sha256}
            for allocator in self.allocators:
                for page_size in self.page_sizes if allocator == "paged" else (None,):
                    for rate in rates:
                        paged = {} if page_size is None else {"page_size": page_size}
                        named = {"workload": workload, "rate": rate, "allocator": allocator}
                        yield {
                            **named,
                            **paged,
                            "num_requests": self.num_requests,
                            **shared,
                            **pinned,
                        }


def read_workload(config: Mapping[str, Any], seed: int) -> Workload:
    """The requests of a point, without their arrivals.

    Raises:
      ValueError: an unknown workload, or a trace that cannot be read, has changed or is malformed.
    """
    names = ("workload", "num_requests", "max_length", "skip_bad_rows")
    return _workload(*(config[name] for name in names), seed, config.get("trace_sha256"))


@functools.lru_cache(maxsize=4)
def _workload(
    text: str,
    num_requests: int | None,
    max_length: int,
    skip_bad_rows: bool,
    seed: int,
    sha256: str | None,
) -> Workload:
    mix = MIXES.get(text)
    if num_requests is None and mix is not None:
        num_requests = int(_TOKENS / (mix.mean_prompt + mix.mean_output))
    elif num_requests is None and not is_trace(text):
        num_requests = _MOST_REQUESTS
    workload = load_workload(
        text,
        num_requests=num_requests,
        seed=seed,
        max_length=max_length,
        skip_bad_rows=skip_bad_rows,
        sha256=sha256,
    )
    return taken(workload, min(len(workload.arrivals), num_requests or _MOST_REQUESTS))


def measure_point(
    config: Mapping[str, Any], seed: int
) -> tuple[dict[str, float], dict[str, list[tuple[float, float]]]]:
    """Serves the requests of one point.

    Args:
      config: from `AllocationStudy.points`.
      seed: of lengths and arrivals.

    Returns:
      Metrics, and series: the share of the token slots that were filled over simulated seconds.
      Requests that have no room in the pool even alone are left out, and counted in
      `requests_refused`.

    Raises:
      ValueError: no request has room.
    """
    workload = read_workload(config, seed)
    if config["rate"] is not None:
        workload = poisson(workload, config["rate"], seed)
    cost = StepCost(
        OPT_13B,
        DEVICES[config["device"]],
        call_overhead_s=config["call_overhead_s"],
        sequence_overhead_s=config["sequence_overhead_s"],
    )
    simulation = SimulationConfig(
        cost,
        config["allocator"],
        config.get("page_size", 1),
        config["kv_slots"],
        slots=_sequences(workload, config["kv_slots"]),
        max_length=_longest(workload, config),
    )
    options = EngineOptions(reuse_prefixes=False, headroom_tokens=config["headroom_tokens"])
    engine = Engine(simulated(simulation), options)
    requests = list(_requests(workload, arrive=config["rate"] is not None))
    refused: dict[str, str] = {}
    for _ in serve(engine, requests, refused):
        pass
    served = [one for one in workload.arrivals if str(one.number) not in refused]
    if not served:
        raise ValueError(
            f"none of {len(refused)} requests has room even alone: kv_slots={config['kv_slots']} "
            f"and max_length={config['max_length']} with allocator={config['allocator']}; give "
            "more --kv_slots"
        )
    metrics = serving_metrics(engine.times, engine.history)
    lengths = np.array([(one.prompt_tokens, one.output_tokens) for one in served])
    metrics["skipped_rows"] = workload.skipped_rows
    metrics["requests_too_long"] = workload.too_long
    metrics["requests_refused"] = len(refused)
    metrics["prompt_tokens_mean"], metrics["output_tokens_mean"] = lengths.mean(axis=0)
    filled = over_time(engine.history, 0.0, lambda use: use.filled / use.total)
    return metrics, {"kv_filled": filled}


def _sequences(workload: Workload, kv_slots: int) -> int:
    """Sequences to allow at once: half as many again as the pool holds on average."""
    held = np.mean([one.prompt_tokens + one.output_tokens / 2 for one in workload.arrivals])
    return min(len(workload.arrivals), 64 * max(1, -(-int(1.5 * kv_slots / held) // 64)))


def _longest(workload: Workload, config: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that there can be: a table of pages is no larger than that."""
    limit: int = config["max_length"]
    if config["allocator"] != "paged":  # `max` reserves them all
        return limit
    return min(limit, max(one.total_tokens for one in workload.arrivals))


def _requests(workload: Workload, arrive: bool) -> Iterator[Request]:
    for one in workload.arrivals:
        prompt = np.broadcast_to(np.int32(0), one.prompt_tokens)
        when = one.arrival_s if arrive else 0.0
        yield Request(str(one.number), prompt, one.output_tokens, arrival_s=when)


def sustained_rate(latencies: Sequence[tuple[float, float]], limit_s: float) -> float | None:
    """The highest rate up to which the normalised latency stays within a limit.

    Args:
      latencies: (requests a second, seconds a token), by rising rate.
      limit_s: seconds a token.

    Returns:
      The rate, by straight lines between the measured ones; None where even the lowest is over
      the limit, and the highest measured one where none is.
    """
    last: tuple[float, float] | None = None
    for rate, latency in latencies:
        if latency > limit_s:
            if last is None:
                return None
            share = (limit_s - last[1]) / (latency - last[1])
            return last[0] + share * (rate - last[0])
        last = rate, latency
    return None if last is None else last[0]
