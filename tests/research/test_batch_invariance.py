"""A request's logits and tokens keep their bits whatever shares its batch (DESIGN section 5).

Everything here compares bits (`np.array_equal`), within one configuration; only page sizes of one
read block are compared between configurations.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.page_table import PageTable
from kvlab.ops.retention import H2O
from kvlab.ops.sampling import Sampling
from kvlab.ops.specs import CacheSpec, Contiguous, Kivi4, Paged, Ring
from kvlab.research.cache import unwrapped
from kvlab.research.inference import prefill
from kvlab.research.sequences import evict

CASES = {
    "paged": ("gqa", Paged(8)),
    "contiguous": ("learned", Contiguous()),
    "per layer": ("mixed", "per layer"),
    "evicting": ("gqa", CacheSpec(Paged(8), "int8", H2O(23, recent=5))),
    "ring and KIVI": (
        "mixed",
        (
            CacheSpec(Ring(13)),
            CacheSpec(Paged(16), Kivi4(16, 3)),
            CacheSpec(Ring(71), Kivi4(16)),
        ),
    ),
}
STEPS = 9


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def baseline(case, tiny):
    """The five prompts in a new session, in slot order."""
    return tiny.trace(tiny.session(*case), tiny.prompts)


def assert_equal_bits(left, right):
    """Two traces of a request, as `Trace.row` gives them."""
    assert left[0] == right[0]
    np.testing.assert_array_equal(left[1], right[1])


def page_tables(session):
    tables = [unwrapped(table)[0] for table in session.cache.tables]
    return [table for table in tables if isinstance(table, PageTable)]


def used(session, tiny):
    """Has sequences come and go until pages lie in no order and hold old keys."""
    for round_ in range(3):
        lengths = np.random.default_rng(round_).integers(1, 33, tiny.slots)
        order = np.random.default_rng(round_ + 10).permutation(tiny.slots).tolist()
        session.prefill({slot: tiny.prompt(int(lengths[slot]), seed=41) for slot in order})
        session.decode(3)
        for slot in reversed(order):
            session.release([slot])
    return session


def test_page_sizes_up_to_the_read_block_agree(tiny):
    sizes = (1, 8, 16, 64)
    sessions = {size: tiny.session("gqa", Paged(size)) for size in sizes}
    hidden = {size: session.prefill(tiny.prompts) for size, session in sessions.items()}
    traces = {size: tiny.continued(sessions[size], tiny.prompts) for size in sizes}
    for size in sizes:
        for slot in tiny.prompts:
            np.testing.assert_array_equal(hidden[size][slot], hidden[1][slot])
            assert_equal_bits(traces[size].row(slot), traces[1].row(slot))


def test_pages_and_what_they_held_before_do_not_matter(case, baseline, tiny):
    fresh, session = tiny.session(*case), used(tiny.session(*case), tiny)
    trace = tiny.trace(session, tiny.prompts)
    fresh.prefill(tiny.prompts)
    for mixed, ordered in zip(page_tables(session), page_tables(fresh), strict=True):
        moved = np.asarray(mixed.page_indices) != np.asarray(ordered.page_indices)
        assert moved.sum() > 5
    for slot in tiny.prompts:
        assert_equal_bits(trace.row(slot), baseline.row(slot))


def test_not_even_nan_in_free_slots_matters(case, baseline, tiny):
    session = tiny.session(*case)
    poisoned = jax.tree.map(
        lambda array: jnp.full_like(array, np.nan if array.dtype.kind == "f" else 77),
        session.cache.layers,
    )
    session.cache = dataclasses.replace(session.cache, layers=poisoned)
    trace = tiny.trace(session, tiny.prompts)
    for slot in tiny.prompts:
        assert_equal_bits(trace.row(slot), baseline.row(slot))


def test_other_slots_and_another_order_do_not_matter(case, baseline, tiny):
    home = {0: 3, 1: 0, 2: 4, 3: 2, 4: 1}  # another partner in the prefill call, another row
    prompts = {home[slot]: tiny.prompts[slot] for slot in (4, 1, 0, 3, 2)}
    trace = tiny.trace(tiny.session(*case), prompts)
    for slot in tiny.prompts:
        assert_equal_bits(trace.row(home[slot]), baseline.row(slot))


def test_neighbours_do_not_matter(case, baseline, tiny):
    for slot in (1, 3, 4):
        alone = tiny.trace(tiny.session(*case), {slot: tiny.prompts[slot]})
        assert_equal_bits(alone.row(slot), baseline.row(slot))
    others = {slot: tiny.prompt(29 - slot, seed=43) for slot in (0, 1, 2, 4)}
    beside = tiny.trace(tiny.session(*case), {**others, 3: tiny.prompts[3]})
    assert_equal_bits(beside.row(3), baseline.row(3))
    assert beside.tokens[0] != baseline.tokens[0]


def test_a_prompt_that_fills_all_rows_of_a_call_is_the_one_that_has_one_row_of_each(case, tiny):
    if tiny.session(*case).config.rows_per_sequence == 1:
        pytest.skip("its prompts have one row of each call")
    ids = tiny.prompt(75, seed=47)  # five pieces of 17
    packed, single = tiny.session(*case), tiny.session(*case)
    hidden = packed.prefill({3: ids})[3]
    config, rows = single.config, single.config.rows
    assert rows > 1
    for start in range(0, len(ids), config.chunk):
        piece = ids[start : start + config.chunk]
        tokens = np.zeros((rows, config.chunk), np.int32)
        tokens[1, : len(piece)] = piece
        slots, counts, total = np.full(rows, config.slots), np.zeros(rows, int), np.zeros(rows, int)
        slots[1], counts[1], total[1] = 3, len(piece), len(ids)
        arguments = (jnp.asarray(array, jnp.int32) for array in (tokens, counts, slots, total))
        single.cache, single.logits, ok, states = prefill(
            single.params, config, single.cache, single.logits, *arguments, np.zeros(rows, bool)
        )
        assert ok.all()
        np.testing.assert_array_equal(states[1, : len(piece)], hidden[start : start + len(piece)])
    if config.evicts:
        single.cache = evict(config, single.cache, np.arange(config.slots) == 3)
    traces = [tiny.continued(session, [3]) for session in (packed, single)]
    assert_equal_bits(traces[0].row(3), traces[1].row(3))


def test_neighbours_that_come_and_go_do_not_matter(case, baseline, tiny):
    session = tiny.session(*case)
    session.prefill({3: tiny.prompts[3], 1: tiny.prompt(31)})
    before = tiny.continued(session, [3], steps=2)
    session.release([1])
    session.prefill({0: tiny.prompt(50), 1: tiny.prompt(1)})
    during = tiny.continued(session, [0, 1, 3], steps=3)
    session.fork(0, [4])
    session.release([0])
    after = tiny.continued(session, [1, 3, 4], steps=STEPS - 5)
    tokens = before.tokens[3] + during.tokens[3] + after.tokens[3]
    logits = [before.logits[:-1, 3], during.logits[:-1, 3], after.logits[:, 3]]
    assert_equal_bits((tokens, np.concatenate(logits)), baseline.row(3))


def test_a_forked_copy_is_the_independent_sequence(case, baseline, tiny):
    session = tiny.session(*case)
    session.prefill({1: tiny.prompts[3]})  # 17 tokens: the last page is shared in part
    session.fork(1, [4, 0])
    trace = tiny.continued(session, [0, 1, 4])
    for slot in (0, 1, 4):
        assert_equal_bits(trace.row(slot), baseline.row(3))


def test_a_fork_in_the_middle_of_decode_goes_its_own_way(case, baseline, tiny):
    session = tiny.session(*case)
    session.prefill({2: tiny.prompts[3]})
    tiny.continued(session, [2], steps=4)
    session.fork(2, [0])
    other = (baseline.tokens[3][4] + 1) % tiny.vocab_size
    trace = tiny.continued(session, [0, 2], steps=STEPS - 4, forced={0: [other]})
    assert_equal_bits(trace.row(2), (baseline.tokens[3][4:], baseline.logits[4:, 3]))
    independent = tiny.session(*case)
    independent.prefill({3: tiny.prompts[3]})
    forced = {3: [*baseline.tokens[3][:4], other]}
    expected = tiny.continued(independent, [3], forced=forced)
    assert_equal_bits(trace.row(0), (expected.tokens[3][4:], expected.logits[4:, 3]))
    assert not np.array_equal(trace.logits[1:, 0], trace.logits[1:, 2])


def test_a_preempted_request_resumes(case, baseline, tiny):
    """Prompt through prefill, what it had generated through decode as forced tokens."""
    session = tiny.session(*case)
    session.prefill({0: tiny.prompt(21), 2: tiny.prompts[4]})
    done = session.decode(5)[2].tokens
    session.release([2])
    session.decode(2)
    session.prefill({4: tiny.prompts[4]})
    session.decode({0: 5, 4: 5}, forced={4: done})
    rest = tiny.continued(session, [0, 4], steps=STEPS - 5)
    assert_equal_bits(rest.row(4), (baseline.tokens[4][5:], baseline.logits[5:, 4]))


def test_the_device_loop_is_the_host_loop(case, baseline, tiny):
    results = {}
    for steps_per_call in (None, 1, 4):
        session = tiny.session(*case)
        session.prefill(tiny.prompts)
        results[steps_per_call] = session.decode(STEPS, steps_per_call=steps_per_call)
        np.testing.assert_array_equal(session.logits, baseline.logits[-1])
        for slot, tokens in baseline.tokens.items():
            assert results[steps_per_call][slot].tokens == tokens
    assert results[None] == results[1] == results[4]


class TestSampling:
    """A draw is keyed by seed, sample index and position alone."""

    REQUEST = Sampling(temperature=1.5, top_k=31, top_p=0.95, min_p=0.001, seed=7)

    def sampled(self, case, tiny, prompts, requests, **options):
        session = tiny.session(*case)
        session.prefill(prompts)
        return session.decode(STEPS, sampling=requests, **options)

    def test_slot_neighbours_and_loop_do_not_matter(self, case, tiny):
        prompt = tiny.prompt(17)
        alone = self.sampled(case, tiny, {1: prompt}, {1: self.REQUEST})[1]
        others = {0: tiny.prompt(40), 2: prompt, 4: tiny.prompt(2)}
        requests = {
            0: Sampling(temperature=0.7, seed=7),
            2: dataclasses.replace(self.REQUEST, seed=8),
            3: self.REQUEST,
        }
        prompts = {**others, 3: prompt}
        beside = self.sampled(case, tiny, prompts, requests)
        assert beside[3] == alone
        assert beside[2].tokens != alone.tokens
        assert self.sampled(case, tiny, prompts, requests, steps_per_call=2) == beside

    def test_parallel_samples_of_a_fork_are_those_of_independent_requests(self, case, tiny):
        prompt = tiny.prompt(17)
        samples = [dataclasses.replace(self.REQUEST, sample_index=index) for index in range(3)]
        session = tiny.session(*case)
        session.prefill({2: prompt})
        session.fork(2, [0, 4])
        forked = session.decode(STEPS, sampling=dict(zip((2, 0, 4), samples, strict=True)))
        assert len({result.tokens for result in forked.values()}) == 3
        for slot, request in zip((2, 0, 4), samples, strict=True):
            alone = self.sampled(case, tiny, {1: prompt}, {1: request})
            assert forked[slot] == alone[1]

    def test_forced_tokens_do_not_shift_later_draws(self, case, tiny):
        prompt = tiny.prompt(17)
        free = self.sampled(case, tiny, {1: prompt}, {1: self.REQUEST})[1]
        forced = self.sampled(
            case, tiny, {3: prompt}, {3: self.REQUEST}, forced={3: free.tokens[:4]}
        )
        assert forced[3] == free
