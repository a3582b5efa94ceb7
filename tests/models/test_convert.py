"""Conversion to other numbers of KV heads: exact where it repeats, the paper's where it merges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.config import DecoderConfig, RMSNorm
from kvlab.models.convert import METHODS, convert_attention, legal_kv_heads
from kvlab.models.decoder import Decoder
from kvlab.models.random_params import random_params
from kvlab.ops.rope import Rope

CONFIG = DecoderConfig(
    family="qwen3",
    vocab_size=41,
    num_layers=2,
    embed_dim=23,
    hidden_dim=31,
    num_heads=12,
    num_kv_heads=6,
    head_dim=10,
    max_length=64,
    norm=RMSNorm(1e-6),
    rope=Rope(),
    qkv_bias=True,
    qk_norm=True,
)


@pytest.fixture(scope="module")
def params():
    """Random parameters whose biases and norms are not neutral."""
    drawn = random_params(CONFIG, 3)
    draw = np.random.default_rng(5)
    return jax.tree.map(
        lambda leaf: leaf + draw.normal(0, 0.2, leaf.shape).astype(np.float32), drawn
    )


def forward(config: DecoderConfig, params: dict) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(7).integers(0, 41, (2, 29)), jnp.int32)
    apply = jax.jit(lambda p, t: Decoder(config).apply({"params": p}, t, method="forward"))
    return np.asarray(apply(params, tokens))


def head(array: jax.Array, index: int) -> np.ndarray:
    """One head of a projection's weight or bias, cut out of its last axis."""
    return np.asarray(array)[..., 10 * index : 10 * (index + 1)]


def test_repeated_heads_are_the_same_function(params):
    """GQA to MHA changes shapes, not mathematics; the rest is the rounding of other shapes."""
    before = forward(CONFIG, params)
    config, converted = convert_attention(CONFIG, params, 12)
    assert config.kv_heads == (12, 12)
    after = forward(config, converted)
    assert np.abs(before).max() > 1
    assert np.abs(after - before).max() <= 2e-6 * np.abs(before).max()


@pytest.mark.parametrize("wanted", [12, 6, 3, 2, 1])
def test_heads_are_repeated_in_place_or_averaged_by_group(wanted, params):
    _, converted = convert_attention(CONFIG, params, wanted)
    for layer in ("layers_0", "layers_1"):
        for name in ("key", "value"):
            for part in ("weight", "bias"):
                old = params[layer]["attention"][name][part]
                new = converted[layer]["attention"][name][part]
                assert new.shape == (*old.shape[:-1], 10 * wanted)
                for index in range(wanted):
                    if wanted >= 6:
                        sources = [index * 6 // wanted]
                    else:
                        group = 6 // wanted
                        sources = range(index * group, (index + 1) * group)
                    mean = np.mean([head(old, source) for source in sources], axis=0)
                    np.testing.assert_allclose(head(new, index), mean, rtol=1e-5, atol=1e-7)


def test_first_keeps_the_first_head_of_each_group(params):
    _, converted = convert_attention(CONFIG, params, 2, method="first")
    for name in ("key", "value"):
        old, new = (tree["layers_1"]["attention"][name] for tree in (params, converted))
        for part in ("weight", "bias"):
            assert np.array_equal(head(new[part], 0), head(old[part], 0))
            assert np.array_equal(head(new[part], 1), head(old[part], 3))


def test_random_draws_each_projection_anew(params):
    _, converted = convert_attention(CONFIG, params, 2, method="random", seed=1)
    _, again = convert_attention(CONFIG, params, 2, method="random", seed=1)
    _, other = convert_attention(CONFIG, params, 2, method="random", seed=2)
    drawn = [
        converted[layer]["attention"][name]["weight"]
        for layer in ("layers_0", "layers_1")
        for name in ("key", "value")
    ]
    for index, weight in enumerate(drawn):
        assert weight.shape == (23, 20)
        assert abs(float(weight.std()) * 23**0.5 - 1) < 0.15
        assert not any(np.array_equal(weight, before) for before in drawn[:index])
    assert jax.tree.all(jax.tree.map(np.array_equal, converted, again))
    key = converted["layers_0"]["attention"]["key"]
    assert not np.array_equal(key["weight"], other["layers_0"]["attention"]["key"]["weight"])
    assert not np.any(key["bias"])


def test_random_leaves_layers_that_keep_or_gain_heads_exact(params):
    _, converted = convert_attention(CONFIG, params, (6, 12), method="random")
    assert converted["layers_0"] is params["layers_0"]
    _, repeated = convert_attention(CONFIG, params, (6, 12))
    assert jax.tree.all(jax.tree.map(np.array_equal, converted, repeated))


def test_layers_differ_and_everything_else_is_shared(params):
    config, converted = convert_attention(CONFIG, params, (6, 3))
    assert config == dataclasses.replace(CONFIG, num_kv_heads=(6, 3))
    assert converted["layers_0"] is params["layers_0"]
    assert converted["embed"] is params["embed"]
    old, new = params["layers_1"]["attention"], converted["layers_1"]["attention"]
    for name in ("query", "output", "query_norm", "key_norm"):
        assert new[name] is old[name]
    assert np.isfinite(forward(config, converted)).all()
    assert params["layers_1"]["attention"]["key"]["weight"].shape == (23, 60)


def test_a_mean_in_bfloat16_is_taken_in_float32(params):
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    _, converted = convert_attention(dataclasses.replace(CONFIG, param_dtype="bfloat16"), narrow, 1)
    heads = np.asarray(narrow["layers_0"]["attention"]["key"]["weight"], np.float32)
    mean = heads.reshape(23, 6, 10).mean(1)
    new = converted["layers_0"]["attention"]["key"]["weight"]
    assert new.dtype == jnp.bfloat16
    assert np.array_equal(new, mean.astype(jnp.bfloat16))


def test_what_is_legal():
    assert legal_kv_heads(12, 6) == [1, 2, 3, 6, 12]
    assert legal_kv_heads(12, 4) == [1, 2, 4, 12]
    assert legal_kv_heads(9, 3) == [1, 3, 9]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (4, "num_kv_heads=4 given for layer 0, which has 6 KV heads and 12 query heads; legal "),
        (24, "legal values: 1, 2, 3, 6, 12"),
        (0, "legal values: 1, 2, 3, 6, 12"),
        ((6, 5), "num_kv_heads=5 given for layer 1"),
        ((6, 6, 6), "3 entries for num_layers=2"),
    ],
)
def test_numbers_of_heads_that_do_not_fit(wanted, words, params):
    with pytest.raises(ValueError, match=words):
        convert_attention(CONFIG, params, wanted)


def test_an_unknown_method(params):
    assert METHODS == ("mean", "first", "random")
    with pytest.raises(ValueError, match="'median' is not known; legal values: mean, first, rand"):
        convert_attention(CONFIG, params, 2, method="median")
