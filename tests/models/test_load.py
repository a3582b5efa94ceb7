"""One loader for every form of a model, and one line for what is none."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.huggingface import load_huggingface
from kvlab.models.fetch import FetchError
from kvlab.models.load import load_model, save_model
from kvlab.models.presets import preset
from kvlab.models.tokenizers import ByteTokenizer


@pytest.fixture(scope="session")
def tiny_gguf(golden_script):
    """tests/goldens/tiny_gguf.py."""
    return golden_script("tiny_gguf")


def same(left: dict, right: dict) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, left, right))


def test_random_weights_of_a_preset():
    model = load_model("random:tiny-gqa")
    assert (model.name, model.path) == ("random:tiny-gqa", None)
    assert model.config == preset("tiny-gqa")
    assert isinstance(model.tokenizer, ByteTokenizer)
    assert model.tokenizer.vocab_size == model.config.vocab_size
    assert same(model.params, load_model("random:tiny-gqa").params)
    weight = model.params["layers_0"]["mlp"]["up"]["weight"]
    assert abs(float(weight.std()) * 96**0.5 - 1) < 0.02
    assert np.all(model.params["final_norm"]["scale"] == 1)


def test_dtypes_of_random_weights():
    model = load_model("random:tiny-mqa", param_dtype="bfloat16", dtype="bfloat16")
    assert (model.config.param_dtype, model.config.dtype) == ("bfloat16", "bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    with pytest.raises(ValueError, match="param_dtype='int3' is not known; legal values: float32"):
        load_model("random:tiny-mqa", param_dtype="int3")


def test_an_unknown_preset_lists_the_legal_ones():
    with pytest.raises(ValueError, match="nearest first: tiny-gqa"):
        load_model("random:tiny-gq")


def test_a_hugging_face_folder_without_tokenizer(tiny_folder):
    folder = tiny_folder("llama_mqa")
    model = load_model(str(folder), dtype="bfloat16")
    config, params = load_huggingface(folder)
    assert model.config == dataclasses.replace(config, dtype="bfloat16")
    assert same(model.params, params)
    assert (model.tokenizer, model.path) == (None, folder)


def test_a_gguf_file_without_tokenizer(tiny_gguf, tiny_families, tiny_folder, tmp_path):
    path = tmp_path / "model.gguf"
    tiny_gguf.write_tiny(path, tiny_families.CASES["qwen2"].config, tiny_families.tensors("qwen2"))
    model = load_model(str(path), param_dtype="bfloat16")
    config, params = load_huggingface(tiny_folder("qwen2"), "bfloat16")
    assert model.config == config
    assert same(model.params, params)
    assert (model.tokenizer, model.path) == (None, path)


def test_a_kvlab_checkpoint_keeps_its_dtypes_and_its_tokenizer(tmp_path):
    model = load_model("random:tiny-window", param_dtype="bfloat16", dtype="bfloat16")
    save_model(tmp_path / "own", model)
    came = load_model(str(tmp_path / "own"))
    assert came.config == model.config
    assert same(came.params, model.params)
    assert isinstance(came.tokenizer, ByteTokenizer)
    assert came.path == tmp_path / "own"
    wide = load_model(str(tmp_path / "own"), param_dtype="float32", dtype="float32")
    assert wide.config == dataclasses.replace(model.config, param_dtype="float32", dtype="float32")
    widened = jax.tree.map(lambda leaf: leaf.astype("float32"), model.params)
    assert same(wide.params, widened)


def test_a_checkpoint_without_tokenizer(tiny_folder, tmp_path):
    model = load_model(str(tiny_folder("llama_mqa")))
    save_model(tmp_path / "own", model)
    assert load_model(str(tmp_path / "own")).tokenizer is None
    save_model(tmp_path / "bare", dataclasses.replace(model, path=None))
    assert load_model(str(tmp_path / "bare")).tokenizer is None


def test_the_tokenizer_of_a_hugging_face_folder_travels(tiny_folder, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(tiny_folder("llama_mqa"), folder)
    vocab = {"a": 0, "b": 1, "ab": 2}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "decoder": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                },
                "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
            }
        )
    )
    model = load_model(str(folder))
    save_model(tmp_path / "own", model)
    save_model(tmp_path / "copy", load_model(str(tmp_path / "own")))
    for name in ("hf", "own", "copy"):
        assert load_model(str(tmp_path / name)).tokenizer.encode("abb") == [2, 1]


@pytest.mark.parametrize("name", ["no/such/model", "smollm3", "llama-2-7b"])
def test_a_path_that_is_not_there(name):
    with pytest.raises(CheckpointError) as caught:
        load_model(name)
    message = str(caught.value)
    assert "\n" not in message
    assert f"model '{name}' does not exist; give a name (smollm2-135m, shakespeare-" in message
    assert "a .gguf file, a kvlab checkpoint or random:<preset>" in message


def test_a_file_that_is_no_model(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"weights.bin' is a file that is no \.gguf; give"):
        load_model(str(path))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_model(str(tmp_path))


def test_a_model_that_was_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    with pytest.raises(FetchError, match="kvlab fetch smollm2-135m"):
        load_model("smollm2-135m")


@pytest.mark.real_model
def test_the_fetched_model_and_its_tokenizer(smollm2_path, tmp_path):
    model = load_model("smollm2-135m")
    assert model.path == smollm2_path
    published = preset("smollm2-135m")
    assert model.config == published
    assert sum(leaf.size for leaf in jax.tree.leaves(model.params)) == 134_515_008
    ids = model.tokenizer.encode("The cache holds keys")
    assert model.tokenizer.decode(ids) == "The cache holds keys"
    tiny = dataclasses.replace(load_model("random:tiny-gqa"), tokenizer=model.tokenizer)
    save_model(tmp_path / "own", dataclasses.replace(tiny, path=smollm2_path))
    assert load_model(str(tmp_path / "own")).tokenizer.encode("The cache holds keys") == ids
    assert (tmp_path / "own" / "tokenizer.gguf").stat().st_size < 5e6
