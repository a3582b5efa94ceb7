"""The NumPy references of retention keep what kvpress 0.5.5 keeps, and what a hand computes.

q and k of the golden are those of kvpress's own model, so nothing here runs kvlab.
"""

import json
import pathlib

import numpy as np
import pytest

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "goldens" / "kvpress.npz")
POLICIES = [json.loads(text) for text in GOLDEN["policies"]]
PROMPTS = [json.loads(text)["name"] for text in GOLDEN["prompts"]]
DETAILED = [name for name in PROMPTS if f"query_{name}" in GOLDEN]
OBSERVATIONS = sorted({p["observation"] for p in POLICIES if "observation" in p})


def layers_of(name):
    """Query [T, N, H], key [T, K, H] and positions, twice, of each layer of a prompt."""
    for query, key in zip(GOLDEN[f"query_{name}"], GOLDEN[f"key_{name}"], strict=True):
        yield query, key, np.arange(len(query)), np.arange(len(key))


def cases_of(name, policy):
    """A policy's parameters, budget and kept tokens [L, K, T] bool, case by case."""
    for case, budget, kept in zip(
        POLICIES, GOLDEN[f"budgets_{name}"], GOLDEN[f"kept_{name}"], strict=True
    ):
        if case["policy"] == policy:
            yield case, int(budget), kept


@pytest.mark.parametrize("name", PROMPTS)
def test_sinks_are_those_of_kvpress(name, retention_reference):
    for case, budget, kept in cases_of(name, "sinks"):
        expected = retention_reference.sinks_kept(kept.shape[-1], budget, case["num_sinks"])
        assert expected.sum() == budget
        np.testing.assert_array_equal(kept, np.broadcast_to(expected, kept.shape))


@pytest.mark.parametrize("name", DETAILED)
def test_snapkv_scores_are_those_of_kvpress(name, retention_reference):
    for observation, golden in zip(OBSERVATIONS, GOLDEN[f"snapkv_{name}"], strict=True):
        for layer, expected in zip(layers_of(name), golden, strict=True):
            scores = retention_reference.snapkv_scores(*layer, observation)
            earlier = scores.shape[1] - observation
            np.testing.assert_allclose(scores[:, :earlier], expected[:, :earlier], rtol=2e-5)
            assert (scores[:, earlier:] == np.inf).all()
            assert (expected[:, earlier:] > 1).all()  # more than any mean of weights


@pytest.mark.parametrize("name", DETAILED)
def test_snapkv_keeps_what_kvpress_keeps(name, retention_reference):
    for case, budget, golden in cases_of(name, "snapkv"):
        for layer, kept in zip(layers_of(name), golden, strict=True):
            expected = retention_reference.snapkv_kept(*layer, budget, case["observation"])
            np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("name", DETAILED)
def test_per_head_keeps_what_kvpress_keeps(name, retention_reference):
    differs, safe_heads = 0, 0
    for case, budget, golden in cases_of(name, "per_head"):
        for layer, kept in zip(layers_of(name), golden, strict=True):
            scores = retention_reference.snapkv_scores(*layer, case["observation"])
            expected = retention_reference.per_head_kept(scores, budget, case["safeguard"])
            np.testing.assert_array_equal(kept, expected)
            differs += (kept != retention_reference.uniform_kept(scores, budget)).any()
            safe_heads += (kept != retention_reference.per_head_kept(scores, budget, 0.0)).any()
    assert differs > 0
    assert safe_heads > 0


@pytest.mark.parametrize("name", DETAILED)
def test_h2o_scores_are_observed_attention_before_its_division(name, retention_reference):
    """kvpress divides each key's mass by the number of queries that saw it."""
    for layer, expected in zip(layers_of(name), GOLDEN[f"observed_{name}"], strict=True):
        scores = retention_reference.h2o_scores(*layer)
        num_queries = np.arange(scores.shape[1], 0, -1)
        np.testing.assert_allclose(scores, expected * num_queries, rtol=2e-5)
        kept = retention_reference.h2o_kept(*layer, 17, 5)
        by_average = retention_reference.protect_newest(expected, 5)
        assert (kept != retention_reference.uniform_kept(by_average, 17)).any()


def test_windows_and_sinks_by_hand(retention_reference):
    kept = retention_reference.window_kept(5, 2)
    assert kept.tolist() == [False, False, False, True, True]
    assert retention_reference.window_kept(3, 5).all()
    kept = retention_reference.sinks_kept(7, 3, 2)
    assert np.flatnonzero(kept).tolist() == [0, 1, 6]
    assert retention_reference.sinks_kept(3, 5, 2).all()


def test_attention_without_preference_gives_each_key_its_share(retention_reference):
    """Queries of zeros see all earlier keys alike: key j gathers 1 / (t + 1) of each t >= j."""
    query, key, positions = np.zeros((3, 4, 2)), np.ones((3, 2, 2)), np.arange(3)
    scores = retention_reference.h2o_scores(query, key, positions, positions)
    np.testing.assert_allclose(scores, [[1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]] * 2)
    kept = retention_reference.h2o_kept(query, key, positions, positions, 2, 1)
    np.testing.assert_array_equal(kept, [[True, False, True]] * 2)


def test_mass_adds_up_over_steps_and_skips_evicted_keys(retention_reference):
    draw = np.random.RandomState(0)
    query, key, positions = draw.randn(5, 6, 2), draw.randn(5, 3, 2), np.arange(5)
    steps = [
        retention_reference.h2o_scores(query[i:j], key, positions[i:j], positions)
        for i, j in ((0, 3), (3, 5))
    ]
    whole = retention_reference.h2o_scores(query, key, positions, positions)
    np.testing.assert_allclose(sum(steps), whole)
    left = np.array([0, 2, 4])
    last = retention_reference.h2o_scores(query[4:], key[left], positions[4:], left)
    np.testing.assert_allclose(last.sum(1), 1)


def test_weights_by_hand(retention_reference):
    """Query heads 0 and 1 read KV head 0; a logit of log 3 weighs three times one of 0."""
    query = np.array([[[np.log(3)], [0.0], [np.log(3)], [0.0]]])  # [1, 4, 1]
    key = np.array([[[1.0], [0.0]], [[0.0], [1.0]], [[9.0], [9.0]]])  # [3, 2, 1]
    weights = retention_reference.attention_weights(
        query, key, np.array([4]), np.array([1, 4, 5]), scale=1.0
    )
    expected = [[[0.75, 0.25, 0]], [[0.5, 0.5, 0]], [[0.25, 0.75, 0]], [[0.5, 0.5, 0]]]
    np.testing.assert_allclose(weights, expected)


def test_pooling_by_hand(retention_reference):
    pooled = retention_reference.average_pool(np.array([[5.0, 0.0, 0.0, 10.0]]), 3)
    np.testing.assert_allclose(pooled, [[5 / 3, 5 / 3, 10 / 3, 10 / 3]])


def test_of_equal_scores_the_older_stays(retention_reference):
    scores = np.array([[1.0, 2.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
    kept = retention_reference.uniform_kept(scores, 2)
    np.testing.assert_array_equal(kept, [[True, True, False, False]] * 2)
    kept = retention_reference.per_head_kept(scores, 2, 0.0)
    np.testing.assert_array_equal(kept, [[True, True, False, False]] * 2)


@pytest.mark.parametrize(
    ("safeguard", "expected"),
    [
        (0.0, [[9, 8, 7, 6], []]),
        (0.1, [[9, 8, 7], [5]]),  # one token at least
        (0.5, [[9, 8, 7], [5]]),
        (1.0, [[9, 8], [5, 4]]),
    ],
)
def test_safeguard_by_hand(safeguard, expected, retention_reference):
    scores = np.array([[6.0, 9.0, 7.0, 8.0, 1.0], [4.0, 0.0, 5.0, 3.0, 2.0]])
    kept = retention_reference.per_head_kept(scores, 2, safeguard)
    found = [sorted(head[mask], reverse=True) for head, mask in zip(scores, kept, strict=True)]
    assert found == expected
