"""Phases against limits, worked by hand; predictions for other devices."""

import dataclasses

import pytest

from kvlab.models.presets import preset
from kvlab.ops.specs import CacheSpec, Paged, Recompute
from kvlab.research.devices import DEVICES, Device
from kvlab.research.operators import Operator
from kvlab.research.roofline import CostModel, Phase
from kvlab.research.roofline_predictions import (
    against_limits,
    device_metrics,
    linear_metrics,
    on_data_sheet,
    operator_metrics,
    phase_operators,
    phase_steps,
    turning_point,
)

# 100 operations and 10 bytes a second: the ridge is at 10.
SLOW = Device("slow", None, bandwidth=10.0, memory=1e9, float32_flops=100.0)
TINY = preset("tiny-gqa")
COSTS = CostModel(TINY, CacheSpec(Paged(16)), DEVICES["A100-80GB"])


def phase(*operators):
    return Phase(operators, SLOW, "float32")


def test_a_prefill_of_two_calls_is_summed():
    first = phase(Operator("a", flops=300, weight_bytes=10), Operator("b", 10, 0, 20, layers=2))
    second = phase(Operator("a", flops=80, weight_bytes=10, kv_bytes=10))
    metrics, samples = against_limits([first, second], "prefill", 3, 7, [20.0, 5.0, 10.0])
    assert metrics["flops"] == 300 + 2 * 10 + 80
    assert metrics["moved_bytes"] == 10 + 2 * 20 + 20
    assert metrics["arithmetic_intensity"] == pytest.approx(400 / 70)
    assert metrics["ridge"] == 10
    # The median is 10 seconds, in which there is room for 1,000 operations and 100 bytes.
    assert metrics["mfu"] == pytest.approx(0.4)
    assert metrics["mbu"] == pytest.approx(0.7)
    assert metrics["limit_share"] == metrics["mbu"]
    # a: 3 s of operations; b: 2 s of bytes, twice; a again: 2 s of bytes.
    assert metrics["predicted_s"] == pytest.approx(3 + 2 * 2 + 2)
    assert samples == {
        "ttft_s": [20.0, 5.0, 10.0],
        "prefill_tokens_per_s": [21 / 20, 21 / 5, 21 / 10],
    }


def test_a_decode_step_is_the_mean_of_those_of_a_call():
    steps = [phase(Operator("a", flops=n, weight_bytes=8, kv_bytes=2)) for n in (380, 420)]
    metrics, samples = against_limits(steps, "decode", 5, 7, [8.0])
    assert (metrics["flops"], metrics["moved_bytes"]) == (400, 10)
    assert metrics["mfu"] == pytest.approx(0.5)
    assert metrics["mbu"] == pytest.approx(0.125)
    assert metrics["limit_share"] == metrics["mfu"]
    assert metrics["predicted_s"] == pytest.approx(4.0)
    assert samples == {"tpot_s": [8.0], "decode_tokens_per_s": [5 / 8]}


def test_steps_are_the_calls_that_run():
    row = {"phase": "prefill", "chunk": 8, "decode_tokens": 3}
    calls = phase_steps(COSTS, row, 2, 19)
    assert calls == [COSTS.prefill(2, 8), COSTS.prefill(2, 8, 8), COSTS.prefill(2, 3, 16)]
    assert sum(call.seconds for call in calls) == pytest.approx(COSTS.ttft_s(19, 2, 8))
    steps = phase_steps(COSTS, row | {"phase": "decode"}, 2, 19)
    assert steps == [COSTS.decode(2, context, 19) for context in (20, 21, 22)]
    whole = dataclasses.replace(COSTS, specs=CacheSpec(Recompute()))
    assert phase_steps(whole, row, 2, 19) == [whole.prefill(2, 19)]


def test_operators_of_both_phases():
    prefill, decode = (
        {one.name: one for one in phase_operators(TINY, CacheSpec(), name, 3, 17, 8)}
        for name in ("prefill", "decode")
    )
    width = TINY.embed_dim * TINY.num_heads * TINY.head_dim
    assert prefill["query"].flops == 3 * 17 * 2 * width
    calls = phase_steps(COSTS, {"phase": "prefill", "chunk": 8}, 3, 17)
    for part in ("flops", "weight_bytes", "activation_bytes", "kv_bytes"):
        whole = sum(getattr(one, part) * one.layers for one in prefill.values())
        assert whole == sum(getattr(call.total, part) for call in calls)
    assert decode["query"].flops == 3 * 2 * width
    metrics = operator_metrics(Operator("x", 50, 10, 5, 5, layers=4), SLOW, "float32")
    assert metrics == {
        "layers": 4,
        "flops": 50,
        "moved_bytes": 20,
        "weight_bytes": 10,
        "kv_bytes": 5,
        "predicted_s": 2.0,
        "ridge": 10,
        "arithmetic_intensity": 2.5,
    }


def test_devices_are_predicted_at_sixteen_bits():
    config, cache = on_data_sheet(TINY, CacheSpec(Paged(16)))
    assert (config.dtype, config.param_dtype) == ("bfloat16", "bfloat16")
    assert cache == CacheSpec(Paged(16), "bfloat16")
    eight = CacheSpec(Paged(16), "int8")
    assert on_data_sheet(TINY, (eight, CacheSpec()))[1] == (eight, CacheSpec(storage="bfloat16"))
    assert on_data_sheet(TINY, CacheSpec(Recompute()))[1] == CacheSpec(Recompute())
    costs = CostModel(config, cache, DEVICES["TPU-v5e"])
    metrics = device_metrics(costs, 2, 100)
    assert metrics["ridge"] == 197e12 / 819e9
    assert metrics["predicted_ttft_s"] == costs.ttft_s(100, 2)
    assert metrics["predicted_tpot_s"] == costs.tpot_s(101, 2)
    assert metrics["largest_batch"] == costs.largest_batch(100)
    assert metrics["largest_context"] == costs.largest_context(2)


def test_what_is_not_there_is_absent():
    assert "compute_bound_batch" not in turning_point(COSTS, 500)
    here = dataclasses.replace(COSTS, device=SLOW)
    assert turning_point(here, 1) == {"compute_bound_batch": here.compute_bound_batch(2, 1)}
    recomputed = dataclasses.replace(COSTS, specs=CacheSpec(Recompute()))
    assert "largest_batch" not in device_metrics(recomputed, 1, 10)


def test_linear_layers_of_another_machine(data_path):
    folder = "measured/vidur/a100/meta-llama"
    path = str(data_path(f"{folder}/Llama-2-7b-hf/mlp.csv"))
    metrics, samples, series = linear_metrics("A100-80GB", [(path, "llama-2-7b")])
    assert not samples
    assert 0.6 < metrics["efficiency"] < 0.8
    assert sum(count for _, count in series["count"]) == metrics["measurements"]
    firsts = [first for first, _ in series["last"]]
    assert firsts == sorted(firsts)
    assert all(dict(series["last"])[first] >= first for first in firsts)
    assert max(most for _, most in series["largest"]) == metrics["largest_error"]
