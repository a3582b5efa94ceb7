"""The tokens that kvlab's policies keep are those that kvpress 0.5.5 keeps (tests/goldens)."""

import dataclasses
import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.load import load_model
from kvlab.ops.caches.protocol import Step
from kvlab.ops.retention import Sinks, SnapKV
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.cache import layer_table
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.session import Session

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
GOLDEN = np.load(GOLDENS / "kvpress.npz")
POLICIES = [json.loads(text) for text in GOLDEN["policies"]]
PROMPTS = [json.loads(text) for text in GOLDEN["prompts"]]
MODELS = sorted({prompt["model"] for prompt in PROMPTS})
LONGEST = max(prompt["length"] for prompt in PROMPTS)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retention")
    spec = importlib.util.spec_from_file_location("tiny_families", GOLDENS / "tiny_families.py")
    families = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(families)
    write = families.write_tiny_folder
    return {name: load_model(str(write(name, folder / name))) for name in MODELS}


def policy_of(case, budget):
    if case["policy"] == "sinks":
        return Sinks(budget, "prefill", num_sinks=case["num_sinks"])
    shares = {"allocation": "per_head", "safeguard": case.get("safeguard")}
    shares = shares if case["policy"] == "per_head" else {}
    return SnapKV(budget, observation=case["observation"], **shares)


def prefilled(model, prompts, policy):
    """A session with the prompts in its slots."""
    config = InferenceConfig(
        model.config,
        CacheSpec(Paged(7), retention=policy),
        slots=len(prompts),
        max_length=LONGEST,
        rows=2,
        chunk=64,
    )
    session = Session(model.params, config)
    session.prefill([GOLDEN[f"tokens_{prompt['name']}"] for prompt in prompts])
    return session


# Compiles faster, and each is run a few times only.
@functools.partial(
    jax.jit,
    static_argnames="options",
    compiler_options={"xla_backend_optimization_level": 0},
)
def choose(layer, table, positions, limits, options):
    return layer.choose(table, positions, limits, options)[:2]


@pytest.mark.parametrize(
    "name",
    [MODELS[0], *(pytest.param(name, marks=pytest.mark.long) for name in MODELS[1:])],
)
@pytest.mark.parametrize("observation", [None, 3, 13])
def test_every_policy_and_budget_keeps_the_tokens_of_kvpress(loaded, name, observation):
    prompts = [prompt for prompt in PROMPTS if prompt["model"] == name]
    cases = [i for i, case in enumerate(POLICIES) if case.get("observation") == observation]
    # The budget holds every prompt whole; the cases' budgets are then limits of a choice.
    session = prefilled(loaded[name], prompts, policy_of(POLICIES[cases[0]], LONGEST))
    positions, options = session.cache.positions, session.config.model.attention_options(None, None)
    for index in cases:
        policy = policy_of(POLICIES[index], LONGEST)
        budgets = [int(GOLDEN[f"budgets_{prompt['name']}"][index]) for prompt in prompts]
        for number, layer in enumerate(session.cache.layers):
            table = session.cache.tables[0]
            swapped = dataclasses.replace(layer, policy=policy)
            limits = table.of_rows(jnp.asarray(budgets, jnp.int32))
            kept, counts = choose(swapped, table, positions, limits, options)
            for slot, prompt in enumerate(prompts):
                expected = GOLDEN[f"kept_{prompt['name']}"][index, number]
                for head, wanted in enumerate(expected[: table.heads]):
                    row = slot * table.heads + head
                    got = np.asarray(kept)[row, : int(counts[row])]
                    assert got.tolist() == np.flatnonzero(wanted).tolist()


@pytest.mark.parametrize(
    ("name", "index"),
    list(zip(MODELS, (1, 7, 16), strict=True)),
    ids=["sinks", "snapkv", "per_head"],
)
def test_a_session_holds_them_after_its_prefill(loaded, name, index):
    prompt = next(p for p in PROMPTS if p["model"] == name and p["length"] == 97)
    budget = int(GOLDEN[f"budgets_{prompt['name']}"][index])
    session = prefilled(loaded[name], [prompt], policy_of(POLICIES[index], budget))
    for layer, spec, expected in zip(
        session.cache.layers,
        session.config.layer_specs,
        GOLDEN[f"kept_{prompt['name']}"][index],
        strict=True,
    ):
        table = layer_table(session.cache.tables, spec)
        step = Step.of_none(table.lengths.shape[0])
        held = np.asarray(layer.inner.note("position", step, table.table))
        for row, length in enumerate(table.lengths.tolist()):
            assert held[row, :length].tolist() == np.flatnonzero(expected[row]).tolist()
