"""Quality of a variant against its definition in float64."""

import dataclasses
import math

import numpy as np
import pytest

from kvlab.research.scoring import Quality, compare


def reference(head, oracle_hidden, hidden, tokens, soft_cap):
    """Negative log-likelihoods, KL per position and agreement, written as their formulas."""

    def log_probs(states):
        logits = states.astype(np.float64) @ head.astype(np.float64)
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    oracle, variant = log_probs(oracle_hidden), log_probs(hidden)
    nll = [-variant[place, token] for place, token in enumerate(tokens[1:])]
    kl = (np.exp(oracle) * (oracle - variant)).sum(-1)
    return np.array(nll), kl, oracle.argmax(-1) == variant.argmax(-1)


@pytest.fixture(params=["gqa", "mixed"])
def model(request, tiny):
    """An untied head, and a tied one with a soft cap."""
    return tiny.model(request.param), tiny.params(request.param)


def head_of(params):
    if "head" in params:
        return np.asarray(params["head"]["weight"])
    return np.asarray(params["embed"]["weight"]).T


# A piece of work is 128 positions.
@pytest.mark.parametrize("length", [2, 127, 128, 129, 300])
def test_every_figure_is_its_formula(length, model, tiny):
    config, params = model
    random = np.random.default_rng(length)
    oracle_hidden = random.standard_normal((length, 23)).astype(np.float32)
    hidden = oracle_hidden + np.float32(0.3) * random.standard_normal((length, 23), np.float32)
    tokens = np.asarray(tiny.prompt(length), np.int32)
    quality = compare(config, params, oracle_hidden, hidden, tokens)
    nll, kl, agrees = reference(
        head_of(params), oracle_hidden, hidden, tokens, config.final_soft_cap
    )
    assert len(quality.nll) == length - 1
    assert len(quality.kl) == length
    np.testing.assert_allclose(quality.nll, nll, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(quality.kl, kl, rtol=1e-4, atol=2e-6)
    assert quality.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-5)
    assert quality.kl_vs_oracle == pytest.approx(kl.mean(), rel=1e-4)
    assert quality.kl_vs_oracle_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-4)
    assert quality.top1_agreement == agrees.mean()
    assert kl.min() > 1e-3


def test_the_oracle_against_itself_is_at_no_distance(model, tiny):
    config, params = model
    hidden = np.random.default_rng(0).standard_normal((131, 23)).astype(np.float32)
    tokens = np.asarray(tiny.prompt(131), np.int32)
    quality = compare(config, params, hidden, hidden, tokens)
    assert quality.kl_vs_oracle == 0
    assert quality.kl == (0.0,) * 131
    assert quality.top1_agreement == 1
    assert quality.perplexity > 1


def test_the_variants_perplexity_is_reported_and_not_the_oracles(model, tiny):
    config, params = model
    random = np.random.default_rng(1)
    left, right = random.standard_normal((2, 19, 23)).astype(np.float32)
    tokens = np.asarray(tiny.prompt(19), np.int32)
    forth, back = (
        compare(config, params, left, right, tokens),
        compare(config, params, right, left, tokens),
    )
    own = compare(config, params, right, right, tokens)
    assert forth.perplexity == own.perplexity != back.perplexity
    assert forth.kl_vs_oracle != back.kl_vs_oracle


def test_it_scores_what_a_session_prefilled(tiny):
    """Hidden states of prefill and the text itself: the perplexity of the whole text."""
    session = tiny.session("gqa")
    text = tiny.prompt(70)
    hidden = session.prefill([text])[0]
    quality = compare(
        tiny.model("gqa"), tiny.params("gqa"), hidden, hidden, np.asarray(text, np.int32)
    )
    logits = tiny.oracle("gqa", [text])[0].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -log_probs[np.arange(69), text[1:]].mean()
    assert math.log(quality.perplexity) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_without_a_next_token_has_no_quality(length, model):
    hidden = np.zeros((length, 23), np.float32)
    with pytest.raises(ValueError, match=f"2 tokens or more; this one has {length}"):
        compare(*model, hidden, hidden, np.zeros(length, np.int32))


def test_quality_is_the_mean_of_its_positions():
    quality = Quality.of(np.array([1.0, 3.0]), np.array([0.5, 0.25, 0.0]), np.array([1, 1, 0]) > 0)
    p99 = pytest.approx(0.25 + 0.98 * 0.25)  # linear between neighbours, 0.98 of the way here
    assert quality == Quality(math.exp(2), 0.25, p99, 2 / 3, (1.0, 3.0), (0.5, 0.25, 0.0))
    assert dataclasses.astuple(quality)[0] == pytest.approx(7.389056)
