"""Tokenizers travel: the same ids in every form, or one line that says why not."""

import dataclasses
import json
import pathlib

import pytest
import tokenizers

from kvlab.models.export import export_model
from kvlab.models.load import Model, load_model
from kvlab.models.presets import preset
from kvlab.models.random_params import random_params
from kvlab.models.tokenizers import ByteTokenizer, load_tokenizer, train_sentencepiece
from kvlab.models.tokenizers.byte_level import PRE_TOKENIZERS, build_byte_level, name_of_cut
from kvlab.models.tokenizers.gguf_export import tokenizer_to_gguf
from kvlab.models.tokenizers.gguf_tokenizer import tokenizer_from_metadata
from kvlab.models.tokenizers.huggingface import HuggingFaceTokenizer
from kvlab.models.tokenizers.huggingface_export import tokenizer_to_files
from kvlab.models.tokenizers.sentencepiece_tokenizer import AddedToken, SentencePieceTokenizer

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = [
    *(path.read_text() for path in sorted((ROOT / "research" / "texts").glob("*.txt"))),
    "",
    " ",
    "  two  spaces \n\n\tand a tab ",
    "aaaa aaa aa a aaaaaaaaaaaaaaaaa",
    "1234567 x==y!= ışık 漢字 🙂👩‍🦱 e\u0301\0",
    "<s> </s> <unk> <0x0A>",
]


def small_config(vocab_size):
    return dataclasses.replace(preset("tiny-mqa"), vocab_size=vocab_size)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_sentencepiece(TEXTS[:2], folder / "tokenizer", 600, user_defined=("<turn>",))


@pytest.fixture(scope="module")
def models(trained, tmp_path_factory):
    """A kvlab folder with the trained vocabulary, padded to 607 rows, as the others are made of."""
    folder = tmp_path_factory.mktemp("models")
    config = small_config(607)
    tokenizer = load_tokenizer(trained)
    model = Model("m", config, random_params(config, 0), tokenizer, trained.parent)
    export_model(folder / "kvlab", model, "kvlab")
    assert (folder / "kvlab" / "tokenizer.model").is_file()
    return folder


def same_tokenizer(left, right, texts=TEXTS):
    for text in texts:
        ids = left.encode(text)
        assert right.encode(text) == ids, text
        assert right.decode(ids) == left.decode(ids)
    assert left.encode("a</s>b", parse_special=True) == right.encode("a</s>b", parse_special=True)
    assert left.special_tokens == right.special_tokens


@pytest.mark.parametrize("forms", [["huggingface"], ["gguf"], ["huggingface", "gguf", "kvlab"]])
def test_a_trained_sentencepiece_vocabulary(forms, models, tmp_path):
    first = model = load_model(str(models / "kvlab"))
    for form in forms:
        path = tmp_path / f"{form}.gguf"
        export_model(path, model, form)
        model = load_model(str(path))
    same_tokenizer(first.tokenizer, model.tokenizer)
    assert model.tokenizer.encode("a<turn>b") == first.tokenizer.encode("a<turn>b")
    assert model.tokenizer.adds_bos
    if forms == ["huggingface"]:
        kept = (tmp_path / "huggingface.gguf" / "tokenizer.model").read_bytes()
        assert kept == (models / "kvlab" / "tokenizer.model").read_bytes()
        said = json.loads((tmp_path / "huggingface.gguf" / "config.json").read_text())
        assert (said["bos_token_id"], said["eos_token_id"]) == (1, 2)


def test_mistrals_vocabulary_with_the_space_that_it_puts_first(data_path, tmp_path):
    tokenizer = load_tokenizer(data_path("tokenizers/mistral/tokenizer.model.v1"))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    for name, content in tokenizer_to_files(tokenizer, 4096).items():
        (tmp_path / name).write_bytes(content)
    same_tokenizer(tokenizer, load_tokenizer(tmp_path))
    keys = tokenizer_to_gguf(tokenizer, tokenizer.vocab_size + 3)
    same_tokenizer(tokenizer, tokenizer_from_metadata(keys, "m"))


@pytest.fixture(scope="module")
def byte_level():
    corpus = " ".join(TEXTS[:2]).split()
    vocab = tokenizers.Tokenizer(tokenizers.models.BPE())
    vocab.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False
    )
    vocab.train_from_iterator([" ".join(corpus)], trainer)
    spec = json.loads(vocab.to_str())["model"]
    added = [tokenizers.AddedToken("<|endoftext|>", special=True, normalized=False)]
    merges = [tuple(merge) for merge in spec["merges"]]
    return lambda cut: HuggingFaceTokenizer(
        build_byte_level(spec["vocab"], merges, cut, added), f"cut as {cut}"
    )


@pytest.mark.parametrize("cut", PRE_TOKENIZERS)
def test_byte_level_vocabularies_keep_their_cut(cut, byte_level, tmp_path):
    tokenizer = byte_level(cut)
    for name, content in tokenizer_to_files(tokenizer, 4096).items():
        (tmp_path / name).write_bytes(content)
    same_tokenizer(tokenizer, load_tokenizer(tmp_path))
    came = tokenizer_from_metadata(tokenizer_to_gguf(tokenizer, tokenizer.vocab_size), "m")
    same_tokenizer(tokenizer, came)


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}], "gpt-2"),
        (
            [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
            "smollm",
        ),
    ],
)
def test_other_spellings_of_a_cut(steps, name):
    assert name_of_cut({"type": "Sequence", "pretokenizers": steps}) == name
    if len(steps) == 1:
        assert name_of_cut(steps[0]) == name
    with pytest.raises(ValueError, match="no name is known for its pre-tokenizer"):
        name_of_cut({"type": "Sequence", "pretokenizers": [*steps, {"type": "Whitespace"}]})


# As the files of Llama 3 and Qwen 2 spell theirs.
PUBLISHED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(("digits", "name"), [(r"\p{N}{1,3}", "llama-bpe"), (r"\p{N}", "qwen2")])
def test_published_spellings_of_a_cut(digits, name):
    regex = {"Regex": PUBLISHED.replace("DIGITS", digits)}
    split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    assert name_of_cut({"type": "Sequence", "pretokenizers": [split, bytes_only]}) == name


def test_gpt2s_vocabulary(data_path, tmp_path):
    tokenizer = load_tokenizer(data_path("tokenizers/gpt2"))
    for name, content in tokenizer_to_files(tokenizer, 1024).items():
        (tmp_path / name).write_bytes(content)
    same_tokenizer(tokenizer, load_tokenizer(tmp_path))
    keys = tokenizer_to_gguf(tokenizer, 50_257)
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    same_tokenizer(tokenizer, tokenizer_from_metadata(keys, "m"))


def test_bytes_are_a_vocabulary_without_merges(tmp_path):
    model = load_model("random:tiny-mqa")
    export_model(tmp_path / "hf", model, "huggingface")
    came = load_model(str(tmp_path / "hf"))
    for text in TEXTS:
        assert came.tokenizer.encode(text) == model.tokenizer.encode(text)
    assert (came.tokenizer.bos_id, came.tokenizer.eos_ids) == (256, (257,))
    export_model(tmp_path / "x.gguf", model, "gguf")
    assert load_model(str(tmp_path / "x.gguf")).tokenizer is None


def test_the_files_of_a_folder_are_kept_as_they_are(models, tmp_path):
    export_model(tmp_path / "a", load_model(str(models / "kvlab")), "huggingface")
    config = tmp_path / "a" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"padding_side": "left"}))
    export_model(tmp_path / "b", load_model(str(tmp_path / "a")), "huggingface")
    for path in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes()


def test_what_has_no_counterpart(trained, tmp_path, byte_level):
    unigram = load_tokenizer(train_sentencepiece(TEXTS[:2], tmp_path / "u", 600, "unigram"))
    spaced = load_tokenizer(
        train_sentencepiece(TEXTS[:2], tmp_path / "s", 600, user_defined=["  "])
    )
    without = load_tokenizer(
        train_sentencepiece(TEXTS[:2], tmp_path / "w", 300, byte_fallback=False)
    )
    for call, words in (
        (lambda: tokenizer_to_gguf(unigram, 600), "u.model is no BPE model"),
        (lambda: tokenizer_to_files(unigram, 64), "u.model is no BPE model"),
        (lambda: tokenizer_to_gguf(without, 300), "w.model has no byte fallback"),
        (lambda: tokenizer_to_files(spaced, 64), "s.model has pieces of the user's with spaces"),
        (lambda: tokenizer_to_gguf(byte_level("gpt-2"), 99), "pieces, the model 99"),
        (lambda: tokenizer_to_gguf(ByteTokenizer(), 258), "bytes has no counterpart in GGUF"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_added_tokens_keep_their_ids(trained):
    added = {600: AddedToken("<|user|>", True), 602: AddedToken("<note>", False)}
    tokenizer = SentencePieceTokenizer(trained.read_bytes(), "t", added=added)
    came = tokenizer_from_metadata(tokenizer_to_gguf(tokenizer, 603), "m")
    for text in ("a <note> b", "<|user|> hi"):
        for parse in (False, True):
            assert came.encode(text, parse_special=parse) == tokenizer.encode(
                text, parse_special=parse
            )
