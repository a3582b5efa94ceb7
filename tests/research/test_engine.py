"""The engine: what a request gets is the same whatever else runs, and everything is given back.

Compares bits throughout: tokens and log-probabilities of a request served alone, in a new engine of
the same configuration, against the same request among others.

Over 400 lines, because all of it is one promise, tested with one way to build and read an engine.
"""

import dataclasses

import numpy as np
import pytest

from kvlab.ops.retention import Sinks
from kvlab.ops.sampling import Sampling
from kvlab.ops.specs import CacheSpec, Contiguous, Kivi4, Paged, Ring
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.executor import ModelExecutor
from kvlab.research.live_requests import PolicyError
from kvlab.research.requests import InterruptedEngineError, RefusedError, Request

PAGED = Paged(8)  # the tiny configs give it 24 pages, and five slots of at most 139 tokens


def engine_of(tiny, model="gqa", placement: object = PAGED, fields=None, **options):
    config = tiny.config(model, placement, **(fields or {}))
    if placement != PAGED:
        options.setdefault("reuse_prefixes", False)
    return Engine(ModelExecutor(tiny.params(model), config), EngineOptions(**options))


def request(tiny, number, length, max_tokens=9, prefix=(), **fields):
    prompt = np.array([*prefix, *tiny.prompt(length, seed=number)], np.int32)
    sampling = Sampling(temperature=0.9, seed=number) if number % 3 else Sampling()
    return Request(f"r{number}", prompt, max_tokens, **{"sampling": sampling, **fields})


def collect(progress, results):
    for part in progress:
        tokens, log_probs, _ = results.get((part.request_id, part.sample), ((), (), None))
        key = part.request_id, part.sample
        results[key] = tokens + part.tokens, log_probs + part.log_probs, part.outcome


def served(engine, requests, results=None):
    """Everything that requests get, by (id, sample): tokens, log-probabilities, outcome."""
    results = {} if results is None else results
    for one in requests:
        engine.add(one)
    for _ in range(10_000):
        if not engine.busy:
            return results
        collect(engine.step(), results)
    raise AssertionError("the engine does not come to an end")


def alone(tiny, one, **options):
    return served(engine_of(tiny, **options), [one])


def assert_all_given_back(engine):
    """No slot, page or block is left with anyone; known prefixes are all that pages hold."""
    executor, index = engine.executor, engine.index
    assert len(engine._slots) == executor.slots
    assert not engine._prefilling
    assert not engine._decoding
    assert not len(engine._waiting)
    known = 0 if index is None else index.num_idle
    free, pool = executor.free_pages(), executor.pool_pages()
    assert np.all(free + known == pool)
    if index is not None:
        assert len(index) == known
        executor.repin((), index.evict(known))
        assert np.all(executor.free_pages() == pool)
    table = executor.calls.cache.all_tables()[0]
    assert not np.asarray(getattr(table, "lengths", 0)).any()


@pytest.fixture(scope="module")
def crowd(tiny):
    """32 requests: short and long, some that share prefixes, some of several samples."""
    prefix = tiny.prompt(40, seed=77)
    lengths = np.random.default_rng(5).integers(1, 45, 32)
    return [
        request(
            tiny,
            number,
            int(length),
            max_tokens=1 + 3 * number % 23,
            prefix=prefix[: (0, 7, 16, 40)[number % 4]],
            n=(1, 1, 1, 2)[number * 7 % 4],
        )
        for number, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def by_itself(tiny, crowd):
    """What each request of the crowd gets alone, cold."""
    results = {}
    for one in crowd:
        results |= alone(tiny, one, reuse_prefixes=False)
    return results


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reuse_prefixes": False},
        {"decode_steps": 1},
        {"prefill_tokens": 200},
        {"policy": lambda candidate: (candidate.n, -candidate.prompt_tokens)},
        {"policy": lambda candidate: -candidate.number},
    ],
    ids=["default", "cold", "one step", "large budget", "long prompts first", "last come first"],
)
def test_a_request_gets_the_same_bits_alone_or_among_31_others(options, tiny, crowd, by_itself):
    engine = engine_of(tiny, **options)
    assert served(engine, crowd) == by_itself
    if engine.index is not None:
        assert engine.index.hit_blocks > 20
    assert_all_given_back(engine)


def test_neither_the_order_of_arrival_nor_a_warm_index_matters(tiny, crowd, by_itself):
    engine = engine_of(tiny)
    order = np.random.default_rng(1).permutation(len(crowd))
    assert served(engine, [crowd[index] for index in order]) == by_itself
    again = [dataclasses.replace(one, id=f"{one.id} again") for one in crowd]
    before = engine.index.hit_tokens
    warm = served(engine, again)
    assert engine.index.hit_tokens - before > before
    assert {(key.removesuffix(" again"), n): got for (key, n), got in warm.items()} == by_itself
    assert_all_given_back(engine)


def test_preempted_requests_get_the_same_bits(tiny):
    """Six long outputs want 48 pages of 24."""
    requests = [request(tiny, number, 5 + number, max_tokens=60) for number in range(6)]
    engine = engine_of(tiny)
    results = served(engine, requests)
    assert engine.preemptions > 3
    assert sum(times.preemptions for times in engine.times.values()) == engine.preemptions
    assert engine.times["r0"].preemptions == 0  # the oldest never waits again
    for one in requests:
        expected = alone(tiny, one)
        assert {key: results[key] for key in expected} == expected
    assert_all_given_back(engine)


def test_preempted_samples_are_forked_again(tiny):
    requests = [request(tiny, number, 20, max_tokens=50, n=2) for number in range(3)]
    engine = engine_of(tiny)
    results = served(engine, requests)
    assert engine.preemptions
    for one in requests:
        expected = alone(tiny, one)
        assert {key: results[key] for key in expected} == expected
    assert_all_given_back(engine)


def test_cancelled_neighbours_leave_no_trace(tiny, crowd, by_itself):
    engine, results = engine_of(tiny), {}
    for one in crowd[:12]:
        engine.add(one)
    cancelled = ["r9", "r2", "r0", "r5"]  # waiting, running, running, and whoever comes next
    for number, name in enumerate(cancelled):
        collect(engine.step(), results)
        if any(one.times.finished_s is None for key, one in engine._live.items() if key == name):
            free = engine.executor.free_pages()[0]
            engine.cancel(name)
            assert engine.executor.free_pages()[0] >= free
        assert name not in engine._live, number
    served(engine, [], results)
    ended = {key for key, got in results.items() if got[2] == "cancelled"}
    assert {name for name, _ in ended} >= {"r9", "r2"}
    for key in {(name, n) for name, n in by_itself if int(name[1:]) < 12} - ended:
        assert results[key] == by_itself[key]
    assert_all_given_back(engine)


def test_cancelling_frees_pages_at_once(tiny):
    engine = engine_of(tiny, reuse_prefixes=False)
    engine.add(request(tiny, 1, 70, max_tokens=60))
    engine.step()
    assert engine.executor.free_pages()[0] < 24
    engine.cancel("r1")
    assert engine.executor.free_pages()[0] == 24
    assert [part.outcome for part in engine.step()] == ["cancelled"]
    assert not engine.busy
    with pytest.raises(KeyError, match="no request 'r1' waits or runs"):
        engine.cancel("r1")


def test_a_prompt_that_is_wholly_known_is_asked_without_being_stored(tiny):
    engine = engine_of(tiny)
    one = request(tiny, 1, 32)  # four pages
    cold = served(engine, [one])
    again = dataclasses.replace(one, id="again")
    engine.add(again)
    warm = {}
    collect(engine.step(), warm)
    assert engine.index.hit_tokens == 32
    # Its four pages are those of the index, and one is taken for what it decodes.
    table = engine.executor.calls.cache.tables[0]
    assert int(table.pages_in_use) == 5
    served(engine, [], warm)
    assert engine.index.hit_blocks == 4
    assert warm["again", 0] == cold["r1", 0]
    assert_all_given_back(engine)


@pytest.mark.parametrize("length", [1, 7, 8, 31, 32, 33, 39])
def test_a_prompt_that_ends_inside_a_known_page_gets_the_bits_of_a_cold_one(length, tiny):
    long = request(tiny, 1, 40)
    short = Request("short", long.prompt[:length], 9)
    engine = engine_of(tiny)
    served(engine, [long])
    warm = served(engine, [short])
    assert engine.index.hit_tokens == length
    assert warm == alone(tiny, short)
    assert (
        served(engine, [dataclasses.replace(long, id="again")])[("again", 0)]
        == (alone(tiny, long)[("r1", 0)])
    )
    assert_all_given_back(engine)


def test_requests_of_one_step_share_what_the_first_of_them_writes(tiny):
    prefix = tiny.prompt(40, seed=3)
    requests = [request(tiny, number, 5, prefix=prefix) for number in range(4)]
    engine = engine_of(tiny)
    results = served(engine, requests)
    assert engine.index.hit_blocks == 3 * 5
    for one in requests:
        assert {key: results[key] for key in [(one.id, 0)]} == alone(tiny, one)
    assert_all_given_back(engine)


def test_known_prefixes_give_way_to_requests_and_not_those_in_use(tiny):
    """Each prompt fills most of the pool, so that what is known is given up each time."""
    engine, results = engine_of(tiny), {}
    requests = [request(tiny, number, 100, max_tokens=30) for number in range(5)]
    served(engine, requests, results)
    assert engine.preemptions == 0
    assert len(engine.index) <= 24
    for one in requests:
        assert {(one.id, 0): results[one.id, 0]} == alone(tiny, one)
    assert_all_given_back(engine)


def test_samples_share_the_pages_of_their_prompt_and_are_those_of_single_requests(tiny):
    engine, results = engine_of(tiny), {}
    one = request(tiny, 1, 36, max_tokens=12, n=4)
    engine.add(one)
    while engine.executor.calls.lengths.max() < 37:
        collect(engine.step(), results)
    # Four full pages are shared, and each sample has a copy of the partial one.
    usage = engine._measure()
    assert usage.filled == 4 * 8 + 4 * (int(engine.executor.calls.lengths[0]) - 32)
    served(engine, [], results)
    for sample in range(4):
        sampling = dataclasses.replace(one.sampling, sample_index=sample)
        session = tiny.session("gqa", PAGED)
        session.prefill([one.prompt])
        (expected,) = session.decode(12, sampling=sampling).values()
        assert results["r1", sample][:2] == (expected.tokens, expected.log_probs)
    assert_all_given_back(engine)


def test_a_stop_token_ends_a_sample_and_is_its_last(tiny):
    one = request(tiny, 3, 20, max_tokens=30)
    tokens, log_probs, _ = alone(tiny, one)["r3", 0]
    stop = tokens[4]
    stopping = dataclasses.replace(one, stop_ids=(101 - 1, stop) if stop != 100 else (stop,))
    end = next(i for i, token in enumerate(tokens) if token in stopping.stop_ids) + 1
    engine = engine_of(tiny)
    assert served(engine, [stopping])["r3", 0] == (tokens[:end], log_probs[:end], "stop")
    assert_all_given_back(engine)


CACHES = {
    "contiguous": ("learned", Contiguous()),
    "per layer": ("mixed", "per layer"),
    "ring and KIVI": (
        "mixed",
        (CacheSpec(Ring(13)), CacheSpec(Paged(16), Kivi4(16, 3)), CacheSpec(Ring(71), Kivi4(16))),
    ),
    "evicting": ("gqa", CacheSpec(PAGED, "int8", Sinks(23, num_sinks=2))),
    "int8": ("gqa", CacheSpec(PAGED, "int8")),
}


LONG = ("per layer", "ring and KIVI")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.long) if c in LONG else c for c in CACHES]
)
def test_every_cache_is_served(case, tiny):
    """Against a session that holds the one request alone."""
    model, placement = CACHES[case]
    requests = [
        request(tiny, number, 3 + 9 * number, max_tokens=8, n=1 + number % 2) for number in range(7)
    ]
    engine = engine_of(tiny, model, placement)
    results = served(engine, requests)
    session = tiny.session(model, placement)
    for one in requests:
        session.prefill([one.prompt])
        (expected,) = session.decode(8, sampling=one.sampling).values()
        session.release()
        assert results[one.id, 0][:2] == (expected.tokens, expected.log_probs)
    assert_all_given_back(engine)


def test_prefixes_are_reused_only_where_pages_can_be_lent(tiny):
    for case in ("contiguous", "per layer", "evicting"):
        with pytest.raises(ValueError, match=r"reuse_prefixes=True given: .*; use .* or reuse_pre"):
            engine_of(tiny, *CACHES[case], reuse_prefixes=True)


def test_int8_pages_are_lent_too(tiny):
    prefix = tiny.prompt(33, seed=3)
    requests = [request(tiny, number, 5, prefix=prefix) for number in range(4)]
    cold = served(engine_of(tiny, *CACHES["int8"]), requests)
    engine = engine_of(tiny, *CACHES["int8"], reuse_prefixes=True)
    assert served(engine, requests) == cold
    assert engine.index.hit_blocks == 3 * 4


def test_a_request_that_fits_the_pool_fits_it_warm_too(tiny):
    """A known page in which its prompt ends is copied, and then not in use beside the copy."""
    text = np.array(tiny.prompt(16, seed=3), np.int32)
    requests = [Request("a", text, 3), Request("b", text[:12], 127)]  # b takes all 18 pages
    for reuse in (False, True):
        engine = engine_of(tiny, fields={"num_pages": 18}, reuse_prefixes=reuse)
        assert served(engine, requests[:1])["a", 0][2] == "length"
        assert served(engine, requests[1:])["b", 0][2] == "length"


REFUSALS = {
    "longer than a sequence": ({"length": 100, "max_tokens": 50}, "make 150, and .* at most 139"),
    "longer than the pool": (
        {"length": 90, "max_tokens": 49, "n": 3},
        "may need 32 pages and the pool has 24",
    ),
    "more samples than slots": ({"length": 5, "n": 6}, "n=6 samples; want 1 to the 5 slots"),
    "no sample": ({"length": 5, "n": 0}, "n=0 samples"),
    "an empty prompt": ({"length": 0}, "its prompt is empty"),
    "no tokens asked": ({"length": 5, "max_tokens": 0}, "max_tokens=0"),
    "an id out of range": ({"length": 5, "prefix": (101,)}, r"token id \[101\] is out of range"),
    "too many stop ids": ({"length": 5, "stop_ids": tuple(range(9))}, "9 stop ids given"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_can_never_be_served_is_refused_with_its_reason(case, tiny, crowd, by_itself):
    fields, reason = REFUSALS[case]
    engine = engine_of(tiny)
    engine.add(crowd[0])
    with pytest.raises(RefusedError, match=f"request 'r99' refused: .*{reason}") as refused:
        engine.add(request(tiny, 99, **fields))
    assert refused.value.request_id == "r99"
    assert served(engine, []) == {("r0", 0): by_itself["r0", 0]}
    assert "r99" not in engine.times
    assert_all_given_back(engine)


MALFORMED = {
    "ids in a column": ({"prompt": np.ones((6, 1), np.int32)}, r"shape \(6, 1\); give token ids"),
    "ids that are no integers": ({"prompt": [1.5, 2.7]}, "its prompt is float64"),
    "a text": ({"prompt": "text"}, "its prompt is <U4"),
    "no prompt": ({"prompt": None}, "its prompt is object"),
    "a stop id past 32 bits": ({"stop_ids": (10**12,)}, r"stop_ids=\(1000000000000,\)"),
    "a stop id that is a text": ({"stop_ids": ("x",)}, "are no token ids"),
    "half a token": ({"max_tokens": 2.5}, "max_tokens=2.5 is no whole number"),
    "samples that are True": ({"n": True}, "n=True is no whole number"),
    "hashes that are lists": ({"prompt_hashes": ([1], [2])}, "cannot be hashed"),
    "no sampling": ({"sampling": None}, "sampling=None is no Sampling"),
    "no time": ({"arrival_s": float("nan")}, "arrival_s=nan is no time"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_no_request_is_refused_and_the_others_go_on(case, tiny, crowd, by_itself):
    fields, reason = MALFORMED[case]
    engine = engine_of(tiny)
    engine.add(crowd[0])
    with pytest.raises(RefusedError, match=f"request 'r99' refused: .*{reason}"):
        engine.add(dataclasses.replace(request(tiny, 99, 5), **fields))
    assert served(engine, []) == {("r0", 0): by_itself["r0", 0]}


def test_the_prompts_array_is_the_callers_again(tiny, crowd, by_itself):
    engine, prompt = engine_of(tiny), np.array(crowd[0].prompt)
    engine.add(dataclasses.replace(crowd[0], prompt=prompt))
    prompt[:] = 7
    assert served(engine, []) == {("r0", 0): by_itself["r0", 0]}


def test_an_engine_whose_step_was_interrupted_says_so_and_a_new_one_gives_the_same(
    tiny, crowd, by_itself
):
    engine = engine_of(tiny)
    decode = engine.executor.decode

    def interrupted(turns):
        decode(turns)
        raise KeyboardInterrupt

    engine.add(crowd[0])
    engine.executor.decode = interrupted
    with pytest.raises(KeyboardInterrupt):
        served(engine, [])
    engine.executor.decode = decode
    for call in (engine.step, lambda: engine.add(crowd[1]), lambda: engine.cancel("r0")):
        with pytest.raises(InterruptedEngineError, match=r"\(KeyboardInterrupt\).*a new engine"):
            call()
    assert served(engine_of(tiny), crowd[:1]) == {("r0", 0): by_itself["r0", 0]}


def test_an_id_is_used_once(tiny):
    engine = engine_of(tiny)
    engine.add(request(tiny, 1, 5))
    for _ in range(2):  # while it runs, and when it has ended
        with pytest.raises(RefusedError, match="its id was used before"):
            engine.add(request(tiny, 1, 9))
        served(engine, [])


def test_a_policy_that_fails_is_named_with_its_request_and_nothing_is_lost(tiny, crowd, by_itself):
    fails = set()

    def policy(candidate):
        if candidate.number in fails:
            raise ZeroDivisionError("bad luck")
        return candidate.number

    engine, results = engine_of(tiny, policy=policy), {}
    fails.add(1)
    engine.add(crowd[0])
    with pytest.raises(PolicyError, match="failed on request 'r1': ZeroDivisionError: bad luck"):
        engine.add(crowd[1])
    fails.clear()
    served(engine, crowd[1:5], results)
    assert results == {key: got for key, got in by_itself.items() if int(key[0][1:]) < 5}
    # Now when one has to be preempted.
    long = [request(tiny, 50 + number, 5 + number, max_tokens=60) for number in range(6)]
    for one in long:
        engine.add(one)
    fails.update(range(20))
    with pytest.raises(PolicyError, match="ZeroDivisionError: bad luck"):
        served(engine, [], results)
    fails.clear()
    served(engine, [], results)
    for one in long:
        assert {(one.id, 0): results[one.id, 0]} == alone(tiny, one)
    assert_all_given_back(engine)


def test_ranks_that_cannot_be_compared_are_the_policys_error(tiny):
    engine = engine_of(tiny, policy=lambda candidate: [None, 1, "two"][candidate.number % 3])
    engine.add(request(tiny, 1, 5))
    with pytest.raises(PolicyError, match="request 'r2': TypeError"):
        engine.add(request(tiny, 2, 5))
    served(engine, [])
    assert_all_given_back(engine)


@pytest.mark.parametrize("rank", [float("nan"), np.float32("nan"), (1, float("nan"))])
def test_a_rank_that_is_not_a_number_is_the_policys_error(rank, tiny):
    engine = engine_of(tiny, policy=lambda candidate: rank)
    with pytest.raises(PolicyError, match=r"request 'r1': ValueError: the rank .* is not a number"):
        engine.add(request(tiny, 1, 5))


def test_requests_are_admitted_in_the_order_of_the_policy(tiny):
    def order(**options):
        engine = engine_of(tiny, fields={"slots": 1, "num_pages": 24}, **options)
        requests = [request(tiny, number, 3, max_tokens=(9, 4, 6)[number]) for number in range(3)]
        served(engine, requests)
        return sorted(engine.times, key=lambda name: engine.times[name].admitted_s)

    assert order() == ["r0", "r1", "r2"]
    assert order(policy=lambda candidate: candidate.max_tokens) == ["r1", "r2", "r0"]


def test_a_long_prompt_does_not_hold_up_running_samples(tiny):
    """Each step prefills one call and decodes beside it."""
    engine, results = engine_of(tiny), {}
    engine.add(request(tiny, 1, 3, max_tokens=40))
    collect(engine.step(), results)
    engine.add(request(tiny, 2, 100))
    for step in range(3):
        before = len(results["r1", 0][0])
        collect(engine.step(), results)
        assert len(results["r1", 0][0]) == before + 1
        assert ("r2", 0) not in results or step == 2


def test_whoever_arrives_first_is_never_passed_by(tiny):
    """A prompt that needs most of the pool is not starved by small ones behind it."""
    engine, results = engine_of(tiny, reuse_prefixes=False), {}
    for number in range(4):
        engine.add(request(tiny, number, 20, max_tokens=30))
    collect(engine.step(), results)
    engine.add(request(tiny, 10, 120, max_tokens=10))
    for number in range(20, 40):
        engine.add(request(tiny, number, 3, max_tokens=3))
    served(engine, [], results)
    admitted = {name: times.admitted_s for name, times in engine.times.items()}
    assert all(admitted["r10"] <= admitted[f"r{number}"] for number in range(20, 40))


def test_a_run_compiles_few_programs_whatever_the_lengths(tiny, crowd):
    engine = engine_of(tiny, fields={"decode_steps": 6})
    served(engine, crowd)
    # prefill, decode, fork, attach, repin, and small ones for copies to the host
    assert engine.executor.calls.compile_count <= 8


def test_an_engine_of_bad_sizes_is_refused(tiny):
    for field in ("prefill_tokens", "decode_steps", "headroom_tokens"):
        for size in (0, 2.5, float("nan")):
            with pytest.raises(ValueError, match=f"{field}={size} given; it must be a whole"):
                EngineOptions(**{field: size})
