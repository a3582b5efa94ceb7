"""`kvlab generate`: text, JSON lines, and prompts that cannot be."""

import json
import math

import numpy as np
import pytest

from kvlab.models.load import load_model
from kvlab.ops.specs import CacheSpec
from kvlab.research.beam import BeamOptions, beam_search
from kvlab.research.inference import InferenceConfig
from kvlab.research.prompts import Prompt
from kvlab.research.session import Session

# One configuration for most tests, which then share its compiled programs.
TINY = ("--model=random:tiny-gqa", "--max_tokens=5", "--slots=4", "--max_length=32", "--chunk=32")


def lines(shown) -> list[dict]:
    assert shown.status == 0, shown.err
    return [json.loads(line) for line in shown.out.splitlines()]


def test_text_and_json_say_the_same(kvlab):
    (line,) = lines(kvlab("generate", *TINY, "--prompt=ışık", "--json"))
    assert set(line) == {
        "prompt",
        "prompt_ids",
        "prompt_index",
        "sample_index",
        "tokens",
        "text",
        "log_probs",
        "cumulative_log_prob",
        "finish_reason",
        "ttft_s",
        "tpot_s",
        "compile_s",
    }
    assert line["prompt"] == "ışık"
    assert line["prompt_ids"] == list("ışık".encode())
    assert len(line["tokens"]) == len(line["log_probs"]) == 5
    assert line["text"] == bytes(line["tokens"]).decode(errors="replace")
    assert math.isclose(line["cumulative_log_prob"], sum(line["log_probs"]))
    assert line["finish_reason"] == "length"
    assert line["ttft_s"] > 0
    assert line["tpot_s"] > 0
    plain = kvlab("generate", *TINY, "--prompt=ışık")
    assert (plain.status, plain.out, plain.err) == (0, line["text"] + "\n", "")


def test_samples_differ_and_come_again_with_the_seed(kvlab):
    arguments = (*TINY, "--prompt=ab", "--prompt_ids=[[7,8],[9]]", "--num_samples=2")
    arguments += ("--temperature=0.9", "--json")
    first, again = (lines(kvlab("generate", *arguments, "--seed=5")) for _ in range(2))
    assert [(line["prompt_index"], line["sample_index"]) for line in first] == [
        (prompt, sample) for prompt in range(3) for sample in range(2)
    ]
    assert [line["tokens"] for line in first] == [line["tokens"] for line in again]
    assert len({tuple(line["tokens"]) for line in first}) == 6
    other = lines(kvlab("generate", *arguments, "--seed=6"))
    assert all(a["tokens"] != b["tokens"] for a, b in zip(first, other, strict=True))
    assert "prompt" not in first[2]


def test_several_texts_stand_under_their_prompts(kvlab, tmp_path):
    (tmp_path / "prompt.txt").write_text("ab\n")
    shown = kvlab("generate", *TINY, f"--prompt_file={tmp_path / 'prompt.txt'}", "--prompt=c")
    heads = [line for line in shown.out.splitlines() if line.startswith("[")]
    assert heads == ["[1.1] c", "[2.1] ab"]


def test_a_beam_search_gives_the_best_beam_of_each_prompt_with_its_score(kvlab):
    prompts = ("--prompt=ışık", "--prompt_ids=7,8")
    search = ("--num_beams=4", "--length_penalty=2", "--early_stopping=never")
    found = lines(kvlab("generate", *TINY, *prompts, *search, "--json"))
    model = load_model("random:tiny-gqa")
    config = InferenceConfig(model.config, CacheSpec(), slots=4, max_length=32, chunk=32)
    options = BeamOptions(4, 5, 2.0, "never", stop_ids=model.tokenizer.eos_ids)
    given = [Prompt(tuple("ışık".encode())), Prompt((7, 8))]
    expected = beam_search(Session(model.params, config), given, options)
    for index, (line, prompt, (beam,)) in enumerate(zip(found, given, expected, strict=True)):
        assert line.pop("prompt", None) == (None if index else "ışık")
        assert line.pop("text") == bytes(line["tokens"]).decode(errors="replace")
        assert line == {
            "prompt_ids": list(prompt.ids),
            "prompt_index": index,
            "tokens": list(beam.tokens),
            "score": beam.score,
            "cumulative_log_prob": beam.log_prob,
            "finish_reason": "length",
        }
    shown = kvlab("generate", *TINY, *prompts, *search)
    heads = [line for line in shown.out.splitlines() if ", score " in line]
    assert heads == [
        f"[1, score {found[0]['score']:.4f}] ışık",
        f"[2, score {found[1]['score']:.4f}] 7,8",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--temperature=0.5"],
            "--num_beams=3 with --temperature: beam search takes the likeliest",
        ),
        (["--num_samples=2"], "--num_beams=3 with --num_samples: "),
        (
            ["--stop=x"],
            "--num_beams=3 with --stop: beam search takes the likeliest continuation and",
        ),
        (["--num_beams=1", "--length_penalty=2"], "--num_beams=1 with --length_penalty: it is of"),
        (
            ["--num_beams=1", "--early_stopping"],
            "--num_beams=1 with --early_stopping: it is of beam",
        ),
        (["--num_beams=5"], "num_beams=5 needs as many slots and the session has slots=4"),
        (["--length_penalty=nan"], "length_penalty=nan given: it must be from -40 to 40"),
    ],
)
def test_flags_that_do_not_go_with_beams_are_named(kvlab, arguments, told):
    refused = kvlab("generate", *TINY, "--prompt=a", "--num_beams=3", *arguments)
    assert refused.status == 1
    assert told in refused.error
    assert not refused.out


def test_a_stop_string_cuts_the_text(kvlab):
    whole = lines(kvlab("generate", *TINY, "--prompt=ab", "--json"))[0]["text"]
    stop = whole[2:4]
    (line,) = lines(kvlab("generate", *TINY, "--prompt=ab", "--json", f"--stop={stop}"))
    assert line["text"] == whole[: whole.index(stop)]
    assert line["finish_reason"] == "stop"


def test_a_lossless_point_gives_the_same_text(kvlab):
    ids = "--prompt_ids=5,6,7"
    (oracle,) = lines(kvlab("generate", *TINY, ids, "--json"))
    axes = ("--placement=contiguous", "--attention=mha", "--implementation=reference")
    (variant,) = lines(kvlab("generate", *TINY, ids, "--json", *axes))
    assert variant["tokens"] == oracle["tokens"]
    np.testing.assert_allclose(variant["log_probs"], oracle["log_probs"], atol=1e-4)


def test_weights_of_8_bits_say_nearly_the_same(kvlab):
    arguments = ("generate", *TINY, "--prompt_ids=5,6,7", "--json", "--max_tokens=1")
    (exact,) = lines(kvlab(*arguments))
    (near,) = lines(kvlab(*arguments, "--weights=int8"))
    distance = abs(near["log_probs"][0] - exact["log_probs"][0])
    assert 0 < distance < 0.1


def test_a_folder_without_a_tokenizer_takes_ids_and_gives_ids(kvlab, tiny_folder):
    ids = ("--model", tiny_folder, "--prompt_ids=[1,2,3]", "--max_tokens=4")
    (line,) = lines(kvlab("generate", *ids, "--json"))
    assert "text" not in line
    assert kvlab("generate", *ids).out == ",".join(map(str, line["tokens"])) + "\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no prompt given; use --prompt, --prompt_file or --prompt_ids"),
        (["--prompt="], "prompt 1 is empty"),
        (["--prompt_ids=[]"], "list 1 is empty"),
        (["--prompt_ids=1,x"], "is no list of token ids; write 1,2,3"),
        (["--prompt_ids=1,258"], "token id 258, which is out of range; the model's ids are 0 to"),
        (["--prompt_ids=-1"], "token id -1, which is out of range"),
        (
            ["--prompt=" + "a" * 1024, "--max_length=1024"],
            "prompt 1 has 1024 tokens and leaves no room for a new one: the model's context is",
        ),
        (["--prompt=abc", "--max_length=3"], "max_length=3 (the model's context is 1024)"),
        (["--prompt=abc", "--max_length=1025"], "past the model's context of 1024 tokens"),
        (["--prompt_file=absent.txt"], "absent.txt: No such file or directory"),
        (["--prompt=a", "--chat"], "has no chat template"),
        (["--prompt_ids=1", "--chat"], "--chat lays out texts"),
        (["--prompt=a", "--stop="], "a stop string is empty"),
        (["--prompt=a", "--temperature=-1"], "temperature=-1.0 given: it must be from 0"),
        (["--prompt=a", "--top_p=0"], "top_p=0.0 given: it must be above 0"),
        (["--prompt=a", "--attention=gqa:4"], "gqa:4 is not possible with 6 query heads and 2 KV"),
        (["--prompt=a", "--placement=recompute", "--chunk=3"], "use chunk="),
        (["--prompt=a", "--placement=recompute", "--storage=bfloat16"], "storage=bfloat16 means"),
    ],
)
def test_what_cannot_be_is_one_line(kvlab, arguments, told):
    refused = kvlab("generate", *TINY, *arguments)
    assert refused.status == 1
    assert refused.error.startswith("kvlab generate: ")
    assert told in refused.error
    assert not refused.out


def test_text_for_a_model_without_a_tokenizer_is_one_line(kvlab, tiny_folder):
    for extra in (["--prompt=a"], ["--prompt_ids=1", "--stop=a"]):
        refused = kvlab("generate", f"--model={tiny_folder}", *extra)
        assert refused.status == 1
        assert "no tokenizer" in refused.error


@pytest.mark.real_model
def test_a_chat_with_the_real_model_ends_at_its_end_of_turn(kvlab, smollm2_path):
    question = "--prompt=What is the capital of France? Answer with one word."
    (line,) = lines(kvlab("generate", "--chat", question, "--max_tokens=12", "--json"))
    assert line["finish_reason"] == "stop"
    assert "Paris" in line["text"]
    assert "<|" not in line["text"]
    assert line["prompt_ids"][0] == 1  # <|im_start|>
