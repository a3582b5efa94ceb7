"""Writes beams.json: what transformers' beam search gives for a tiny model of tiny_families.py.

Run in an environment with torch and transformers (the `peers` extra; 5.24 made the committed file):

    python tests/goldens/make_beams.py
"""

import importlib.util
import itertools
import json
import pathlib
import sys
import tempfile
import types
from typing import Any

HERE = pathlib.Path(__file__).parent
CASE = "llama_gqa"
NUM_BEAMS, MAX_TOKENS = 4, 31
PROMPT_LENGTHS = (1, 7, 23)
LENGTH_PENALTIES = (0.0, 1.0, 2.0)
EARLY_STOPPING = (False, True, "never")
STOP_IDS = ((51,), (79, 95))  # tokens that this model likes: some beams end early, some never


def settings() -> list[dict[str, Any]]:
    """Every setting of the search that is compared."""
    return [
        {"length_penalty": penalty, "early_stopping": early, "stop_ids": list(stop_ids)}
        for penalty, early, stop_ids in itertools.product(
            LENGTH_PENALTIES, EARLY_STOPPING, STOP_IDS
        )
    ]


def prompts(families: types.ModuleType) -> list[list[int]]:
    """Prompts of different lengths."""
    text, other = families.tokens(CASE)
    return [list(map(int, (text, other, text)[i][-n:])) for i, n in enumerate(PROMPT_LENGTHS)]


def reference_beams(
    folder: pathlib.Path, prompt: list[int], setting: dict[str, Any]
) -> tuple[list[list[int]], list[float]]:
    """transformers' beams of one prompt: new tokens up to the stop token, and scores.

    Args:
      folder: a Hugging Face model folder.
      prompt: token ids.
      setting: one of `settings`.

    Returns:
      The NUM_BEAMS best, best first.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=NUM_BEAMS,
        num_return_sequences=NUM_BEAMS,
        max_new_tokens=MAX_TOKENS,
        length_penalty=setting["length_penalty"],
        early_stopping=setting["early_stopping"],
        eos_token_id=setting["stop_ids"],
        pad_token_id=setting["stop_ids"][0],
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for row in output.sequences[:, len(prompt) :].tolist():
        stops = [place for place, token in enumerate(row) if token in setting["stop_ids"]]
        beams.append(row[: stops[0] + 1] if stops else row)
    return beams, output.sequences_scores.tolist()


def _tiny_families() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_families", HERE / "tiny_families.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_families"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _check(cases: list[dict[str, Any]]) -> None:
    """The goldens test what they are for: some beams end early, and every setting counts."""
    beams = {
        (case["length_penalty"], case["early_stopping"], tuple(case["stop_ids"])): case["tokens"]
        for case in cases
    }
    for stop_ids in STOP_IDS:
        for found in (beams[penalty, True, stop_ids] for penalty in LENGTH_PENALTIES):
            ended = [tokens[-1] in stop_ids for of_prompt in found for tokens in of_prompt]
            lengths = {len(tokens) for of_prompt in found for tokens in of_prompt}
            assert any(ended)
            assert min(lengths) < MAX_TOKENS / 2
            assert max(lengths) == MAX_TOKENS or all(ended)
    single, pair = STOP_IDS
    for one, other in itertools.combinations(LENGTH_PENALTIES, 2):
        assert beams[one, False, single] != beams[other, False, single]
    for one, other in itertools.combinations(EARLY_STOPPING, 2):
        assert beams[1.0, one, pair] != beams[1.0, other, pair]


def main() -> None:
    """Writes the file, a setting a line, and prints the lengths of the beams."""
    families = _tiny_families()
    given, cases = prompts(families), []
    with tempfile.TemporaryDirectory() as folder:
        path = families.write_tiny_folder(CASE, pathlib.Path(folder))
        for setting in settings():
            beams = [reference_beams(path, prompt, setting) for prompt in given]
            tokens, scores = (list(column) for column in zip(*beams, strict=True))
            cases.append(setting | {"tokens": tokens, "scores": scores})
            print(setting, [[len(beam) for beam in found] for found in tokens])
    _check(cases)
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (HERE / "beams.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
