"""SentencePiece models: the library's ids, what is special, and models that are refused."""

import json
import pathlib

import pytest
import sentencepiece

from kvlab.models.tokenizers import load_tokenizer
from kvlab.models.tokenizers.sentencepiece_proto import (
    NO_DUMMY_PREFIX,
    ModelSettings,
    PieceType,
    read_settings,
    write_bpe_model,
)
from kvlab.models.tokenizers.sentencepiece_tokenizer import AddedToken, SentencePieceTokenizer

PIECES = [
    ("<unk>", 0.0, PieceType.UNKNOWN),
    ("<s>", 0.0, PieceType.CONTROL),
    ("</s>", 0.0, PieceType.CONTROL),
    ("[INST]", 0.0, PieceType.CONTROL),
    *((f"<0x{byte:02X}>", 0.0, PieceType.BYTE) for byte in range(256)),
    ("▁a", -1.0, PieceType.NORMAL),
    ("bb", -2.0, PieceType.NORMAL),
    *((letter, -3.0, PieceType.NORMAL) for letter in "▁ab"),
    ("▁▁", -4.0, PieceType.NORMAL),
]


def model(**changes):
    settings = {"byte_fallback": True, "add_dummy_prefix": True, "remove_extra_whitespaces": False}
    ids = {"unk_id": 0, "bos_id": 1, "eos_id": 2}
    return write_bpe_model(PIECES, **(settings | ids | changes))


def pieces_of(tokenizer, text, **options):
    return [tokenizer.id_to_piece(i) for i in tokenizer.encode(text, **options)]


@pytest.fixture(scope="module")
def mistral_path(data_path) -> pathlib.Path:
    return data_path("tokenizers/mistral/tokenizer.model.v1")


@pytest.mark.parametrize("language", ["en", "tr"])
@pytest.mark.parametrize("name", ["mistral/tokenizer.model.v1", "sentencepiece/test_model.model"])
def test_ids_and_text_are_the_librarys(data_path, name, language):
    path = data_path(f"tokenizers/{name}")
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load_tokenizer(path)
    sentences = data_path(f"text/parallel_en_tr/pud.{language}.txt").read_text("utf-8").split("\n")

    for sentence in sentences[:199]:
        ids = tokenizer.encode(sentence)
        assert ids == library.encode(sentence)
        assert tokenizer.decode(ids) == library.decode(ids)


def test_the_model_names_its_special_tokens(mistral_path):
    tokenizer = load_tokenizer(mistral_path)

    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2,), True)
    assert tokenizer.vocab_size == 32_000
    assert tokenizer.encode("hi", add_bos=True) == [1, *tokenizer.encode("hi")]
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2]) == "hi"
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2], keep_special=True) == "<s> hi</s>"


def test_the_space_symbol_itself_is_spelled_in_bytes():
    tokenizer = SentencePieceTokenizer(model(), "small")

    spelled = ["<0xE2>", "<0x96>", "<0x81>"]
    assert pieces_of(tokenizer, "a\u2581a") == ["▁a", *spelled, "a"]
    assert pieces_of(tokenizer, "\u2581\u2581 bb") == [*spelled, *spelled, "▁", "bb"]
    assert tokenizer.decode(tokenizer.encode(" \u2581")) == " \u2581"


def test_without_byte_fallback_the_losses_are_the_librarys(data_path):
    tokenizer = load_tokenizer(data_path("tokenizers/sentencepiece/test_model.model"))

    assert tokenizer.decode(tokenizer.encode("漢 hello")) == " ⁇  hello"
    assert tokenizer.decode(tokenizer.encode("  two\u2581words ")) == "two words"


def test_special_tokens_are_read_from_text_only_on_request():
    tokenizer = SentencePieceTokenizer(model(), "small")

    read = pieces_of(tokenizer, "<s>[INST]a[INST]bb</s>", parse_special=True)
    assert read == ["<s>", "[INST]", "▁a", "[INST]", "▁", "bb", "</s>"]
    assert not any(map(tokenizer.is_special, tokenizer.encode("<s>[INST]a</s><unk>")))


def test_added_tokens_lie_beside_the_trained_ones():
    added = {269: AddedToken("<|im_end|>", True), 271: AddedToken("<tool>", False)}
    tokenizer = SentencePieceTokenizer(model(), "small", added=added)

    assert tokenizer.vocab_size == 272
    assert tokenizer.eos_ids == (2, 269)
    assert pieces_of(tokenizer, "a<tool>bb") == ["▁a", "<tool>", "▁", "bb"]
    assert 269 not in tokenizer.encode("a<|im_end|>")
    assert tokenizer.encode("a<|im_end|>", parse_special=True)[-1] == 269
    assert tokenizer.decode([261, 269, 271]) == "bb<tool>"
    assert tokenizer.id_to_piece(270) == "<unused_270>"
    assert tokenizer.piece_to_id("<tool>") == 271


def test_settings_are_read_back():
    assert read_settings(model()) == ModelSettings(
        add_dummy_prefix=True, remove_extra_whitespaces=False, bpe=True, byte_fallback=True
    )
    assert not read_settings(model() + NO_DUMMY_PREFIX).add_dummy_prefix
    assert read_settings(b"") == ModelSettings()


def test_a_written_model_is_what_the_library_reads():
    library = sentencepiece.SentencePieceProcessor(model_proto=model())

    assert [library.id_to_piece(i) for i in range(len(PIECES))] == [p for p, _, _ in PIECES]
    assert library.get_score(260) == -1.0
    assert library.is_control(3)
    assert library.is_byte(4)
    assert (library.unk_id(), library.bos_id(), library.eos_id()) == (0, 1, 2)


def test_removed_spaces_stay_removed():
    tokenizer = SentencePieceTokenizer(model(remove_extra_whitespaces=True), "small")

    assert tokenizer.decode(tokenizer.encode("  a   bb ")) == "a bb"


def varint_field(number, value):
    return bytes([number << 3 & 0x7F | 0x80, number >> 4, value])


@pytest.mark.parametrize(
    ("suffix", "named"),
    [
        (b"\x12\x03" + varint_field(24, 1), "treat_whitespace_as_suffix"),
        (b"\x1a\x02\x28\x00", "escape_whitespaces = false"),
        (b"\x2a\x03\x12\x01x", "denormalizer_spec"),
    ],
)
def test_settings_that_are_not_supported_are_named(suffix, named):
    with pytest.raises(ValueError, match=f"model odd: {named} is not supported"):
        SentencePieceTokenizer(model() + suffix, "odd")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"IQ== 0\nIg== 1\n",
        json.dumps({"a": 1}).encode(),
        model()[:-7],
        b"\x1a\x7f",
        b"\x18" + b"\xff" * 11,
        b"\x18\x01",
    ],
)
def test_files_that_are_no_models_are_refused(tmp_path, content):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)

    with pytest.raises(ValueError, match="SentencePiece model"):
        load_tokenizer(path)
