"""Generation: waves, forks, stops and streams; what a sequence gets never depends on the others."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from kvlab.models.config import DecoderConfig
from kvlab.models.random_params import random_params
from kvlab.models.tokenizers import ByteTokenizer
from kvlab.ops.rope import Rope
from kvlab.ops.sampling import Sampling
from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Recompute
from kvlab.research.fitting import fitting_config
from kvlab.research.generation import Options, check_prompts, generate, warm_up
from kvlab.research.inference import InferenceConfig
from kvlab.research.prompts import Prompt
from kvlab.research.session import Continuation, Session

MODEL = DecoderConfig(
    family="llama",
    vocab_size=263,
    num_layers=1,
    embed_dim=29,
    hidden_dim=37,
    num_heads=6,
    num_kv_heads=2,
    head_dim=14,
    max_length=67,
    rope=Rope(),
)
TOKENIZER = ByteTokenizer(MODEL.vocab_size)
EOS = TOKENIZER.eos_ids[0]


class ScriptedSession:
    """Stands in for a session: the continuation of a prompt is written down beforehand."""

    def __init__(self, script: Mapping[str, str | bytes], slots: int = 2, **changes) -> None:
        sizes = {"slots": slots, "max_length": 40, "chunk": 8, "decode_steps": 16} | changes
        self.config = InferenceConfig(MODEL, CacheSpec(), **sizes)
        self.script = {
            tuple(prompt.encode()): list(text.encode() if isinstance(text, str) else text)
            for prompt, text in script.items()
        }
        self.waiting: dict[int, list[int]] = {}
        self.calls: list[tuple] = []
        self.stalls_at: int | None = None

    def prefill(self, prompts: Mapping[int, Sequence[int]], *, hidden: bool) -> None:
        assert not hidden  # nobody asked for hidden states
        for slot, ids in prompts.items():
            assert slot not in self.waiting
            self.calls.append(("prefill", slot))
            self.waiting[slot] = list(self.script[tuple(ids)])

    def fork(self, source: int, targets: Sequence[int]) -> None:
        self.calls.append(("fork", source, tuple(targets)))
        for slot in targets:
            assert slot not in self.waiting
            self.waiting[slot] = list(self.waiting[source])

    def decode(self, limits, *, sampling, stop_ids) -> dict[int, Continuation]:
        self.calls.append(("decode", dict(limits)))
        assert all(limit > 0 for limit in limits.values())
        return {slot: self._next(slot, limit, stop_ids) for slot, limit in limits.items()}

    def _next(self, slot: int, limit: int, stop_ids: Sequence[int]) -> Continuation:
        tokens = []
        while len(tokens) < limit:
            if self.stalls_at == len(self.waiting[slot]):
                return self._continuation(tokens, stalled=True)
            tokens.append(self.waiting[slot].pop(0) if self.waiting[slot] else EOS)
            if tokens[-1] in stop_ids:
                return self._continuation(tokens, stopped=True)
        return self._continuation(tokens)

    @staticmethod
    def _continuation(tokens, stopped=False, stalled=False) -> Continuation:
        return Continuation(tuple(tokens), tuple(-t / 256 for t in tokens), stopped, stalled)

    def release(self) -> None:
        self.calls.append(("release",))
        self.waiting = {}


def texts(*prompts: str) -> list[Prompt]:
    return [Prompt(tuple(prompt.encode()), prompt) for prompt in prompts]


def run(session, *prompts, on_text=None, **options):
    chosen = Options(**({"stop_ids": (EOS,)} | options))
    return list(generate(session, texts(*prompts), chosen, TOKENIZER, on_text))


def test_text_ends_at_the_end_token_or_after_max_tokens():
    session = ScriptedSession({"a": "hello", "b": "long text"})
    done = run(session, "a", "b", max_tokens=6)
    assert [c.text for c in done] == ["hello", "long t"]
    assert [c.finish_reason for c in done] == ["stop", "length"]
    assert done[0].tokens == (*b"hello", EOS)
    assert done[0].log_probs == tuple(-t / 256 for t in done[0].tokens)
    assert [(c.prompt_index, c.sample_index, c.prompt.text) for c in done] == [
        (0, 0, "a"),
        (1, 0, "b"),
    ]


def test_the_end_token_after_exactly_max_tokens_is_not_looked_for():
    (done,) = run(ScriptedSession({"a": "hello"}), "a", max_tokens=5)
    assert (done.text, done.finish_reason) == ("hello", "length")


def test_more_sequences_than_slots_run_in_waves_in_order():
    script = {name: name * 3 for name in "abcde"}
    session = ScriptedSession(script)
    done = run(session, *"abcde")
    assert [c.text for c in done] == [name * 3 for name in "abcde"]
    assert [call for call in session.calls if call[0] != "decode"] == [
        *[("prefill", 0), ("prefill", 1), ("release",)] * 2,
        *[("prefill", 0), ("release",)],
    ]


def test_a_prompt_is_computed_once_a_wave_and_forked_for_its_samples():
    session = ScriptedSession({"a": "xy", "b": "z"}, slots=4)
    done = run(session, "a", "b", num_samples=3)
    assert [(c.prompt_index, c.sample_index) for c in done] == [
        (prompt, sample) for prompt in (0, 1) for sample in (0, 1, 2)
    ]
    assert [c.text for c in done] == ["xy"] * 3 + ["z"] * 3
    assert [call for call in session.calls if call[0] in ("prefill", "fork")] == [
        ("prefill", 0),
        ("fork", 0, (1, 2)),
        ("prefill", 3),
        ("prefill", 0),
        ("fork", 0, (1,)),
    ]


@pytest.mark.parametrize(
    ("text", "stop", "cut"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "wo"), "one t"),
        ("one twtwo", ("two",), "one tw"),
        ("x\n\nUser: y", ("\n\nUser:",), "x"),
        ("günün ışığı", ("ı",), "günün "),
        ("end", ("endless",), "end"),
        ("stop", ("stop",), ""),
    ],
)
def test_text_is_cut_before_a_stop_string_wherever_tokens_split_it(text, stop, cut):
    (done,) = run(ScriptedSession({"a": text}), "a", stop=stop)
    assert (done.text, done.finish_reason) == (cut, "stop")
    found = min((text.index(one) + len(one) for one in stop if one in text), default=None)
    seen = (*text.encode(), EOS) if found is None else tuple(text[:found].encode())
    assert done.tokens == seen


def test_only_the_sequence_with_the_stop_string_ends():
    done = run(ScriptedSession({"a": "12.45", "b": "123456.8"}), "a", "b", stop=(".",))
    assert [c.text for c in done] == ["12", "123456"]


def test_a_stream_gives_whole_characters_and_nothing_of_a_stop_string():
    streamed: list[tuple[int, str]] = []
    session = ScriptedSession({"a": "ışık 🎉 END more"})
    (done,) = run(session, "a", stop=("END",), on_text=lambda *got: streamed.append(got))
    assert done.text == "ışık 🎉 "
    assert [text for _, text in streamed] == list("ışık 🎉 ")
    assert {index for index, _ in streamed} == {0}
    limits = [call[1] for call in session.calls if call[0] == "decode"]
    assert all(limit == {0: 1} for limit in limits)


def test_a_stream_hands_over_at_the_end_what_it_held_back():
    streamed: list[str] = []
    session = ScriptedSession({"a": b"EN" + "ı".encode()[:1]})
    (done,) = run(session, "a", stop=("END",), on_text=lambda _, text: streamed.append(text))
    assert done.text == "".join(streamed) == "EN\ufffd"


def test_streams_name_the_completion_across_waves():
    streamed: dict[int, str] = {}
    session = ScriptedSession({"a": "1", "b": "2"})
    done = run(
        session,
        "a",
        "b",
        num_samples=2,
        on_text=lambda index, text: streamed.update({index: streamed.get(index, "") + text}),
    )
    assert streamed == {0: "1", 1: "1", 2: "2", 3: "2"}
    assert [c.text for c in done] == ["1", "1", "2", "2"]


def test_a_full_cache_and_a_full_pool_are_told_apart():
    session = ScriptedSession({"a" * 37: "xyzxyz", "b": "123456"})
    done = run(session, "a" * 37, "b", max_tokens=5)
    assert [(c.text, c.finish_reason) for c in done] == [
        ("xyz", "max_length"),
        ("12345", "length"),
    ]
    session = ScriptedSession({"a": "123456"})
    session.stalls_at = 2
    (done,) = run(session, "a")
    assert (done.text, done.finish_reason) == ("1234", "out_of_pages")


def test_a_sequence_without_a_token_has_no_times():
    session = ScriptedSession({"a": "1"})
    session.stalls_at = 1
    (done,) = run(session, "a")
    assert (done.tokens, done.ttft_s, done.tpot_s) == ((), None, None)
    (single,) = run(ScriptedSession({"a": "1"}), "a", max_tokens=1)
    assert single.ttft_s > 0
    assert single.tpot_s is None


def test_times_are_shared_out_over_tokens(monkeypatch):
    clock = iter([10.0, 12.0, 13.0, 20.0, 28.0])  # wave; first call from 12 to 13; second
    monkeypatch.setattr("kvlab.research.generation.time.perf_counter", lambda: next(clock))
    done = run(ScriptedSession({"a": "123456789", "b": "12"}), "a", "b", max_tokens=9)
    assert [c.ttft_s for c in done] == [3.0, 3.0]
    assert [c.tpot_s for c in done] == [1.0, 1.0]  # 8 seconds for the 8 steps of the longest


def test_without_a_tokenizer_there_are_tokens_and_no_text():
    session = ScriptedSession({"a": "xyz"})
    (done,) = generate(session, texts("a"), Options(max_tokens=2))
    assert (done.tokens, done.text) == (tuple(b"xy"), None)
    with pytest.raises(ValueError, match="stop strings need text"):
        list(generate(session, texts("a"), Options(stop=("x",))))


def test_the_space_that_begins_a_text_is_dropped_only_at_its_beginning():
    spaced = ByteTokenizer(MODEL.vocab_size)
    spaced.leading_space = "one"
    spaced.id_to_piece = lambda token: "\u2581" if token == 0x20 else "x"
    session = ScriptedSession({"a": " hi"})
    session.script[(256,)] = list(b" hi")
    prompts = [Prompt((256,), ""), *texts("a")]
    done = generate(session, prompts, Options(stop_ids=(EOS,)), spaced)
    assert [c.text for c in done] == ["hi", " hi"]


def test_the_session_is_left_empty_when_the_reader_stops_or_decode_fails():
    session = ScriptedSession({"a": "1", "b": "2", "c": "3"})
    stream = generate(session, texts("a", "b", "c"), Options(stop_ids=(EOS,)), TOKENIZER)
    next(stream)
    stream.close()
    assert not session.waiting
    session = ScriptedSession({"a": "1"})
    session.decode = None
    with pytest.raises(TypeError):
        run(session, "a")
    assert not session.waiting


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([(1,), ()], "prompt 2 is empty; give at least one token"),
        ([(1,), (2, 263)], "prompt 2 has token id 263, which is out of range; the model's ids are"),
        ([(-1,)], "prompt 1 has token id -1, which is out of range"),
        ([(1,) * 40], "prompt 1 has 40 tokens and leaves no room for a new one: max_length=40 "),
    ],
)
def test_wrong_prompts_are_named_before_anything_runs(prompts, told):
    session = ScriptedSession({})
    with pytest.raises(ValueError, match=re.escape(told)):
        list(generate(session, [Prompt(ids) for ids in prompts], Options(), TOKENIZER))
    assert not session.calls


def test_a_prompt_longer_than_the_context_is_told_the_context():
    config = fitting_config(MODEL, CacheSpec(), sequences=1, needed=1000)
    with pytest.raises(ValueError, match=r"the model's context is 67 tokens; shorten it$"):
        check_prompts([Prompt((1,) * 67)], config)
    check_prompts([Prompt((1,) * 66)], config)


@pytest.fixture(scope="module")
def real() -> Session:
    config = InferenceConfig(
        MODEL, CacheSpec(Paged(5)), slots=3, max_length=40, chunk=7, decode_steps=8
    )
    return Session(random_params(MODEL, 0), config)


def test_a_sequence_gets_the_same_whatever_runs_beside_it(real):
    prompts = [Prompt((5, 6, 7)), Prompt(tuple(range(20))), Prompt((9,)), Prompt((1, 2))]
    options = Options(max_tokens=13, num_samples=2, sampling=Sampling(temperature=0.8, seed=4))
    together = list(generate(real, prompts, options))
    assert len({c.tokens for c in together}) == 8
    for index, prompt in enumerate(prompts):
        alone = list(generate(real, [prompt], options))
        for sample in (0, 1):
            one = together[2 * index + sample]
            assert (alone[sample].tokens, alone[sample].log_probs) == (one.tokens, one.log_probs)
    assert not real.lengths.any()


def test_streaming_and_stop_strings_change_no_token(real):
    prompts, options = [Prompt((5, 6, 7))], Options(max_tokens=13)
    (plain,) = generate(real, prompts, options, TOKENIZER)
    (streamed,) = generate(real, prompts, options, TOKENIZER, lambda *_: None)
    stopping = dataclasses.replace(options, stop=("never seen",))
    (stopped,) = generate(real, prompts, stopping, TOKENIZER)
    for other in (streamed, stopped):
        assert (other.tokens, other.log_probs, other.text) == (
            plain.tokens,
            plain.log_probs,
            plain.text,
        )


def test_after_the_warm_up_generation_compiles_nothing(real):
    warm_up(real, forks=True)
    assert not real.lengths.any()
    before = real.compile_count
    list(generate(real, [Prompt((1,) * 17), Prompt((2,))], Options(3, num_samples=2)))
    assert real.compile_count == before


@pytest.mark.parametrize(
    ("placement", "sequences", "needed", "expected"),
    [
        (Paged(), 3, 40, (3, 64, 64)),
        (Paged(), 1, 65, (1, 128, 128)),
        (Contiguous(), 20, 300, (8, 512, 128)),
        (Paged(), 9, 1500, (8, 2048, 128)),
        (Paged(), 9, 3100, (8, 4096, 128)),
        (Paged(), 1, 9000, (1, 5000, 128)),
        (Recompute(), 2, 40, (2, 48, 48)),
    ],
)
def test_shapes_that_nobody_names_fit_the_sequences(placement, sequences, needed, expected):
    model = dataclasses.replace(MODEL, max_length=5000)
    config = fitting_config(model, CacheSpec(placement), sequences=sequences, needed=needed)
    assert (config.slots, config.max_length, config.chunk) == expected


@pytest.mark.parametrize(
    ("group", "sequences", "slots"), [(4, 4, 4), (4, 20, 8), (3, 30, 6), (11, 22, 11), (1, 5, 5)]
)
def test_sequences_that_run_together_get_whole_groups_of_slots(group, sequences, slots):
    config = fitting_config(MODEL, CacheSpec(), sequences=sequences, needed=9, group=group)
    assert config.slots == slots


def test_shapes_that_are_named_are_taken():
    config = fitting_config(
        MODEL, CacheSpec(), sequences=9, needed=9, slots=2, max_length=33, chunk=5
    )
    assert (config.slots, config.max_length, config.chunk) == (2, 33, 5)
    huge = fitting_config(MODEL, CacheSpec(), sequences=9, needed=9, chunk=10**9)
    assert huge.chunk == huge.max_length  # no prompt can fill more
    with pytest.raises(ValueError, match="past the model's context of 67"):
        fitting_config(MODEL, CacheSpec(), sequences=9, needed=9, max_length=68)


def test_log_probs_are_the_models_own_whatever_the_sampling(real):
    options = Options(max_tokens=4, sampling=Sampling(temperature=2.0, top_k=3, seed=1))
    (done,) = generate(real, [Prompt((5, 6, 7))], options)
    real.prefill({0: [5, 6, 7]})
    forced = real.decode({0: 4}, forced={0: done.tokens})[0]
    real.release()
    np.testing.assert_array_equal(forced.log_probs, done.log_probs)
