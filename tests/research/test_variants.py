"""Attention variants by name, and the product of the cache axes."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.decoder import Decoder
from kvlab.models.load import load_model
from kvlab.models.presets import preset
from kvlab.research.variants import (
    apply_attention,
    kv_heads,
    parse_attention,
    with_attention,
)

GQA = preset("tiny-gqa")  # 6 query heads, 2 KV heads, 2 layers


@pytest.mark.parametrize("name", ["mha", "gqa", "mqa", "gqa:2"])
def test_names_are_taken_as_they_are(name):
    assert parse_attention(name) == name


def test_a_name_has_one_spelling():
    assert parse_attention("gqa:004") == "gqa:4"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mla", "attention='mla' is not known; legal values: mha, gqa, gqa:K"),
        ("mqa:1", "attention='mqa:1' is not known"),
        ("gqa:", "names no number of KV heads; write gqa:2"),
        ("gqa:-2", "names no number of KV heads"),
        ("gqa:0", "names no number of KV heads"),
        ("gqa:²", "names no number of KV heads"),
        ("gqa:1", "that is mqa; use mqa"),
    ],
)
def test_wrong_names_are_refused(name, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        parse_attention(name)


def test_kv_heads_of_each_variant():
    assert kv_heads(GQA, "mha") == (6, 6)
    assert kv_heads(GQA, "gqa") == (2, 2)
    assert kv_heads(GQA, "gqa:2") == (2, 2)
    assert kv_heads(GQA, "mqa") == (1, 1)
    assert kv_heads(GQA, ("mqa", "gqa")) == (1, 2)
    assert kv_heads(preset("tiny-mha"), "gqa:3") == (3, 3)
    assert kv_heads(preset("tiny-mqa"), "gqa:3") == (3, 3)


def test_gqa_keeps_the_own_heads_of_a_model_that_differs_by_layer():
    mixed = dataclasses.replace(GQA, num_kv_heads=(2, 6))
    assert kv_heads(mixed, "gqa") == (2, 6)


@pytest.mark.parametrize(
    ("model", "name", "told"),
    [
        ("tiny-mha", "gqa", "this model is mha (6 query heads, 6 KV heads); use gqa:2, gqa:3, "),
        ("tiny-mqa", "gqa", "this model is mqa (6 query heads, 1 KV heads); use gqa:2, gqa:3, "),
        ("tiny-gqa", "gqa:3", "gqa:3 is not possible with 6 query heads and 2 KV heads; use gqa:2"),
        ("tiny-gqa", "gqa:4", "gqa:4 is not possible"),
        ("tiny-gqa", "gqa:6", "gqa:6 is mha"),
        ("tiny-gqa", ("mha",), "attention has 1 entries for 2 layers"),
    ],
)
def test_what_a_model_cannot_be_is_refused_with_a_legal_value(model, name, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        kv_heads(preset(model), name)


def test_the_own_attention_is_the_model_itself():
    params = {"layers_0": {}}
    for name in ("gqa", "gqa:2"):
        assert apply_attention(GQA, params, name) == (GQA, params)


def test_mha_computes_the_same_function_and_mqa_another():
    model = load_model("random:tiny-gqa")
    tokens = jnp.arange(13, dtype=jnp.int32)[None]

    def logits(variant) -> np.ndarray:
        apply = Decoder(variant.config).apply
        return np.asarray(apply({"params": variant.params}, tokens, method="forward"))

    own, mha, mqa = (logits(with_attention(model, name)) for name in (None, "mha", "mqa"))
    scale = np.abs(own).max()
    assert np.abs(own - mha).max() < 1e-5 * scale
    assert np.abs(own - mqa).max() > 1e-2 * scale
    assert with_attention(model, "mqa").config.kv_heads == (1, 1)
    assert with_attention(model, "mqa").params["layers_1"]["attention"]["key"]["weight"].shape == (
        96,
        16,
    )
