"""What a session refuses, and that its calls do what a plain forward pass says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder
from kvlab.models.random_params import random_params
from kvlab.ops.rope import Rope
from kvlab.ops.sampling import Sampling
from kvlab.ops.specs import CacheSpec, Contiguous, Paged
from kvlab.research.inference import InferenceConfig, head
from kvlab.research.session import Session

MODEL = DecoderConfig(
    family="llama",
    vocab_size=101,
    num_layers=2,
    embed_dim=29,
    hidden_dim=37,
    num_heads=6,
    num_kv_heads=2,
    head_dim=14,
    max_length=61,
    rope=Rope(),
)
PARAMS = random_params(MODEL, 0)
SLOTS, MAX_LENGTH, PAGE_SIZE, CHUNK, NUM_PAGES = 3, 24, 4, 7, 11
TEXT = np.random.default_rng(0).integers(0, MODEL.vocab_size, MAX_LENGTH).tolist()
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def shared() -> Session:
    config = InferenceConfig(
        MODEL,
        CacheSpec(Paged(PAGE_SIZE)),
        slots=SLOTS,
        max_length=MAX_LENGTH,
        rows=2,
        chunk=CHUNK,
        num_pages=NUM_PAGES,
        decode_steps=5,
    )
    return Session(PARAMS, config)


@pytest.fixture
def session(shared) -> Session:
    shared.release()
    return shared


@pytest.fixture(scope="module")
def plain():
    """Logits [T, V] of a text, computed without a cache."""
    apply = jax.jit(
        lambda tokens: Decoder(MODEL).apply({"params": PARAMS}, tokens, method="forward")
    )

    def logits(ids) -> np.ndarray:
        padded = np.zeros((1, MAX_LENGTH), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(apply(jnp.asarray(padded)))[0, : len(ids)]

    return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def test_prefill_in_pieces_gives_the_hidden_states_of_the_whole_text(session, plain):
    prompts = {2: TEXT[:17], 0: TEXT[5:8], 1: TEXT[3:14]}
    hidden = session.prefill(prompts)
    assert list(session.lengths) == [3, 11, 17]
    for slot, ids in prompts.items():
        assert hidden[slot].shape == (len(ids), MODEL.embed_dim)
        logits = np.asarray(head(PARAMS, MODEL, jnp.asarray(hidden[slot])))
        np.testing.assert_allclose(logits, plain(ids), atol=TOLERANCE)
        np.testing.assert_allclose(session.logits[slot], plain(ids)[-1], atol=TOLERANCE)


def test_a_second_prefill_continues_the_text(session, plain):
    session.prefill([TEXT[:9]])
    session.prefill({0: TEXT[9:14]})
    assert session.lengths[0] == 14
    np.testing.assert_allclose(session.logits[0], plain(TEXT[:14])[-1], atol=TOLERANCE)


def test_greedy_decode_takes_the_likeliest_token_of_a_plain_pass(session, plain):
    session.prefill([TEXT[:6]])
    got = session.decode(7)[0]
    text = TEXT[:6]
    for token, log_prob in zip(got.tokens, got.log_probs, strict=True):
        expected = log_softmax(plain(text)[-1])
        assert token == expected.argmax()
        assert log_prob == pytest.approx(expected[token], abs=1e-4)
        text = [*text, token]
    assert len(got.tokens) == 7
    assert not got.stopped
    assert not got.stalled
    assert session.lengths[0] == 13


def test_forced_tokens_are_fed_and_scored(session, plain):
    session.prefill([TEXT[:6], TEXT[:2]])
    got = session.decode({0: 8, 1: 3}, forced={0: TEXT[6:14]}, stop_ids=TEXT[7:9])
    assert got[0].tokens == tuple(TEXT[6:14])
    assert not got[0].stopped
    expected = log_softmax(plain(TEXT[:14]))
    scores = [expected[place - 1, TEXT[place]] for place in range(6, 14)]
    np.testing.assert_allclose(got[0].log_probs, scores, atol=1e-4)
    np.testing.assert_allclose(session.logits[0], plain(TEXT[:14])[-1], atol=TOLERANCE)


def test_a_stop_token_ends_its_sequence_alone_and_is_not_fed(session):
    session.prefill([TEXT[:6], TEXT[:11]])
    free = session.decode(6)
    stop = free[0].tokens[3]
    assert stop not in free[0].tokens[:3]
    session.release()
    session.prefill([TEXT[:6], TEXT[:11]])
    got = session.decode({0: 6, 1: 6}, stop_ids=[stop])
    assert got[0].tokens == free[0].tokens[:4]
    assert got[0].stopped
    assert session.lengths[0] == 9
    if stop not in free[1].tokens:
        assert got[1] == free[1]


def test_the_host_loop_gives_the_bits_of_the_device_loop(session):
    requests = {0: Sampling(temperature=0.9, seed=3), 1: Sampling()}
    results = []
    for steps in (None, 1, 2):
        session.release()
        session.prefill([TEXT[:6], TEXT[:9]])
        results.append(session.decode(7, sampling=requests, steps_per_call=steps))
    assert results[0] == results[1] == results[2]
    assert results[0][0].tokens != results[0][1].tokens


def test_a_fork_continues_as_its_source_would(session):
    session.prefill({1: TEXT[:6]})
    session.fork(1, [0, 2])
    assert list(session.lengths) == [6, 6, 6]
    sampling = {slot: Sampling(temperature=1.0, sample_index=slot) for slot in range(3)}
    forked = session.decode(5, sampling=sampling)
    for slot in range(3):
        session.release()
        session.prefill({slot: TEXT[:6]})
        assert session.decode(5, sampling=sampling)[slot] == forked[slot]


@pytest.mark.parametrize("placement", [Contiguous(), Paged(5)], ids=str)
def test_decode_ends_at_max_length(placement):
    small = dataclasses.replace(MODEL, num_layers=1, num_kv_heads=2, windows=None)
    sizes = {"slots": 1, "max_length": MAX_LENGTH, "chunk": MAX_LENGTH}
    session = Session(
        random_params(small, 0), InferenceConfig(small, CacheSpec(placement), **sizes)
    )
    session.prefill([TEXT[:22]])
    got = session.decode(5)[0]
    assert session.lengths[0] == MAX_LENGTH
    assert len(got.tokens) == 2
    assert got.stalled


def test_a_full_pool_pauses_decode_and_room_lets_it_go_on(session, plain):
    session.prefill([TEXT[:20], TEXT[:20]])  # 5 pages each of 11
    got = session.decode(3)
    assert [len(got[slot].tokens) for slot in (0, 1)] == [3, 0]
    assert got[1].stalled
    assert list(session.lengths) == [23, 20, 0]
    session.release([0])
    rest = session.decode({1: 3})[1]
    assert rest.tokens == got[0].tokens
    assert rest.log_probs == got[0].log_probs


def test_a_prompt_that_finds_no_page_is_refused_and_leaves_nothing(session):
    session.prefill([TEXT[:20], TEXT[:16]])
    with pytest.raises(ValueError, match="the prompts need 3 more pages of 4 tokens"):
        session.prefill({2: TEXT[:10]})
    assert list(session.lengths) == [20, 16, 0]
    session.release([0])
    session.prefill({2: TEXT[:10]})
    assert list(session.lengths) == [0, 16, 10]


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([[]], "prompt for slot 0 is empty"),
        ([[1], [*TEXT, 1]], "25 tokens after 0 held, past max_length=24"),
        ([[1, 101]], "token id 101 for slot 0 is out of range; ids are 0 to 100"),
        ([[1], [-1, 2]], "token id -1 for slot 1 is out of range"),
        ({3: [1]}, "slot 3 does not exist; slots are 0 to 2"),
        ([[1], [2], [3], [4]], "slot 3 does not exist"),
    ],
)
def test_wrong_prompts_are_named_and_nothing_is_stored(session, prompts, told):
    with pytest.raises(ValueError, match=told):
        session.prefill(prompts)
    assert not session.lengths.any()


@pytest.mark.parametrize(
    ("limits", "options", "told"),
    [
        ({1: 2}, {}, "slot 1 is empty; prefill a prompt"),
        ({-1: 2}, {}, "slot -1 does not exist"),
        (2, {"stop_ids": range(9)}, "9 stop ids given; at most 8"),
        (2, {"steps_per_call": 6}, "steps_per_call=6 given; use 1 to 5"),
        (2, {"steps_per_call": 0}, "steps_per_call=0 given"),
        (2, {"forced": {0: [101]}}, "token id 101 for slot 0 is out of range"),
    ],
)
def test_wrong_requests_to_decode_are_named(session, limits, options, told):
    session.prefill([TEXT[:3]])
    with pytest.raises(ValueError, match=told):
        session.decode(limits, **options)
    assert session.lengths[0] == 3


@pytest.mark.parametrize(
    ("source", "targets", "told"),
    [
        (1, [2], "slot 1 is empty; there is nothing to fork"),
        (0, [0], "must be distinct empty slots"),
        (0, [1, 1], "must be distinct empty slots"),
        (0, [3], "slot 3 does not exist"),
    ],
)
def test_wrong_forks_are_named(session, source, targets, told):
    session.prefill([TEXT[:3]])
    with pytest.raises(ValueError, match=told):
        session.fork(source, targets)
    assert list(session.lengths) == [3, 0, 0]


def test_a_fork_onto_a_sequence_names_it(session):
    session.prefill([TEXT[:3], TEXT[:2]])
    with pytest.raises(ValueError, match=r"\[1\] hold a sequence: release them first"):
        session.fork(0, [1, 2])


@pytest.mark.parametrize(
    ("parents", "told"),
    [
        ([0, 1], "2 parents given for 3 slots; give one for each"),
        ([0, 1, 4], "slot 4 does not exist"),
        ([0, -1, 3], "slot -1 does not exist"),
        ([0, 2, 3], "slot 1 cannot take over slot 2, which is empty; parent 3 empties a slot"),
    ],
)
def test_wrong_parents_are_named(session, parents, told):
    session.prefill([TEXT[:3], TEXT[:2]])
    with pytest.raises(ValueError, match=told):
        session.reorder(parents)
    assert list(session.lengths) == [3, 2, 0]


def test_a_fork_without_a_page_for_its_last_one_changes_nothing(session):
    session.prefill([TEXT[:22], TEXT[:20]])  # 6 and 5 of 11 pages; slot 0's last is partial
    with pytest.raises(ValueError, match="no free page"):
        session.fork(0, [2])
    assert list(session.lengths) == [22, 20, 0]
    assert session.decode({0: 2})[0].stalled is False


def test_use_is_measured_from_the_arrays(session):
    session.prefill([TEXT[:6], TEXT[:4]])
    use = session.use()
    per_token = 2 * MODEL.num_layers * 2 * MODEL.head_dim * 4  # keys and values, K = 2, float32
    assert use.bytes_per_token == per_token
    assert use.allocated_bytes == NUM_PAGES * PAGE_SIZE * per_token
    assert use.used_bytes == 10 * per_token
    assert use.waste == pytest.approx(1 - 10 / 12)  # of 3 pages
    session.fork(0, [2])  # shares the full page, copies the partial one with its 2 tokens
    assert session.use().used_bytes == 12 * per_token


def test_limits_and_forced_tokens_are_checked(session):
    session.prefill([TEXT[:4]])
    with pytest.raises(ValueError, match="limit -1 for slot 0 is no number of tokens"):
        session.decode({0: -1})
    with pytest.raises(ValueError, match=r"forced tokens for slots \[1\]"):
        session.decode({0: 1}, forced={1: [3]})
    with pytest.raises(ValueError, match="whole numbers"):
        session.prefill({1: [0.5]})
    with pytest.raises(ValueError, match="out of range"):
        session.prefill({1: [2**70]})


def test_the_warm_up_compiles_both_programs_and_changes_nothing(session):
    session.prefill([TEXT[:7]])
    before = np.asarray(session.logits)
    session.decode(1)
    compiled = session.compile_count
    session.warm_up()
    session.decode(2)
    assert session.compile_count == compiled  # the session's programs were compiled before
    session.release()
    session.prefill([TEXT[:7]])
    np.testing.assert_array_equal(before[0], np.asarray(session.logits)[0])
    other = Session(session.params, dataclasses.replace(session.config, chunk=13))
    other.warm_up()
    assert other.compile_count == 2
    other.prefill([TEXT[:7]])
    other.decode(1)
    assert other.compile_count == 2
    other.release()
    assert list(other.lengths) == [0] * other.config.slots
