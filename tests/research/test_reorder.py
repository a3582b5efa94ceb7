"""A sequence taken over by another slot goes on with the very bits, and pages are shared."""

import numpy as np
import pytest

from kvlab.ops.page_table import PageTable
from kvlab.ops.specs import Contiguous, Paged, Recompute

CASES = {
    "paged": ("gqa", Paged(8)),
    "contiguous": ("learned", Contiguous()),
    "recompute": ("gqa", Recompute()),
    "per layer": ("mixed", "per layer"),
}
EMPTY = 5  # no slot
PARENTS = (4, 3, 3, EMPTY, 1)  # slot 0 is forgotten, 3 goes twice


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sequences_go_on_in_other_slots_with_their_bits(case, tiny):
    prompts = tiny.prompts
    # The two that share all they hold part at once.
    forced = {slot: tiny.prompt(9, seed=slot) for slot in (1, 2)}
    apart = tiny.session(*case)
    taken = {slot: prompts[parent] for slot, parent in enumerate(PARENTS) if parent != EMPTY}
    tokens = tiny.trace(apart, taken, steps=3).tokens
    expected = tiny.continued(apart, taken, forced=forced)

    session = tiny.session(*case)
    before = tiny.trace(session, prompts, steps=3)
    session.reorder(PARENTS)
    lengths = [len(taken[slot]) + 3 if slot in taken else 0 for slot in range(tiny.slots)]
    assert session.lengths.tolist() == lengths
    trace = tiny.continued(session, taken, forced=forced)
    for slot, parent in enumerate(PARENTS):
        if parent != EMPTY:
            assert before.tokens[parent] == tokens[slot]
            assert trace.tokens[slot] == expected.tokens[slot]
            np.testing.assert_array_equal(trace.logits[:, slot], expected.logits[:, slot])


def test_pages_change_hands_are_shared_and_come_back(tiny):
    session = tiny.session("gqa", Paged(8))
    session.prefill(tiny.prompts)
    table = session.cache.tables[0]
    assert isinstance(table, PageTable)
    assert int(table.pages_in_use) == 1 + 2 + 2 + 3 + 9  # 1, 15, 16, 17 and 70 tokens
    old = np.asarray(table.page_indices)
    session.reorder(PARENTS)
    table = session.cache.tables[0]
    new = np.asarray(table.page_indices)
    assert int(table.pages_in_use) == 9 + (3 + 1) + 2  # 17 tokens twice: two full pages and one
    np.testing.assert_array_equal(new[0], old[4])
    np.testing.assert_array_equal(new[1, :2], new[2, :2])
    assert new[1, 2] != new[2, 2]
    session.reorder([EMPTY] * 5)
    assert int(session.cache.tables[0].pages_in_use) == 0
    assert not session.lengths.any()


def test_every_slot_its_own_parent_changes_nothing(tiny):
    session = tiny.session("gqa", Paged(8))
    session.prefill({slot: tiny.prompts[slot] for slot in (0, 2, 4)})
    before, logits = np.asarray(session.cache.tables[0].page_indices), np.asarray(session.logits)
    session.reorder(range(5))
    np.testing.assert_array_equal(session.cache.tables[0].page_indices, before)
    np.testing.assert_array_equal(session.logits, logits)
