"""Simulated executors under the engine: who holds what after each step, against plain recounts."""

import dataclasses
import itertools

import numpy as np
import pytest

from kvlab.research.cache_usage import Usage
from kvlab.research.cost_model import OPT_13B, StepCost
from kvlab.research.devices import DEVICES
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.requests import Request
from kvlab.research.serving import serve
from kvlab.research.simulated_runs import SimulatedRuns, simulated
from kvlab.research.simulation import SimulationConfig

COST = StepCost(OPT_13B, DEVICES["A100-40GB"])
ORCA_SLOTS = 15_728  # of OPT-13B in 12 GiB
SIZE = 16  # tokens a page, and of a block


def engine_of(allocator="paged", look=None, calls=None, reuse=False, **fields):
    """An engine; `look` is called after each step, `calls` are the rows and chunk of a prefill."""
    sizes = {"page_size": SIZE, "kv_slots": 8192, "slots": 16, "max_length": 2048, **fields}
    executor = simulated(SimulationConfig(COST, allocator, **sizes))
    if calls is not None:
        executor.rows = executor.rows_per_sequence = calls[0]
        executor.chunk = calls[1]
    engine = Engine(executor, EngineOptions(reuse_prefixes=reuse))
    step = engine.step

    def watched():
        progress = step()
        assert len(engine.history) < 20_000, "the engine does not come to an end"
        if look is not None:
            look(engine)
        return progress

    engine.step = watched
    return engine


def request(number, prompt, output, arrival_s=0.0, **fields):
    return Request(f"r{number}", np.zeros(prompt, np.int32), output, arrival_s=arrival_s, **fields)


def crowd(seed, count=50, prompt=200, output=150, samples=1, rate=50.0):
    random = np.random.default_rng(seed)
    return [
        request(
            number,
            *random.integers(1, (prompt, output)).tolist(),
            at,
            n=1 + int(random.integers(samples)),
        )
        for number, at in enumerate(np.cumsum(random.exponential(1 / rate, count)).tolist())
    ]


def sharing(seed, count=60, rate=20.0, output=60):
    """Requests whose prompts begin alike: four families, of up to 12 blocks; the rest is new."""
    random = np.random.default_rng(seed)
    requests, fresh = [], 1000
    for number, at in enumerate(np.cumsum(random.exponential(1 / rate, count)).tolist()):
        family, shared = int(random.integers(4)), int(random.integers(13))
        tokens = shared * SIZE + int(random.integers(1, 60))
        new = tokens // SIZE - shared
        hashes = [family * 100 + block for block in range(shared)]
        hashes += range(fresh, fresh + new)
        fresh += new
        wanted, samples = int(random.integers(1, output)), 1 + int(random.integers(5)) // 4
        more = {"prompt_hashes": tuple(hashes), "n": samples}
        requests.append(request(number, tokens, wanted, at, **more))
    return requests


def running(engine):
    return [*engine._prefilling, *engine._decoding]


def ended(engine):
    return {name for name, times in engine.times.items() if times.finished_s is not None}


def assert_it_adds_up(usage):
    parts = usage.filled, usage.reserved, usage.internal, usage.cached, usage.free
    assert sum(parts) == usage.total
    assert min(usage) >= 0


def assert_all_given_back(engine):
    executor, index = engine.executor, engine.index
    assert sorted(engine._slots) == list(range(executor.slots))
    assert not running(engine)
    known = 0 if index is None else index.num_idle
    assert np.all(executor.free_pages() + known == executor.pool_pages())
    if index is not None:
        assert len(index) == known
        executor.repin((), index.evict(known))
        assert np.all(executor.free_pages() == executor.pool_pages())
    if isinstance(executor, SimulatedRuns):
        assert executor._buddies.used_slots == 0
    else:
        executor._flush()
        assert not np.asarray(executor._table.lengths).any()
        assert not np.asarray(executor._table.ref_counts).any()
    assert not executor.held.any()


def pages_by_hand(engine):
    """Pages of requests that share nothing with each other."""
    size, count = engine.executor.page_size, 0
    for live in engine._prefilling:
        count += -(-live.done // size)
    for live in engine._decoding:
        whole = live.prompt_tokens // size  # shared by all samples
        lengths = [live.prompt_tokens + sample.fed for sample in live.open_samples]
        count += whole + sum(-(-length // size) - whole for length in lengths)
    return count


@pytest.mark.parametrize("size", [1, 5, 16, 256])
@pytest.mark.parametrize("calls", [None, (2, 17)], ids=["large calls", "small calls"])
def test_pages_in_use_are_those_that_a_plain_count_gives(size, calls):
    seen = []

    def look(engine):
        executor = engine.executor
        seen.append(int(executor.pool_pages()[0] - executor.free_pages()[0]))
        assert seen[-1] == pages_by_hand(engine)
        assert executor.token_slots(np.zeros(0)) == (8192 // size * size, seen[-1] * size)

    engine = engine_of(look=look, calls=calls, page_size=size)
    list(serve(engine, crowd(1, samples=3)))
    assert engine.preemptions == 0
    assert max(seen) * size > 1000
    assert len(ended(engine)) == 50
    for usage in engine.history:
        assert_it_adds_up(usage)
    assert_all_given_back(engine)


def test_a_page_of_one_token_wastes_and_reserves_nothing():
    engine = engine_of(page_size=1)
    list(serve(engine, crowd(2)))
    assert {(usage.reserved, usage.internal) for usage in engine.history} == {(0, 0)}


def test_what_is_filled_reserved_and_wasted_is_counted_token_by_token():
    """One request of 20 tokens that makes 6, on pages of 16: the last slots stay empty."""
    engine = engine_of(kv_slots=160)
    list(serve(engine, [request(0, 20, 6), request(1, 3, 20)]))
    first = engine.history[0]._replace(time_s=0, step_s=0)
    # 12 slots are free behind 20 tokens, 6 of them to be used; 13 behind 3, all to be used.
    counts = {"running": 2, "samples": 2, "waiting": 0, "left": 2, "total": 160, "filled": 23}
    assert first == Usage(0, 0, **counts, reserved=6 + 13, internal=6, cached=0, free=160 - 48)


@pytest.mark.parametrize("calls", [None, (1, 17)], ids=["large calls", "small calls"])
def test_a_pool_that_is_too_small_preempts_and_all_still_end(calls):
    """Twenty requests want up to 350 tokens each; the pool holds 480."""

    def look(engine):
        pages = engine.executor.pool_pages() - engine.executor.free_pages()
        assert int(pages[0]) == pages_by_hand(engine) <= 30

    engine = engine_of(look=look, calls=calls, kv_slots=480)
    requests, tokens = crowd(3, count=20), {}
    for part in serve(engine, requests):
        tokens[part.request_id] = tokens.get(part.request_id, 0) + len(part.tokens)
        assert part.outcome in (None, "length")
    assert engine.preemptions > 3
    assert sum(times.preemptions for times in engine.times.values()) == engine.preemptions
    assert engine.times["r0"].preemptions == 0
    assert tokens == {one.id: one.max_tokens for one in requests}
    admitted = [engine.times[one.id].admitted_s for one in requests]
    assert admitted == sorted(admitted)
    for usage in engine.history:
        assert_it_adds_up(usage)
    assert_all_given_back(engine)


def test_a_call_is_cut_short_before_anyone_is_preempted():
    """Two requests want 116 tokens each and could have 64 in a call; the pool holds 160."""
    engine = engine_of(kv_slots=160)
    list(serve(engine, [request(number, 16, 100) for number in range(2)]))
    full = next(n for n, usage in enumerate(engine.history) if usage.filled == 160)
    assert {usage.running for usage in engine.history[: full + 1]} == {2}
    assert engine.preemptions == engine.times["r1"].preemptions == 1


def test_what_was_preempted_pays_for_its_tokens_again():
    large, small = engine_of(), engine_of(kv_slots=480)
    for engine in (large, small):
        list(serve(engine, crowd(3, count=20)))
    assert small.preemptions
    assert small.executor.now() > large.executor.now()


def aligned_free_run(executor, size):
    """Whether a run of so many slots, at a multiple of it, is in nobody's run."""
    size = 1 << (size - 1).bit_length()
    pool = executor._buddies
    taken = np.zeros(pool.num_slots // size * size, bool)
    for start in executor._starts.values():
        taken[start : start + (1 << pool._orders[start])] = True
    return bool((~taken.reshape(-1, size).any(axis=1)).any())


def orca(allocator, requests, **fields):
    """Runs Orca; every claim is checked against the runs that are really free."""
    refused = []

    def look(engine):
        executor = engine.executor
        reserve = {
            "max": lambda live: 2048,
            "pow2": lambda live: (
                len(live.request.prompt)
                + next(1 << n for n in range(12) if 1 << n >= live.request.max_tokens)
            ),
            "oracle": lambda live: len(live.request.prompt) + live.request.max_tokens,
        }[allocator]
        slots = {slot: reserve(live) for live in running(engine) for slot in live.slots}
        assert executor._starts.keys() == slots.keys()
        rounded = {slot: 1 << (size - 1).bit_length() for slot, size in slots.items()}
        assert sum(rounded.values()) == executor._buddies.used_slots <= ORCA_SLOTS
        runs = sorted((executor._starts[slot], size) for slot, size in rounded.items())
        for (start, size), (following, _) in itertools.pairwise([*runs, (ORCA_SLOTS, 0)]):
            assert start + size <= following

    engine = engine_of(allocator, look, kv_slots=ORCA_SLOTS, slots=64, **fields)
    executor = engine.executor
    claim = executor.claim

    def checked(slot, prompt_tokens, most_tokens):
        size = executor._reserve(prompt_tokens, most_tokens, 2048)
        possible = aligned_free_run(executor, size)
        claimed = claim(slot, prompt_tokens, most_tokens)
        assert claimed == possible
        refused.extend([size] * (not claimed))
        return claimed

    executor.claim = checked
    list(serve(engine, requests))
    assert len(ended(engine)) == len(requests)
    assert engine.preemptions == 0
    for usage in engine.history:
        assert_it_adds_up(usage)
        assert (usage.total, usage.cached) == (ORCA_SLOTS, 0)
    assert_all_given_back(engine)
    return engine, refused


def test_orca_max_runs_seven_requests_at_most():
    engine, refused = orca("max", crowd(4))
    assert max(usage.running for usage in engine.history) == 7
    assert set(refused) == {2048}
    full = [usage for usage in engine.history if usage.running == 7]
    assert {usage.free for usage in full} == {ORCA_SLOTS - 7 * 2048}
    assert all(usage.internal > 7 * (2048 - 350) for usage in full)


@pytest.mark.parametrize("samples", [1, 3])
def test_orcas_hold_what_their_buddy_allocators_allow(samples):
    requests = crowd(5, count=80, prompt=500, output=500, samples=samples)
    most, finished = {}, {}
    for allocator in ("max", "pow2", "oracle"):
        engine, refused = orca(allocator, requests)
        assert refused
        most[allocator] = max(usage.samples for usage in engine.history)
        finished[allocator] = engine.executor.now()
        if allocator == "oracle":
            assert {usage.internal for usage in engine.history} == {0}
    assert 6 <= most["max"] <= 7 < most["pow2"] < most["oracle"]
    assert finished["max"] > finished["pow2"] > finished["oracle"]


def test_orca_pow2_wastes_what_the_power_adds_and_reserves_the_rest():
    """Outputs of 25 reserve 32, as the paper has it: 7 are never used."""
    engine, _ = orca("pow2", [request(0, 100, 25)])
    first, last = engine.history[0], engine.history[-1]
    assert (first.filled, first.reserved, first.internal) == (100, 25, 7)
    assert (last.filled + last.reserved, last.internal) == (125, 7)
    assert first.free == ORCA_SLOTS - 132  # a run of 256: nobody's, and not to be had


def block_hits(requests):
    """Full pages of each prompt, and those that an earlier request had, if nothing is given up."""
    known, asked, hits = set(), 0, 0
    for one in requests:
        blocks = one.prompt_hashes[: len(one.prompt) // SIZE]
        first_new = next((n for n, block in enumerate(blocks) if block not in known), len(blocks))
        asked, hits = asked + len(blocks), hits + first_new
        known.update(blocks)
    return asked, hits


def look_at_texts(engine):
    """Each page in use holds one text, each known block one page, and all of them are counted."""
    executor = engine.executor
    executor._flush()
    table = executor._table
    rows, lengths = np.asarray(table.page_indices), np.asarray(table.lengths)
    texts = {block.page: {("block", digest)} for digest, block in engine.index._blocks.items()}
    for live in running(engine):
        blocks = live.blocks.hashes
        for sample in live.open_samples:
            forked = live in engine._decoding
            held = live.done + sample.fed if forked or sample.slot == live.slots[0] else 0
            assert lengths[sample.slot] == held
            for column in range(-(-held // SIZE)):
                own = "own", live.request.id, sample.index, column
                text = ("block", blocks[column]) if column < len(blocks) else own
                texts.setdefault(int(rows[sample.slot, column]), set()).add(text)
    assert all(len(held) == 1 for held in texts.values())
    assert len(set().union(*texts.values())) == len(texts)
    assert table.num_pages not in texts
    assert len(texts) == int(table.pages_in_use)
    assert executor.free_pages() == table.num_pages - len(texts)


@pytest.mark.parametrize("calls", [None, (2, 17)], ids=["large calls", "small calls"])
@pytest.mark.parametrize("seed", range(2))
def test_a_large_pool_finds_every_block_that_an_earlier_prompt_had(seed, calls):
    requests = sharing(seed)
    engine = engine_of(look=look_at_texts, calls=calls, reuse=True, kv_slots=30_000)
    list(serve(engine, requests))
    full, hits = block_hits(requests)
    asked = sum(-(-len(one.prompt) // SIZE) for one in requests)  # partial blocks too
    assert hits > 100
    assert (engine.index.asked_blocks, engine.index.hit_blocks) == (asked, hits)
    assert engine.index.hit_tokens == hits * SIZE
    assert engine.index.asked_tokens == sum(len(one.prompt) for one in requests)
    assert len(engine.index) == engine.index.num_idle == full - hits
    assert_all_given_back(engine)


@pytest.mark.parametrize("calls", [None, (2, 17)], ids=["large calls", "small calls"])
@pytest.mark.parametrize("pages", [24, 40])
def test_a_small_pool_gives_up_no_page_in_use(pages, calls):
    requests = sharing(7, count=40, rate=200.0)
    engine = engine_of(look=look_at_texts, calls=calls, reuse=True, kv_slots=pages * SIZE)
    tokens = {}
    for part in serve(engine, requests):
        tokens[part.request_id] = tokens.get(part.request_id, 0) + len(part.tokens)
    assert tokens == {one.id: one.max_tokens * one.n for one in requests}
    assert engine.index.hit_blocks > 20
    assert len(engine.index) < np.subtract(*block_hits(requests))  # some were given up
    for usage in engine.history:
        assert_it_adds_up(usage)
    assert any(usage.cached for usage in engine.history)
    assert_all_given_back(engine)


def test_known_blocks_save_the_time_of_their_prefill():
    requests = [
        request(number, 1600, 4, float(number), prompt_hashes=tuple(range(100)))
        for number in range(3)
    ]
    cold, warm = engine_of(reuse=False), engine_of(reuse=True)
    for engine in (cold, warm):
        list(serve(engine, requests))
    spent = [
        [times.finished_s - times.arrival_s for times in engine.times.values()]
        for engine in (cold, warm)
    ]
    assert spent[1] == pytest.approx([spent[0][0], *[spent[1][1]] * 2])
    assert spent[1][1] < spent[0][1]
    # A prompt that is wholly known is asked what follows it: a call that adds nothing.
    asked, full = (float(COST.prefill_s(n, n * (n + 1) / 2, 1600)) for n in (0, 1600))
    assert spent[0][1] - spent[1][1] == pytest.approx(full - asked)


def test_prompts_without_hashes_are_like_no_other():
    engine = engine_of(reuse=True)
    list(serve(engine, crowd(6, count=10)))
    assert (engine.index.hit_blocks, len(engine.index)) == (0, 0)


def test_hashes_beyond_the_full_pages_of_a_prompt_are_not_looked_at():
    engine = engine_of(reuse=True)
    long = request(0, 40, 2, prompt_hashes=(1, 2, 3))
    list(serve(engine, [long, dataclasses.replace(long, id="again", arrival_s=1.0)]))
    assert (engine.index.asked_blocks, engine.index.hit_blocks, len(engine.index)) == (6, 2, 2)


@pytest.mark.parametrize("allocator", ["max", "pow2", "oracle"])
def test_runs_have_no_pages_to_share(allocator):
    with pytest.raises(ValueError, match=f"allocator={allocator} has no pages to share"):
        engine_of(allocator, reuse=True)
