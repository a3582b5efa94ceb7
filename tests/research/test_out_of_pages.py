"""24 pages of 8 tokens for 5 slots: a sequence pauses as it was, and goes on when it can."""

import types

import jax
import numpy as np
import pytest

from kvlab.ops.page_table import PageTable
from kvlab.ops.specs import Paged
from kvlab.research import inference

# The second has two tables more, which do not refuse.
CASES = (("gqa", Paged(8)), ("mixed", "per layer"))
each_case = pytest.mark.parametrize("case", CASES, ids=["one table", "three tables"])
# 6 + 8 + 8 pages, with room for 3, 2 and 1 tokens in the last.
LENGTHS = types.MappingProxyType({0: 45, 1: 62, 3: 63})


def held_by(session, slot):
    """All that a session holds of one sequence: stored keys and values, place, logits."""
    cache, length = session.cache, int(session.lengths[slot])
    held = [np.array(cache.prompt_lengths[slot]), np.array(session.logits[slot])]
    for layer, spec in zip(cache.layers, session.config.layer_specs, strict=True):
        table = cache.tables[spec.table]
        assert int(table.lengths[slot]) == length
        held += [np.array(array[slot, :length]) for array in layer.gather(table)]
    return held


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


def fill(tiny, case):
    session = tiny.session(*case)
    session.prefill({slot: tiny.prompt(length) for slot, length in LENGTHS.items()})
    assert int(session.cache.tables[0].num_free) == 2
    return session


def alone(tiny, case, slot, steps):
    session = tiny.session(*case)
    session.prefill({slot: tiny.prompt(LENGTHS[slot])})
    return session, session.decode(steps)[slot]


@pytest.mark.parametrize("steps_per_call", [None, 1])
@each_case
def test_a_stalled_sequence_is_as_before_its_step(case, steps_per_call, tiny):
    session = fill(tiny, case)
    results = session.decode(12, steps_per_call=steps_per_call)
    # Slot 3 takes a page for its second token, slot 1 the last one for its third.
    for slot, done in {0: 3, 1: 10, 3: 9}.items():
        assert results[slot].stalled
        assert len(results[slot].tokens) == done
        other, expected = alone(tiny, case, slot, done)
        assert results[slot].tokens == expected.tokens
        assert results[slot].log_probs == expected.log_probs
        assert_same(held_by(session, slot), held_by(other, slot))


@each_case
def test_the_others_do_not_notice_and_it_goes_on_when_there_is_room(case, tiny):
    session = fill(tiny, case)
    session.decode(12)
    stalled = {slot: held_by(session, slot) for slot in (0, 1)}
    results = session.decode({0: 3, 1: 3})
    assert all(result.stalled and not result.tokens for result in results.values())
    for slot, before in stalled.items():
        assert_same(held_by(session, slot), before)
    session.release([3])
    rest = session.decode(6)
    for slot, done in [(0, 3), (1, 10)]:
        other, expected = alone(tiny, case, slot, done + 6)
        assert rest[slot].tokens == expected.tokens[done:]
        assert rest[slot].log_probs == expected.log_probs[done:]
        assert not rest[slot].stalled
        assert_same(held_by(session, slot), held_by(other, slot))


def pages_in_use(session):
    tables = session.cache.tables
    return [int(table.pages_in_use) for table in tables if isinstance(table, PageTable)]


@each_case
def test_a_prompt_that_does_not_fit_takes_nothing_from_any_table(case, tiny):
    """Asked of `prefill` itself: a session refuses such a prompt before."""
    session = fill(tiny, case)
    before = {slot: held_by(session, slot) for slot in LENGTHS}
    in_use = pages_in_use(session)
    tokens = np.array([tiny.prompt(17), tiny.prompt(17, seed=1)], np.int32)
    counts, slots = np.array([17, 0], np.int32), np.array([2, 5], np.int32)
    stored = np.zeros(2, bool)
    arguments = (session.cache, session.logits, tokens, counts, slots, counts, stored)
    session.cache, session.logits, ok, _ = inference.prefill(
        session.params, session.config, *arguments
    )
    assert ok.tolist() == [False, True]
    assert pages_in_use(session) == in_use
    for table in session.cache.tables:
        assert table.lengths.tolist() == session.lengths.tolist() == [45, 62, 0, 63, 0]
    for slot, held in before.items():
        assert_same(held_by(session, slot), held)


def test_a_session_refuses_prompts_that_do_not_fit_before_any_is_stored(tiny):
    session = fill(tiny, CASES[0])
    with pytest.raises(ValueError, match="need 3 more pages of 8 tokens and 2 of 24 are free"):
        session.prefill({2: tiny.prompt(16), 4: tiny.prompt(1)})
    assert session.lengths.tolist() == [45, 62, 0, 63, 0]
    session.prefill({2: tiny.prompt(16), 3: tiny.prompt(1)})  # the last slot of its page
    assert session.lengths.tolist() == [45, 62, 16, 64, 0]
    assert int(session.cache.tables[0].num_free) == 0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda s: s.fork(3, [2]), "no free page to copy the partial page of slot 3"),
        (lambda s: s.reorder([0, 1, 3, 3, 4]), "no free page to copy a partial page that slots"),
    ],
    ids=["fork", "reorder"],
)
@each_case
def test_sharing_that_finds_no_page_changes_nothing(case, call, told, tiny):
    session = fill(tiny, case)
    session.prefill({4: tiny.prompt(15)})
    before = {slot: held_by(session, slot) for slot in (0, 1, 3, 4)}
    tables = jax.tree.map(np.array, session.cache.tables)
    with pytest.raises(ValueError, match=told):
        call(session)
    assert_same(jax.tree.leaves(tables), jax.tree.leaves(session.cache.tables))
    for slot, held in before.items():
        assert_same(held_by(session, slot), held)
