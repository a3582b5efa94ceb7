"""Which tokenizer a path gives, and what the JSON files of its folder change."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kvlab.models.tokenizers import load_tokenizer, train_sentencepiece
from kvlab.models.tokenizers.byte_level import build_byte_level, byte_alphabet
from kvlab.models.tokenizers.huggingface import HuggingFaceTokenizer

VOCAB = {p: i for i, p in enumerate([*byte_alphabet(), "th", "Ġth", "<|endoftext|>"])}
MERGES = [("t", "h"), ("Ġ", "th")]
END = VOCAB["<|endoftext|>"]


def special(*pieces):
    return [tokenizers.AddedToken(piece, special=True, normalized=False) for piece in pieces]


def byte_level(*pieces):
    return build_byte_level(VOCAB, MERGES, "gpt-2", special(*pieces))


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def write_gpt2_files(folder, names=("vocab.json", "merges.txt")):
    write_json(folder / names[0], VOCAB)
    lines = ["#version: 0.2", *(" ".join(merge) for merge in MERGES), ""]
    (folder / names[1]).write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory):
    texts = ["the end of the turn", "the turn of the end"]
    prefix = tmp_path_factory.mktemp("loading") / "tiny"
    return train_sentencepiece(texts, prefix, 281).read_bytes()


def test_nothing_at_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*absent"):
        load_tokenizer(tmp_path / "absent")


def test_a_folder_without_a_tokenizer_gives_none(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    (tmp_path / "merges.txt").write_text("t h\n")

    assert load_tokenizer(tmp_path) is None


def test_tokenizer_json_comes_first_then_the_model_then_gpt2_files(tmp_path, model_bytes):
    write_gpt2_files(tmp_path)
    assert load_tokenizer(tmp_path).vocab_size == 259

    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    assert load_tokenizer(tmp_path).vocab_size == 281

    byte_level("<a>", "<b>").save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 261
    assert tokenizer.name == tmp_path.name


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
@pytest.mark.parametrize("given", [0, 1, None])
def test_gpt2_files_under_both_names(tmp_path, names, given):
    write_gpt2_files(tmp_path, names)
    tokenizer = load_tokenizer(tmp_path if given is None else tmp_path / names[given])

    pieces = [tokenizer.id_to_piece(i) for i in tokenizer.encode("th th<|endoftext|>")]
    assert pieces[:3] == ["th", "Ġth", "<"]
    assert tokenizer.encode("<|endoftext|>", parse_special=True) == [END]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (END, (END,), False)
    assert tokenizer.decode([END, 0]) == "!"
    assert tokenizer.decode([END, 0], keep_special=True) == "<|endoftext|>!"


def test_gpt2_itself(data_path):
    tokenizer = load_tokenizer(data_path("tokenizers/gpt2"))

    assert tokenizer.vocab_size == 50_257
    assert tokenizer.eos_ids == (50_256,)
    assert tokenizer.encode("Hello world") == [15496, 995]


def test_a_folder_names_its_special_tokens(tmp_path):
    byte_level("<s>", "<turn>", "<|im_end|>").save(str(tmp_path / "tokenizer.json"))
    write_json(
        tmp_path / "tokenizer_config.json",
        {
            "bos_token": {"content": "<s>", "special": True},
            "eos_token": "<turn>",
            "add_bos_token": True,
            "chat_template": "{{ bos_token }}",
        },
    )
    write_json(tmp_path / "config.json", {"bos_token_id": 1, "eos_token_id": 2})
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [7, 5]})
    tokenizer = load_tokenizer(tmp_path)

    # The named token, the ids of generation, then END_PIECES in the vocabulary.
    assert tokenizer.eos_ids == (260, 7, 5, END, 261)
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (259, True)
    assert tokenizer.encode("th", add_bos=True) == [259, 256]
    assert tokenizer.chat_template == "{{ bos_token }}"


def test_a_folder_may_refuse_a_begin_token(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": None, "add_bos_token": True})
    write_json(tmp_path / "config.json", {"bos_token_id": 1})
    tokenizer = load_tokenizer(tmp_path)

    assert (tokenizer.bos_id, tokenizer.adds_bos) == (None, False)
    with pytest.raises(ValueError, match="has no begin-of-text token"):
        tokenizer.encode("th", add_bos=True)


def test_ids_of_the_model_serve_where_no_token_is_named(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "config.json", {"bos_token_id": 3, "eos_token_id": 5})

    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (3, (5, END))

    write_json(tmp_path / "special_tokens_map.json", {"bos_token": "!", "eos_token": "#"})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (2, 5, END))


def test_the_post_processor_says_whether_texts_begin_with_a_token(tmp_path):
    library = byte_level("<s>")
    library.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 259)])
    library.save(str(tmp_path / "tokenizer.json"))

    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(path)
        assert (tokenizer.bos_id, tokenizer.adds_bos) == (259, True)
        assert tokenizer.encode("th") == [256]


def test_a_jinja_file_comes_before_the_template_in_the_configuration(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer(tmp_path).chat_template == "d"

    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template == "file"


def test_a_sentencepiece_folder_takes_added_tokens(tmp_path, model_bytes):
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    write_json(tmp_path / "added_tokens.json", {"<|im_end|>": 281})
    write_json(
        tmp_path / "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "add_bos_token": False,
            "added_tokens_decoder": {"282": {"content": "<tool>", "special": False}},
        },
    )
    tokenizer = load_tokenizer(tmp_path)

    assert tokenizer.vocab_size == 283
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2, 281), False)
    assert tokenizer.encode("<tool>") == [282]


def test_qwen_files_are_cut_and_normalised_as_qwens(tmp_path):
    write_gpt2_files(tmp_path)
    added = {str(END + 1): {"content": "<|im_end|>", "special": True}}
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added}
    write_json(tmp_path / "tokenizer_config.json", config | {"eos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(tmp_path)

    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"
    assert tokenizer.eos_ids == (END + 1, END)
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [END + 1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokenizer_class": "BartTokenizer"}, "class BartTokenizer; supported: GPT2Tokenizer"),
        ({"add_prefix_space": True}, "add_prefix_space is not supported"),
        ({"eos_token": "<nowhere>"}, "names the token '<nowhere>'"),
        (
            {"added_tokens_decoder": {"999": {"content": "<far>", "special": True}}},
            "adds '<far>' as 999, but the next free id is 259",
        ),
    ],
)
def test_what_a_folder_wants_and_cannot_have(tmp_path, config, message):
    write_gpt2_files(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", config)

    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_a_vocabulary_without_its_merges_is_refused(tmp_path):
    write_json(tmp_path / "vocab.json", VOCAB)

    with pytest.raises(FileNotFoundError, match=r"merges\.txt is missing"):
        load_tokenizer(tmp_path / "vocab.json")


def test_a_line_that_is_no_merge_is_named(tmp_path):
    write_gpt2_files(tmp_path)
    (tmp_path / "merges.txt").write_text("t h\nth\n")

    with pytest.raises(ValueError, match=r"merges\.txt line 2 is not a merge: 'th'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "is not a tokenizer.json"),
        ("tokenizer.json", "{}", "is not a tokenizer.json: Model missing"),
        ("vocab.json", "[1]", "holds a JSON list, not an object"),
        ("vocab.json", "{'a'}", "is not JSON"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    write_gpt2_files(tmp_path)
    (tmp_path / name).write_text(content)

    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path / name)


def test_truncation_padding_and_dropout_do_not_reach_the_ids():
    library = byte_level()
    expected = library.encode("th th th th").ids
    library.enable_truncation(2)
    library.enable_padding(length=11)
    library.model.dropout = 0.9

    tokenizer = HuggingFaceTokenizer(library, "trained")

    assert [tokenizer.encode("th th th th") for _ in range(5)] == [expected] * 5


def test_an_unknown_decoder_is_refused():
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match="decodes by nothing; supported are ByteLevel"):
        HuggingFaceTokenizer(library, "words")

    library.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"decodes by \['WordPiece'\]"):
        HuggingFaceTokenizer(library, "words")


def test_a_metaspace_decoder_without_byte_fallback():
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    library.decoder = decoders.Metaspace()
    tokenizer = HuggingFaceTokenizer(library, "spaces")

    assert tokenizer.encode("a a") == [3, 3]
    assert tokenizer.decode([3, 3]) == "a a"
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"
    assert tokenizer.decode(tokenizer.encode("a▁a")) == "a a"


def test_holes_between_ids_have_no_piece():
    library = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 4}, merges=[]))
    library.decoder = decoders.ByteLevel()
    tokenizer = HuggingFaceTokenizer(library, "holes")

    assert tokenizer.vocab_size == 5
    assert tokenizer.id_to_piece(2) == "<unused_2>"
