"""The engine on layers of the real model: equal bits alone, among others, warm, preempted."""

import dataclasses
import importlib.resources

import numpy as np
import pytest

from kvlab.ops.sampling import Sampling
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.executor import ModelExecutor
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.requests import Request
from kvlab.research.serving import serve

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def model(smollm2_layers):
    return smollm2_layers


@pytest.fixture(scope="module")
def requests(model):
    """Six pieces of the English text, some of which begin alike, and a pool too small for them."""
    text = importlib.resources.files("kvlab.research").joinpath("texts/english.txt").read_text()
    ids = np.array(model.tokenizer.encode(text), np.int32)
    shared = ids[100:140]
    made = []
    for number in range(6):
        start = shared[: (0, 17, 40)[number % 3]]
        prompt = np.concatenate([start, ids[300 * number :][: 5 + 9 * number]])
        sampling = Sampling(temperature=0.7, seed=number) if number % 2 else Sampling()
        made.append(Request(f"r{number}", prompt, 40 - 5 * number, sampling, n=1 + (number == 4)))
    return made


def engine_of(model, reuse):
    config = InferenceConfig(
        model.config, CacheSpec(Paged(16)), 4, 144, chunk=64, num_pages=14, decode_steps=8
    )
    return Engine(ModelExecutor(model.params, config), EngineOptions(reuse_prefixes=reuse))


def answers(engine, requests):
    found = {}
    for part in serve(engine, requests):
        tokens, log_probs = found.get((part.request_id, part.sample), ((), ()))
        new = tokens + part.tokens, log_probs + part.log_probs
        found[part.request_id, part.sample] = new
    return found


def test_a_request_keeps_its_bits_whatever_else_runs(model, requests):
    alone = {}
    for one in requests:
        alone |= answers(engine_of(model, reuse=False), [one])
    assert sum(len(tokens) for tokens, _ in alone.values()) == 40 + 35 + 30 + 25 + 2 * 20 + 15
    engine = engine_of(model, reuse=True)
    assert answers(engine, requests) == alone
    assert engine.preemptions
    assert engine.index.hit_blocks
    again = [dataclasses.replace(one, id=f"{one.id}+") for one in reversed(requests)]
    warm = answers(engine, again)
    assert {(name.removesuffix("+"), sample): got for (name, sample), got in warm.items()} == alone
    pool, free = engine.executor.pool_pages(), engine.executor.free_pages()
    assert np.all(free + engine.index.num_idle == pool)
