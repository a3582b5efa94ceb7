"""Training: deterministic, nothing skipped, and sizes that do not work are answered with one."""

import re

import pytest

from kvlab.models.tokenizers import load_tokenizer, train_sentencepiece

LINES = [
    "prefill reads the whole prompt at once, decode reads the whole model for every token",
    "ön doldurma istemi bir kerede okur, çözme ise her belirteç için bütün modeli okur",
    "caches: 16 pages, 128 tokens; sayfalar: 16, belirteçler: 128",
]
BOTH = pytest.mark.parametrize("model_type", ["bpe", "unigram"])


@BOTH
def test_the_same_texts_give_the_same_bytes(tmp_path, model_type):
    first = train_sentencepiece(LINES, tmp_path / "a", 311, model_type)
    second = train_sentencepiece(iter(LINES), tmp_path / "deep" / "b", 311, model_type)

    assert first.read_bytes() == second.read_bytes()
    assert load_tokenizer(first).vocab_size == 311


def test_files_are_read_as_texts_are(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("\n".join(LINES), encoding="utf-8")

    from_file = train_sentencepiece([file], tmp_path / "a", 311)
    from_texts = train_sentencepiece(LINES, tmp_path / "b", 311)

    assert from_file.read_bytes() == from_texts.read_bytes()


@BOTH
def test_long_lines_and_reserved_characters_are_not_skipped(tmp_path, model_type):
    texts = [f"{' '.join(LINES) * 40}\u2585\u2581\0 tokens"]

    tokenizer = load_tokenizer(train_sentencepiece(texts, tmp_path / "a", 311, model_type))

    assert len(tokenizer.encode(LINES[0])) < 0.8 * len(LINES[0])
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]


@BOTH
def test_a_size_that_the_texts_cannot_fill_is_answered_with_the_largest(tmp_path, model_type):
    with pytest.raises(ValueError, match="vocab_size 9001 is more than these texts") as raised:
        train_sentencepiece(LINES, tmp_path / "a", 9001, model_type)
    legal = int(re.search(r"largest that works is (\d+)", str(raised.value))[1])

    assert not (tmp_path / "a.model").exists()
    path = train_sentencepiece(LINES, tmp_path / "a", legal, model_type)
    assert load_tokenizer(path).vocab_size == legal


@BOTH
def test_a_size_too_small_for_the_characters_is_answered_with_the_smallest(tmp_path, model_type):
    with pytest.raises(ValueError, match="vocab_size 131 is too small") as raised:
        train_sentencepiece(LINES, tmp_path / "a", 131, model_type)
    legal = int(re.search(r"smallest that works is (\d+)", str(raised.value))[1])

    path = train_sentencepiece(LINES, tmp_path / "a", legal, model_type)
    assert load_tokenizer(path).vocab_size == legal


def test_options_reach_the_trainer(tmp_path):
    path = train_sentencepiece(
        LINES,
        tmp_path / "a",
        311,
        character_coverage=0.98,
        split_digits=True,
        user_defined=["prefill", "[SEP]"],
    )
    tokenizer = load_tokenizer(path)
    pieces = [tokenizer.id_to_piece(i) for i in range(tokenizer.vocab_size)]

    assert not [p for p in pieces[3:] if any(map(str.isdigit, p)) and len(p) > 1 and p[0] != "<"]
    assert tokenizer.encode("prefill[SEP]") == [pieces.index("prefill"), pieces.index("[SEP]")]
    assert tokenizer.decode(tokenizer.encode("ö[SEP]ğ")) == "ö[SEP]ğ"


def test_without_byte_fallback_unknown_characters_are_lost(tmp_path):
    path = train_sentencepiece(LINES, tmp_path / "a", 97, byte_fallback=False)
    tokenizer = load_tokenizer(path)

    assert tokenizer.decode(tokenizer.encode("read 漢")) == "read  ⁇ "


@pytest.mark.parametrize("texts", [[], ["", "\n\n"], ["\u2581"]])
def test_no_text_is_refused(tmp_path, texts):
    with pytest.raises(ValueError, match="no text to train on"):
        train_sentencepiece(texts, tmp_path / "a", 311)


def test_other_refusals_keep_the_trainers_reason(tmp_path):
    with pytest.raises(ValueError, match=r"could not train 311 pieces: .*coverage"):
        train_sentencepiece(LINES, tmp_path / "a", 311, character_coverage=0.1)
