"""decode(encode(text)) == text for every text, one list of tokenizers through one set of checks."""

import functools
import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kvlab.models.tokenizers import ByteTokenizer, Detokenizer, load_tokenizer, train_sentencepiece
from kvlab.models.tokenizers.byte_level import build_byte_level, byte_alphabet
from kvlab.models.tokenizers.huggingface import HuggingFaceTokenizer

CORPUS = [
    "the cache holds the keys and the values of every token that came before",
    "ışığın hızı değişmez, İzmir'de ılık bir güz öğleni",
    "    return x ** 2  # 1234 🙂 e\u0301",
]
AWKWARD = "aeıİiIğŞç ▁\u2581\0\r\n\t🙂👩\u200d🇹🇷\u0301\u0307<0x>s/|1'.漢\ufffd\ufeff\u2585\u00a0"
WHOLE = ["<s>", "</s>", "<unk>", "<0x0A>", "<bos>", "<|endoftext|>", "the", "  ", "▁▁", "\r\n"]

texts = st.one_of(
    st.text(max_size=40),
    st.text(st.sampled_from(AWKWARD), max_size=40),
    st.lists(st.one_of(st.sampled_from(WHOLE), st.text(max_size=3)), max_size=12).map("".join),
)
each_text = hypothesis.given(texts)
many = hypothesis.settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


def byte_fallback_json(prefix: str) -> tokenizers.Tokenizer:
    """A Llama-2-like tokenizer.json: spaces as U+2581, bytes for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghimnorstuvyıİ", "th", "the", "▁the", "▁a", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix == "prepend":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    elif prefix == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    if prefix != "none":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def byte_level_json() -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate([*byte_alphabet(), "th", "the", "Ġthe"])}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    added = [tokenizers.AddedToken("<|endoftext|>", special=True, normalized=False)]
    return build_byte_level(vocab, merges, "llama-bpe", added)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    @functools.cache
    def train(model_type):
        folder = tmp_path_factory.mktemp(model_type)
        return train_sentencepiece(CORPUS, folder / "small", 307, model_type)

    return train


KINDS = (
    "bytes",
    "trained bpe",
    "trained unigram",
    "byte level",
    "byte fallback, no prefix",
    "byte fallback, prepend",
    "byte fallback, metaspace",
    "gpt2",
    "mistral",
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, trained, data_path):
    kind = request.param
    if kind == "bytes":
        return ByteTokenizer()
    if kind.startswith("trained"):
        return load_tokenizer(trained(kind.removeprefix("trained ")))
    if kind == "byte level":
        return HuggingFaceTokenizer(byte_level_json(), kind)
    if kind.startswith("byte fallback"):
        prefix = kind.removeprefix("byte fallback, ").removeprefix("no prefix") or "none"
        return HuggingFaceTokenizer(byte_fallback_json(prefix), kind)
    relative = {"gpt2": "gpt2", "mistral": "mistral/tokenizer.model.v1"}[kind]
    return load_tokenizer(data_path(f"tokenizers/{relative}"))


@many
@each_text
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)

    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()


@many
@each_text
def test_a_stream_gives_the_same_text_and_only_whole_characters(tokenizer, text):
    stream = Detokenizer(tokenizer, continued=False)

    parts = [stream.push([token_id]) for token_id in tokenizer.encode(text)]

    assert "".join([*parts, stream.finish()]) == text


@many
@hypothesis.given(st.data())
def test_any_ids_decode_the_same_streamed_and_at_once(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=20))
    stream = Detokenizer(tokenizer, continued=False)

    parts = [stream.push([token_id]) for token_id in ids]

    assert "".join([*parts, stream.finish()]) == tokenizer.decode(ids)


@many
@each_text
def test_special_tokens_in_a_text_are_text(tokenizer, text):
    assert not any(map(tokenizer.is_special, tokenizer.encode(text)))


def test_a_continuation_keeps_its_space(tokenizer):
    ids = tokenizer.encode("the") + tokenizer.encode("the the")[len(tokenizer.encode("the")) :]

    assert tokenizer.decode(ids) == "the the"
    assert tokenizer.decode(ids[len(tokenizer.encode("the")) :], continued=True) == " the"


def test_ids_past_the_vocabulary_are_visible_and_negative_ones_refused(tokenizer):
    assert tokenizer.decode([tokenizer.vocab_size]) == "\ufffd"
    with pytest.raises(ValueError, match="token id -1 is negative"):
        tokenizer.decode([-1])
    with pytest.raises(ValueError, match=f"has ids 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.id_to_piece(tokenizer.vocab_size)


def test_pieces_and_ids_agree(tokenizer):
    for token_id in range(0, tokenizer.vocab_size, 97):
        assert tokenizer.piece_to_id(tokenizer.id_to_piece(token_id)) == token_id
    assert tokenizer.piece_to_id("no such piece, surely") is None


def test_every_code_point_comes_back(trained):
    tokenizer = load_tokenizer(trained("bpe"))
    points = [*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200), 0x10FFFF]
    blocks = ["a".join(map(chr, points[i : i + 1021])) for i in range(0, len(points), 1021)]

    assert [tokenizer.decode(tokenizer.encode(block)) for block in blocks] == blocks


def test_library_ids_where_the_library_loses_nothing(data_path):
    """The care taken for U+2581 and for leading spaces changes no other text."""
    for prefix in ("none", "prepend", "metaspace"):
        library = byte_fallback_json(prefix)
        ours = HuggingFaceTokenizer(byte_fallback_json(prefix), prefix)
        for text in ("the the", "a  the İ\n", "x", ""):
            assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids
            assert ours.decode(ours.encode(text)) == library.decode(ours.encode(text))


def test_a_vocabulary_without_a_byte_says_so():
    vocab = {piece: i for i, piece in enumerate(p for p, b in byte_alphabet().items() if b != 4)}
    tokenizer = HuggingFaceTokenizer(build_byte_level(vocab, [], "gpt-2", []), "holed")

    assert tokenizer.decode(tokenizer.encode("a\x05")) == "a\x05"
    with pytest.raises(ValueError, match=r"U\+0004 cannot be encoded.*holed.*0x04"):
        tokenizer.encode("a\x04")


def test_the_byte_tokenizer_fits_any_vocabulary_that_holds_the_bytes():
    tokenizer = ByteTokenizer(307)

    assert tokenizer.encode("ı<eos>", parse_special=True) == [*"ı".encode(), 257]
    assert [tokenizer.id_to_piece(i) for i in (10, 65, 256, 257, 306)] == [
        "<0x0A>",
        "A",
        "<bos>",
        "<eos>",
        "<unused_306>",
    ]
    assert tokenizer.piece_to_id("<eos>") == 257
    assert tokenizer.decode([306]) == "\ufffd"
    with pytest.raises(ValueError, match="vocab_size 257 is too small"):
        ByteTokenizer(257)


def test_paths_are_given_back_as_they_were(trained):
    assert isinstance(trained("bpe"), pathlib.Path)
    assert load_tokenizer(str(trained("bpe"))).encode("the") == load_tokenizer(
        trained("bpe")
    ).encode("the")
