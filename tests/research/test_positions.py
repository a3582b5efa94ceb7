"""Logits of every position, by prefill or by decode, and the file they go to."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder
from kvlab.models.random_params import random_params
from kvlab.ops.rope import Rope
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.inference import InferenceConfig
from kvlab.research.positions import npz_writer, position_logits
from kvlab.research.session import Session

MODEL = DecoderConfig(
    family="llama",
    vocab_size=101,
    num_layers=1,
    embed_dim=29,
    hidden_dim=37,
    num_heads=6,
    num_kv_heads=2,
    head_dim=14,
    max_length=61,
    rope=Rope(),
)
PARAMS = random_params(MODEL, 0)
DRAW = np.random.default_rng(0)
LISTS = [DRAW.integers(0, MODEL.vocab_size, length).tolist() for length in (11, 1, 19, 4, 3)]


@pytest.fixture(scope="module")
def session() -> Session:
    config = InferenceConfig(MODEL, CacheSpec(Paged(5)), slots=2, max_length=19, chunk=7)
    return Session(PARAMS, config)


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """Logits of each list by a plain forward pass."""
    forward = jax.jit(lambda t: Decoder(MODEL).apply({"params": PARAMS}, t, method="forward"))
    padded = np.zeros((len(LISTS), 19), np.int32)
    for row, ids in zip(padded, LISTS, strict=True):
        row[: len(ids)] = ids
    logits = np.asarray(forward(jnp.asarray(padded)))
    return [rows[: len(ids)] for rows, ids in zip(logits, LISTS, strict=True)]


@pytest.mark.parametrize("decode_from", [None, 1, 4, 18])
def test_logits_are_those_of_a_plain_pass(session, expected, decode_from):
    told: list[int] = []
    computed = list(position_logits(session, LISTS, decode_from, told.append))
    assert len(computed) == len(LISTS)
    for got, wanted in zip(computed, expected, strict=True):
        assert got.dtype == np.float32
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert sum(told) == sum(map(len, LISTS))
    assert not session.lengths.any()


def test_only_what_is_asked_for_goes_through_decode(session, monkeypatch):
    fed = []
    decode = session.decode
    monkeypatch.setattr(
        session,
        "decode",
        lambda limits, forced: (fed.append(forced), decode(limits, forced=forced)),
    )
    prefilled = list(position_logits(session, LISTS))
    assert not fed
    decoded = list(position_logits(session, LISTS, 9))
    assert fed == [{0: [LISTS[0][9]]}, {0: [LISTS[0][10]]}] + [
        {0: [token]} for token in LISTS[2][9:]
    ]
    for one, other, ids in zip(prefilled, decoded, LISTS, strict=True):
        np.testing.assert_array_equal(one[: min(9, len(ids))], other[:9])


@pytest.mark.parametrize(
    ("lists", "decode_from", "told"),
    [
        ([[1], []], None, "list 2 is empty"),
        ([[1], [2, 101]], None, "list 2 has token id 101, which is out of range"),
        ([[1] * 20], None, "list 1 has 20 tokens, past max_length=19; shorten it or raise"),
        ([[1]], 0, "decode_from=0 given: decode continues a text"),
        ([[1, 2, 3], [1]], 3, "decode_from=3 is past the longest list, of 3 tokens"),
    ],
)
def test_wrong_lists_are_named(session, lists, decode_from, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        list(position_logits(session, lists, decode_from))
    assert not session.lengths.any()


def test_the_file_is_whole_and_numpy_reads_it(tmp_path):
    path = tmp_path / "logits.npz"
    with npz_writer(path) as write:
        for index in range(3):
            write(f"logits_{index}", np.full((index + 1, 2), index, np.float32))
        assert not path.exists()
    with np.load(path) as found:
        assert sorted(found.files) == ["logits_0", "logits_1", "logits_2"]
        np.testing.assert_array_equal(found["logits_1"], np.ones((2, 2), np.float32))
    assert [p.name for p in tmp_path.iterdir()] == ["logits.npz"]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_error_leaves_the_old_file_as_it_was(tmp_path):
    path = tmp_path / "logits.npz"
    path.write_text("old")

    def fail() -> None:
        with npz_writer(path) as write:
            write("logits_0", np.zeros(3, np.float32))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["logits.npz"]


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path):
    for path, told in [
        (tmp_path / "no" / "logits.npz", "cannot write .*logits.npz: No such file"),
        (tmp_path, "is a folder; give the path of a file"),
    ]:
        with pytest.raises(OSError, match=told), npz_writer(path):
            pytest.fail("the block must not run")
