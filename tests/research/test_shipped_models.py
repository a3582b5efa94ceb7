"""Shipped models against the text they were trained on: held-out losses, and the curve again."""

import functools
import json

import jax
import numpy as np
import pytest

from kvlab.models.load import load_model
from kvlab.models.named import MATCHED_MODELS, SHIPPED_MODELS, named_path
from kvlab.research.training import Trainer, initial_state
from kvlab.research.training_config import TrainingConfig
from kvlab.research.training_data import ShuffledRows, batches_of, pack_texts, prepare, read_texts

DATA = "text/tinyshakespeare/input.txt"


@pytest.fixture(autouse=True)
def _optax_promotes():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def texts(data_path):
    return read_texts([str(data_path(DATA))])


@pytest.fixture(scope="module")
def curves():
    path = named_path("shakespeare-mha").parent / "curves.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def data(texts):
    tokenizer = load_model("shakespeare-mha").tokenizer
    return pack_texts(texts, tokenizer, length=256, held_out=0.1)


@functools.cache
def trainer_of(config):
    """Compiled once for each number of KV heads."""
    return Trainer(config)


EACH = [
    pytest.param(name, marks=[] if name in MATCHED_MODELS else pytest.mark.long)
    for name in SHIPPED_MODELS
]


@pytest.mark.parametrize("name", EACH)
def test_held_out_losses_are_those_of_the_curves(name, data, curves):
    """The curves are of float32 parameters; what is shipped is rounded to bfloat16."""
    model = load_model(name)
    trainer = trainer_of(TrainingConfig(model.config))
    loss, count = trainer.score(model.params, batches_of(data.held_out, 8))
    assert count == data.held_out_tokens
    assert loss == pytest.approx(curves[name]["held_out"][-1][1], abs=2e-3)


def trained_again(texts, name, steps):
    """What `kvlab train --data=TEXT --num_kv_heads=K` computes, tokenizer included."""
    data = prepare(texts, vocab_size=1024, length=256, held_out=0.1)
    config = TrainingConfig(load_model(name).config)
    trainer = trainer_of(config)
    state = trainer.place(initial_state(config))
    rows = ShuffledRows(data.rows, np.asarray(state.key))
    losses = []
    for step in range(steps):
        state, figures = trainer.step(state, rows.take(8 * step, 1, 8))
        losses.append(figures.loss)
    return losses, trainer.score(state.params, batches_of(data.held_out, 8))[0]


def test_the_curve_begins_again(texts, curves):
    losses, _ = trained_again(texts, "shakespeare-gqa4", 50)
    np.testing.assert_allclose(losses, curves["shakespeare-gqa4"]["loss"][:50], rtol=0, atol=1e-5)


@pytest.mark.long
def test_the_whole_curve_again(texts, curves):
    _, held_out = trained_again(texts, "shakespeare-mqa", 1200)
    assert held_out == pytest.approx(curves["shakespeare-mqa"]["held_out"][-1][1], abs=0.02)
