"""The models that come with kvlab: as their card says, without a download."""

import json
import math
import pathlib

import jax
import numpy as np
import pytest

from kvlab.models import named
from kvlab.models.load import load_model
from kvlab.models.named import SHIPPED_MODELS, named_path
from kvlab.models.presets import parameter_count

FOLDER = pathlib.Path(named.__file__).parent / "shipped"
KV_HEADS = {"mha": 8, "gqa4": 4, "gqa2": 2, "mqa": 1}
PARAMETERS = {8: 885_888, 4: 820_352, 2: 787_584, 1: 771_200}


def heads_of(name: str) -> int:
    return KV_HEADS[name.split("-")[1]]


@pytest.fixture(scope="module", params=SHIPPED_MODELS)
def model(request):
    return load_model(request.param)


def test_all_that_is_shipped_has_a_name():
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(SHIPPED_MODELS)
    assert all(named_path(name) == FOLDER / name for name in SHIPPED_MODELS)
    assert named_path("shakespeare") is None


def test_it_fits_into_twelve_megabytes():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12_000_000


def test_models_differ_in_their_kv_heads_alone(model):
    config = model.config
    assert config.kv_heads == (heads_of(model.name),) * 4
    assert (config.num_layers, config.embed_dim, config.hidden_dim) == (4, 128, 320)
    assert (config.num_heads, config.head_dim, config.vocab_size) == (8, 16, 1024)
    assert parameter_count(config) == PARAMETERS[heads_of(model.name)]


def test_parameters_are_bfloat16_numbers(model):
    for leaf in jax.tree.leaves(model.params):
        assert leaf.dtype == np.float32
        assert np.array_equal(leaf, leaf.astype("bfloat16").astype("float32"))
        assert np.isfinite(leaf).all()


def test_one_tokenizer(model):
    text = "KING RICHARD: thou wast çok güzel\n"
    ids = model.tokenizer.encode(text)
    assert model.tokenizer.decode(ids) == text
    assert ids == load_model("shakespeare-mha").tokenizer.encode(text)


def test_curves_are_those_of_the_models():
    curves = json.loads((FOLDER / "curves.json").read_text(encoding="utf-8"))
    assert list(curves) == list(SHIPPED_MODELS)
    for name, curve in curves.items():
        steps = 60 if name.endswith("-uptrained") else 1200
        assert len(curve["loss"]) == steps
        assert curve["held_out"][-1][0] == steps
    begun = [curve["loss"][0] for name, curve in curves.items() if "uptrained" not in name]
    np.testing.assert_allclose(begun, math.log(1024), atol=0.1)
