"""Timed phases: as many samples as asked for, of sequences that really ran."""

import numpy as np
import pytest

from kvlab.models.load import load_model
from kvlab.ops.retention import Window
from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Recompute
from kvlab.research.inference import InferenceConfig
from kvlab.research.phase_timing import PhaseTimer

MODEL = load_model("random:tiny-gqa")


def timer(cache, chunk=8, **more):
    config = InferenceConfig(
        MODEL.config,
        cache,
        slots=3,
        max_length=23,
        rows=3,
        chunk=chunk,
        decode_steps=4,
        **more,
    )
    return PhaseTimer(MODEL.params, config, seed=0)


@pytest.mark.parametrize(
    ("cache", "chunk"),
    [
        (CacheSpec(Paged(4)), 8),
        (CacheSpec(Contiguous()), 8),
        (CacheSpec(Recompute()), 23),
        (CacheSpec(Paged(4), retention=Window(budget=6)), 8),
    ],
    ids=["paged", "contiguous", "recompute", "evicting"],
)
def test_each_length_has_its_samples_and_nothing_compiles_late(cache, chunk):
    timed = timer(cache, chunk)
    assert timed.compile_count == (3 if cache.retention else 2)
    times = timed.times((5, 19), repeats=2)
    assert list(times) == [5, 19]
    for prefills, steps in times.values():
        assert len(prefills) == len(steps) == 2
        assert min(*prefills, *steps) > 0
    assert (timed._calls.lengths == 19 + 4).all()
    assert timed._calls.compile_count == timed.compile_count


def test_prefill_leaves_what_a_session_would():
    from kvlab.research.session import Session

    timed = timer(CacheSpec(Paged(4)))
    timed._prefill(19)
    session = Session(MODEL.params, timed._calls.config)
    session.prefill(list(timed._ids[:, :19]))
    np.testing.assert_array_equal(timed._calls.logits, session.logits)


def test_sequences_that_found_no_room_are_no_measurement():
    with pytest.raises(RuntimeError, match="no room for 3 sequences of 19"):
        timer(CacheSpec(Paged(4)), num_pages=10).times((19,), 1)
