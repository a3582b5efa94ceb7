"""Tables of tokenizers: names, counts, sentences, pieces and neighbours."""

import pathlib
import re
import shutil

import numpy as np
import pytest

from kvlab.models.fetch import FetchError
from kvlab.models.tokenizers import ByteTokenizer
from kvlab.research.token_tables import (
    count_table,
    named_tokenizer,
    named_tokenizers,
    piece_table,
    project_texts,
    read_texts,
)

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


def test_the_byte_tokenizer_needs_no_file():
    name, tokenizer = named_tokenizer("bytes")
    assert (name, tokenizer.encode("ı")) == ("bytes", [0xC4, 0xB1])


def test_names_are_short_where_they_can_be(tmp_path, data_path):
    source = data_path("tokenizers/gpt2/encoder.json")
    for folder in (tmp_path / "one" / "bpe", tmp_path / "two" / "bpe"):
        shutil.copytree(source.parent, folder)
    one, two = (str(tmp_path / name / "bpe") for name in ("one", "two"))
    assert list(named_tokenizers([one, f"{one}/encoder.json", "bytes"])) == [
        "bpe",
        "bpe/encoder.json",
        "bytes",
    ]
    found = named_tokenizers([one, two, two])
    assert list(found) == [one, two]
    assert found[two].encode("the") == [1169]


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    wrong = tmp_path / "wrong.model"
    wrong.write_bytes(b"\x0f\x0f")
    for name, kind, told in [
        (
            tmp_path / "absent",
            ValueError,
            "does not exist; give a folder, a file, bytes or a name (smollm2-135m",
        ),
        (tmp_path, ValueError, "there is no tokenizer in"),
        (wrong, ValueError, f"tokenizer {wrong}: not a SentencePiece model"),
        ("smollm2-135m", FetchError, "kvlab fetch smollm2-135m"),
    ]:
        with pytest.raises(kind, match=re.escape(told)):
            named_tokenizer(str(name))


def test_the_project_has_texts_in_both_languages():
    texts = project_texts()
    assert list(texts) == ["English", "Turkish"]
    for lines in texts.values():
        assert 1300 < sum(len(line.split()) for line in lines) < 1700
    assert "ı" in "".join(texts["Turkish"])


def test_texts_are_named_by_file_or_by_path_where_names_repeat(tmp_path):
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "other" / "b.txt"]
    for path in paths:
        path.write_text(f"one\ntwo {path.parent.name}")
    assert list(read_texts(list(map(str, paths)))) == ["a.txt", str(paths[1]), str(paths[2])]
    paths[0].write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"a.txt is not UTF-8 text \(byte 0\)"):
        read_texts([str(paths[0])])


def test_counts_are_a_table_and_the_claim_is_answered_in_words():
    told = count_table(
        {"bytes": ByteTokenizer(), "more": ByteTokenizer()},
        {"English": ["a bc", "", "d"], "Turkish": ["ışık"]},
    )
    assert told.splitlines() == [
        "tokenizer  text     words  tokens  tokens/word  words/token  bytes/token",
        "─────────  ───────  ─────  ──────  ───────────  ───────────  ───────────",
        "bytes      English      3       5        1.667        0.600         1.00",
        "bytes      Turkish      1       7        7.000        0.143         1.00",
        "more       English      3       5        1.667        0.600         1.00",
        "more       Turkish      1       7        7.000        0.143         1.00",
        "",
        'The claim is "1 token is about 0.75 English words". Measured:',
        "- bytes: 1 token is about 0.60 words of English and 0.14 words of Turkish",
        "- more: 1 token is about 0.60 words of English and 0.14 words of Turkish",
    ]


def test_a_text_without_a_word_is_named():
    with pytest.raises(ValueError, match=r"empty.txt: there are no words"):
        count_table({"bytes": ByteTokenizer()}, {"a.txt": ["a"], "empty.txt": [" ", ""]})


def test_pieces_have_ids_and_what_they_add():
    lines = piece_table("bytes", ByteTokenizer(), "aı").splitlines()
    assert lines[0] == "bytes: 3 tokens, 1 word, 3 bytes"
    assert [line.split() for line in lines[4:7]] == [
        ["a", "97", '"a"'],
        ["<0xC4>", "196", "<0xC4>"],
        ["<0xB1>", "177", "<0xB1>"],
    ]
    assert lines[-1].startswith("vectors: [3, D] for a model of width D")
    assert "vectors: [3, 576]; " in piece_table("bytes", ByteTokenizer(), "aı", width=576)
    with pytest.raises(ValueError, match="the text is empty"):
        piece_table("bytes", ByteTokenizer(), "")


def test_neighbours_are_the_vectors_that_point_alike():
    embedding = np.eye(258, 258, dtype=np.float32)
    embedding[ord("a")] = 3 * embedding[ord("b")] + 4 * embedding[ord("c")]
    told = piece_table("bytes", ByteTokenizer(), "a", embedding, neighbours=2)
    assert '"c" 0.80, "b" 0.60' in told
    assert "vectors: [1, 258], one row of the model's embedding [258, 258]" in told
    with pytest.raises(ValueError, match="count 258 is not possible"):
        piece_table("bytes", ByteTokenizer(), "a", embedding, neighbours=258)
