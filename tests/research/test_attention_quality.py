"""A matched set of tiny models: what may be in it, what its points are, and what they measure."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.config import DecoderConfig
from kvlab.models.load import Model
from kvlab.models.random_params import random_params
from kvlab.models.tokenizers import ByteTokenizer
from kvlab.ops.rope import Rope
from kvlab.research import matched_models
from kvlab.research.attention_quality_study import AttentionQualityStudy
from kvlab.research.matched_models import load_matched
from kvlab.research.training_data import Text

DECODER = DecoderConfig(
    family="llama",
    vocab_size=259,
    num_layers=1,
    embed_dim=12,
    hidden_dim=7,
    num_heads=6,
    num_kv_heads=6,
    head_dim=2,
    max_length=16,
    rope=Rope(),
    tie_embeddings=True,
)
TEXT = Text("story.txt", "decode reads a prompt\n" * 40)


class OtherBytes(ByteTokenizer):
    """Cuts texts otherwise."""

    def encode(self, text, **options):
        return super().encode(text, **options)[::-1]


def model(name, heads=6, seed=0, tokenizer=ByteTokenizer, **changes):
    config = dataclasses.replace(DECODER, num_kv_heads=heads, **changes)
    given = None if tokenizer is None else tokenizer(config.vocab_size)
    return Model(name, config, random_params(config, seed), given, None)


@pytest.fixture
def loading(monkeypatch):
    """Makes `load_matched` find models by name."""

    def load(*models):
        by_name = {one.name: one for one in models}
        monkeypatch.setattr(matched_models, "load_model", lambda name, *_: by_name[name])
        return load_matched(list(by_name), "decode")

    return load


@pytest.fixture(autouse=True)
def _promotion():
    """Optax promotes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def study_of(models, **changes):
    settings = {
        "data": (TEXT.to_json(),),
        "separator": None,
        "held_out": 0.2,
        "length": 16,
        "shares": (0.25, 0.5),
        "pooling_share": 0.5,
        "steps": 8,
        "batch": 4,
        "batches": (1, 2),
        "prompt_tokens": 5,
        "decode_tokens": 3,
        "repeats": 3,
        "kv_mib": 2**-8,
        "page_size": 4,
    }
    return AttentionQualityStudy(tuple(models), DECODER.num_heads, **settings | changes)


def test_models_of_one_k_are_repeats_and_weights_are_rounded(loading):
    models = loading(model("a"), model("b", seed=1), model("c", 2))
    assert [(one.model, one.num_kv_heads, one.repeat) for one in models] == [
        ("a", 6, 0),
        ("b", 6, 1),
        ("c", 2, 0),
    ]
    for one in models.values():
        for leaf in jax.tree.leaves(one.params):
            assert leaf.dtype == jnp.float32
            assert np.array_equal(leaf, leaf.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {"heads": 2, "embed_dim": 14}, "b has embed_dim=14 and a 12; models of a set differ"),
        ({}, {"heads": 2, "vocab_size": 300}, "b has vocab_size=300 and a 259"),
        ({"heads": 3}, {"heads": 2}, r"as many KV heads as query heads \(6; there are 2, 3\); co"),
        ({}, {"seed": 1}, "every model of the set has 6 KV heads; add one with fewer"),
        ({}, {}, "b and a are the same model; name it once"),
        (
            {},
            {"heads": (1, 2), "num_layers": 2, "windows": None},
            r"num_kv_heads=\(1, 2\), which differ between layers",
        ),
        ({}, {"heads": 2, "tokenizer": OtherBytes}, "tokenizer of b cuts these texts otherwise"),
        ({}, {"heads": 2, "tokenizer": None}, "b has no tokenizer to cut the texts with"),
    ],
)
def test_models_that_cannot_be_compared(loading, first, second, words):
    with pytest.raises(ValueError, match=words) as caught:
        loading(model("a", **first), model("b", **second))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"shares": (0.25, 1.5)},
            "shares=1.5 given; a share of the steps is above 0 and at most 1",
        ),
        ({"pooling_share": 0.0}, "pooling_share=0 given"),
        ({"shares": (0.05,)}, "shares=0.05 of steps=8 is no step; give a larger share"),
        ({"poolings": ("median",)}, "pooling='median' is not known; legal values: mean, first"),
        ({"decode_tokens": 12}, "prompt_tokens=5 and decode_tokens=12 are past the models' length"),
    ],
)
def test_studies_that_cannot_be_run(change, words):
    with pytest.raises(ValueError, match=words):
        study_of((), **change)


def test_every_source_is_converted_to_every_k_and_uptrained(loading):
    models = loading(model("a"), model("b", seed=1), model("c", 2), model("d", 1))
    study = study_of(models, poolings=("first", "mean"))
    points = [
        tuple(point.get(name) for name in ("kind", "num_kv_heads", "pooling", "share", "model"))
        for point in study.quality_points()
    ]
    assert len(points) == len(set(points))
    assert points[:4] == [
        ("trained", heads, None, None, name)
        for name, heads in zip("abcd", (6, 6, 2, 1), strict=True)
    ]
    for name in "ab":
        made = {point[:4] for point in points[4:] if point[4] == name}
        assert made == {
            *(("converted", heads, way, None) for heads in (2, 1) for way in ("first", "mean")),
            *(("control", 6, None, share) for share in (0.25, 0.5)),
            *(("uptrained", heads, "first", share) for heads in (2, 1) for share in (0.25, 0.5)),
            *(("uptrained", heads, "mean", 0.5) for heads in (2, 1)),
        }
    (once,) = {p["steps"] for p in study.quality_points() if p.get("share") == 0.25}
    assert once == 2
