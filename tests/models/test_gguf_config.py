"""The metadata of GGUF files: every key is understood or refused."""

import math

import numpy as np
import pytest

from kvlab.models.checkpoints.gguf import load_gguf
from kvlab.models.checkpoints.gguf_config import read_config
from kvlab.models.checkpoints.gguf_file import open_gguf
from kvlab.models.checkpoints.huggingface import load_huggingface
from kvlab.ops.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    attention_factor,
    inverse_frequencies,
)


def test_gemma2_of_46_layers_scales_queries_by_width_over_heads(tiny_gguf, tiny_families, tmp_path):
    config = tiny_families.CASES["gemma2"].config
    table = {"token_embd.weight": np.zeros((97, 66), np.float32)}
    for layers, scale in ((45, None), (46, (66 / 6) ** -0.5)):
        keys = tiny_gguf.metadata(config) | {"block_count": layers}
        path = tiny_gguf.write(tmp_path / "model.gguf", "gemma2", keys, table)
        assert read_config(open_gguf(path), "float32").query_scale == scale


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scale_linear": 2.5}, LinearScaling(2.5)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            YarnScaling(4.0, 67, attention_factor=0.1 * math.log(4.0) + 1),
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 17,
                "rope.scaling.attn_factor": 1.5,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.finetuned": True,
            },
            YarnScaling(4.0, 17, 16.0, 2.0, attention_factor=1.5 * (0.1 * math.log(4.0) + 1)),
        ),
    ],
)
def test_rope_scaling_keys(keys, scaling, tiny_gguf, llama, tmp_path):
    metadata, arrays = llama
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", metadata | keys, arrays)
    assert load_gguf(path)[0].rope == Rope(10_000.0, scaling)


def test_yarn_is_the_yarn_of_transformers(tiny_gguf, tiny_families, tiny_folder, tmp_path):
    wanted, _ = load_huggingface(tiny_folder("llama_yarn"))
    path = tmp_path / "model.gguf"
    tiny_gguf.write_tiny(
        path, tiny_families.CASES["llama_yarn"].config, tiny_families.tensors("llama_yarn")
    )
    config, _ = load_gguf(path)
    assert config.max_length == wanted.max_length == 68
    assert attention_factor(config.rope) == attention_factor(wanted.rope)
    assert np.array_equal(
        inverse_frequencies(config.rope, 14), inverse_frequencies(wanted.rope, 14)
    )


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_the_scaling_of_llama_3_is_recovered_from_its_divisors(
    factor, head_dim, tiny_gguf, tiny_families, tmp_path
):
    config = tiny_families.CASES["llama_sharded"].config | {
        "head_dim": head_dim,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    arrays = {
        name: np.zeros(shape, np.float32) for name, shape in tiny_families._llama_shapes(config)
    }
    path = tmp_path / "model.gguf"
    tiny_gguf.write_tiny(path, config, arrays)
    assert load_gguf(path)[0].rope == Rope(500_000.0, Llama3Scaling(factor, 1.0, 4.0, 8192))


def test_frequency_divisors_of_1_are_no_scaling(tiny_gguf, llama, tmp_path):
    keys, arrays = llama
    arrays["rope_freqs.weight"] = np.ones(7, np.float32)
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", keys, arrays)
    assert load_gguf(path)[0].rope == Rope(10_000.0)


@pytest.mark.parametrize(
    "divisors",
    [
        [1, 8, 8, 8, 8, 8, 8],
        [1, 2, 1, 2, 1, 2, 8],
        [8, 4, 2, 1, 1, 1, 1],
        [1, 1, 1.1, 7.9, 8, 8, 8],
        [0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1],
    ],
)
def test_frequency_divisors_that_are_not_llama_3s(divisors, tiny_gguf, llama, tmp_path, refused):
    keys, arrays = llama
    arrays["rope_freqs.weight"] = np.asarray(divisors, np.float32)
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", keys, arrays)
    refused(lambda: load_gguf(path), "rope_freqs.weight", "Llama 3")


def test_windows_by_pattern_and_kv_heads_by_layer(tiny_gguf, llama, tmp_path):
    keys, arrays = llama
    window = {"attention.sliding_window": 11}
    for pattern, wanted in (
        ({}, (11, 11)),
        ({"attention.sliding_window_pattern": 2}, (11, None)),
        ({"attention.sliding_window_pattern": [False, True]}, (None, 11)),
    ):
        path = tiny_gguf.write(tmp_path / "m.gguf", "llama", keys | window | pattern, arrays)
        assert load_gguf(path)[0].layer_windows == wanted
    for part in ("attn_k", "attn_v"):
        arrays[f"blk.1.{part}.weight"] = arrays[f"blk.1.{part}.weight"][:14]
    per_layer = keys | {"attention.head_count_kv": [3, 1]}
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", per_layer, arrays)
    assert load_gguf(path)[0].kv_heads == (3, 1)


def test_what_old_files_leave_out_has_the_meaning_of_llama_cpp(tiny_gguf, llama, tmp_path):
    keys, arrays = llama
    for name in ("rope.freq_base", "rope.dimension_count", "vocab_size"):
        del keys[name]
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", keys, arrays)
    config, _ = load_gguf(path)
    assert (config.rope, config.head_dim, config.vocab_size) == (Rope(10_000.0), 14, 97)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope.scaling.type": "longrope"}, ["longrope", "supported: none, linear, yarn"]),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 0.1}, ["yarn_log"]),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, ["yarn_ext"]),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.5}, ["factor=0.5"]),
        ({"rope.dimension_count": 7}, ["rotates 7 of 14"]),
        ({"expert_count": 8}, ["mixture of experts"]),
        ({"attention.value_length": 13}, ["keys of size 14 and values of size 13"]),
        (
            {"logit_scale": 0.5, "attention.clamp_kqv": 3.0},
            ["llama.attention.clamp_kqv, llama.log"],
        ),
        ({"attention.head_count_kv": 4}, ["contradicts itself"]),
        ({"feed_forward_length": [71, 73]}, ["feed_forward_length", "differs between layers"]),
        ({"attention.key_length": 13, "attention.value_length": 13}, ["13"]),
        ({"embedding_length": 67}, ["token_embd.weight", "(97, 66)", "(97, 67)"]),
        ({"block_count": 3}, ["lacks the tensors blk.2."]),
        ({"block_count": 1}, ["no llama decoder uses: blk.1."]),
    ],
)
def test_keys_that_are_wrong_or_not_supported(change, words, tiny_gguf, llama, tmp_path, refused):
    keys, arrays = llama
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", keys | change, arrays)
    refused(lambda: load_gguf(path), "m.gguf", *words)


def test_scaling_twice(tiny_gguf, llama, tmp_path, refused):
    keys, arrays = llama
    arrays["rope_freqs.weight"] = np.ones(7, np.float32)
    keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", keys, arrays)
    refused(lambda: load_gguf(path), "scales RoPE twice")


@pytest.mark.parametrize(
    "key",
    [
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key(key, tiny_gguf, llama, tmp_path, refused):
    keys, arrays = llama
    del keys[key]
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", keys, arrays)
    refused(lambda: load_gguf(path), f"lacks the key llama.{key}")
