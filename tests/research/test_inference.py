"""Prefill and decode against the oracle; configs that cannot be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.decoder import Decoder
from kvlab.ops.sampling import Sampling
from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Recompute
from kvlab.research.inference import MAX_STOP_IDS, head
from kvlab.research.inference_config import InferenceConfig

BOUND = 1e-4  # of the largest logit: DESIGN section 5, lossless variants

PER_LAYER = ("mixed", "per layer")
CASES = [
    *(("gqa", Paged(page_size)) for page_size in (1, 8, 16, 64)),
    ("gqa", Recompute()),
    ("learned", Contiguous()),
    PER_LAYER,
]
THREE_PLACEMENTS = [("gqa", Paged(8)), ("learned", Contiguous()), ("gqa", Recompute())]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def assert_agrees(logits, oracle):
    """Within the bound, and with the same best token where the oracle's two best differ by more."""
    bound = BOUND * np.abs(oracle).max()
    np.testing.assert_allclose(logits, oracle, rtol=0, atol=bound)
    second, first = np.sort(oracle, axis=-1)[..., -2:].T
    clear = bound < (first - second).T
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(logits.argmax(-1)[clear], oracle.argmax(-1)[clear])


def oracle_of(tiny, name, prompts, tokens):
    """Logits of every prompt followed by its tokens, in the order of `prompts`."""
    texts = [[*prompts[slot], *tokens[slot]] for slot in prompts]
    logits = tiny.oracle(name, texts, [len(prompt) for prompt in prompts.values()])
    return dict(zip(prompts, logits, strict=True))


@pytest.mark.parametrize(("name", "placement"), CASES, ids=str)
def test_logits_and_tokens_are_those_of_the_whole_text(name, placement, tiny):
    session = tiny.session(name, placement)
    hidden = session.prefill(tiny.prompts)
    trace = tiny.continued(session, tiny.prompts)
    oracle = oracle_of(tiny, name, tiny.prompts, trace.tokens)
    for slot, prompt in tiny.prompts.items():
        of_prompt = head(session.params, session.config.model, jnp.asarray(hidden[slot]))
        assert_agrees(np.asarray(of_prompt), oracle[slot][: len(prompt)])
        assert_agrees(trace.logits[:, slot], oracle[slot][len(prompt) - 1 :])
        assert trace.tokens[slot] == tuple(trace.logits[:-1, slot].argmax(-1))
    lengths = [len(prompt) + 9 for prompt in tiny.prompts.values()]
    assert session.lengths.tolist() == lengths


def test_the_mixed_model_is_not_blind_to_its_windows_and_its_base(tiny):
    """If another config gave the same logits, the cases above would not test it."""
    text = tiny.prompt(70)
    (logits,) = tiny.oracle("mixed", [text])
    (other_base,) = tiny.oracle("mixed", [text], [16])
    assert np.abs(other_base - logits).max() > 0.1
    no_windows = dataclasses.replace(tiny.model("mixed"), windows=None)
    apply = jax.jit(Decoder(no_windows).apply, static_argnames="method")
    without = apply({"params": tiny.params("mixed")}, jnp.asarray([text]), method="forward")[0]
    assert np.abs(without[:13] - logits[:13]).max() < 1e-5
    assert np.abs(without[13:] - logits[13:]).max() > 0.1


@pytest.mark.parametrize(("name", "placement"), THREE_PLACEMENTS, ids=str)
def test_a_prompt_in_pieces_is_the_prompt_at_once(name, placement, tiny):
    prompt = tiny.prompt(70)
    whole, pieces = tiny.session(name, placement), tiny.session(name, placement)
    hidden = whole.prefill({2: prompt})[2]
    parts = [
        pieces.prefill({2: prompt[start:end]})[2]
        for start, end in [(0, 1), (1, 4), (4, 21), (21, 70)]
    ]
    assert [len(part) for part in parts] == [1, 3, 17, 49]
    np.testing.assert_allclose(np.concatenate(parts), hidden, rtol=0, atol=1e-4)
    np.testing.assert_allclose(pieces.logits[2], whole.logits[2], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "placement"), [*THREE_PLACEMENTS, PER_LAYER], ids=str)
def test_a_text_goes_on_after_decode(name, placement, tiny):
    """Dynamic NTK keeps the base of the first prompt."""
    session = tiny.session(name, placement)
    session.prefill({1: tiny.prompt(29)})
    tokens = session.decode(3)[1].tokens
    session.prefill({1: tiny.prompt(20)})
    text = [*tiny.prompt(29), *tokens, *tiny.prompt(20)]
    (oracle,) = tiny.oracle(name, [text], [29])
    bound = BOUND * np.abs(oracle).max()
    np.testing.assert_allclose(session.logits[1], oracle[-1], rtol=0, atol=bound)


class TestForcedTokens:
    """Fed instead of sampled, their log-probabilities given back."""

    def test_log_probs_are_those_of_the_whole_text(self, tiny):
        session = tiny.session("gqa", Paged(8))
        forced = {slot: tiny.prompt(11, seed=slot) for slot in (0, 3)}
        prompts = {slot: tiny.prompts[slot] for slot in (0, 3)}
        session.prefill(prompts)
        results = session.decode(11, forced=forced)  # more than one device call
        for slot, oracle in oracle_of(tiny, "gqa", prompts, forced).items():
            assert results[slot].tokens == tuple(forced[slot])
            expected = log_softmax(oracle[len(prompts[slot]) - 1 : -1])[np.arange(11), forced[slot]]
            np.testing.assert_allclose(results[slot].log_probs, expected, rtol=0, atol=2e-4)

    def test_sampling_takes_over_where_they_end(self, tiny):
        session = tiny.session("gqa", Paged(8))
        prompt, forced = tiny.prompt(16), tiny.prompt(3, seed=1)
        session.prefill({1: prompt, 2: prompt})
        results = session.decode(9, forced={1: forced})
        assert results[1].tokens[:3] == tuple(forced)
        assert results[2].tokens[:3] != tuple(forced)
        (oracle,) = tiny.oracle("gqa", [[*prompt, *results[1].tokens]])
        assert results[1].tokens[3:] == tuple(oracle[len(prompt) + 2 : -1].argmax(-1))

    def test_more_than_the_limit_are_not_fed(self, tiny):
        session = tiny.session("gqa", Paged(8))
        session.prefill({1: tiny.prompt(16)})
        results = session.decode({1: 2}, forced={1: [5, 6, 7]})
        assert results[1].tokens == (5, 6)
        assert session.lengths[1] == 18

    def test_a_forced_stop_token_does_not_stop(self, tiny):
        session = tiny.session("gqa", Paged(8))
        session.prefill({1: tiny.prompt(16)})
        result = session.decode(3, forced={1: [5, 6, 7]}, stop_ids=[6])[1]
        assert result.tokens == (5, 6, 7)
        assert not result.stopped


class TestLogProbs:
    def test_they_are_the_models_own_whatever_the_sampling(self, tiny):
        session = tiny.session("gqa", Paged(8))
        prompt = tiny.prompt(16)
        session.prefill({1: prompt})
        result = session.decode(9, sampling=Sampling(temperature=3.0, top_k=11, seed=5))[1]
        (oracle,) = tiny.oracle("gqa", [[*prompt, *result.tokens]])
        expected = log_softmax(oracle[15:-1])[np.arange(9), list(result.tokens)]
        np.testing.assert_allclose(result.log_probs, expected, rtol=0, atol=2e-4)
        assert np.any(oracle[15:-1].argmax(-1) != result.tokens)


class TestStopTokens:
    """Inside the device loop: each sequence on its own, the stop token counted and not fed."""

    def test_a_sequence_ends_with_its_stop_token_and_the_others_go_on(self, tiny):
        undisturbed = tiny.session("gqa", Paged(8))
        undisturbed.prefill(tiny.prompts)
        free = undisturbed.decode(12)
        stop = free[3].tokens[4]
        ends = {
            slot: result.tokens.index(stop) if stop in result.tokens else 12
            for slot, result in free.items()
        }
        assert ends[3] <= 4
        assert max(ends.values()) == 12
        session = tiny.session("gqa", Paged(8))
        session.prefill(tiny.prompts)
        results = session.decode(12, stop_ids=[stop])
        for slot, end in ends.items():
            assert results[slot].tokens == free[slot].tokens[: end + 1]
            assert results[slot].log_probs == free[slot].log_probs[: end + 1]
            assert results[slot].stopped == (end < 12)
            assert not results[slot].stalled
            assert session.lengths[slot] == len(tiny.prompts[slot]) + end
            if end == 12:
                np.testing.assert_array_equal(session.logits[slot], undisturbed.logits[slot])

    def test_a_stopped_sequence_can_be_told_to_go_on(self, tiny):
        session = tiny.session("gqa", Paged(8))
        session.prefill({1: tiny.prompt(16)})
        first = session.decode(5)[1].tokens
        session.release()
        session.prefill({1: tiny.prompt(16)})
        stopped = session.decode(5, stop_ids=[first[1]])[1]
        end = first.index(first[1])
        assert stopped.tokens == first[: end + 1]
        assert session.decode(4 - end, forced={1: first[end : end + 1]})[1].tokens == first[end:4]

    def test_as_many_as_fit_all_count(self, tiny):
        session = tiny.session("gqa", Paged(8))
        session.prefill({1: tiny.prompt(16)})
        first = session.decode(1)[1].tokens[0]
        session.release()
        session.prefill({1: tiny.prompt(16)})
        others = [token for token in range(tiny.vocab_size) if token != first]
        stops = [*others[: MAX_STOP_IDS - 1], first]
        assert session.decode(5, stop_ids=stops)[1].tokens == (first,)


class TestConfig:
    PER_LAYER = (CacheSpec(Paged(8)), CacheSpec(Paged(16)), CacheSpec(Contiguous()))

    def config(self, tiny, specs=CacheSpec(Paged(8)), **fields):  # noqa: B008 (frozen)
        sizes = {"slots": 5, "max_length": 139, "rows": 2, "chunk": 17}
        return InferenceConfig(tiny.model("mixed"), specs, **{**sizes, **fields})

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            *(
                ({field: 0}, f"{field}=0 given; it must be a whole number, 1 or more")
                for field in ("slots", "max_length", "rows", "chunk", "decode_steps")
            ),
            ({"num_pages": 0}, "num_pages=0 given; it must be a whole number, 1 or more"),
            (
                {"specs": CacheSpec(Paged(152))},
                "page_size=152 is past .* use page_size=151 or less",
            ),
            ({"max_length": 152}, "max_length=152 is past .* context of 151 tokens; use 151"),
            ({"specs": PER_LAYER[:2]}, "2 cache specs for 3 layers; give one spec, or one per"),
            (
                {"specs": CacheSpec(Recompute())},
                "placement=recompute with chunk=17 and max_length=139: .* use chunk=139",
            ),
            (
                {"specs": (*PER_LAYER[:2], CacheSpec(Recompute()))},
                "placement=recompute on some layers and placement=paged:8 on others",
            ),
            ({"implementation": "flash"}, "'flash' is not known; .* reference, chunked"),
        ],
    )
    def test_what_cannot_be_is_named_with_a_way_out(self, fields, message, tiny):
        with pytest.raises(ValueError, match=message):
            self.config(tiny, **fields)

    def test_one_spec_stands_for_all_layers(self, tiny):
        assert self.config(tiny) == self.config(tiny, (CacheSpec(Paged(8)),) * 3)
        assert hash(self.config(tiny)) == hash(self.config(tiny, (CacheSpec(Paged(8)),) * 3))
        assert [spec.table for spec in self.config(tiny, self.PER_LAYER).layer_specs] == [0, 1, 2]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_heads": 6, "num_kv_heads": 4}, "num_kv_heads=4 does not divide num_heads=6"),
            ({"num_kv_heads": (1, 6)}, "num_kv_heads has 2 entries for num_layers=3; give one"),
            ({"windows": (1, 2)}, "windows has 2 entries for num_layers=3"),
            ({"head_dim": 7}, "head_dim=7 is odd"),
            ({"vocab_size": 0}, "vocab_size=0 given; it must be 1 or more"),
            ({"max_length": 0}, "max_length=0 given; it must be 1 or more"),
            ({"activation": "swish"}, "'swish' is not known; .* silu, gelu, gelu_tanh, relu"),
            ({"dtype": "int8"}, "dtype='int8' is not known; .* float32, bfloat16, float16"),
        ],
    )
    def test_a_model_that_cannot_be_is_named_too(self, fields, message, tiny):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(tiny.model("mixed"), **fields)


def test_session_errors_that_need_a_large_context(tiny):
    session = tiny.session("gqa", Paged(8))
    message = "the prompt for slot 1 has 140 tokens after 0 held, past max_length=139; .* takes 151"
    with pytest.raises(ValueError, match=message):
        session.prefill({1: tiny.prompt(140)})
    assert not session.lengths.any()
