"""Texts become rows: nothing lost, nothing mixed, an order that a key alone decides."""

import jax
import numpy as np
import pytest

from kvlab.models.tokenizers import load_tokenizer
from kvlab.research.training_data import (
    ShuffledRows,
    Text,
    batches_of,
    documents,
    pack,
    prepare,
    read_texts,
    split_held_out,
)

BOS = 1
WORDS = ("prefill", "reads", "a", "whole", "prompt", "and", "decode", "the", "model", "at", "once")


def story(lines=200, seed=0):
    random = np.random.default_rng(seed)
    return "".join(" ".join(random.choice(WORDS, 7)) + "\n" for _ in range(lines))


def test_rows_hold_whole_texts_and_pieces_of_long_ones():
    texts = [list(range(10, 23)), [30, 31], [40], [50, 51, 52]]
    tokens, segments = pack(texts, 5, BOS)
    assert tokens.tolist() == [
        [BOS, 10, 11, 12, 13, 14],
        [BOS, 15, 16, 17, 18, 19],
        [BOS, 20, 21, 22, 0, 0],
        [BOS, 30, 31, BOS, 40, 0],
        [BOS, 50, 51, 52, 0, 0],
    ]
    assert segments.tolist() == [
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 2, 2, 0],
        [1, 1, 1, 1, 0, 0],
    ]


def test_every_token_is_predicted_once():
    random = np.random.default_rng(0)
    texts = [random.integers(10, 99, n).tolist() for n in random.integers(1, 40, 60)]
    tokens, segments = pack(texts, 13, BOS)
    predicted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    assert tokens[:, 1:][predicted].tolist() == [token for text in texts for token in text]


def test_the_end_of_a_text_is_held_out_from_a_line_end_on():
    content = "one\ntwo\nthree\nfour\n"
    assert split_held_out(content, 0.3) == ("one\ntwo\n", "three\nfour\n")
    assert split_held_out("abcdefghij", 0.2) == ("abcdefgh", "ij")


def test_documents_stand_between_separators():
    assert documents("a\n\n\n\nb\n", "\n\n") == ["a", "b\n"]
    assert documents("a\n\nb", None) == ["a\n\nb"]


def test_prepared_texts_can_be_read_again(tmp_path):
    content = story()
    data = prepare(
        [Text("story", content)], vocab_size=311, length=31, held_out=0.25, separator="\n"
    )
    assert data.filled > 0.7
    (tmp_path / "tokenizer.model").write_bytes(data.tokenizer_model)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    again, counts = "", []
    for tokens, segments in (data.rows, data.held_out):
        again += tokenizer.decode(tokens[segments > 0].tolist())
        predicted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        counts.append(predicted.sum())
    assert again == content.replace("\n", "")
    assert counts == [data.tokens, data.held_out_tokens]
    assert 0.2 < data.held_out_bytes / len(content) < 0.3


def test_one_preparation_is_like_another():
    texts = [Text("a", story()), Text("b", story(seed=1))]
    one, two = (prepare(texts, vocab_size=311, length=31, held_out=0.1) for _ in range(2))
    assert one.tokenizer_model == two.tokenizer_model
    assert np.array_equal(one.rows.tokens, two.rows.tokens)


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (story(3), {"length": 999}, r"have \d+ tokens to train on, and a sequence has 999; give"),
        (story(), {"vocab_size": 9001}, "vocab_size 9001 is more than these texts can fill; the"),
        (story(), {"vocab_size": 100}, "too small for the special pieces"),
        (story(), {"held_out": 1.0}, "held_out=1.0 given; it must be above 0 and below 1"),
        ("x", {}, "leave nothing to train on where held_out=0.3 of each is held out; give more"),
        (story() + " " * 5000, {"held_out": 0.1}, "held_out=0.1 holds no text out; give more"),
    ],
)
def test_texts_that_do_not_suffice(content, options, words):
    asked = {"vocab_size": 290, "length": 7, "held_out": 0.3} | options
    with pytest.raises(ValueError, match=words) as caught:
        prepare([Text("story", content)], **asked)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_texts(tmp_path):
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "latin").write_bytes("çözme".encode("latin-1"))
    with pytest.raises(ValueError, match="empty is empty; give a file of text"):
        read_texts([str(tmp_path / "empty")])
    with pytest.raises(ValueError, match=r"latin is not UTF-8 text \(byte 0\)"):
        read_texts([str(tmp_path / "latin")])
    with pytest.raises(FileNotFoundError):
        read_texts([str(tmp_path / "absent")])


def test_an_epoch_has_every_row_once_and_each_epoch_its_own_order():
    rows = pack([[10 + number] for number in range(7)], 1, BOS)
    key = np.asarray(jax.random.key_data(jax.random.key(3)))
    shuffled = ShuffledRows(rows, key)
    read = np.concatenate(
        [shuffled.take(first, 2, 3).tokens[..., 1].ravel() for first in range(0, 42, 6)]
    )
    epochs = read.reshape(6, 7)
    assert all(sorted(epoch) == list(range(10, 17)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3
    again = ShuffledRows(rows, key).take(12, 2, 3)
    assert np.array_equal(again.tokens[..., 1].ravel(), read[12:18])
    assert again.tokens.shape == (2, 3, 2)


def test_batches_are_filled_up_with_padding():
    rows = pack([[10 + number] for number in range(7)], 1, BOS)
    first, second = batches_of(rows, 4)
    assert first.tokens.shape == second.tokens.shape == (4, 2)
    assert second.tokens[:3].tolist() == rows.tokens[4:].tolist()
    assert second.segments[3].tolist() == [0, 0]
