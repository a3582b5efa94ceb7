"""The engine schedules the model and its simulation alike, step by step."""

import numpy as np
import pytest

from kvlab.ops.specs import Paged
from kvlab.research.cost_model import OPT_13B, StepCost
from kvlab.research.devices import DEVICES
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.executor import ModelExecutor
from kvlab.research.requests import Request
from kvlab.research.simulated_runs import simulated
from kvlab.research.simulation import SimulationConfig

COST = StepCost(OPT_13B, DEVICES["A100-40GB"])


def steps_of(engine, requests):
    """What an engine does with requests, step by step: who runs, waits and ends, and the cache."""
    for one in requests:
        engine.add(one)
    steps = []
    while engine.busy:
        progress = engine.step()
        ends = [(part.request_id, part.sample, part.outcome) for part in progress if part.outcome]
        groups = engine._prefilling, engine._decoding, engine._live.values()
        names = [[live.request.id for live in group] for group in groups]
        steps.append((engine.history[-1][2:], names, ends, engine.preemptions))
    order = sorted(engine.times, key=lambda name: engine.times[name].admitted_s)
    return steps, order


@pytest.mark.parametrize("reuse", [False, True], ids=["cold", "shared prefixes"])
def test_the_model_and_the_simulation_are_scheduled_alike(reuse, tiny):
    """Five slots, 24 pages of 8 tokens; prompts whose first blocks are alike, up to 3 samples."""
    random = np.random.default_rng(11)
    requests = []
    for number in range(30):
        family, shared = int(random.integers(3)), int(random.integers(6))
        text = tiny.prompt(40, seed=100 + family)[: 8 * shared]
        text += tiny.prompt(int(random.integers(1, 40)), seed=number)
        hashes = [family * 10 + block for block in range(shared)]
        hashes += [1000 + 10 * number + block for block in range(len(text) // 8 - shared)]
        requests.append(
            Request(
                f"r{number}",
                np.array(text, np.int32),
                int(random.integers(1, 60)),
                n=(1, 1, 1, 2, 3)[number % 5],
                prompt_hashes=tuple(hashes),
            )
        )
    options = EngineOptions(decode_steps=1, reuse_prefixes=reuse)
    config = tiny.config("gqa", Paged(8))
    model = Engine(ModelExecutor(tiny.params("gqa"), config), options)
    sizes = {"page_size": 8, "kv_slots": 24 * 8, "slots": 5, "max_length": tiny.max_length}
    executor = simulated(SimulationConfig(COST, "paged", **sizes))
    executor.rows = executor.rows_per_sequence = config.rows
    executor.chunk = config.chunk
    simulation = Engine(executor, options)
    requests = [one for one in requests if one.n * (len(one.prompt) + one.max_tokens) < 24 * 8]
    assert len(requests) > 20
    expected, order = steps_of(model, requests)
    found, simulated_order = steps_of(simulation, requests)
    assert found == expected
    assert simulated_order == order
    assert model.preemptions > 3
    if reuse:
        counts = [(one.index.asked_blocks, one.index.hit_blocks) for one in (model, simulation)]
        assert counts[0] == counts[1]
        assert counts[0][1] > 10
