"""kvlab's own checkpoints: what is saved comes back, and half a checkpoint is refused."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.orbax import (
    is_checkpoint,
    load_checkpoint,
    save_checkpoint,
    tokenizer_files,
)
from kvlab.models.config import DecoderConfig, LayerNorm, RMSNorm
from kvlab.models.config_json import config_from_json, config_to_json
from kvlab.models.presets import PRESETS, preset
from kvlab.models.random_params import random_params
from kvlab.ops.rope import DynamicNTK, LinearScaling, Rope, YarnScaling

TINY = DecoderConfig(
    family="llama",
    vocab_size=43,
    num_layers=2,
    embed_dim=13,
    hidden_dim=17,
    num_heads=6,
    num_kv_heads=(3, 1),
    head_dim=10,
    max_length=64,
    norm=RMSNorm(1e-5, scale_offset=1.0),
    rope=Rope(500.0, YarnScaling(4.0, 16)),
    windows=(7, None),
)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint, to spoil."""
    path = tmp_path / "models" / "tiny"
    save_checkpoint(path, TINY, random_params(TINY, 0))
    return path


def refused(call, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        *PRESETS.values(),
        dataclasses.replace(TINY, rope=Rope(1e4, LinearScaling(2.0)), norm=LayerNorm()),
        dataclasses.replace(TINY, rope=Rope(1e4, DynamicNTK(2.0, 11)), query_scale=0.3),
    ],
)
def test_configs_come_back_from_json(config):
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"vocab_size": 43', '"vocab_size": 0'), "vocab_size=0"),
        (('"vocab_size": 43', '"vocab_sizes": 43'), "has no field vocab_sizes"),
        (('"vocab_size": 43,', ""), "DecoderConfig lacks the field vocab_size"),
        (('"vocab_size": 43', '"vocab_size": "43"'), "does not fit"),
        (('"YarnScaling"', '"WarnScaling"'), "'WarnScaling' is not known; legal values: Dec"),
        (('"type": "DecoderConfig",', ""), "type None is not known"),
        (('"family"', "family"), "not JSON"),
    ],
)
def test_json_that_is_no_config(change, words):
    text = config_to_json(TINY)
    assert change[0] in text
    with pytest.raises(ValueError, match=words):
        config_from_json(text.replace(*change))


@pytest.mark.parametrize("text", ["[]", "3", '{"type": "RMSNorm"}'])
def test_json_of_something_else(text):
    with pytest.raises(ValueError, match="not a DecoderConfig"):
        config_from_json(text)


def test_fields_with_a_default_may_be_absent():
    text = config_to_json(dataclasses.replace(TINY, norm=RMSNorm()))
    shorter = text.replace('"epsilon": 1e-06,', "").replace('"soft_cap": null,', "")
    assert len(shorter) < len(text)
    assert config_from_json(shorter) == dataclasses.replace(TINY, norm=RMSNorm())


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
def test_a_checkpoint_comes_back_in_bits(param_dtype, tmp_path):
    config = dataclasses.replace(TINY, param_dtype=param_dtype)
    params = random_params(config, 1)
    save_checkpoint(tmp_path / "a" / "b", config, params)
    came_config, came = load_checkpoint(tmp_path / "a" / "b")
    assert came_config == config
    assert jax.tree.structure(came) == jax.tree.structure(params)
    for left, right in zip(jax.tree.leaves(came), jax.tree.leaves(params), strict=True):
        assert left.dtype == right.dtype == jnp.dtype(param_dtype)
        assert np.array_equal(left, right)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b"]
    assert is_checkpoint(tmp_path / "a" / "b")
    assert not is_checkpoint(tmp_path / "a")


def test_an_existing_path_is_not_overwritten(saved):
    before = sorted(saved.rglob("*"))
    refused(lambda: save_checkpoint(saved, TINY, random_params(TINY, 2)), "exists already")
    assert sorted(saved.rglob("*")) == before


def test_parameters_of_another_config_are_not_saved(tmp_path):
    params = random_params(TINY, 0)
    wider = dataclasses.replace(TINY, hidden_dim=19)
    refused(lambda: save_checkpoint(tmp_path / "x", wider, params), "layers_0/mlp/")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_half_way_leaves_nothing(tmp_path):
    absent = tmp_path / "absent.json"
    call = lambda: save_checkpoint(tmp_path / "x", TINY, random_params(TINY, 0), [absent])  # noqa: E731
    refused(call, "cannot write", str(absent), "No such file")
    (tmp_path / "file").write_bytes(b"")
    inside = tmp_path / "file" / "x"
    refused(lambda: save_checkpoint(inside, TINY, random_params(TINY, 0)), "cannot write")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_no_checkpoint(tmp_path):
    refused(lambda: load_checkpoint(tmp_path / "absent"), "absent is no kvlab checkpoint")
    refused(lambda: load_checkpoint(tmp_path), "holds no kvlab.json")


def test_every_file_must_be_there_and_whole(saved):
    for path in sorted(path for path in saved.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.unlink()
        refused(lambda: load_checkpoint(saved), str(saved))
        path.write_bytes(content[: len(content) // 2])
        refused(lambda: load_checkpoint(saved), str(saved))
        path.write_bytes(content)
    assert load_checkpoint(saved)[0] == TINY


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"hidden_dim": 19},
            ["contradicts its config", "layers_0/mlp/down/weight", "[17, 13]", "[19, 13]"],
        ),
        ({"param_dtype": "bfloat16"}, ["is float32[43, 13] and should be bfloat16[43, 13]"]),
        ({"qkv_bias": True}, ["attention/", "bias is nothing"]),
        ({"tie_embeddings": True}, ["head/weight", "should be nothing"]),
    ],
)
def test_a_config_that_contradicts_the_parameters(change, words, saved):
    changed = config_to_json(dataclasses.replace(TINY, **change))
    (saved / "kvlab.json").write_text(changed)
    sizes = (saved / "files.json").read_text()
    assert "kvlab.json" not in sizes
    refused(lambda: load_checkpoint(saved), *words)


def test_a_flipped_bit_is_noticed(saved):
    for path in sorted(path for path in (saved / "params").rglob("*") if path.is_file()):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        refused(lambda: load_checkpoint(saved), "damaged", path.name, "not what was written")
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert load_checkpoint(saved)[0] == TINY


def test_a_list_of_sizes_alone_still_does(saved):
    listed = json.loads((saved / "files.json").read_text())
    sizes = {name: size for name, (size, _) in listed.items()}
    (saved / "files.json").write_text(json.dumps(sizes))
    assert load_checkpoint(saved)[0] == TINY


def test_orbax_errors_are_one_line(saved, monkeypatch):
    import orbax.checkpoint as ocp

    def fail(self, *arguments):
        raise Exception("Encountered error\nwith details")

    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", fail)
    refused(lambda: load_checkpoint(saved), "params is damaged: Encountered error")


def test_tokenizer_files_are_found_and_travel(tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors", "config.json"):
        (source / name).write_text(name)
    found = tokenizer_files(source)
    assert [path.name for path in found] == ["tokenizer.json", "tokenizer_config.json"]
    assert tokenizer_files("some.gguf") == [pathlib.Path("some.gguf")]
    config = preset("tiny-gqa")
    save_checkpoint(tmp_path / "a", config, random_params(config, 0), found)
    save_checkpoint(
        tmp_path / "b", config, random_params(config, 0), tokenizer_files(tmp_path / "a")
    )
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "tokenizer.json"
    save_checkpoint(tmp_path / "c", config, random_params(config, 0), "bytes")
    assert [path.name for path in tokenizer_files(tmp_path / "c")] == ["tokenizer.bytes"]
