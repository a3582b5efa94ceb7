"""Choosing by score: ties, budgets that heads share, victims, and the lots of the control."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.eviction import ScoreError, judged, kept_tokens, victims
from kvlab.ops.retention import H2O, Evidence, Random, Retention, Sinks, SnapKV, Window

ROWS, S = 6, 13


def arrays(scores, positions=None, stored=None):
    scores = jnp.asarray(scores, jnp.float32)
    width = scores.shape[1]
    if positions is None:
        positions = np.broadcast_to(np.arange(width), scores.shape)
    stored = np.ones(scores.shape, bool) if stored is None else stored
    return scores, jnp.asarray(positions, jnp.int32), jnp.asarray(stored)


def test_of_equal_scores_the_older_token_stays_wherever_it_lies():
    scores, positions, stored = arrays([[3, 1, 1, 1, 2]], [[9, 7, 3, 5, 4]])
    kept = kept_tokens(scores, positions, stored, jnp.array([3], jnp.int32))
    assert kept.tolist() == [[True, False, True, False, True]]


def test_rows_keep_their_own_number_and_what_is_stored():
    scores, positions, stored = arrays(np.ones((3, 5)))
    stored = stored.at[1, 2:].set(False)
    kept = kept_tokens(scores, positions, stored, jnp.array([2, 4, 9], jnp.int32))
    assert kept.sum(axis=1).tolist() == [2, 2, 5]
    assert not (kept & ~stored).any()


@pytest.mark.parametrize(
    ("safeguard", "expected"),
    [
        (0.0, [[0, 0, 0, 0], [1, 1, 1, 1]]),
        (0.5, [[0, 0, 0, 1], [1, 1, 1, 0]]),
        (1.0, [[0, 0, 1, 1], [1, 1, 0, 0]]),
    ],
)
def test_heads_that_share_a_budget_keep_the_best_of_all_and_a_part_of_their_own(
    safeguard, expected
):
    scores, positions, stored = arrays([[1, 2, 3, 4], [50, 40, 30, 20]])
    limits = jnp.array([2, 2], jnp.int32)
    kept = kept_tokens(scores, positions, stored, limits, heads=2, safeguard=safeguard)
    assert kept.astype(int).tolist() == expected


def test_sequences_do_not_share():
    scores, positions, stored = arrays([[1, 2], [3, 4], [90, 91], [92, 93]])
    limits = jnp.ones(4, jnp.int32)
    kept = kept_tokens(scores, positions, stored, limits, heads=2, safeguard=0.0)
    assert kept.sum(axis=1).tolist() == [0, 2, 0, 2]


def test_the_victim_has_the_lowest_score_and_of_equals_is_the_younger():
    scores, positions, stored = arrays(
        [[5, 1, 1, 0], [np.inf, np.inf, np.inf, 1], [3, 2, 1, 0]],
        [[4, 2, 9, 1], [3, 8, 5, 6], [0, 1, 2, 3]],
        [[True] * 3 + [False], [True] * 3 + [False], [False] * 4],
    )
    # Where all are protected the youngest goes; an empty row gives slot 0.
    assert victims(scores, positions, stored).tolist() == [2, 1, 0]


def test_a_share_of_a_prompt_is_rounded_down_and_at_least_one():
    lengths = jnp.array([100, 7, 1, 50_000], jnp.int32)
    assert Window(0.29).limits(lengths).tolist() == [29, 2, 1, 14_500]
    assert H2O(40).limits(lengths).tolist() == [40] * 4


def lots(policy, layer=3, heads=2, width=4001):
    rows = 2 * heads
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    evidence = Evidence(
        positions,
        jnp.ones(positions.shape, bool),
        jnp.full(rows, width, jnp.int32),
        jnp.zeros(positions.shape, jnp.float32),
        jnp.arange(rows, dtype=jnp.int32) % heads,
        jnp.asarray(layer, jnp.int32),
    )
    return np.asarray(policy.score(evidence))


def test_lots_are_fair_and_depend_on_seed_layer_head_and_position_alone():
    scores = lots(Random(8))
    np.testing.assert_array_equal(scores[:2], scores[2:])  # another sequence, the same heads
    for other in (lots(Random(8, seed=1)), lots(Random(8), layer=4)):
        assert (scores != other).mean() > 0.99
    assert (scores[0] != scores[1]).mean() > 0.99
    best = np.argsort(-scores[0])[:1000]  # a random thousand of the places: mean 2000, sd 36
    assert abs(best.mean() - 2000) < 150
    assert abs(np.corrcoef(scores[0], scores[1])[0, 1]) < 0.06
    recent = lots(Random(8, recent=5))
    assert np.isinf(recent[:, -5:]).all()
    np.testing.assert_array_equal(recent[:, :-5], scores[:, :-5])


def test_a_policy_without_a_score_says_so():
    with pytest.raises(NotImplementedError, match="Retention defines no score"):
        lots(Retention(8), width=7)


class Scored(Retention):
    """A policy of a user: what `give` makes of the positions."""

    give = None

    def score(self, evidence):
        return type(self).give(evidence.positions)


def scored(monkeypatch, give):
    monkeypatch.setattr(Scored, "give", staticmethod(give))
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (ROWS, S))
    none = jnp.zeros(ROWS, jnp.int32)
    stored = positions < 9
    mass = jnp.zeros((ROWS, S), jnp.float32)
    evidence = Evidence(positions, stored, none + 9, mass, none, none[0])
    return judged(Scored(4), evidence), positions, stored


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float16, jnp.bfloat16, jnp.float32])
def test_scores_of_any_real_type_choose_alike(dtype, monkeypatch):
    scores, positions, stored = scored(monkeypatch, lambda places: places.astype(dtype))
    assert scores.dtype == jnp.float32
    assert victims(scores, positions, stored).tolist() == [0] * ROWS
    kept = kept_tokens(scores, positions, stored, jnp.full(ROWS, 4, jnp.int32))
    assert np.flatnonzero(kept[0]).tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("low", [-np.inf, np.nan])
def test_the_lowest_scores_of_all_still_go_before_no_token(low, monkeypatch):
    """A budget is filled, whatever the scores, and whatever slots are empty."""
    give = lambda places: jnp.where(places % 3 == 0, places.astype(jnp.float32), low)  # noqa: E731
    scores, positions, stored = scored(monkeypatch, give)
    kept = kept_tokens(scores, positions, stored, jnp.full(ROWS, 5, jnp.int32))
    assert np.flatnonzero(kept[0]).tolist() == [0, 1, 2, 3, 6]  # of equals the older
    assert victims(scores, positions, stored).tolist() == [8] * ROWS


@pytest.mark.parametrize(
    ("give", "got"),
    [
        (lambda places: None, "gave NoneType"),
        (lambda places: [0.0], "gave list"),
        (lambda places: jnp.zeros(3), r"gave float32\[3\]"),
        (lambda places: jnp.zeros((1, S)), rf"gave float32\[1, {S}\]"),
        (lambda places: places.astype(jnp.complex64), rf"gave complex64\[{ROWS}, {S}\]"),
        (lambda places: places.recieved, "raised AttributeError: .*recieved"),
    ],
)
def test_what_is_no_score_for_each_token_names_policy_and_shapes(give, got, monkeypatch):
    with pytest.raises(ScoreError, match=rf"retention=.*:Scored: score\(\) {got}"):
        scored(monkeypatch, give)


def test_a_share_leaves_a_choice_beside_what_a_policy_always_keeps():
    lengths = jnp.array([10, 1000], jnp.int32)
    assert Sinks(0.01, num_sinks=4).limits(lengths).tolist() == [5, 10]
    assert H2O(0.01, recent=32).limits(lengths).tolist() == [33, 33]
    assert SnapKV(0.1, observation=32).limits(lengths).tolist() == [33, 100]
    assert Random(0.01, recent=3).limits(lengths).tolist() == [4, 10]
    assert Window(0.01).limits(lengths).tolist() == [1, 10]


@pytest.mark.parametrize("budget", [0, -3, 1.5, float("nan"), True])
def test_a_budget_is_tokens_or_a_share(budget):
    with pytest.raises(ValueError, match="want a number of tokens, 1 or more, or a share"):
        Window(budget)
