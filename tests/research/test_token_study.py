"""Words, tokens and bytes of real texts; pieces; neighbours."""

import numpy as np
import pytest

from kvlab.models.tokenizers import ByteTokenizer, load_tokenizer
from kvlab.research.token_study import TokenCounts, measure, nearest_neighbours, pieces


@pytest.mark.parametrize(
    ("name", "english", "turkish"),
    [
        ("gpt2", 1.255, 3.719),
        ("mistral/tokenizer.model.v1", 1.400, 3.772),
        ("sentencepiece/test_model.model", 2.650, 5.629),
    ],
)
def test_tokens_per_word_of_parallel_sentences(data_path, name, english, turkish):
    tokenizer = load_tokenizer(data_path(f"tokenizers/{name}"))
    counts = {
        language: measure(
            tokenizer,
            data_path(f"text/parallel_en_tr/pud.{language}.txt").read_text("utf-8").split("\n"),
        )
        for language in ("en", "tr")
    }

    assert (counts["en"].words, counts["tr"].words) == (18_430, 14_356)
    assert (counts["en"].sentences, counts["tr"].sentences) == (1000, 1000)
    assert round(counts["en"].tokens_per_word, 3) == english
    assert round(counts["tr"].tokens_per_word, 3) == turkish


def test_counts_by_hand():
    counts = measure(ByteTokenizer(), ["  iki  söz\n", "", "one"])

    assert counts == TokenCounts(sentences=2, words=3, tokens=12, bytes=12)
    assert counts.tokens_per_word == 4
    assert counts.words_per_token == 0.25
    assert counts.bytes_per_token == 1


def test_empty_texts_have_no_figures():
    with pytest.raises(ValueError, match="no words to count"):
        measure(ByteTokenizer(), ["", " \n"])


def test_pieces_join_to_the_text(data_path):
    tokenizer = load_tokenizer(data_path("tokenizers/gpt2"))
    text = "LLM mimarisi hızlıdır"

    found = pieces(tokenizer, text)

    assert b"".join(piece.raw for piece in found) == text.encode()
    assert [piece.token_id for piece in found] == tokenizer.encode(text)
    assert (found[0].piece, found[0].raw) == ("LL", b"LL")
    assert found[2].piece == "Ġmim"


def plain_neighbours(embedding, token_id, count):
    lengths = np.linalg.norm(embedding, axis=1)
    cosines = embedding @ embedding[token_id] / np.maximum(lengths * lengths[token_id], 1e-30)
    order = sorted(range(len(embedding)), key=lambda i: (-cosines[i], i))
    return [i for i in order if i != token_id][:count], cosines


@pytest.mark.parametrize("chunk", [1, 5, 101, 1000])
def test_neighbours_are_those_of_the_definition(chunk):
    embedding = np.random.default_rng(3).normal(size=(101, 7))

    nearest, cosines = nearest_neighbours(embedding, [0, 53, 100], 11, chunk=chunk)

    for row, token_id in enumerate((0, 53, 100)):
        expected, all_cosines = plain_neighbours(embedding, token_id, 11)
        assert nearest[row].tolist() == expected
        np.testing.assert_allclose(cosines[row], all_cosines[expected], rtol=1e-5, atol=1e-6)


def test_neighbours_by_hand():
    embedding = np.array([[1, 0], [2, 0], [0, 0], [-3, 0], [0, 5], [4, 0]], np.float16)

    nearest, cosines = nearest_neighbours(embedding, np.array([0, 2]), 5)

    assert nearest.tolist() == [[1, 5, 2, 4, 3], [0, 1, 3, 4, 5]]
    assert cosines.tolist() == [[1, 1, 0, 0, -1], [0, 0, 0, 0, 0]]
    assert cosines.dtype == np.float32


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    [
        ([0], 0, "count 0 is not possible: 3 vectors give 1 to 2"),
        ([0], 3, "count 3 is not possible"),
        ([3], 1, r"ids \[3\] must lie in 0 to 2"),
        ([-1, 0], 1, r"ids \[-1, 0\] must lie in 0 to 2"),
    ],
)
def test_impossible_neighbours_are_refused(ids, count, message):
    with pytest.raises(ValueError, match=message):
        nearest_neighbours(np.eye(3, dtype=np.float32), ids, count)
