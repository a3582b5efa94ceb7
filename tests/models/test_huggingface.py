"""Hugging Face folders: what lands where in the tree, and every way a folder can be wrong."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.huggingface import load_huggingface
from kvlab.models.checkpoints.tree import nest
from kvlab.models.decoder import param_shapes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A llama folder that a test may change."""
    return pathlib.Path(shutil.copytree(tiny_folder("llama_gqa"), tmp_path / "llama"))


@pytest.fixture
def sharded(tiny_folder, tmp_path):
    """A llama folder in three shards that a test may change."""
    return pathlib.Path(shutil.copytree(tiny_folder("llama_sharded"), tmp_path / "sharded"))


def change(folder: pathlib.Path, drop: str = "", **arrays: np.ndarray) -> None:
    """Rewrites model.safetensors without one tensor and with others."""
    stored = load_file(folder / SINGLE)
    stored.pop(drop, None)
    save_file(stored | arrays, folder / SINGLE)


def configure(folder: pathlib.Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(folder: pathlib.Path, *words: object) -> None:
    """Asserts a one-line CheckpointError that names every word."""
    with pytest.raises(CheckpointError) as caught:
        load_huggingface(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, message


def test_llama_weights_are_transposed_and_tables_are_not(tiny_folder, tiny_families):
    config, params = load_huggingface(tiny_folder("llama_biases"))
    stored = tiny_families.tensors("llama_biases")
    layer = params["layers_1"]
    for (group, ours), theirs in {
        ("attention", "query"): "self_attn.q_proj",
        ("attention", "key"): "self_attn.k_proj",
        ("attention", "value"): "self_attn.v_proj",
        ("attention", "output"): "self_attn.o_proj",
        ("mlp", "gate"): "mlp.gate_proj",
        ("mlp", "up"): "mlp.up_proj",
        ("mlp", "down"): "mlp.down_proj",
    }.items():
        weight, bias = (stored[f"model.layers.1.{theirs}.{kind}"] for kind in ("weight", "bias"))
        np.testing.assert_array_equal(layer[group][ours]["weight"], weight.T)
        np.testing.assert_array_equal(layer[group][ours]["bias"], bias)
    np.testing.assert_array_equal(params["embed"]["weight"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"]["weight"], stored["lm_head.weight"].T)
    np.testing.assert_array_equal(params["final_norm"]["scale"], stored["model.norm.weight"])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, param_shapes(config))


def test_gpt2_queries_keys_and_values_are_split_and_not_transposed(tiny_folder, tiny_families):
    _, params = load_huggingface(tiny_folder("gpt2"))
    stored = tiny_families.tensors("gpt2")
    for part, name in enumerate(("query", "key", "value")):
        columns = slice(55 * part, 55 * (part + 1))
        projection = params["layers_1"]["attention"][name]
        fused = stored["transformer.h.1.attn.c_attn.weight"]
        np.testing.assert_array_equal(projection["weight"], fused[:, columns])
        fused = stored["transformer.h.1.attn.c_attn.bias"]
        np.testing.assert_array_equal(projection["bias"], fused[columns])
    up = params["layers_0"]["mlp"]["up"]["weight"]
    np.testing.assert_array_equal(up, stored["transformer.h.0.mlp.c_fc.weight"])
    positions = params["position_embed"]["weight"]
    np.testing.assert_array_equal(positions, stored["transformer.wpe.weight"])


def test_gpt2_head_is_transposed_even_without_the_prefix(tiny_folder, tiny_families):
    _, params = load_huggingface(tiny_folder("gpt2_variant"))
    stored = tiny_families.tensors("gpt2_variant")
    assert "wte.weight" in stored
    np.testing.assert_array_equal(params["head"]["weight"], stored["lm_head.weight"].T)


def test_gemma2_norms_have_their_own_names(tiny_folder, tiny_families):
    _, params = load_huggingface(tiny_folder("gemma2"))
    stored = tiny_families.tensors("gemma2")
    for ours, theirs in {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }.items():
        scale = stored[f"model.layers.2.{theirs}.weight"]
        np.testing.assert_array_equal(params["layers_2"][ours]["scale"], scale)


def test_shards_hold_what_one_file_holds(sharded, tiny_families, tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    shutil.copy(sharded / "config.json", whole)
    save_file(tiny_families.tensors("llama_sharded"), whole / SINGLE)
    jax.tree.map(
        np.testing.assert_array_equal, load_huggingface(sharded)[1], load_huggingface(whole)[1]
    )


def test_names_without_the_prefix_of_the_model(folder):
    _, params = load_huggingface(folder)
    stored = load_file(folder / SINGLE)
    save_file({n.removeprefix("model."): a for n, a in stored.items()}, folder / SINGLE)
    jax.tree.map(np.testing.assert_array_equal, load_huggingface(folder)[1], params)


@pytest.mark.parametrize("stored_dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
def test_every_stored_dtype_becomes_every_parameter_dtype(folder, stored_dtype, param_dtype):
    stored = {name: a.astype(stored_dtype) for name, a in load_file(folder / SINGLE).items()}
    save_file(stored, folder / SINGLE)
    config, params = load_huggingface(folder, param_dtype)
    assert config.param_dtype == param_dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(param_dtype)}
    weight = np.asarray(params["layers_1"]["attention"]["query"]["weight"])
    np.testing.assert_array_equal(weight, stored[QUERY].T.astype(param_dtype))


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tiny_folder, tmp_path):
    folder = pathlib.Path(shutil.copytree(tiny_folder("llama_tied"), tmp_path / "tied"))
    embed = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    change(folder, **{"lm_head.weight": embed})
    assert "head" not in load_huggingface(folder)[1]
    embed[96, 65] += 1
    change(folder, **{"lm_head.weight": embed})
    refused(folder, SINGLE, "lm_head.weight", "tie_word_embeddings")
    change(folder, **{"lm_head.weight": embed[:, :65]})
    refused(folder, SINGLE, "lm_head.weight", (97, 65), (97, 66))


def test_a_path_that_is_no_model_folder(folder, tmp_path):
    refused(tmp_path / "absent", tmp_path / "absent", "no folder")
    refused(folder / SINGLE, "no folder")
    (folder / "config.json").unlink()
    refused(folder, folder, "config.json")


@pytest.mark.parametrize(
    ("content", "word"),
    [(b'{"model_type": "lla', "JSON"), (b"\xff\xfe", "JSON"), (b"[1, 2]", "list"), (b"", "JSON")],
)
def test_a_config_that_is_no_json_object(folder, content, word):
    (folder / "config.json").write_bytes(content)
    refused(folder, folder / "config.json", word)


def test_config_errors_name_the_file(folder):
    configure(folder, model_type="mixtral")
    refused(folder, folder / "config.json", "mixtral", "llama")
    configure(folder, model_type="llama", rope_parameters={"rope_type": "longrope"})
    refused(folder, folder / "config.json", "longrope", "yarn")
    configure(folder, rope_parameters=None, num_key_value_heads=4)
    refused(folder, folder / "config.json", "num_key_value_heads=4")


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file(folder, kept):
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:kept])
    refused(folder, folder / SINGLE, "damaged")


def test_a_truncated_shard(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(sharded, shard, "damaged")


def test_a_folder_without_safetensors(folder):
    (folder / SINGLE).unlink()
    refused(folder, folder, SINGLE, INDEX)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    refused(folder, "pytorch_model.bin", "convert")


def test_a_missing_shard(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    refused(sharded, shard, INDEX)


def test_an_index_that_does_not_fit_its_shards(sharded):
    index = json.loads((sharded / INDEX).read_text())
    moved = dict(index["weight_map"])
    moved[QUERY] = next(shard for shard in moved.values() if shard != moved[QUERY])
    (sharded / INDEX).write_text(json.dumps({"weight_map": moved}))
    refused(sharded, INDEX, QUERY, "disagree")
    (sharded / INDEX).write_text(json.dumps({"metadata": {}}))
    refused(sharded, INDEX, "weight_map")
    (sharded / INDEX).write_text("{")
    refused(sharded, INDEX, "JSON")


def test_a_tensor_in_two_shards(sharded):
    index = json.loads((sharded / INDEX).read_text())
    shard = sharded / index["weight_map"]["lm_head.weight"]
    twin = QUERY.removeprefix("model.")
    save_file(load_file(shard) | {twin: np.zeros((84, 66), np.float32)}, shard)
    index["weight_map"][twin] = shard.name
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, shard.name, index["weight_map"][QUERY], QUERY, "also")


def test_a_missing_tensor(folder):
    change(folder, drop=QUERY)
    refused(folder, folder / SINGLE, "layers.1.self_attn.q_proj.weight", (84, 66), "missing")


def test_an_untied_head_that_is_missing(folder):
    change(folder, drop="lm_head.weight")
    refused(folder, folder / SINGLE, "lm_head.weight", (97, 66), "missing")


def test_an_unexpected_tensor(folder):
    change(folder, **{"model.layers.1.self_attn.q_norm.weight": np.ones(14, np.float32)})
    refused(folder, folder / SINGLE, "model.layers.1.self_attn.q_norm.weight", "unexpected")


def test_a_layer_more_than_config_json_has(folder):
    configure(folder, num_hidden_layers=1)
    refused(folder, folder / SINGLE, "model.layers.1.", "unexpected")


@pytest.mark.parametrize(
    ("fields", "name", "stored", "wanted"),
    [
        ({"vocab_size": 101}, "model.embed_tokens.weight", (97, 66), (101, 66)),
        ({"intermediate_size": 73}, "mlp.gate_proj.weight", (71, 66), (73, 66)),
        ({"num_key_value_heads": 2}, "self_attn.k_proj.weight", (42, 66), (28, 66)),
        ({"head_dim": 22}, "self_attn.q_proj.weight", (84, 66), (132, 66)),
    ],
)
def test_a_shape_that_contradicts_config_json(folder, fields, name, stored, wanted):
    configure(folder, **fields)
    refused(folder, folder / SINGLE, name, stored, wanted, "config.json")


def test_a_tensor_of_integers(folder):
    change(folder, **{QUERY: np.zeros((84, 66), np.int8)})
    refused(folder, folder / SINGLE, QUERY, "I8", "F32", "BF16", "F16")


def test_an_unknown_param_dtype(folder):
    with pytest.raises(ValueError, match="param_dtype='int8'"):
        load_huggingface(folder, "int8")


def test_nest_names_what_does_not_fit(folder):
    config, params = load_huggingface(folder)
    flat = {
        "/".join(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert jax.tree.structure(nest(flat, config)) == jax.tree.structure(params)
    name = "layers_1/mlp/up/weight"
    for changed, words in (
        ({k: v for k, v in flat.items() if k != name}, [name, "missing"]),
        (flat | {"layers_2/mlp/up/weight": flat[name]}, ["layers_2/mlp/up/weight", "llama"]),
        (flat | {name: flat[name].T}, [name, "(71, 66)", "(66, 71)"]),
        (flat | {name: flat[name].astype("bfloat16")}, [name, "bfloat16", "float32"]),
    ):
        with pytest.raises(CheckpointError) as caught:
            nest(changed, config)
        assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(CheckpointError, match="and 18 more"):
        nest({}, config)
