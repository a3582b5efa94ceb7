"""Chat templates: the text they give, and that they cannot do more than give text."""

import datetime

import pytest

from kvlab.models.tokenizers import ByteTokenizer, SpecialTokens, encode_chat, render_chat

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Merhaba <|im_end|>"},
]


def with_template(template):
    special = SpecialTokens(bos_id=256, eos_ids=(257,), chat_template=template)
    return ByteTokenizer().with_special_tokens(special)


def render(template, messages=None, **options):
    return render_chat(with_template(template), messages or MESSAGES, **options)


def test_turns_are_laid_out_and_the_answer_is_opened():
    closed = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nMerhaba <|im_end|><|im_end|>\n"
    )

    assert render(CHATML, add_generation_prompt=False) == closed
    assert render(CHATML) == closed + "<|im_start|>assistant\n"


def test_whitespace_around_blocks_is_dropped_as_in_transformers():
    inner = "    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n"
    template = f"{{% for m in messages %}}\n{inner}{{% endfor %}}\n"

    assert render(template) == "Merhaba <|im_end|>\n"


def test_templates_know_the_special_tokens_and_further_variables():
    template = "{{ bos_token }}|{{ eos_token }}|{{ tools }}|{{ missing is defined }}"

    assert render(template, tools=["clock"]) == "<bos>|<eos>|['clock']|False"
    assert render_chat(ByteTokenizer(), MESSAGES, template="{{ messages | length }}") == "2"


def test_a_tokenizer_without_special_tokens_gives_empty_ones():
    tokenizer = ByteTokenizer().with_special_tokens(SpecialTokens())

    assert render_chat(tokenizer, MESSAGES, template="[{{ bos_token }}{{ eos_token }}]") == "[]"


def test_json_is_plain_and_dates_are_todays():
    assert render("{{ {'ı': '<'} | tojson }}") == '{"ı": "<"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_loops_can_be_left_early():
    assert render("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "system"


def test_encoding_reads_the_templates_special_tokens():
    tokenizer = with_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")

    assert encode_chat(tokenizer, [{"role": "user", "content": "hi"}]) == [256, *b"hi", 257]


def test_no_template_is_refused():
    with pytest.raises(ValueError, match="tokenizer bytes has no chat template"):
        render_chat(ByteTokenizer(), MESSAGES)


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "hi"}, {}])
def test_messages_need_a_role_and_content(message):
    with pytest.raises(ValueError, match=r"message 1 has .* it needs role and content"):
        render(CHATML, [MESSAGES[0], message])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses .*: roles must alternate"),
        ("line\n{% if %}", "wrong in line 2"),
        ("{{ messages[0].nothing.more }}", "refuses .*has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "failed: TypeError"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "refuses .*unsafe"),
        ("{{ messages.append(1) }}", "refuses .*'append' of 'list' object is unsafe"),
        ("{{ range(10 ** 9) | length }}", "failed: OverflowError"),
        ("{% include 'other' %}", "failed: TypeError"),
    ],
)
def test_errors_in_templates_are_value_errors(template, message):
    with pytest.raises(ValueError, match=message):
        render(template)
