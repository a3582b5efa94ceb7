"""Two programs a session, whatever it is asked; buffers are given away and used again."""

import dataclasses

import jax
import numpy as np
import pytest

from kvlab.ops.page_pool import unchecked
from kvlab.ops.sampling import Sampling
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research import sequences
from kvlab.research.compilation import count_compilations
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.session import Session


@pytest.fixture(scope="module")
def one_layer_session(tiny):
    """Of a config that no other test compiles."""
    one_layer = {"num_layers": 1, "num_kv_heads": 2, "windows": None}
    model = dataclasses.replace(tiny.model("gqa"), **one_layer)
    config = InferenceConfig(
        model, CacheSpec(Paged(8)), slots=5, max_length=139, rows=2, chunk=17, decode_steps=7
    )
    params = {name: tiny.params("gqa")[name] for name in tiny.params("gqa") if name[-1] != "1"}
    return Session(params, config)


def test_prefill_and_decode_are_one_program_each_and_then_nothing_compiles(one_layer_session, tiny):
    session = one_layer_session
    session.prefill({0: tiny.prompt(40)})
    assert session.compile_count == 1
    session.decode(5)
    assert session.compile_count == 2
    assert session.compile_s > 0
    session.fork(0, [3])
    assert session.compile_count == 3
    session.reorder([3, 0, 0, 3, 5])
    assert session.compile_count == 4
    session.use(), session.release()  # host-side calls compile small programs of their own
    sampled = Sampling(temperature=0.9, top_k=7, top_p=0.8, min_p=0.01, seed=3)
    with count_compilations() as compilations:
        session.prefill([tiny.prompt(length) for length in (1, 17, 18, 35, 2)])
        session.decode(1)
        session.decode({1: 13, 3: 2}, sampling={1: sampled}, stop_ids=[3, 5])
        session.decode(9, sampling=sampled, forced={0: tiny.prompt(9)}, steps_per_call=2)
        session.release([1, 4])
        session.fork(0, [4, 1])
        session.reorder([2, 1, 4, 5, 5])
        session.prefill({4: tiny.prompt(3), 2: tiny.prompt(21)})
        session.decode(7, sampling=Sampling(sample_index=4))
        session.use()
    assert compilations.count == 0
    assert session.compile_count == 4


def test_an_equal_session_compiles_nothing(one_layer_session, tiny):
    session = one_layer_session
    session.release()
    session.prefill([tiny.prompt(3)])
    session.decode(2)
    other = Session(session.params, dataclasses.replace(session.config))
    other.prefill([tiny.prompt(5)])
    other.decode(4)
    assert other.compile_count == 0


def test_a_program_is_the_same_whatever_was_traced_before(one_layer_session):
    """Or the persistent cache would not know it: a check for checkify counts those before it."""
    session = one_layer_session
    arguments = session.cache, np.zeros(session.config.slots, bool)

    def text():
        jax.clear_caches()
        with unchecked():
            return sequences.release.lower(*arguments).as_text()

    first = text()
    checked = sequences.release.lower(*arguments).as_text()
    assert text() == first != checked


def test_hidden_states_are_fetched_only_where_they_are_wanted(one_layer_session, tiny):
    session = one_layer_session
    session.release()
    prompts = {1: tiny.prompt(40), 3: tiny.prompt(3)}
    hidden = session.prefill(prompts)
    assert {slot: states.shape[0] for slot, states in hidden.items()} == {1: 40, 3: 3}
    logits = np.asarray(session.logits)
    session.release()
    assert session.prefill(prompts, hidden=False) == {}
    np.testing.assert_array_equal(session.logits, logits)


def test_buffers_are_donated(one_layer_session, tiny):
    session = one_layer_session
    session.release()
    for call in [
        lambda: session.prefill([tiny.prompt(40)]),
        lambda: session.decode(2),
        lambda: session.fork(0, [1]),
        lambda: session.reorder([1, 0, 0, 5, 5]),
        session.release,
    ]:
        before = session.cache.layers
        call()
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(session.cache))


def test_what_was_read_before_a_step_stays_as_it_was(one_layer_session, tiny):
    session = one_layer_session
    session.release()
    session.prefill([tiny.prompt(40)])
    lengths, logits = session.lengths, np.asarray(session.logits)
    kept = lengths.copy(), logits.copy()
    session.decode(5)
    assert session.lengths[0] == 45
    np.testing.assert_array_equal(lengths, kept[0])
    np.testing.assert_array_equal(logits, kept[1])
