"""`kvlab convert`: every form is a model again, and what cannot be is one line."""

import jax
import numpy as np
import pytest

from kvlab.models.convert import METHODS, convert_attention
from kvlab.models.export import FORMATS
from kvlab.models.load import load_model


def same(left, right):
    return jax.tree.all(jax.tree.map(np.array_equal, left, right))


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_is_the_model(form, kvlab, tmp_path):
    out = tmp_path / "new" / ("out.gguf" if form == "gguf" else "out")
    shown = kvlab("convert", "--model=random:tiny-gqa", f"--format={form}", f"--out={out}")
    assert (shown.status, shown.err) == (0, "")
    bare = ", for token ids: GGUF has no tokenizer of bytes" if form == "gguf" else ""
    assert shown.out == f"{out}: llama, 246,624 parameters in float32, 2 KV heads of 6{bare}\n"
    model = load_model("random:tiny-gqa")
    came = load_model(str(out))
    assert came.config == model.config
    assert same(came.params, model.params)
    again = kvlab("convert", f"--model={out}", f"--out={out}", f"--format={form}")
    assert again.status == 1
    advice = "give a new name, or allow it to be replaced (overwrite)"
    assert again.error == f"kvlab convert: {out} exists already; {advice}"
    again = kvlab("convert", f"--model={out}", f"--out={out}", f"--format={form}", "--overwrite")
    assert again.status == 0
    assert same(load_model(str(out)).params, model.params)


@pytest.mark.parametrize("pooling", METHODS)
def test_attention_is_pooled_before_it_is_rounded(pooling, kvlab, tmp_path):
    arguments = ["--model=random:tiny-mha", "--attention=gqa:2", f"--pooling={pooling}", "--seed=5"]
    shown = kvlab("convert", *arguments, f"--out={tmp_path / 'x'}", "--dtype=bfloat16")
    assert shown.status == 0
    assert shown.out.endswith("parameters in bfloat16, 2 KV heads of 6\n")
    came, model = load_model(str(tmp_path / "x")), load_model("random:tiny-mha")
    _, wanted = convert_attention(model.config, model.params, 2, pooling, 5)
    assert came.config.kv_heads == (2, 2)
    assert same(came.params, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), wanted))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--out is missing"),
        (
            ["--out=x", "--format=gguf"],
            "--out=x does not fit --format=gguf: names of GGUF files end",
        ),
        (["--out=x.gguf"], "--out=x.gguf does not fit --format=kvlab"),
        (["--out=x", "--attention=gqa:4"], "attention=gqa:4 is not possible with 6 query heads"),
        (["--out=x", "--model=absent"], "model 'absent' does not exist"),
        (["--out=x.gguf", "--format=gguf", "--model=random:tiny-window"], "sliding window"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, told, kvlab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = kvlab("convert", "--model=random:tiny-mha", *arguments)
    assert (shown.status, shown.out) == (1, "")
    assert told in shown.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--format=onnx", "--pooling=median", "--dtype=int8"])
def test_flags_name_what_is_legal(flag, kvlab):
    shown = kvlab("convert", "--out=x", flag)
    assert shown.status == 2
    assert "legal values" in shown.error
