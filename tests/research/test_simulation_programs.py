"""Random requests on simulated executors: everything ends, nothing leaks, the cache adds up."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from kvlab.research.cost_model import OPT_13B, StepCost
from kvlab.research.devices import DEVICES
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.requests import Request
from kvlab.research.serving import serve
from kvlab.research.simulated_runs import simulated
from kvlab.research.simulation import SimulationConfig

COST = StepCost(OPT_13B, DEVICES["A100-40GB"])
SLOTS, MAX_LENGTH, SIZE = 5, 40, 4
MAX_STEPS = 3000  # of a program; a request alone takes fewer than 60

REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.integers(1, 26),
            "output": st.integers(1, 14),
            "n": st.integers(1, 3),
            "gap": st.sampled_from([0.0, 0.0, 0.02, 0.2, 5.0]),
            "family": st.integers(0, 2),
            "shared": st.integers(0, 6),
        }
    ),
    min_size=1,
    max_size=14,
)
CANCELS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 13)), max_size=5)
CALLS = st.sampled_from([(16, 128), (2, 5), (1, 3)])  # rows and chunk of a prefill call


def requests_of(drawn):
    """Blocks of a family have one hash each; those behind the shared ones are a request's own."""
    at, requests = 0.0, []
    for number, one in enumerate(drawn):
        at += one["gap"]
        full = one["prompt"] // SIZE
        shared = min(full, one["shared"])
        hashes = [10 * one["family"] + block for block in range(shared)]
        hashes += [100 * (number + 1) + block for block in range(full - shared)]
        prompt = np.zeros(one["prompt"], np.int32)
        more = {"n": one["n"], "arrival_s": at, "prompt_hashes": tuple(hashes)}
        requests.append(Request(f"r{number}", prompt, one["output"], **more))
    return requests


def pages_of(one):
    """Pages that a request needs in the end: its samples share the full pages of its prompt."""
    shared = len(one.prompt) // SIZE
    return shared + one.n * (-(-(len(one.prompt) + one.max_tokens) // SIZE) - shared)


def assert_it_adds_up(usage):
    parts = usage.filled, usage.reserved, usage.internal, usage.cached, usage.free
    assert sum(parts) == usage.total
    assert min(usage) >= 0
    assert usage.samples >= usage.running


def assert_pages_are_counted(engine):
    """Pages in use are those that a running sample maps or a known block holds."""
    executor = engine.executor
    executor._flush()
    rows, table = np.asarray(executor._table.page_indices), executor._table
    used = set(rows[rows < table.num_pages].tolist())
    if engine.index is not None:
        used |= {block.page for block in engine.index._blocks.values()}
    assert len(used) == int(table.pages_in_use)
    running = [*engine._prefilling, *engine._decoding]
    slots = {slot for live in running for slot in live.slots}
    assert set(np.flatnonzero(np.asarray(table.lengths))) <= slots
    assert len(slots) + len(engine._slots) == SLOTS


def run(engine, requests, cancels=(), look=None):
    """Serves requests, and cancels some that have not ended after so many parts of progress."""
    step = engine.step

    def counted():
        assert len(engine.history) < MAX_STEPS, "a request starves"
        progress = step()
        if look is not None:
            look(engine)
        return progress

    engine.step = counted
    tokens, outcomes, refused, cancelled = {}, {}, {}, set()
    due = dict(cancels)
    for number, part in enumerate(serve(engine, requests, refused), 1):
        key = part.request_id, part.sample
        assert key not in outcomes
        tokens[key] = tokens.get(key, 0) + len(part.tokens)
        if part.outcome is not None:
            outcomes[key] = part.outcome
        name = f"r{due.get(number)}"
        if name in engine._live:
            engine.cancel(name)
            cancelled.add(name)
    assert not engine.busy
    for one in requests:
        keys = [(one.id, sample) for sample in range(one.n)]
        if one.id in refused:
            assert not any(key in outcomes for key in keys)
            continue
        times = engine.times[one.id]
        assert times.arrival_s <= times.finished_s
        for key in keys:
            assert outcomes[key] in (("length", "cancelled") if one.id in cancelled else "length")
            if outcomes[key] == "length":
                assert tokens[key] == one.max_tokens
    for usage in engine.history:
        assert_it_adds_up(usage)
    assert [usage.time_s for usage in engine.history] == sorted(
        usage.time_s for usage in engine.history
    )
    assert sorted(engine._slots) == list(range(SLOTS))
    return refused, cancelled


def engine_of(allocator, kv_slots, calls, reuse=False):
    config = SimulationConfig(COST, allocator, SIZE, kv_slots, SLOTS, MAX_LENGTH)
    executor = simulated(config)
    executor.rows = executor.rows_per_sequence = calls[0]
    executor.chunk = calls[1]
    return Engine(executor, EngineOptions(reuse_prefixes=reuse))


SEEN = {"preempted": 0, "hits": 0, "cancelled": 0, "refused": 0, "given up": 0}


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(REQUESTS, CANCELS, CALLS, st.sampled_from([9, 14, 40]), st.booleans())
def _pages(drawn, cancels, calls, pages, looked_at):
    engine, requests = engine_of("paged", pages * SIZE, calls, reuse=True), requests_of(drawn)
    # Looking at the table tells it who was released, so only some programs are looked at.
    look = assert_pages_are_counted if looked_at else None
    refused, cancelled = run(engine, requests, cancels, look)
    assert set(refused) == {one.id for one in requests if pages_of(one) > pages}
    executor, index = engine.executor, engine.index
    assert len(index) == index.num_idle
    assert executor.free_pages() + len(index) == pages
    assert_pages_are_counted(engine)
    SEEN["given up"] += len(index) < index.asked_blocks - index.hit_blocks
    executor.repin((), index.evict(len(index)))
    assert executor.free_pages() == pages
    SEEN["preempted"] += engine.preemptions
    SEEN["hits"] += index.hit_blocks
    SEEN["cancelled"] += len(cancelled)
    SEEN["refused"] += len(refused)


def test_pages_do_not_leak_and_nothing_starves():
    SEEN.update(dict.fromkeys(SEEN, 0))
    _pages()
    assert min(SEEN.values()) > 10, SEEN  # the programs did what they are for


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(REQUESTS, CANCELS, CALLS, st.sampled_from([9, 14, 40]))
def test_pages_without_reuse_do_not_leak_and_nothing_starves(drawn, cancels, calls, pages):
    engine, requests = engine_of("paged", pages * SIZE, calls), requests_of(drawn)
    refused, _ = run(engine, requests, cancels)
    assert set(refused) == {one.id for one in requests if pages_of(one) > pages}
    assert {usage.cached for usage in engine.history} <= {0}
    assert engine.executor.free_pages() == pages
    assert_pages_are_counted(engine)


@pytest.mark.parametrize("allocator", ["max", "pow2", "oracle"])
def test_runs_do_not_leak_and_nothing_starves(allocator):
    """The pools hold three runs of 64 and more: room for any request alone."""

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
    @hypothesis.given(REQUESTS, CANCELS, CALLS, st.sampled_from([192, 207, 256]))
    def programs(drawn, cancels, calls, kv_slots):
        def look(engine):
            executor = engine.executor
            running = [*engine._prefilling, *engine._decoding]
            assert executor._starts.keys() == {slot for live in running for slot in live.slots}
            assert executor._buddies.used_slots <= kv_slots

        engine, requests = engine_of(allocator, kv_slots, calls), requests_of(drawn)
        refused, _ = run(engine, requests, cancels, look)
        assert not refused
        assert engine.preemptions == 0
        assert not engine.executor._starts
        assert engine.executor._buddies.used_slots == 0
        assert engine.executor._buddies.allocate(128) is not None  # runs have joined again

    programs()
