"""Prefill and decode against the oracle, and what a session promises about its programs."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.page_table import PageTable
from kvlab.ops.sampling import Sampling
from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Recompute
from kvlab.research import inference
from kvlab.research.compilation import count_compilations
from kvlab.research.inference import MAX_STOP_IDS, InferenceConfig, head
from kvlab.research.session import Session

BOUND = 1e-4  # of the largest logit: DESIGN section 5, lossless variants

PLACEMENTS = [Paged(1), Paged(8), Paged(16), Paged(64), Contiguous(), Recompute()]
PER_LAYER = (CacheSpec(Paged(8)), CacheSpec(Paged(16)), CacheSpec(Contiguous()))


def case_id(value):
    return (
        "+".join(str(spec.placement) for spec in value) if isinstance(value, tuple) else str(value)
    )


CASES = [
    *(("gqa", placement) for placement in PLACEMENTS),
    ("mixed", PER_LAYER),
    ("learned", Contiguous()),
    ("dynamic", Paged(8)),
]


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
    lengths = [len(prompt) for prompt in prompts.values()] if name == "dynamic" else None
    return dict(zip(prompts, tiny.oracle(name, texts, lengths), strict=True))


@pytest.mark.parametrize(("name", "placement"), CASES, ids=case_id)
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


def test_the_models_are_not_blind_to_their_windows_and_bases(tiny):
    """If another config gave the same logits, the cases above would not test it."""
    text = [tiny.prompt(70)]
    (mixed,) = tiny.oracle("mixed", text)
    no_windows = dataclasses.replace(tiny.model("mixed"), windows=None)
    apply = jax.jit(inference.Decoder(no_windows).apply, static_argnames="method")
    other = apply({"params": tiny.params("mixed")}, jnp.asarray(text), method="forward")
    assert np.abs(np.asarray(other[0]) - mixed)[:13].max() < 1e-5
    assert np.abs(np.asarray(other[0]) - mixed)[20:].max() > 0.1
    short, long = (tiny.oracle("dynamic", text, [length])[0] for length in (16, 70))
    assert np.abs(short - long).max() > 0.1


@pytest.mark.parametrize("placement", [Paged(8), Contiguous(), Recompute()], ids=str)
def test_a_prompt_in_pieces_is_the_prompt_at_once(placement, tiny):
    prompt = tiny.prompt(70)
    whole, pieces = tiny.session("gqa", placement), tiny.session("gqa", placement)
    hidden = whole.prefill({2: prompt})[2]
    parts = [
        pieces.prefill({2: prompt[start:end]})[2]
        for start, end in [(0, 1), (1, 4), (4, 21), (21, 70)]
    ]
    assert [len(part) for part in parts] == [1, 3, 17, 49]
    np.testing.assert_allclose(np.concatenate(parts), hidden, rtol=0, atol=1e-4)
    np.testing.assert_allclose(pieces.logits[2], whole.logits[2], rtol=0, atol=1e-4)


@pytest.mark.parametrize("placement", [Paged(8), Contiguous(), Recompute()], ids=str)
def test_a_text_goes_on_after_decode(placement, tiny):
    session = tiny.session("gqa", placement)
    session.prefill({1: tiny.prompt(15)})
    tokens = session.decode(3)[1].tokens
    session.prefill({1: tiny.prompt(20)})
    (oracle,) = tiny.oracle("gqa", [[*tiny.prompt(15), *tokens, *tiny.prompt(20)]])
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


def held_by(session, slot):
    """All that a session holds of one sequence: stored keys and values, place, logits."""
    cache, length = session.cache, int(session.lengths[slot])
    held = [np.array(cache.prompt_lengths[slot]), np.array(session.logits[slot])]
    for layer, spec in zip(cache.layers, session.config.layer_specs, strict=True):
        table = cache.tables[spec.table]
        assert int(table.lengths[slot]) == length
        held += [np.array(array[slot, :length]) for array in layer.gather(table)]
    return held


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


class TestOutOfPages:
    """24 pages of 8 tokens for 5 slots: a sequence pauses as it was, and goes on when it can."""

    CASES = (("gqa", Paged(8)), ("mixed", PER_LAYER))  # the second has tables that do not refuse
    # 6 + 8 + 8 pages, with room for 3, 2 and 1 tokens in the last.
    LENGTHS = types.MappingProxyType({0: 45, 1: 62, 3: 63})

    def fill(self, tiny, case):
        session = tiny.session(*case)
        session.prefill({slot: tiny.prompt(length) for slot, length in self.LENGTHS.items()})
        assert int(session.cache.tables[0].num_free) == 2
        return session

    def alone(self, tiny, case, slot, steps):
        session = tiny.session(*case)
        session.prefill({slot: tiny.prompt(self.LENGTHS[slot])})
        return session, session.decode(steps)[slot]

    @pytest.mark.parametrize("steps_per_call", [None, 1])
    @pytest.mark.parametrize("case", CASES, ids=["one table", "three tables"])
    def test_a_stalled_sequence_is_as_before_its_step(self, case, steps_per_call, tiny):
        session = self.fill(tiny, case)
        results = session.decode(12, steps_per_call=steps_per_call)
        # Slot 3 takes a page for its second token, slot 1 the last one for its third.
        for slot, done in {0: 3, 1: 10, 3: 9}.items():
            assert results[slot].stalled
            assert len(results[slot].tokens) == done
            other, expected = self.alone(tiny, case, slot, done)
            assert results[slot].tokens == expected.tokens
            assert results[slot].log_probs == expected.log_probs
            assert_same(held_by(session, slot), held_by(other, slot))

    @pytest.mark.parametrize("case", CASES, ids=["one table", "three tables"])
    def test_the_others_do_not_notice_and_it_goes_on_when_there_is_room(self, case, tiny):
        session = self.fill(tiny, case)
        session.decode(12)
        stalled = {slot: held_by(session, slot) for slot in (0, 1)}
        results = session.decode({0: 3, 1: 3})
        assert all(result.stalled and not result.tokens for result in results.values())
        for slot, before in stalled.items():
            assert_same(held_by(session, slot), before)
        session.release([3])
        rest = session.decode(6)
        for slot, done in [(0, 3), (1, 10)]:
            other, expected = self.alone(tiny, case, slot, done + 6)
            assert rest[slot].tokens == expected.tokens[done:]
            assert rest[slot].log_probs == expected.log_probs[done:]
            assert not rest[slot].stalled
            assert_same(held_by(session, slot), held_by(other, slot))

    @pytest.mark.parametrize("case", CASES, ids=["one table", "three tables"])
    def test_a_prompt_that_does_not_fit_takes_nothing_from_any_table(self, case, tiny):
        session = self.fill(tiny, case)
        before = {slot: held_by(session, slot) for slot in self.LENGTHS}
        in_use = [int(t.pages_in_use) for t in session.cache.tables if isinstance(t, PageTable)]
        with pytest.raises(ValueError, match="no room for the prompt of 17 tokens in slot 2"):
            session.prefill({2: tiny.prompt(17)})
        for slot, held in before.items():
            assert_same(held_by(session, slot), held)
        for table in session.cache.tables:
            assert table.lengths.tolist() == session.lengths.tolist() == [45, 62, 0, 63, 0]
        after = [int(t.pages_in_use) for t in session.cache.tables if isinstance(t, PageTable)]
        assert after == in_use
        session.prefill({2: tiny.prompt(16)})
        assert int(session.cache.tables[0].num_free) == 0

    @pytest.mark.parametrize("case", CASES, ids=["one table", "three tables"])
    def test_a_fork_that_finds_no_page_changes_nothing(self, case, tiny):
        session = self.fill(tiny, case)
        session.prefill({4: tiny.prompt(15)})
        before = {slot: held_by(session, slot) for slot in (0, 1, 3, 4)}
        tables = jax.tree.map(np.array, session.cache.tables)
        with pytest.raises(ValueError, match="no free page to copy the partial page of slot 3"):
            session.fork(3, [2])
        assert_same(jax.tree.leaves(tables), jax.tree.leaves(session.cache.tables))
        for slot, held in before.items():
            assert_same(held_by(session, slot), held)


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


class TestPrograms:
    """Two programs a session, whatever it is asked; buffers are given away and used again."""

    def test_prefill_and_decode_are_one_program_each_and_then_nothing_compiles(
        self, one_layer_session, tiny
    ):
        session = one_layer_session
        session.prefill({0: tiny.prompt(40)})
        assert session.compile_count == 1
        session.decode(5)
        assert session.compile_count == 2
        assert session.compile_s > 0
        session.fork(0, [3])
        assert session.compile_count == 3
        session.use(), session.release()  # host-side calls compile small programs of their own
        sampled = Sampling(temperature=0.9, top_k=7, top_p=0.8, min_p=0.01, seed=3)
        with count_compilations() as compilations:
            session.prefill([tiny.prompt(length) for length in (1, 17, 18, 35, 2)])
            session.decode(1)
            session.decode({1: 13, 3: 2}, sampling={1: sampled}, stop_ids=[3, 5])
            session.decode(9, sampling=sampled, forced={0: tiny.prompt(9)}, steps_per_call=2)
            session.release([1, 4])
            session.fork(0, [4, 1])
            session.prefill({4: tiny.prompt(3), 2: tiny.prompt(21)})
            session.decode(7, sampling=Sampling(sample_index=4))
            session.use()
        assert compilations.count == 0
        assert session.compile_count == 3

    def test_an_equal_session_compiles_nothing(self, one_layer_session, tiny):
        session = one_layer_session
        session.release()
        session.prefill([tiny.prompt(3)])
        session.decode(2)
        other = Session(session.params, dataclasses.replace(session.config))
        other.prefill([tiny.prompt(5)])
        other.decode(4)
        assert other.compile_count == 0

    def test_buffers_are_donated(self, one_layer_session, tiny):
        session = one_layer_session
        session.release()
        for call in [
            lambda: session.prefill([tiny.prompt(40)]),
            lambda: session.decode(2),
            lambda: session.fork(0, [1]),
            session.release,
        ]:
            before = session.cache.layers
            call()
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(session.cache))

    def test_what_was_read_before_a_step_stays_as_it_was(self, one_layer_session, tiny):
        session = one_layer_session
        session.release()
        session.prefill([tiny.prompt(40)])
        lengths, logits = session.lengths, np.asarray(session.logits)
        kept = lengths.copy(), logits.copy()
        session.decode(5)
        assert session.lengths[0] == 45
        assert_same((lengths, logits), kept)


class TestConfig:
    def config(self, tiny, specs=CacheSpec(Paged(8)), **fields):  # noqa: B008 (frozen)
        sizes = {"slots": 5, "max_length": 139, "rows": 2, "chunk": 17}
        return InferenceConfig(tiny.model("mixed"), specs, **{**sizes, **fields})

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            *(
                ({field: 0}, f"{field}=0 given; it must be 1 or more")
                for field in ("slots", "max_length", "rows", "chunk", "decode_steps")
            ),
            ({"num_pages": 0}, "num_pages=0 given; it must be 1 or more, or None"),
            ({"rows": 7}, "rows=7 is more than slots=5: .* use rows=5 or less"),
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
        assert [spec.table for spec in self.config(tiny, PER_LAYER).layer_specs] == [0, 1, 2]

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
