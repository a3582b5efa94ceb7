"""What a step costs: figures of OPT-13B, exact counts, and seconds worked out by hand."""

import dataclasses
import math

import numpy as np
import pytest

from kvlab.models.presets import preset
from kvlab.ops.retention import Sinks
from kvlab.ops.specs import CacheSpec, Kivi4, Paged, Recompute, Ring
from kvlab.research.cost_model import OPT_13B, ServedModel, StepCost, served_model
from kvlab.research.devices import DEVICES, Device
from kvlab.research.roofline import CostModel

A100 = DEVICES["A100-40GB"]
# A token costs 20 operations, 7 more for its logits, and 240 for each key that it meets; keys and
# values are 120 bytes a token.
SMALL = ServedModel("small", 20, 240, 7, weight_bytes=20, kv_bytes_per_token=120)
SLOW_MEMORY = StepCost(SMALL, Device("d", flops=1e9, bandwidth=100.0, memory=1.0))
SLOW_SUMS = StepCost(SMALL, Device("d", flops=100.0, bandwidth=1e9, memory=1.0))


def test_opt_13b_is_as_large_as_the_paged_attention_paper_says():
    """Section 3 of arXiv 2309.06180: "800 KB" a token; Table 1: 26 GB of parameters, 12 GB of
    KV cache and 15.7K slots on an A100 of 40 GB."""
    assert round(OPT_13B.weight_bytes / 1e9) == 26
    assert OPT_13B.weight_bytes == pytest.approx(2 * 12.85e9, rel=1e-3)  # without positions
    assert OPT_13B.token_flops + OPT_13B.position_flops == pytest.approx(2 * 12.85e9, rel=1e-3)
    assert OPT_13B.pair_flops == pytest.approx(4 * 40 * 40 * 128, rel=0.01)  # and the softmax
    assert OPT_13B.kv_bytes_per_token == 819_200 == 800 * 1024
    assert 12 * 2**30 // OPT_13B.kv_bytes_per_token == 15_728
    assert OPT_13B.weight_bytes + 12 * 2**30 < A100.memory


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_a_served_model_costs_what_its_operators_do(storage):
    config = dataclasses.replace(preset("llama-3-8b"), dtype="bfloat16", param_dtype="bfloat16")
    spec = CacheSpec(Paged(16), storage)
    served = served_model("Llama-3-8B", config, spec)
    exact = CostModel(config, spec, DEVICES["A100-80GB"])
    decode = exact.decode(7, 131).total
    flops = 7 * (served.token_flops + served.position_flops) + 7 * 131 * served.pair_flops
    assert decode.flops == flops
    assert decode.kv_bytes == (7 * 131 + 7) * served.kv_bytes_per_token
    embedded = 7 * 4096 * 2
    assert decode.weight_bytes == served.weight_bytes + embedded
    prefill = exact.prefill(3, 29, 13).total
    pairs = 3 * sum(range(14, 43))
    flops = 3 * 29 * served.token_flops + 3 * served.position_flops + pairs * served.pair_flops
    assert prefill.flops == flops
    assert prefill.kv_bytes == (3 * 42 + 3 * 29) * served.kv_bytes_per_token


def test_models_whose_tokens_are_not_alike_are_refused():
    mistral, llama = preset("mistral-7b-v0.1"), preset("llama-3-8b")
    with pytest.raises(ValueError, match="Mistral reads fewer keys in some layers than its"):
        served_model("Mistral", mistral, CacheSpec(Paged(16)))
    with pytest.raises(ValueError, match="use a model without windows, and retention=all"):
        served_model("Llama", llama, CacheSpec(Paged(16), retention=Sinks(19)))
    for spec in (CacheSpec(Recompute()), CacheSpec(Ring(13)), CacheSpec(Paged(16), Kivi4(4))):
        with pytest.raises(ValueError, match="must be the same wherever it stands; use placement="):
            served_model("Llama", llama, spec)
    with pytest.raises(ValueError, match="no known peak for dtype='bfloat16'"):
        StepCost(SMALL, Device("d", None, 1.0, 1.0, float32_flops=1.0))


def test_decode_takes_its_bytes_over_the_bandwidth_where_memory_binds():
    # 20 bytes of weights, 7 tokens of 120 bytes that are read and 2 that are written.
    assert SLOW_MEMORY.decode_s(2, 7) == pytest.approx((20 + 9 * 120) / 100)
    half = dataclasses.replace(SLOW_MEMORY, bandwidth_efficiency=0.5, flops_efficiency=0.9)
    assert half.decode_s(2, 7) == pytest.approx((20 + 9 * 120) / 50)


def test_decode_takes_its_operations_over_the_peak_where_sums_bind():
    # 2 tokens meet 7 keys together.
    assert SLOW_SUMS.decode_s(2, 7) == pytest.approx((2 * 27 + 240 * 7) / 100)
    quarter = dataclasses.replace(SLOW_SUMS, flops_efficiency=0.25, bandwidth_efficiency=0.9)
    assert quarter.decode_s(2, 7) == pytest.approx((2 * 27 + 240 * 7) / 25)


def test_prefill_counts_pairs_for_its_operations_and_held_tokens_for_its_bytes():
    # 5 tokens behind 3 that are held: 5 x 3 + 5 x 6 / 2 = 30 pairs.
    assert SLOW_SUMS.prefill_s(5, 30, 8) == pytest.approx((5 * 27 + 240 * 30) / 100)
    assert SLOW_MEMORY.prefill_s(5, 30, 8) == pytest.approx((20 + 13 * 120) / 100)


def test_the_larger_of_both_counts_and_overheads_come_on_top():
    cost = StepCost(
        SMALL,
        Device("d", flops=1000.0, bandwidth=800.0, memory=1.0),
        call_overhead_s=3.0,
        sequence_overhead_s=0.5,
    )
    operations, moved = (4 * 27 + 240 * 9) / 1000, (20 + 13 * 120) / 800
    assert operations > moved
    assert cost.decode_s(4, 9) == pytest.approx(3 + 4 * 0.5 + operations)
    assert cost.prefill_s(4, 0, 9) == pytest.approx(3 + moved)  # no pairs: bytes bind


def test_a_lone_sequence_of_opt_13b_decodes_at_the_speed_of_its_weights():
    cost = StepCost(OPT_13B, A100)
    seconds = float(cost.decode_s(1, 1000))
    assert seconds == pytest.approx((25.7e9 + 1001 * 819_200) / 1555e9, rel=1e-3)
    assert 0.016 < seconds < 0.018
    # Prefill of 2,048 tokens is bound by its sums: 2 x 12.85e9 a token and 819,200 a pair.
    pairs = 2048 * 2049 / 2
    operations = 2 * 12.85e9 * 2048 + 4 * 40 * 40 * 128 * pairs
    assert cost.prefill_s(2048, pairs, 2048) == pytest.approx(operations / 312e12, rel=1e-3)


def test_more_work_never_takes_less_time():
    cost = StepCost(OPT_13B, A100, 0.5, 0.8, 1e-4, 1e-6)
    for tokens in (0, 1, 100, 15_728):
        by_sequences = [float(cost.decode_s(count, tokens)) for count in (1, 2, 64, 256, 2048)]
        assert by_sequences == sorted(set(by_sequences))
    held = np.arange(0, 15_728, 13)
    for count in (1, 256, 2048):
        assert np.all(np.diff(cost.decode_s(count, held)) > 0)
    by_tokens = [float(cost.prefill_s(n, n * (n + 1) / 2, n)) for n in range(0, 2049, 64)]
    assert by_tokens == sorted(set(by_tokens))


@pytest.mark.parametrize("field", ["flops_efficiency", "bandwidth_efficiency"])
def test_a_device_that_reaches_less_takes_no_less_time(field):
    for cost in (SLOW_MEMORY, SLOW_SUMS):
        slower = dataclasses.replace(cost, **{field: 0.3})
        assert slower.decode_s(2, 7) >= cost.decode_s(2, 7)
        assert slower.prefill_s(2, 3, 7) >= cost.prefill_s(2, 3, 7)
    # And more where it binds.
    binding = SLOW_SUMS if field == "flops_efficiency" else SLOW_MEMORY
    slower = dataclasses.replace(binding, **{field: 0.3})
    assert slower.decode_s(2, 7) == pytest.approx(binding.decode_s(2, 7) / 0.3)


def test_several_steps_at_once_cost_what_they_cost_one_by_one():
    cost = StepCost(OPT_13B, A100, 0.6, 0.7, 1e-3, 1e-5)
    # Bytes bind first and sums later: the second term grows faster.
    turning = dataclasses.replace(
        cost, model=dataclasses.replace(OPT_13B, kv_bytes_per_token=20_480)
    )
    for one in (cost, turning):
        totals = 5000 + 300 * np.arange(1, 65)
        together = one.decode_s(300, totals)
        assert together.shape == (64,)
        assert together.tolist() == [float(one.decode_s(300, total)) for total in totals.tolist()]


ERRORS = {
    "no peak": ({"flops_efficiency": 0.0}, "flops_efficiency=0.0 given: want above 0, at most 1"),
    "above the peak": ({"flops_efficiency": 1.01}, "flops_efficiency=1.01 given"),
    "negative": ({"bandwidth_efficiency": -0.5}, "bandwidth_efficiency=-0.5 given"),
    "no number": ({"bandwidth_efficiency": math.nan}, "bandwidth_efficiency=nan given"),
    "gains time": ({"call_overhead_s": -1e-9}, "call_overhead_s=-1e-09 given: want a number of"),
    "never ends": ({"sequence_overhead_s": math.inf}, "sequence_overhead_s=inf given"),
    "no overhead": ({"sequence_overhead_s": math.nan}, "sequence_overhead_s=nan given"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_numbers_that_no_device_has_are_refused(case):
    fields, reason = ERRORS[case]
    with pytest.raises(ValueError, match=reason):
        StepCost(OPT_13B, A100, **fields)
