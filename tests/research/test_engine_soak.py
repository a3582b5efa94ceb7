"""Random requests against a pool too small for them: nothing leaks, starves or comes out wrong."""

import contextlib

import numpy as np
import pytest

from kvlab.ops.sampling import Sampling
from kvlab.ops.specs import Paged
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.executor import ModelExecutor
from kvlab.research.requests import RefusedError, Request
from kvlab.research.serving import serve

PAGES = 24  # of 8 tokens, for five slots of at most 139 tokens


def drawn(random, number, prefixes):
    """A request of any kind: its length, samples, sampling and what it shares with others."""
    prefix = prefixes[int(random.integers(len(prefixes)))]
    shared = prefix[: int(random.integers(len(prefix) + 1))] if random.random() < 0.6 else []
    own = random.integers(0, 101, int(random.integers(1, 30)))
    temperature = 0.8 if random.random() < 0.5 else 0.0
    return Request(
        f"r{number}",
        np.array([*shared, *own], np.int32),
        int(random.integers(1, 40)),
        Sampling(temperature=temperature, seed=int(random.integers(2**32))),
        stop_ids=tuple(random.integers(0, 101, 3).tolist()) if random.random() < 0.3 else (),
        n=int(random.choice([1, 1, 1, 2, 3])),
    )


def check_counts(engine):
    """Pages that rows map, known prefixes and free pages are all there are."""
    table = engine.executor.calls.cache.tables[0]
    mapped = np.asarray(table.page_indices)
    known = {block.page for block in engine.index._blocks.values()}
    used = {*mapped[mapped < table.num_pages].tolist(), *known}
    assert len(used) + int(table.num_free) == table.num_pages
    assert len(known) == len(engine.index)


def soak(tiny, seed, count):
    """Adds, cancels and steps at random; every answer is that of the request alone."""
    random = np.random.default_rng(seed)
    config = tiny.config("gqa", Paged(8))
    # The least headroom, for the most preemptions.
    engine = Engine(ModelExecutor(tiny.params("gqa"), config), EngineOptions(headroom_tokens=1))
    oracle = Engine(ModelExecutor(tiny.params("gqa"), config), EngineOptions(reuse_prefixes=False))
    prefixes = [random.integers(0, 101, int(random.integers(8, 60))).tolist() for _ in range(4)]
    requests, results, cancelled = {}, {}, set()
    added, steps = 0, 0
    while added < count or engine.busy:
        while added < count and random.random() < 0.5:
            one = drawn(random, added, prefixes)
            added += 1
            with contextlib.suppress(RefusedError):  # a few are larger than the pool
                engine.add(one)
                requests[one.id] = one
        if random.random() < 0.05 and engine._live:
            name = str(random.choice(list(engine._live)))
            engine.cancel(name)
            cancelled.add(name)
        for part in engine.step():
            tokens, log_probs, _ = results.get((part.request_id, part.sample), ((), (), None))
            new = tokens + part.tokens, log_probs + part.log_probs, part.outcome
            results[part.request_id, part.sample] = new
        steps += 1
        if steps % 50 == 0:
            check_counts(engine)
        assert steps < 300 * count, "someone starves"
    assert len(requests) > 0.95 * count
    check_counts(engine)
    assert engine.executor.free_pages()[0] + engine.index.num_idle == PAGES
    expected = {}
    for name, one in requests.items():
        if name not in cancelled:
            for part in serve(oracle, [one]):
                tokens, log_probs, _ = expected.get((name, part.sample), ((), (), None))
                new = tokens + part.tokens, log_probs + part.log_probs, part.outcome
                expected[name, part.sample] = new
    served = {key: got for key, got in results.items() if key[0] not in cancelled}
    assert served == expected
    assert engine.executor.calls.compile_count <= 8
    return engine, cancelled


def test_random_requests_are_served_as_if_alone(tiny):
    engine, cancelled = soak(tiny, seed=1, count=150)
    assert engine.preemptions > 5
    assert engine.index.hit_blocks > 20
    assert cancelled


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_five_thousand_random_requests(seed, tiny):
    engine, _ = soak(tiny, seed=100 + seed, count=500)
    assert engine.preemptions > 10
