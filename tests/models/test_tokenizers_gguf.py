"""The tokenizer inside a GGUF file: llama.cpp's ids, and files that cannot be used."""

import json
import pathlib

import gguf
import pytest

from kvlab.models.tokenizers import encode_chat, load_tokenizer
from kvlab.models.tokenizers.byte_level import PRE_TOKENIZERS, build_byte_level, byte_alphabet
from kvlab.models.tokenizers.gguf_tokenizer import tokenizer_from_metadata
from kvlab.models.tokenizers.sentencepiece_proto import PieceType

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def generator(golden_script):
    return golden_script("make_tokenizer")


def golden(name):
    return json.loads((GOLDENS / f"tokenizer_{name}.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def spm_path(generator, data_path, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("gguf") / "spm.gguf"
    generator.write_spm_gguf(data_path("tokenizers/mistral/tokenizer.model.v1"), path)
    return path


def check_against(tokenizer, expected, texts):
    assert list(expected) == list(texts)
    for name, text in texts.items():
        assert tokenizer.encode(text) == expected[name]["plain"], name
        assert tokenizer.encode(text, parse_special=True) == expected[name]["special"], name
        assert tokenizer.decode(tokenizer.encode(text)) == text, name


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.mark.real_model
def test_ids_of_the_real_model_are_those_of_llama_cpp(generator, smollm2):
    tokenizer = smollm2

    check_against(tokenizer, golden("smollm2"), generator.TEXTS)
    assert tokenizer.vocab_size == 49_152
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2, 0), False)
    assert tokenizer.id_to_piece(2) == "<|im_end|>"
    assert "<|im_start|>" in tokenizer.chat_template


@pytest.mark.real_model
def test_the_template_of_the_real_model(smollm2):
    ids = encode_chat(smollm2, [{"role": "user", "content": "Bir önbellek nedir?"}])

    text = smollm2.decode(ids, keep_special=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("nedir?<|im_end|>\n<|im_start|>assistant\n")
    assert ids[0] == 1
    assert [ids.count(1), ids.count(2)] == [3, 2]


@pytest.mark.real_model
def test_bytes_that_the_real_vocabulary_lacks_are_named(smollm2):
    with pytest.raises(ValueError, match=r"U\+0004 cannot be encoded"):
        smollm2.encode("end\x04")


def test_ids_of_a_sentencepiece_vocabulary_are_those_of_llama_cpp(generator, spm_path, data_path):
    tokenizer = load_tokenizer(spm_path)

    check_against(tokenizer, golden("spm"), generator.TEXTS)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2,), True)
    original = load_tokenizer(data_path("tokenizers/mistral/tokenizer.model.v1"))
    for language in ("en", "tr"):
        path = data_path(f"text/parallel_en_tr/pud.{language}.txt")
        for sentence in path.read_text("utf-8").split("\n")[:97]:
            assert tokenizer.encode(sentence) == original.encode(sentence)


@pytest.mark.peers
@pytest.mark.real_model
def test_goldens_live(generator, smollm2_path, spm_path):
    pytest.importorskip("llama_cpp")

    assert generator.llama_cpp_ids(smollm2_path) == golden("smollm2")
    assert generator.llama_cpp_ids(spm_path) == golden("spm")


def byte_level_metadata(**changes):
    tokens = ["<|end|>", *byte_alphabet(), "th", "Ġth", "<tool>", "<|im_end|>", ""]
    types = [PieceType.NORMAL] * len(tokens)
    types[0] = types[-2] = PieceType.CONTROL
    types[-3] = PieceType.USER_DEFINED
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "merges": ["t h", "Ġ th"],
        "eos_token_id": 0,
    }
    merged = {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items()}
    return {key: value for key, value in merged.items() if value is not None}


def write(path, metadata):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_byte_level_vocabulary_from_a_file(tmp_path):
    metadata = byte_level_metadata(eot_token_id=260, bos_token_id=0, add_bos_token=True)
    tokenizer = load_tokenizer(
        write(tmp_path / "small.gguf", metadata | {"tokenizer.chat_template": "{{ messages }}"})
    )

    spelled = [tokenizer.id_to_piece(i) for i in tokenizer.encode("th th<tool>x<|im_end|>")]
    assert spelled[:4] == ["th", "Ġth", "<tool>", "x"]
    assert "".join(spelled[4:]) == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [260]
    assert tokenizer.eos_ids == (0, 260)
    assert tokenizer.adds_bos
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.name == "small"
    assert tokenizer.id_to_piece(261) == "[EMPTY_261]"


def test_the_cut_decides_where_merges_stop():
    text = "'S th  12345 a\n\n"
    cuts = {
        pre: tokenizer_from_metadata(byte_level_metadata(pre=pre), pre).encode(text)
        for pre in PRE_TOKENIZERS
    }

    assert cuts["llama-bpe"] == cuts["llama3"] == cuts["llama-v3"]
    assert cuts["qwen2"] == cuts["deepseek-r1-qwen"]
    assert (
        tokenizer_from_metadata(byte_level_metadata(pre=None), "old").encode(text)
        == (cuts["default"])
    )


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["We", "'", "LL", " ", " pay", " 12345", "!?", " \n", "\n", "x"]),
        ("smollm", ["We", "'", "LL", " ", " pay", " ", *"12345", "!?", " \n", "\n", "x"]),
        ("llama-bpe", ["We", "'LL", " ", " pay", " ", "123", "45", "!?", " \n\n", "x"]),
        ("qwen2", ["We", "'LL", " ", " pay", " ", *"12345", "!?", " \n\n", "x"]),
        ("default", ["We", "'", "LL", " ", " pay", " ", "123", "45", "!?", " \n", "\n", "x"]),
    ],
)
def test_words_of_each_cut(pre, words):
    text = "We'LL  pay 12345!? \n\nx"
    vocab = {piece: i for i, piece in enumerate(byte_alphabet())}

    cut = build_byte_level(vocab, [], pre, []).pre_tokenizer.pre_tokenize_str(text)

    assert [text[start:end] for _, (start, end) in cut] == words


def test_a_file_without_tokens_has_no_tokenizer(tmp_path):
    assert load_tokenizer(write(tmp_path / "bare.gguf", {"llama.block_count": 2})) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "tekken"}, r"'tekken' is not supported; supported: default, gpt-2, smollm"),
        ({"model": "t5"}, r"tokenizer\.ggml\.model 't5' of odd .*supported: gpt2, llama"),
        ({"model": None}, r"tokenizer\.ggml\.model None"),
        ({"merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"merges": ["t", "h"]}, r"merge 't' of odd"),
        ({"merges": ["t zz"]}, r"vocabulary and merges do not fit together"),
        ({"token_type": [1, 3]}, r"262 tokens but 2 values of tokenizer\.ggml\.token_type"),
        ({"model": "llama"}, r"no tokenizer\.ggml\.scores"),
        ({"model": "llama", "scores": [0.0] * 262}, r"not a SentencePiece model .* unk"),
    ],
)
def test_what_cannot_be_used_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_metadata(byte_level_metadata(**changes), "odd")


def test_a_file_that_is_not_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")

    with pytest.raises(ValueError, match="not a GGUF file"):
        load_tokenizer(path)
