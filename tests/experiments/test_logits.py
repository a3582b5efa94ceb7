"""`kvlab logits`: the file, against transformers' goldens, and checkpoints that are wrong."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

GOLDENS = np.load(pathlib.Path(__file__).parents[1] / "goldens" / "families.npz")
TOLERANCE = 2e-4


@pytest.fixture
def tokens(tmp_path, tiny_families) -> pathlib.Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([row.tolist() for row in tiny_families.tokens("llama_gqa")]))
    return path


@pytest.mark.parametrize(
    "axes",
    [
        [],
        ["--decode_from=17", "--placement=contiguous", "--attention=mha", "--slots=1"],
        ["--decode_from=39", "--placement=recompute", "--implementation=reference"],
    ],
)
def test_logits_are_those_of_transformers(kvlab, tmp_path, tiny_folder, tokens, axes):
    out = tmp_path / "logits.npz"
    shown = kvlab("logits", f"--model={tiny_folder}", f"--tokens={tokens}", f"--out={out}", *axes)
    assert shown.status == 0, shown.err
    assert shown.out == f"{out}: 2 lists, 82 tokens, 97 logits each\n"
    golden = GOLDENS["llama_gqa"]
    with np.load(out) as found:
        assert found.files == ["logits_0", "logits_1"]
        for index, wanted in enumerate(golden):
            got = found[f"logits_{index}"]
            assert got.dtype == np.float32
            assert got.shape == wanted.shape
            assert np.abs(got - wanted).max() <= TOLERANCE


def test_storage_in_bfloat16_is_close_and_not_equal(kvlab, tmp_path, tiny_folder, tokens):
    arguments = (f"--model={tiny_folder}", f"--tokens={tokens}", f"--out={tmp_path / 'x'}")
    assert kvlab("logits", *arguments, "--storage=bfloat16").status == 0
    with np.load(tmp_path / "x") as found:  # under the name as given
        difference = np.abs(found["logits_0"] - GOLDENS["llama_gqa"][0]).max()
    assert TOLERANCE < difference < 0.2


def spoil_config(folder: pathlib.Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(folder: pathlib.Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_tensor(folder: pathlib.Path) -> None:
    arrays = load_file(folder / "model.safetensors")
    del arrays["model.layers.1.mlp.up_proj.weight"]
    save_file(arrays, folder / "model.safetensors")


WRONG = {
    "truncated": (truncate, "model.safetensors"),
    "a tensor missing": (drop_tensor, "missing tensors: layers.1.mlp.up_proj.weight (71, 66)"),
    "another shape": (lambda f: spoil_config(f, intermediate_size=73), "mlp"),
    "unknown family": (lambda f: spoil_config(f, model_type="mamba"), "mamba"),
    "unknown scaling": (
        lambda f: spoil_config(f, rope_parameters={"rope_type": "spiral", "rope_theta": 10.0}),
        "spiral",
    ),
    "heads that do not divide": (lambda f: spoil_config(f, num_key_value_heads=4), "4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_checkpoint_is_one_line(kvlab, tmp_path, tiny_folder, tokens, case):
    spoil, told = WRONG[case]
    folder = tmp_path / "wrong"
    shutil.copytree(tiny_folder, folder)
    spoil(folder)
    out = tmp_path / "logits.npz"
    refused = kvlab("logits", f"--model={folder}", f"--tokens={tokens}", f"--out={out}")
    assert refused.status == 1
    assert refused.error.startswith("kvlab logits: ")
    assert told in refused.error
    assert not [path.name for path in tmp_path.iterdir() if "logits" in path.name]


@pytest.mark.parametrize(
    ("content", "arguments", "told"),
    [
        ("[[1,2]", [], "tokens.json is not a list of token ids: Expecting"),
        ("{}", [], "holds a dict; wanted is a list of lists"),
        ("[]", [], "holds no list of token ids"),
        ("[[1],[]]", [], "list 2 is empty"),
        ("[[1,2.0]]", [], "list 1 has 2.0, which is no whole number"),
        ("[[1,97]]", [], "list 1 has token id 97, which is out of range; the model's ids are 0 to"),
        (json.dumps([[1] * 68]), [], "list 1 has 68 tokens, past max_length=67"),
        ("[[1]]", ["--max_length=68"], "past the model's context of 67 tokens"),
        ("[[1]]", ["--attention=gqa:4"], "use gqa:3, mha or mqa"),
        ("[[1]]", ["--out=absent/logits.npz"], "cannot write absent/logits.npz: No such file"),
        ("[[1]]", ["--tokens=absent.json"], "absent.json: No such file or directory"),
        ("[[1]]", ["--model=absent"], "model 'absent' does not exist; give a name (smollm2-135m"),
        ("[[1]]", ["--model=random:tiny"], "preset 'tiny' is not known; legal values"),
    ],
)
def test_what_cannot_be_is_one_line(kvlab, tmp_path, tiny_folder, content, arguments, told):
    path = tmp_path / "tokens.json"
    path.write_text(content)
    given = (f"--model={tiny_folder}", f"--tokens={path}", f"--out={tmp_path / 'logits.npz'}")
    refused = kvlab("logits", *given, *arguments)
    assert refused.status == 1
    assert refused.error.startswith("kvlab logits: ")
    assert told in refused.error
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.json"]


def test_missing_flags_are_named(kvlab, tmp_path):
    assert (
        kvlab("logits").error
        == "kvlab logits: --tokens is missing: token ids: a JSON list of lists"
    )
    assert "--out is missing" in kvlab("logits", "--tokens=x").error
