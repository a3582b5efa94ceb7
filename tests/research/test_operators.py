"""Operators of a step: every count worked out by hand, and weights against the parameters."""

import dataclasses

import pytest

from kvlab.models.config import DecoderConfig, LayerNorm
from kvlab.models.packing import param_bytes
from kvlab.models.presets import PRESETS, parameter_count
from kvlab.ops.rope import Rope
from kvlab.research.operators import (
    EXACT,
    UNVEILED,
    LayerWork,
    Operator,
    step_operators,
    total,
)

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=101,
    num_layers=2,
    embed_dim=7,
    hidden_dim=13,
    num_heads=6,
    num_kv_heads=3,
    head_dim=10,
    max_length=31,
    rope=Rope(),
    param_dtype="float32",  # 4 bytes
    dtype="bfloat16",  # 2 bytes
)
WORK = LayerWork(3, tokens=3, pairs=11, key_bytes=17, value_bytes=19, written_bytes=23)

# flops, weight bytes, activation bytes, kv bytes: 3 tokens, queries of 60 values, keys of 30.
BY_HAND = {
    "embed": (0, 3 * 7 * 4, 3 * 7 * 2, 0),
    "attention_norm": (7 * 21, 7 * 4, 2 * 21 * 2, 0),
    "query": (2 * 3 * 7 * 60, 7 * 60 * 4, 3 * (7 + 60) * 2, 0),
    "key": (2 * 3 * 7 * 30, 7 * 30 * 4, 3 * (7 + 30) * 2, 0),
    "value": (2 * 3 * 7 * 30, 7 * 30 * 4, 3 * (7 + 30) * 2, 0),
    "rope": (3 * 270, 0, 2 * 270 * 2, 0),
    "kv_write": (0, 0, 2 * 3 * 30 * 2, 23),
    "attention": (1320 + 330 + 1320, 0, 2 * 180 * 2, 17 + 19),
    "output": (2 * 3 * 60 * 7, 60 * 7 * 4, 3 * (60 + 7) * 2, 0),
    "attention_add": (21, 0, 3 * 21 * 2, 0),
    "mlp_norm": (7 * 21, 7 * 4, 2 * 21 * 2, 0),
    "gate": (2 * 3 * 7 * 13, 7 * 13 * 4, 3 * 20 * 2, 0),
    "up": (2 * 3 * 7 * 13, 7 * 13 * 4, 3 * 20 * 2, 0),
    "activation": (5 * 39, 0, 3 * 39 * 2, 0),
    "down": (2 * 3 * 13 * 7, 13 * 7 * 4, 3 * 20 * 2, 0),
    "mlp_add": (21, 0, 3 * 21 * 2, 0),
    "final_norm": (7 * 21, 7 * 4, 2 * 21 * 2, 0),
    "head": (2 * 2 * 7 * 101, 7 * 101 * 4, 2 * (7 + 101) * 2, 0),
}


def counted(config=CONFIG, accounting=EXACT, works=(WORK, WORK), positions=2):
    operators = step_operators(config, works, positions, accounting)
    return {one.name: one for one in operators}


def numbers(one):
    return one.flops, one.weight_bytes, one.activation_bytes, one.kv_bytes


def test_every_operator_counts_what_it_computes_and_moves():
    operators = counted()
    assert {name: numbers(one) for name, one in operators.items()} == BY_HAND
    outside = {"embed", "final_norm", "head"}
    assert all(one.layers == (1 if one.name in outside else 2) for one in operators.values())


def test_a_total_counts_each_layer():
    outside = {"embed", "final_norm", "head"}
    sums = [
        sum(values[index] * (1 if name in outside else 2) for name, values in BY_HAND.items())
        for index in range(4)
    ]
    whole = total(counted().values())
    assert list(numbers(whole)) == sums
    assert whole.moved_bytes == sum(sums[1:])
    assert whole.intensity == sums[0] / sum(sums[1:])
    assert Operator("nothing moves", 5).intensity == float("inf")


def test_scores_that_are_not_fused_go_to_memory_and_come_back():
    unfused = counted(accounting=dataclasses.replace(EXACT, fused_attention=False))
    assert numbers(unfused["qk_matmul"]) == (2 * 10 * 66, 0, 180 * 2 + 66 * 2, 17)
    assert numbers(unfused["softmax"]) == (5 * 66, 0, 2 * 66 * 2, 0)
    assert numbers(unfused["sv_matmul"]) == (2 * 10 * 66, 0, 66 * 2 + 180 * 2, 19)
    fused = numbers(counted()["attention"])
    names = ("qk_matmul", "softmax", "sv_matmul")
    parts = total(dataclasses.replace(unfused[name], layers=1) for name in names)
    assert numbers(parts) == (fused[0], 0, fused[2] + 4 * 66 * 2, fused[3])


def test_the_paper_reads_no_scales_and_one_operand_of_an_addition():
    operators = counted(accounting=UNVEILED)
    assert operators["attention_norm"].weight_bytes == operators["final_norm"].weight_bytes == 0
    assert operators["mlp_add"].activation_bytes == 2 * 21 * 2
    assert "qk_matmul" in operators


def test_what_other_families_have():
    config = dataclasses.replace(
        CONFIG,
        rope=None,
        norm=LayerNorm(),
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embed_scale=2.0,
    )
    operators = counted(config)
    assert not {"rope", "gate"} & set(operators)
    assert numbers(operators["embed"]) == (
        2 * 21,
        2 * 21 * 4,
        21 * 2,
        0,
    )  # a second table, a factor
    assert operators["attention_norm"].weight_bytes == 2 * 7 * 4
    assert numbers(operators["key"]) == (1260 + 3 * 30, (210 + 30) * 4, 222, 0)
    assert numbers(operators["output"])[:2] == (2520 + 21, (420 + 7) * 4)
    assert numbers(operators["up"])[:2] == (546 + 39, (91 + 13) * 4)
    assert numbers(operators["activation"]) == (4 * 39, 0, 2 * 39 * 2, 0)
    gemma = dataclasses.replace(
        CONFIG, post_norms=True, qk_norm=True, soft_cap=3.0, final_soft_cap=5.0
    )
    operators = counted(gemma)
    assert numbers(operators["mlp_post_norm"]) == BY_HAND["mlp_norm"]
    assert numbers(operators["query_norm"]) == (7 * 180, 10 * 4, 2 * 180 * 2, 0)
    assert numbers(operators["key_norm"]) == (7 * 90, 10 * 4, 2 * 90 * 2, 0)
    assert operators["attention"].flops == 2970 + 3 * 66
    assert operators["head"].flops == 2828 + 3 * 2 * 101


def test_layers_that_differ_are_apart_and_those_alike_together():
    config = dataclasses.replace(CONFIG, num_layers=3, num_kv_heads=(3, 1, 3), windows=None)
    other = dataclasses.replace(WORK, kv_heads=1, pairs=5)
    operators = step_operators(config, (WORK, other, WORK), 1)
    keys = [(one.layers, one.flops) for one in operators if one.name == "key"]
    assert keys == [(2, 2 * 3 * 7 * 30), (1, 2 * 3 * 7 * 10)]
    attention = [(one.layers, one.flops) for one in operators if one.name == "attention"]
    assert attention == [(2, 45 * 66), (1, 45 * 30)]


def test_without_a_cache_keys_are_activations_and_nothing_is_written():
    work = LayerWork(3, tokens=3, pairs=11, dense_keys=5)
    operators = counted(works=(work, work))
    assert "kv_write" not in operators
    assert operators["attention"].activation_bytes == 2 * 180 * 2 + 2 * 5 * 30 * 2
    assert operators["attention"].kv_bytes == 0


@pytest.mark.parametrize(
    "name",
    [
        "llama-2-7b",
        "llama-3.2-1b",
        "mistral-7b-v0.1",
        "qwen2-0.5b",
        "qwen3-0.6b",
        "gemma2-2b",
        "gpt2",
    ],
)
def test_weights_are_all_parameters_of_every_family(name):
    config = PRESETS[name]
    works = [LayerWork(heads, 0, 0) for heads in config.kv_heads]
    read = total(step_operators(config, works, 0)).weight_bytes
    if not config.tie_embeddings:  # of the embedding only rows are read; a tied one is the head
        read += 4 * config.vocab_size * config.embed_dim
    if config.rope is None:
        read += 4 * config.max_length * config.embed_dim
    assert read == 4 * parameter_count(config)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2-0.5b", "tiny-gqa"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_packed_weights_are_read_as_they_are_stored(name, weights):
    config = PRESETS[name]
    works = [LayerWork(heads, 0, 0) for heads in config.kv_heads]
    read = total(step_operators(config, works, 0, weights=weights)).weight_bytes
    if not config.tie_embeddings:
        read += 4 * config.vocab_size * config.embed_dim
    assert read == param_bytes(config, weights)


@pytest.mark.parametrize(
    ("weights", "bits"), [("float32", 32), ("bfloat16", 16), ("int8", 8.5), ("int4", 4.5)]
)
def test_bits_of_a_weight(weights, bits):
    """Of a projection, and of the row of a tied embedding that a token looks up."""
    config = PRESETS["llama-3.2-1b"]
    assert config.tie_embeddings
    operators = step_operators(config, [LayerWork(8, 3, 0)] * 16, 0, weights=weights)
    found = {one.name: one.weight_bytes for one in operators}
    assert found["gate"] == 2048 * 8192 * bits / 8
    assert found["embed"] == 3 * 2048 * bits / 8
    assert found["mlp_norm"] == 4 * 2048
