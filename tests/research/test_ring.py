"""Rings that wrap: the model's own windows, over texts far longer than a ring."""

import dataclasses

import numpy as np
import pytest

from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Ring
from kvlab.research.cache import unwrapped
from kvlab.research.session import Session

# Windows 13, none and 71 in a context of 139: the rings have 64 and 128 slots.
LAYERS = (CacheSpec(Ring(13)), CacheSpec(Paged(8)), CacheSpec(Ring(71)))


def test_a_wrapped_ring_gives_the_logits_of_the_whole_text(tiny):
    session = tiny.session("mixed", LAYERS)
    prompts = {0: tiny.prompt(130), 2: tiny.prompt(40), 3: tiny.prompt(1), 4: tiny.prompt(85)}
    steps = 9
    forced = {slot: tiny.prompt(steps, seed=slot) for slot in prompts}
    session.prefill(prompts)
    trace = tiny.continued(session, prompts, steps=steps, forced=forced)
    texts = [[*prompts[slot], *forced[slot]] for slot in prompts]
    whole = tiny.oracle("mixed", texts, [len(prompt) for prompt in prompts.values()])
    for row, slot in enumerate(prompts):
        expected = whole[row][len(prompts[slot]) - 1 :]
        difference = np.abs(trace.logits[:, slot] - expected).max()
        assert difference <= 1e-4 * np.abs(expected).max()


def test_the_chunk_counts_where_the_window_alone_would_fit_fewer_slots(tiny):
    """A window of 60 and a chunk of 17 need 76 slots, so 128 and not 64."""
    model = dataclasses.replace(tiny.model("mixed"), windows=(13, None, 60))
    session = tiny.session("mixed", (CacheSpec(Ring(13)), CacheSpec(Paged(8)), CacheSpec(Ring(60))))
    config = dataclasses.replace(tiny.config("mixed", Contiguous()), model=model)
    full = Session(tiny.params("mixed"), config)
    text = {1: tiny.prompt(120)}
    got, expected = session.prefill(text)[1], full.prefill(text)[1]
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    assert session.cache.layers[2].capacity == 128


def test_a_ring_holds_its_window_and_a_chunk_and_no_more(tiny):
    session = tiny.session("mixed", LAYERS)
    full = tiny.session("mixed", CacheSpec(Contiguous()))
    for layer, other, needed in zip(
        session.cache.layers, full.cache.layers, (13 + 16, None, 71 + 16), strict=True
    ):
        if needed is not None:
            slots = -(-needed // 64) * 64
            assert layer.capacity == slots
            assert layer.nbytes() == other.nbytes() * slots // 192
    assert session.config.rows_per_sequence == 1
    assert len(session.cache.tables) == 2


def test_a_call_that_brings_more_than_a_chunk_is_refused_as_a_value(tiny):
    """The pure function's guard; a session never asks for it."""
    from kvlab.research.inference import prefill

    session = tiny.session("mixed", LAYERS)
    config = session.config
    tokens = np.zeros((config.rows, config.chunk), np.int32)
    counts, slots = np.full(config.rows, config.chunk, np.int32), np.ones(config.rows, np.int32)
    state = session.params, config, session.cache, session.logits
    stored = np.zeros(config.rows, bool)
    cache, _, ok, _ = prefill(*state, tokens, counts, slots, 2 * counts, stored)
    assert not ok.any()
    assert not np.asarray(cache.positions).any()
    assert all(not np.asarray(unwrapped(table)[0].lengths).any() for table in cache.tables)


@pytest.mark.parametrize("window", [13, 30])
def test_a_ring_narrows_the_window_of_its_layer(window, tiny):
    config = tiny.config("mixed", (CacheSpec(Ring(window)), *LAYERS[1:]))
    assert config.decoder.layer_windows == (13, None, 71)
    config = tiny.config("mixed", (LAYERS[0], CacheSpec(Ring(window)), LAYERS[2]))
    assert config.decoder.layer_windows == (13, window, 71)
