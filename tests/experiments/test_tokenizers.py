"""`kvlab tokenizers`: the checked values, the claim, and one text in pieces."""

import pytest

CHECKED = {  # tokens per word on PUD, English and Turkish
    "tokenizers/gpt2/encoder.json": ("gpt2/encoder.json", "1.255", "3.719"),
    "tokenizers/mistral/tokenizer.model.v1": ("mistral/tokenizer.model.v1", "1.400", "3.772"),
    "tokenizers/sentencepiece/test_model.model": (
        "sentencepiece/test_model.model",
        "2.650",
        "5.629",
    ),
}


def test_the_checked_values_come_out(kvlab, data_path):
    given = [f"--tokenizer={data_path(path)}" for path in CHECKED]
    texts = [
        f"--text_file={data_path(f'text/parallel_en_tr/pud.{name}.txt')}" for name in ("en", "tr")
    ]
    shown = kvlab("tokenizers", *given, *texts)
    assert (shown.status, shown.err) == (0, "")
    rows = [line.split() for line in shown.out.splitlines() if ".txt  " in line]
    assert [(row[0], row[1], row[2], row[4]) for row in rows] == [
        (name, f"pud.{language}.txt", words, per_word)
        for name, *figures in CHECKED.values()
        for language, words, per_word in zip(
            ("en", "tr"), ("18,430", "14,356"), figures, strict=True
        )
    ]
    assert "- gpt2/encoder.json: 1 token is about 0.80 words of pud.en.txt and 0.27" in shown.out


def test_without_the_real_model_it_counts_bytes_and_says_so(kvlab, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    shown = kvlab("tokenizers")
    assert shown.status == 0
    assert shown.error.startswith("byte tokenizer, because smollm2-135m is not in")
    assert "- bytes: 1 token is about 0.16 words of English and 0.12 words of Turkish" in shown.out


@pytest.mark.real_model
def test_by_default_it_counts_with_the_real_model(kvlab, smollm2_path):
    shown = kvlab("tokenizers")
    assert (shown.status, shown.err) == (0, "")
    assert "- smollm2-135m: 1 token is about 0.84 words of English and 0.27" in shown.out


def test_one_text_is_shown_in_pieces(kvlab):
    shown = kvlab("tokenizers", "--tokenizer=bytes", "--text=LLM mimarisi hızlıdır")
    assert shown.status == 0
    assert shown.out.startswith("bytes: 24 tokens, 3 words, 24 bytes\n")
    assert (
        "vectors: [24, D] for a model of width D; --model=MODEL shows what they lie near"
        in shown.out
    )
    assert "words/token" not in shown.out


def test_a_text_and_files_are_both_shown(kvlab, tmp_path):
    (tmp_path / "a.txt").write_text("one two")
    file = f"--text_file={tmp_path / 'a.txt'}"
    shown = kvlab("tokenizers", "--tokenizer=bytes", "--text=ab", file)
    assert "bytes: 2 tokens" in shown.out
    assert "1 token is about 0.29 words of a.txt" in shown.out


def test_a_model_shows_the_neighbours_of_each_piece(kvlab):
    shown = kvlab("tokenizers", "--model=random:tiny-gqa", "--text=ab", "--neighbours=2")
    assert shown.status == 0
    assert "vectors: [2, 96], one row of the model's embedding [258, 96]" in shown.out
    (row,) = [line for line in shown.out.splitlines() if line.startswith("a ")]
    assert row.count("0.") == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tokenizer=absent"], "tokenizer 'absent' does not exist"),
        (["--tokenizer=bytes", "--text_file=absent.txt"], "absent.txt: No such file"),
        (["--tokenizer=bytes", "--text="], "the text is empty"),
        (["--model=random:tiny-gqa"], "give one with --text"),
        (["--model=random:tiny-gqa", "--text=a", "--tokenizer=bytes"], "leave --tokenizer out"),
        (["--model=random:tiny-gqa", "--text=a", "--neighbours=258"], "count 258 is not possible"),
    ],
)
def test_what_cannot_be_is_one_line(kvlab, arguments, told):
    refused = kvlab("tokenizers", *arguments)
    assert refused.status == 1
    assert told in refused.error


def test_a_model_without_a_tokenizer_is_one_line(kvlab, tiny_folder):
    refused = kvlab("tokenizers", f"--model={tiny_folder}", "--text=a")
    assert "has no tokenizer to cut a text with" in refused.error
    assert "there is no tokenizer in" in kvlab("tokenizers", f"--tokenizer={tiny_folder}").error
