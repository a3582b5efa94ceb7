"""GGUF files load as the Hugging Face folders that they were converted from."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest

from kvlab.models.checkpoints.gguf import load_gguf
from kvlab.models.checkpoints.huggingface import load_huggingface

Kind = gguf.GGMLQuantizationType
SAME_BOTH_WAYS = (
    "llama_mha",
    "llama_gqa",
    "llama_mqa",
    "llama_tied",
    "llama_biases",
    "llama_linear",
    "llama_llama3",
    "mistral_window",
    "qwen2",
    "qwen3",
    "gpt2",
)


def same(left: dict, right: dict) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


@pytest.mark.parametrize("case", SAME_BOTH_WAYS)
def test_a_converted_model_is_the_same_model(case, tiny_gguf, tiny_families, tiny_folder, tmp_path):
    wanted_config, wanted = load_huggingface(tiny_folder(case))
    path = tmp_path / "model.gguf"
    tiny_gguf.write_tiny(path, tiny_families.CASES[case].config, tiny_families.tensors(case))
    config, params = load_gguf(path)
    assert dataclasses.replace(config, family=wanted_config.family) == wanted_config
    assert same(params, wanted)


def test_gemma2_norms_hold_their_1_and_every_other_layer_is_windowed(
    tiny_gguf, tiny_families, tiny_folder, tmp_path
):
    wanted_config, wanted = load_huggingface(tiny_folder("gemma2"))
    path = tmp_path / "model.gguf"
    tiny_gguf.write_tiny(
        path, tiny_families.CASES["gemma2"].config, tiny_families.tensors("gemma2")
    )
    config, params = load_gguf(path)
    assert config.norm.scale_offset == 0
    assert wanted_config.norm.scale_offset == 1
    assert config.layer_windows == (tiny_families.WINDOW, None, tiny_families.WINDOW)
    # The file does not hold query_pre_attn_scalar: all sizes but 27B take the head's size.
    changed = dataclasses.replace(config, norm=wanted_config.norm, query_scale=19**-0.5)
    assert changed == wanted_config
    assert config.attention_scale == config.head_dim**-0.5

    def is_norm(path) -> bool:
        return "norm" in jax.tree_util.keystr(path)

    stored = jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.asarray(leaf) + np.float32(is_norm(path)), wanted
    )
    assert same(params, stored)


def test_a_quantised_model_is_unpaired_and_transposed_after_dequantising(
    tiny_gguf, tiny_families, tmp_path
):
    config = tiny_families.CASES["llama_sharded"].config | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
    }
    draw = np.random.default_rng(7)
    arrays = {
        name: draw.standard_normal(shape, np.float32)
        for name, shape in tiny_families._llama_shapes(config)
    }
    kinds = {
        name: Kind.Q8_0 if "embd" in name or name.startswith("output.") else Kind.Q4_1
        for name, array in tiny_gguf.tensors(config, arrays).items()
        if array.ndim == 2
    }
    stored = {
        name: gguf.quantize(array, kinds[name]) if name in kinds else array
        for name, array in tiny_gguf.tensors(config, arrays).items()
    }
    path = tiny_gguf.write(
        tmp_path / "m.gguf", "llama", tiny_gguf.metadata(config), stored, kinds=kinds
    )
    _, params = load_gguf(path)
    attention = params["layers_1"]["attention"]
    for name, source, kind in (
        ("query", "q_proj", Kind.Q4_1),
        ("key", "k_proj", Kind.Q4_1),
        ("value", "v_proj", Kind.Q4_1),
    ):
        rows = arrays[f"model.layers.1.self_attn.{source}.weight"]
        wanted = gguf.dequantize(gguf.quantize(rows, kind), kind).T
        assert np.array_equal(attention[name]["weight"], wanted)
    table = arrays["model.embed_tokens.weight"]
    wanted = gguf.dequantize(gguf.quantize(table, Kind.Q8_0), Kind.Q8_0)
    assert np.array_equal(params["embed"]["weight"], wanted)
    assert not np.array_equal(wanted, table)


def test_parameters_in_bfloat16_are_rounded_once(tiny_gguf, llama, tmp_path):
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", *llama)
    _, wide = load_gguf(path)
    config, narrow = load_gguf(path, param_dtype="bfloat16")
    assert config.param_dtype == "bfloat16"
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), wide)
    assert same(narrow, rounded)


def test_tensors_that_are_missing_unknown_or_of_another_shape(tiny_gguf, llama, tmp_path, refused):
    keys, arrays = llama

    def load(**changes) -> None:
        changed = {name.replace("__", "."): array for name, array in changes.items()}
        kept = {k: v for k, v in (arrays | changed).items() if v is not None}
        load_gguf(tiny_gguf.write(tmp_path / "m.gguf", "llama", keys, kept))

    load()
    refused(lambda: load(token_embd__weight=None), "token_embd.weight")
    refused(lambda: load(blk__1__attn_k__weight=None), "lacks the tensors blk.1.attn_k.weight")
    extra = np.ones(5, np.float32)
    refused(lambda: load(blk__1__attn_sinks__weight=extra), "blk.1.attn_sinks.weight")
    refused(lambda: load(output_norm__weight=extra), "output_norm.weight", "(5,)", "(66,)")
    refused(lambda: load(blk__0__attn_q__bias=np.ones(84, np.float32)), "blk.0.attn_k.bias")


def test_fused_projections_of_gpt2(tiny_gguf, tiny_families, tmp_path, refused):
    config = tiny_families.CASES["gpt2"].config
    keys = tiny_gguf.metadata(config)
    arrays = tiny_gguf.tensors(config, tiny_families.tensors("gpt2"))
    arrays["blk.1.attn_qkv.weight"] = arrays["blk.1.attn_qkv.weight"][:-1]
    path = tiny_gguf.write(tmp_path / "m.gguf", "gpt2", keys, arrays)
    refused(lambda: load_gguf(path), "blk.1.attn_qkv.weight", "(164, 55)", "(165, 55)")
    del arrays["blk.1.attn_qkv.weight"]
    path = tiny_gguf.write(tmp_path / "m.gguf", "gpt2", keys, arrays)
    refused(lambda: load_gguf(path), "blk.1.attn_")
