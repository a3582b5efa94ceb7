"""Passkey retrieval: texts that hide a key, and whether a variant ranks its tokens first."""

import numpy as np
import pytest

from kvlab.models.load import load_model
from kvlab.models.tokenizers.byte_tokenizer import ByteTokenizer
from kvlab.ops.retention import H2O
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.forced_scoring import ForcedText, recomputed_hidden
from kvlab.research.passkey import decoded_digits, passkey_texts, recomputed_digits

BYTES = ByteTokenizer()


def written(text):
    """What is fed, and the key."""
    return BYTES.decode(text.tokens.tolist()), BYTES.decode(text.targets.tolist())


def continued(tiny, prompts, steps=5):
    """Texts whose targets are what the model writes itself, greedily, with the full cache."""
    session = tiny.session("gqa", Paged(16))
    session.prefill(prompts)
    tokens = [list(result.tokens) for result in session.decode(steps + 1).values()]
    return [
        ForcedText(
            np.asarray([*prompt, *ids[:-1]], np.int32), len(prompt), np.asarray(ids[1:], np.int32)
        )
        for prompt, ids in zip(prompts, tokens, strict=True)
    ]


@pytest.mark.parametrize("length", [211, 499, 1024])
def test_texts_fill_the_length_and_hide_the_key_at_its_depth(length):
    texts = passkey_texts(BYTES, length)
    assert len({written(text)[1] for text in texts}) == 5
    places = []
    for text in texts:
        story, key = written(text)
        assert length - 80 < len(text.tokens) + 1 <= length  # whole sentences, of 70 bytes at most
        assert len(key) == 5
        assert key.isdigit()
        assert story.count(key) == 2
        assert f"The pass key is {key}. Remember it: {key}." in story
        assert story.endswith(f"What is the pass key? The pass key is {key[:-1]}")
        assert text.prompt_length == len(text.tokens) - 5
        assert BYTES.decode(text.forced.tolist()) == f" {key[:-1]}"
        places.append(story.index(key) / length)
    assert places == sorted(places)
    if length == 1024:
        assert places == pytest.approx((0.1, 0.3, 0.5, 0.7, 0.9), abs=0.12)


def test_texts_are_the_same_each_time():
    for one, other in zip(passkey_texts(BYTES, 499), passkey_texts(BYTES, 499), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_length_without_room_for_the_question_is_an_error():
    with pytest.raises(ValueError, match=r"passkey_tokens=100 is too short: .* take 1\d\d tokens"):
        passkey_texts(BYTES, 100)


def test_what_the_model_would_write_is_found_and_nothing_else(tiny):
    model = tiny.model("gqa"), tiny.params("gqa")
    texts = continued(tiny, [tiny.prompt(41, seed) for seed in range(7)][:5])
    hidden = recomputed_hidden(*model, texts)
    texts[2].targets[3] += 1 if texts[2].targets[3] == 0 else -1
    expected = np.ones((5, 5), bool)
    expected[2, 3] = False
    decoded = decoded_digits(tiny.session("gqa", Paged(16)), texts)
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(recomputed_digits(hidden, texts, *model), expected)


def test_every_token_of_the_key_is_predicted_from_what_a_policy_left(tiny):
    texts = continued(tiny, [tiny.prompt(41, seed) for seed in range(5)])
    spec = CacheSpec(Paged(8), retention=H2O(19, recent=5))
    session = tiny.session("gqa", (spec,) * 2, num_pages=None)
    found = np.asarray(decoded_digits(session, texts))
    assert not found[:, 0].all()
    assert found.mean() < 0.7


@pytest.mark.real_model
def test_the_real_model_finds_every_key_with_the_full_cache(smollm2_path):
    model = load_model(str(smollm2_path))
    assert model.tokenizer is not None
    texts = passkey_texts(model.tokenizer, 512)
    assert {len(text.targets) for text in texts} == {5}
    hidden = recomputed_hidden(model.config, model.params, texts)
    assert np.all(recomputed_digits(hidden, texts, model.config, model.params))
