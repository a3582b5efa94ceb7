"""Prompts and token lists as users write them."""

import re

import pytest

from kvlab.models.tokenizers import ByteTokenizer, SpecialTokens
from kvlab.research.prompts import (
    Prompt,
    check_token_ids,
    encode_prompts,
    parse_ids,
    read_prompt,
    read_token_lists,
)


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        ("1,2,3", [(1, 2, 3)]),
        (" 7 ", [(7,)]),
        ("[1, 2]", [(1, 2)]),
        ("[[1, 2], [3]]", [(1, 2), (3,)]),
    ],
)
def test_ids_are_read_in_each_form(written, ids):
    assert parse_ids(written) == [Prompt(one) for one in ids]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("1,,2", "is no list of token ids; write 1,2,3"),
        ("one", "prompt_ids='one' is no list of token ids"),
        ("[1, 2", "is no list of token ids"),
        ("[" * 100_000, "is no list of token ids"),
        ("", "list 1 is empty"),
        ("[]", "list 1 is empty"),
        ("[[1], []]", "list 2 is empty"),
        ("1.5,2", "list 1 has 1.5, which is no whole number"),
        ("[true]", "list 1 has true, which is no whole number"),
        ('[[1], ["a"]]', 'list 2 has "a", which is no whole number'),
    ],
)
def test_wrong_ids_are_refused(written, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        parse_ids(written)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"a": 1}', "holds a dict; wanted is a list of lists, such as [[1, 2, 3], [4, 5]]"),
        ("[]", "holds no list of token ids"),
        ("[1, 2]", "entry 1 is 1; wanted is a list of lists"),
        ("[[1], [2, []]]", "list 2 has [], which is no whole number"),
        ("[[1], [2]", "is not a list of token ids"),
    ],
)
def test_wrong_token_files_are_refused_by_name(tmp_path, content, told):
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        read_token_lists(path)
    assert str(path) in str(caught.value)


def test_token_files_are_read(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text("[[1, 2], [3]]\n")
    assert read_token_lists(path) == [(1, 2), (3,)]
    path.write_bytes(b"[[1]]\xff")
    with pytest.raises(ValueError, match="byte 5 is not UTF-8"):
        read_token_lists(path)
    with pytest.raises(FileNotFoundError):
        read_token_lists(tmp_path / "absent.json")


def test_a_prompt_file_loses_the_line_end_of_its_editor_alone(tmp_path):
    path = tmp_path / "prompt.txt"
    for content, text in [(b"a \n\nb\n\n", "a \n\nb\n"), (b"a\r\n", "a"), ("ı".encode(), "ı")]:
        path.write_bytes(content)
        assert read_prompt(path) == text
    path.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"prompt.txt is not UTF-8 text \(byte 2\)"):
        read_prompt(path)


def test_text_is_encoded_with_the_begin_token_that_the_model_wants():
    tokenizer = ByteTokenizer()
    assert encode_prompts(["Aı"], tokenizer) == [Prompt((65, 0xC4, 0xB1), "Aı")]
    wants = tokenizer.with_special_tokens(SpecialTokens(bos_id=256, adds_bos=True))
    assert encode_prompts(["", "A"], wants) == [Prompt((256,), ""), Prompt((256, 65), "A")]


def test_chat_goes_through_the_models_template():
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<bot>{% endif %}<eos>"
    chatty = ByteTokenizer().with_special_tokens(SpecialTokens(chat_template=template))
    (prompt,) = encode_prompts(["Hi"], chatty, chat=True)
    assert prompt == Prompt((*b"<user>Hi<bot>", 257), "Hi")
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompts(["Hi"], ByteTokenizer(), chat=True)


def test_text_needs_a_tokenizer_and_to_be_text():
    assert encode_prompts([], None) == []
    with pytest.raises(ValueError, match="no tokenizer; give prompts as token ids"):
        encode_prompts(["a"], None)
    with pytest.raises(ValueError, match="prompt 2 is not UTF-8 text"):
        encode_prompts(["a", "\udcff"], ByteTokenizer())


def test_ids_that_a_model_does_not_have_are_named():
    check_token_ids([(0, 9), (3,)], 10, "prompt")
    for wrong in (10, -1, 2**70):
        with pytest.raises(ValueError, match=f"prompt 2 has token id {wrong}, which is out of r"):
            check_token_ids([(0,), (3, wrong)], 10, "prompt")
