"""Timed phases: as many samples as asked for, of sequences that really ran."""

import numpy as np
import pytest

from kvlab.models.load import load_model
from kvlab.ops.retention import Window
from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Recompute
from kvlab.research.inference import InferenceConfig
from kvlab.research.phase_timing import PhaseTimer, timed_in_turns

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
    made = []

    def make():
        made.append(timer(cache, chunk))
        return made[0]

    timed = timed_in_turns({"one": make}, (5, 19), repeats=2)["one"]
    assert timed.compile_count == (3 if cache.retention else 2)
    for samples in (timed.prefill_s, timed.step_s):
        assert list(samples) == [5, 19]
        assert all(len(some) == 2 and min(some) > 0 for some in samples.values())
    calls = made[0]._calls
    assert (calls.lengths == 19 + 4).all()
    assert calls.compile_count == timed.compile_count


class Scripted:
    """A session that says when it is asked, and fails at one prompt length."""

    compile_s, compile_count = 1.0, 2

    def __init__(self, name, asked, fails_at=None):
        self.name, self.asked, self.fails_at = name, asked, fails_at

    def once(self, length):
        if length == self.fails_at:
            raise RuntimeError(f"{self.name} is full")
        self.asked.append((self.name, length))
        return float(length), length / 10


def test_sessions_take_turns_and_fail_alone():
    asked = []

    def refuse():
        raise MemoryError("none left")

    makers = {
        "a": lambda: Scripted("a", asked),
        "b": refuse,
        "c": lambda: Scripted("c", asked, fails_at=7),
        "d": lambda: Scripted("d", asked),
    }
    timed = timed_in_turns(makers, (7, 3), repeats=2)
    warm_up, turns = asked[:3], asked[3:]
    assert warm_up == [("a", 3), ("c", 3), ("d", 3)]
    assert turns == [("a", 7), ("d", 7), ("a", 3), ("d", 3)] * 2
    assert timed["a"].prefill_s == {7: [7.0, 7.0], 3: [3.0, 3.0]}
    assert timed["d"].step_s == {7: [0.7, 0.7], 3: [0.3, 0.3]}
    assert (str(timed["b"]), str(timed["c"])) == ("none left", "c is full")


def test_prefill_leaves_what_a_session_would():
    from kvlab.research.session import Session

    timed = timer(CacheSpec(Paged(4)))
    timed._prefill(19)
    session = Session(MODEL.params, timed._calls.config)
    session.prefill(list(timed._ids[:, :19]))
    np.testing.assert_array_equal(timed._calls.logits, session.logits)


def test_sequences_that_found_no_room_are_no_measurement():
    with pytest.raises(RuntimeError, match="no room for 3 sequences of 19"):
        timer(CacheSpec(Paged(4)), num_pages=10).once(19)
