"""Quality on the path that evicts, against whole texts computed without a cache."""

import dataclasses

import numpy as np
import pytest

from kvlab.models.random_params import random_params
from kvlab.ops.retention import H2O, Window
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.forced_scoring import (
    ForcedText,
    forced_steps,
    recomputed_hidden,
    score_decoded,
    score_recomputed,
    windows,
)
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.session import Session

WINDOW, FORCED, BUDGET = 61, 13, 19
PROMPT = WINDOW - FORCED


@pytest.fixture(scope="module")
def texts(tiny):
    """Seven windows, two waves in five slots, the last with fewer forced tokens."""
    return windows(np.asarray(tiny.prompt(139), np.int32), WINDOW, FORCED, limit=6 * FORCED + 5)


@pytest.fixture(scope="module")
def oracle(tiny, texts):
    return recomputed_hidden(tiny.model("gqa"), tiny.params("gqa"), texts)


def of_texts(values, texts):
    """A figure of every position, text by text."""
    return np.split(np.asarray(values), np.cumsum([len(text.forced) for text in texts])[:-1])


def test_windows_score_every_position_after_the_first_prompt_once():
    tokens = np.arange(100, 200, dtype=np.int32)
    texts = windows(tokens, 31, 7)
    assert [len(text.tokens) for text in texts] == [31] * 10 + [29]
    for text in texts:
        assert len(text.prompt) == 24
        assert text.tokens.tolist() == [*text.prompt, *text.forced]
        assert text.targets.tolist() == [token + 1 for token in text.forced]
    forced = np.concatenate([text.forced for text in texts])
    assert forced.tolist() == tokens[24:-1].tolist()


@pytest.mark.parametrize("limit", [1, 7, 8, 20, 1000])
def test_a_limit_is_the_number_of_positions(limit):
    texts = windows(np.arange(100, dtype=np.int32), 31, 7, limit)
    assert sum(len(text.forced) for text in texts) == min(limit, 100 - 1 - 24)
    assert [len(text.forced) for text in texts[:-1]] == [7] * (len(texts) - 1)
    assert texts[-1].tokens[-1] + 1 == texts[-1].targets[-1]


def test_every_window_begins_with_the_token_that_the_model_expects():
    texts = windows(np.arange(100, dtype=np.int32), 31, 7, bos_id=999)
    assert {int(text.tokens[0]) for text in texts} == {999}
    assert {len(text.prompt) for text in texts} == {24}
    assert np.concatenate([text.forced for text in texts]).tolist() == list(range(23, 99))
    assert texts[1].tokens[1:].tolist() == list(range(7, 37))


def test_a_text_too_short_for_a_window_is_an_error_and_not_a_shorter_window():
    assert len(windows(np.arange(32, dtype=np.int32), 31, 7)) == 1
    with pytest.raises(ValueError, match="31 tokens is too short for window_tokens=31"):
        windows(np.arange(31, dtype=np.int32), 31, 7)


def test_a_full_cache_gives_what_a_prefill_of_the_same_windows_gives(tiny, texts, oracle):
    model = tiny.model("gqa"), tiny.params("gqa")
    session = tiny.session("gqa", Paged(16))
    decoded = score_decoded(session, texts, oracle, *model)
    assert not session.lengths.any()
    hidden = []
    for text in texts:
        hidden += session.prefill([text.tokens]).values()
        session.release()
    prefilled = score_recomputed(hidden, texts, oracle, *model)
    assert len(decoded.nll) == len(decoded.kl) == 6 * FORCED + 5
    np.testing.assert_allclose(decoded.nll, prefilled.nll, rtol=1e-5, atol=1e-5)
    assert max(*decoded.kl, *prefilled.kl) < 1e-6  # float32 sums
    assert decoded.top1_agreement == prefilled.top1_agreement == 1
    recomputed = score_recomputed(oracle, texts, oracle, *model)
    assert recomputed.kl == (0.0,) * len(decoded.kl)
    np.testing.assert_allclose(decoded.nll, recomputed.nll, rtol=1e-5, atol=1e-5)


def test_the_targets_are_the_texts_next_tokens(tiny, texts, oracle):
    quality = score_recomputed(oracle, texts, oracle, tiny.model("gqa"), tiny.params("gqa"))
    logits = tiny.oracle("gqa", [texts[2].tokens.tolist()])[0].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    text = np.asarray(tiny.prompt(139))
    places = np.arange(PROMPT, WINDOW)
    expected = -log_probs[places, text[2 * FORCED + places + 1]]
    np.testing.assert_allclose(of_texts(quality.nll, texts)[2], expected, rtol=1e-5, atol=1e-5)


def test_page_sizes_give_the_same_bits(tiny, texts, oracle):
    model = tiny.model("gqa"), tiny.params("gqa")
    sixteen, sixty_four = (
        score_decoded(tiny.session("gqa", Paged(size)), texts, oracle, *model) for size in (16, 64)
    )
    assert sixteen == sixty_four


def test_a_window_of_one_layer_is_the_masked_model(tiny, texts):
    """In one layer keys and values come from the tokens alone, whatever was evicted before."""
    config = dataclasses.replace(tiny.model("gqa"), num_layers=1, num_kv_heads=2, windows=(None,))
    params = random_params(config, seed=3)
    shapes = InferenceConfig(
        config,
        CacheSpec(Paged(8), retention=Window(BUDGET)),
        slots=3,
        max_length=WINDOW,
        chunk=17,
        decode_steps=1,
    )
    oracle = recomputed_hidden(config, params, texts)
    masked_config = dataclasses.replace(config, windows=(BUDGET,))
    masked = recomputed_hidden(masked_config, params, texts)
    decoded = score_decoded(Session(params, shapes), texts, oracle, config, params)
    expected = score_recomputed(masked, texts, oracle, config, params)
    np.testing.assert_allclose(decoded.nll, expected.nll, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(decoded.kl, expected.kl, rtol=1e-3, atol=1e-7)
    assert decoded.kl_vs_oracle > 1e-3
    assert decoded.kl_vs_oracle_p99 == pytest.approx(np.quantile(expected.kl, 0.99), rel=1e-3)


def test_an_evicting_variant_differs_and_its_bits_do_not_follow_the_slots(tiny, texts, oracle):
    model = tiny.model("gqa"), tiny.params("gqa")
    spec = CacheSpec(Paged(8), retention=H2O(BUDGET, recent=5))
    session = tiny.session("gqa", (spec,) * 2, num_pages=None)
    forth = score_decoded(session, texts, oracle, *model)
    assert forth.kl_vs_oracle > 1e-3
    back = score_decoded(session, texts[::-1], oracle[::-1], *model)
    mirrored = of_texts(back.kl, texts[::-1])[::-1]
    for ours, theirs in zip(of_texts(forth.kl, texts), mirrored, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_oracle_takes_the_base_of_dynamic_rope_from_the_prompt(tiny, texts):
    model = tiny.model("mixed"), tiny.params("mixed")
    few = texts[:2]
    oracle = recomputed_hidden(*model, few)
    decoded = score_decoded(tiny.session("mixed", Paged(16)), few, oracle, *model)
    assert decoded.kl_vs_oracle < 1e-6
    whole = [ForcedText(it.tokens, len(it.tokens), it.targets[:0]) for it in few]
    for one, other in zip(oracle, recomputed_hidden(*model, whole), strict=True):
        assert np.abs(one - other).max() > 1e-3  # so the prompt's length does matter


def test_steps_name_their_texts_and_stop_where_there_is_no_room(tiny, texts):
    session = tiny.session("gqa", Paged(16))
    steps = [(dict(step.texts), step.index) for step in forced_steps(session, texts)]
    assert len(steps) == 2 * FORCED
    assert steps[0] == ({0: 0, 1: 1, 2: 2, 3: 3, 4: 4}, 0)
    assert steps[FORCED + 4] == ({0: 5, 1: 6}, 4)
    assert steps[FORCED + 5] == ({0: 5}, 5)
    # 24 pages of 8 tokens hold four prompts of 48, and no token more.
    with pytest.raises(ValueError, match=r"forced token 0 of texts \[0, 1, 2, 3\]; give"):
        list(forced_steps(tiny.session("gqa", Paged(8)), texts[:4]))
