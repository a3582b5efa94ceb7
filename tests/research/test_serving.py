"""Requests in the time of their arrival, on a simulated executor: its seconds by hand."""

import dataclasses

import numpy as np
import pytest

from kvlab.research.cost_model import OPT_13B, StepCost
from kvlab.research.devices import DEVICES
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.requests import RefusedError, Request
from kvlab.research.serving import serve
from kvlab.research.simulated_runs import simulated
from kvlab.research.simulation import SimulationConfig

COST = StepCost(OPT_13B, DEVICES["A100-40GB"], 0.7, 0.8, call_overhead_s=1e-3)
FIELDS = {"page_size": 16, "kv_slots": 4096, "slots": 8, "max_length": 2048}


def engine_of(allocator="paged", **fields):
    """An engine whose steps look at the clock: it must not run back."""
    executor = simulated(SimulationConfig(COST, allocator, **{**FIELDS, **fields}))
    engine = Engine(executor, EngineOptions(reuse_prefixes=False))
    step, steps, latest = engine.step, [], [executor.now()]

    def watched():
        assert executor.now() >= latest[0]
        latest[0] = executor.now()
        progress = step()
        assert executor.now() >= latest[0]
        steps.append(latest[0])
        latest[0] = executor.now()
        assert len(steps) < 20_000, "the engine does not come to an end"
        return progress

    engine.step, engine.begins = watched, steps
    return engine


def request(number, prompt, output, arrival_s=0.0, **fields):
    return Request(f"r{number}", np.zeros(prompt, np.int32), output, arrival_s=arrival_s, **fields)


def crowd(seed, count=60, rate=4.0):
    random = np.random.default_rng(seed)
    return [
        request(number, *random.integers(1, (300, 120)).tolist(), at, n=1 + number % 3 // 2)
        for number, at in enumerate(np.cumsum(random.exponential(1 / rate, count)).tolist())
    ]


def prefill_s(new, before=0):
    return float(COST.prefill_s(new, new * before + new * (new + 1) / 2, before + new))


def decode_s(prompt, tokens, sequences=1):
    return [float(COST.decode_s(sequences, prompt + number)) for number in range(1, tokens + 1)]


@pytest.mark.parametrize("allocator", ["paged", "max", "pow2", "oracle"])
def test_a_lone_request_takes_its_prefill_and_a_step_for_each_token(allocator):
    engine = engine_of(allocator)
    parts = list(serve(engine, [request(0, 300, 170)]))
    times, steps = engine.times["r0"], decode_s(300, 170)
    assert times.admitted_s == 0
    assert times.first_token_s == pytest.approx(prefill_s(300) + steps[0], rel=1e-12)
    assert times.finished_s == pytest.approx(prefill_s(300) + sum(steps), rel=1e-12)
    assert engine.executor.now() == times.finished_s
    assert sum(len(part.tokens) for part in parts) == 170
    assert [part.outcome for part in parts if part.outcome] == ["length"]


def test_a_long_prompt_takes_calls_of_2048_tokens_that_read_what_is_held():
    engine = engine_of(max_length=5100, kv_slots=5200)
    list(serve(engine, [request(0, 5000, 1)]))
    calls = prefill_s(2048) + prefill_s(2048, 2048) + prefill_s(904, 4096)
    assert engine.times["r0"].finished_s == pytest.approx(calls + decode_s(5000, 1)[0], rel=1e-12)
    assert [usage.filled for usage in engine.history] == [2048, 4096, 5000]


def test_two_requests_share_their_calls():
    engine = engine_of()
    list(serve(engine, [request(0, 100, 5), request(1, 40, 3)]))
    pairs = 100 * 101 / 2 + 40 * 41 / 2
    began = float(COST.prefill_s(140, pairs, 140))
    both = sum(float(COST.decode_s(2, 140 + 2 * number)) for number in (1, 2, 3))
    first, second = engine.times["r0"], engine.times["r1"]
    assert second.finished_s == pytest.approx(began + both, rel=1e-12)
    alone = sum(float(COST.decode_s(1, 100 + number)) for number in (4, 5))
    assert first.finished_s == pytest.approx(began + both + alone, rel=1e-12)


def test_samples_are_forked_after_one_prefill():
    engine = engine_of()
    list(serve(engine, [request(0, 100, 4, n=3)]))
    steps = sum(float(COST.decode_s(3, 300 + 3 * number)) for number in (1, 2, 3, 4))
    assert engine.times["r0"].finished_s == pytest.approx(prefill_s(100) + steps, rel=1e-12)


def test_a_request_starts_with_the_first_step_that_begins_after_its_arrival():
    """The decode call of the one that runs ends there, though it could go on for 64 tokens."""
    ends = prefill_s(50) + np.cumsum(decode_s(50, 100))
    arrival = float(ends[20] + ends[21]) / 2
    engine = engine_of()
    list(serve(engine, [request(0, 50, 100), request(1, 30, 2, arrival)]))
    assert engine.times["r1"].arrival_s == arrival
    assert engine.times["r1"].admitted_s == pytest.approx(float(ends[21]), rel=1e-12)


def test_nothing_starts_before_it_arrives_and_every_step_sees_all_that_came():
    engine = engine_of()
    requests = crowd(1)
    list(serve(engine, requests))
    begins = np.array(engine.begins)
    for one in requests:
        times = engine.times[one.id]
        assert times.arrival_s == one.arrival_s
        assert one.arrival_s <= times.admitted_s < times.first_token_s <= times.finished_s
        assert times.admitted_s >= begins[np.searchsorted(begins, one.arrival_s)]
    seen = [
        sum(one.arrival_s <= begin for one in requests)
        - sum(engine.times[one.id].finished_s <= begin for one in requests)
        for begin in begins
    ]
    assert seen == [usage.running + usage.waiting for usage in engine.history]
    assert max(usage.running for usage in engine.history) > 3


def test_idle_time_is_jumped_over():
    engine = engine_of()
    list(serve(engine, [request(0, 10, 2, 5.0), request(1, 10, 2, 1e6), request(2, 10, 2, 1e6)]))
    alone = prefill_s(10) + sum(decode_s(10, 2))
    assert engine.times["r0"].admitted_s == 5.0
    assert engine.times["r0"].finished_s == pytest.approx(5.0 + alone)
    assert [engine.times[name].admitted_s for name in ("r1", "r2")] == [1e6, 1e6]
    assert len(engine.history) == 4  # no step in which there is nothing to do
    assert all(usage.running for usage in engine.history)


def test_arrivals_count_from_the_call():
    engine = engine_of()
    list(serve(engine, [request(0, 10, 2)]))
    engine.executor.wait_until(100.0)
    list(serve(engine, [request(1, 10, 2, 0.0), request(2, 10, 2, 3.5)]))
    assert [engine.times[name].arrival_s for name in ("r1", "r2")] == [100.0, 103.5]
    assert engine.times["r1"].admitted_s == 100.0
    assert engine.times["r2"].admitted_s == 103.5
    assert list(serve(engine, [])) == []


@pytest.mark.parametrize("allocator", ["paged", "max", "pow2", "oracle"])
def test_every_sample_gets_exactly_its_tokens(allocator):
    engine = engine_of(allocator)
    requests = crowd(2)
    tokens, outcomes = {}, {}
    for part in serve(engine, requests):
        key = part.request_id, part.sample
        assert key not in outcomes
        tokens[key] = tokens.get(key, 0) + len(part.tokens)
        if part.outcome is not None:
            outcomes[key] = part.outcome
    wanted = {(one.id, sample): one.max_tokens for one in requests for sample in range(one.n)}
    assert tokens == wanted
    assert outcomes == dict.fromkeys(wanted, "length")
    for one in requests:
        bursts = engine.times[one.id].bursts
        assert [sum(burst.tokens for burst in sample) for sample in bursts] == (
            [one.max_tokens] * one.n
        )


@pytest.mark.parametrize("allocator", ["paged", "oracle"])
def test_whoever_arrives_first_starts_first(allocator):
    engine = engine_of(allocator, kv_slots=1024)
    requests = crowd(3, rate=40.0)
    list(serve(engine, requests))
    admitted = [engine.times[one.id].admitted_s for one in requests]
    assert admitted == sorted(admitted)
    assert max(usage.waiting for usage in engine.history) > 5


@pytest.mark.parametrize("allocator", ["paged", "pow2"])
def test_more_slots_than_are_used_change_nothing(allocator):
    requests = crowd(4, count=30, rate=20.0)
    runs = {}
    for slots in (32, 40):
        engine = engine_of(allocator, slots=slots)
        list(serve(engine, requests))
        runs[slots] = engine.times, engine.history, engine.preemptions
    assert max(usage.samples for usage in runs[32][1]) < 30  # nobody ever wanted for a slot
    assert runs[32] == runs[40]


REFUSED = {
    "empty": request(1, 0, 5, 1.0),
    "long": request(2, 2000, 49, 2.0),
    "many": request(3, 5, 5, 2.0, n=9),
    "large": request(4, 1500, 500, 9.0, n=8),
}


def test_refused_requests_are_collected_and_the_others_served():
    requests = [request(0, 20, 5), *REFUSED.values(), request(5, 20, 5, 9.0)]
    engine, refused = engine_of(), {}
    parts = list(serve(engine, requests, refused))
    assert list(refused) == ["r1", "r2", "r3", "r4"]
    reasons = ["its prompt is empty", "make 2049, and", "n=9 samples", "the pool has 256"]
    for said, reason in zip(refused.values(), reasons, strict=True):
        assert reason in said
    assert {part.request_id for part in parts} == {"r0", "r5"} == engine.times.keys()
    assert engine.times["r5"].admitted_s == 9.0


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_request_raises_where_nobody_collects_it(case):
    engine = engine_of()
    ran = serve(engine, [request(0, 20, 5), REFUSED[case]])
    with pytest.raises(RefusedError, match=REFUSED[case].id):
        list(ran)
    assert engine.times.keys() == {"r0"}


def test_an_id_that_comes_twice_is_refused_the_second_time():
    engine, refused = engine_of(), {}
    twice = [request(0, 20, 5), dataclasses.replace(request(0, 30, 7), arrival_s=1.0)]
    list(serve(engine, twice, refused))
    assert "its id was used before" in refused["r0"]
    assert sum(burst.tokens for burst in engine.times["r0"].bursts[0]) == 5
