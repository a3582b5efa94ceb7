"""Simulated executors where little is left: what never fits, and who holds what while it waits."""

import contextlib

import numpy as np
import pytest

from kvlab.research.cost_model import OPT_13B, StepCost
from kvlab.research.devices import DEVICES
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.request_metrics import serving_metrics
from kvlab.research.requests import RefusedError, Request
from kvlab.research.serving import serve
from kvlab.research.simulated_runs import simulated
from kvlab.research.simulation import SimulationConfig

COST = StepCost(OPT_13B, DEVICES["A100-40GB"])


def engine_of(allocator="paged", page_size=8, kv_slots=192, slots=5, max_length=139):
    executor = simulated(SimulationConfig(COST, allocator, page_size, kv_slots, slots, max_length))
    return Engine(executor, EngineOptions(reuse_prefixes=False))


def request(number, prompt, output, **fields):
    return Request(f"r{number}", np.zeros(prompt, np.int32), output, **fields)


@pytest.mark.parametrize(
    ("allocator", "kv_slots", "n"), [("max", 100, 1), ("oracle", 200, 5), ("pow2", 200, 2)]
)
def test_a_reservation_that_never_fits_is_refused(allocator, kv_slots, n):
    engine = engine_of(allocator, kv_slots=kv_slots)
    with pytest.raises(RefusedError, match=f"allocator={allocator} reserves .* has no room for"):
        engine.add(request(0, 60, 5, n=n))
    if allocator != "max":
        engine.add(request(1, 60, 5))
        while engine.busy:
            engine.step()


def test_idle_time_is_no_use():
    engine = engine_of()
    list(serve(engine, [request(0, 10, 5), request(1, 10, 5, arrival_s=100.0)]))
    metrics = serving_metrics(engine.times, engine.history)
    busy = sum(usage.step_s for usage in engine.history if usage.time_s <= 100.0)
    assert metrics["running_mean"] == pytest.approx(busy / 100.0)
    assert metrics["running_mean"] < 0.01


def test_samples_that_wait_for_their_fork_hold_nothing():
    random = np.random.default_rng(18)
    engine = engine_of(page_size=2, kv_slots=80, slots=9, max_length=64)
    executor = engine.executor
    executor.rows = executor.rows_per_sequence = 1
    executor.chunk = 3
    for number in range(12):
        prompt, output, n = (int(random.integers(1, most)) for most in (30, 34, 4))
        random.integers(0, 4)
        with contextlib.suppress(RefusedError):
            engine.add(request(number, prompt, output, n=n))
    measure = engine._measure

    def checked():
        usage = measure()
        held = np.array([executor.held[slot] for slot in range(9)])
        unfilled = int(np.sum(-(-held // 2) * 2 - held))  # behind the last token of each sample
        assert usage.filled == usage.total - usage.free - unfilled
        return usage

    engine._measure = checked
    while engine.busy:
        engine.step()
    assert engine.preemptions
