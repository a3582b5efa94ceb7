"""Rooflines of whole phases: the paper's table, hand-worked times, brute force for limits."""

import dataclasses

import pytest

from kvlab.models.config import DecoderConfig
from kvlab.models.presets import preset
from kvlab.ops.retention import Sinks
from kvlab.ops.rope import Rope
from kvlab.ops.specs import CacheSpec, Kivi4, Paged, Recompute, Ring
from kvlab.research.devices import DEVICES, Device
from kvlab.research.operators import UNVEILED, Accounting
from kvlab.research.roofline import CostModel
from kvlab.research.variants import kv_heads

HALF = {"param_dtype": "float16", "dtype": "float16"}
LLAMA_2_7B = dataclasses.replace(preset("llama-2-7b"), **HALF)
PAGED_16_BIT = CacheSpec(Paged(16), "bfloat16")

# "LLM Inference Unveiled" (arXiv 2402.16363), Table 1: Llama-2-7B on an A6000, batch 1, sequence
# 2,048, as printed: operations, bytes, intensity, performance, bound.
_PRODUCT = ("69G", "67M", "1024", "155T", "compute"), ("34M", "34M", "1", "768G", "memory")
_MLP = ("185G", "152M", "1215", "155T", "compute"), ("90M", "90M", "1", "768G", "memory")
_SCORES = ("34G", "302M", "114", "87T", "memory"), ("17M", "17M", "0.99", "762G", "memory")
_NORM = ("59M", "34M", "1.75", "1T", "memory"), ("29K", "16K", "1.75", "1T", "memory")
_ADD = ("8M", "34M", "0.25", "192G", "memory"), ("4K", "16K", "0.25", "192G", "memory")
TABLE_1 = {
    "query": _PRODUCT,
    "key": _PRODUCT,
    "value": _PRODUCT,
    "output": _PRODUCT,
    "gate": _MLP,
    "up": _MLP,
    "down": _MLP,
    "qk_matmul": _SCORES,
    "sv_matmul": _SCORES,
    "softmax": (
        ("671M", "537M", "1.25", "960G", "memory"),
        ("328K", "262K", "1.25", "960G", "memory"),
    ),
    "attention_norm": _NORM,
    "mlp_norm": _NORM,
    "attention_add": _ADD,
    "mlp_add": _ADD,
}


def assert_prints(value, printed):
    """The number rounds to what is printed."""
    scale = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(printed[-1], 1)
    digits = printed.rstrip("KMGT")
    decimals = len(digits.partition(".")[2])
    assert abs(value / scale - float(digits)) <= 0.5 * 10**-decimals, (value, printed)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", TABLE_1)
def test_the_table_of_llm_inference_unveiled_is_reproduced(name, phase):
    model = CostModel(LLAMA_2_7B, PAGED_16_BIT, DEVICES["A6000"], UNVEILED)
    device = model.device
    operators = (model.prefill if phase == "prefill" else model.decode)(1, 2048).operators
    (one,) = [operator for operator in operators if operator.name == name]
    flops, moved, intensity, performance, bound = TABLE_1[name][phase == "decode"]
    assert_prints(one.flops, flops)
    assert_prints(one.moved_bytes, moved)
    assert_prints(one.intensity, intensity)
    assert_prints(device.attainable(one.intensity, "float16"), performance)
    assert device.bound(one.intensity, "float16") == bound


def test_the_turning_point_of_the_paper():
    assert round(DEVICES["A6000"].ridge("float16"), 1) == 201.6
    model = CostModel(LLAMA_2_7B, PAGED_16_BIT, DEVICES["A6000"], UNVEILED)
    assert [model.prefill(1, 2048).bound, model.decode(1, 2048).bound] == ["compute", "memory"]


SMALL = DecoderConfig(
    family="llama",
    vocab_size=101,
    num_layers=3,
    embed_dim=23,
    hidden_dim=31,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    max_length=211,
    rope=Rope(),
    windows=(7, None, 13),
)
DEVICE = Device("d", None, bandwidth=1000.0, memory=5e5, float32_flops=3000.0)
PAGED = CacheSpec(Paged(8))


def model_of(specs: object = PAGED, config=SMALL, device=DEVICE, accounting=None):
    return CostModel(config, specs, device, *([] if accounting is None else [accounting]))


def attention_of(phase):
    """Pairs, and bytes of keys and values, of each kind of layer."""
    found = [one for one in phase.operators if one.name == "attention"]
    return [(one.flops / (6 * (4 * 10 + 5)), one.kv_bytes) for one in found]


@pytest.mark.parametrize(("new", "held"), [(1, 0), (5, 0), (5, 3), (11, 17), (40, 0)])
def test_prefill_computes_the_pairs_that_the_mask_lets_through(new, held):
    phase = model_of().prefill(2, new, held)
    wanted = []
    for window in (7, 10**6, 13):
        places = range(held, held + new)
        pairs = sum(min(place + 1, window) for place in places)
        seen = {key for place in places for key in range(max(0, place + 1 - window), place + 1)}
        wanted.append((2 * pairs, 2 * len(seen) * 2 * 2 * 10 * 4))
    assert attention_of(phase) == list(dict.fromkeys(wanted))  # layers alike are one group


def test_without_a_mask_every_query_meets_every_key_that_is_read():
    phase = model_of(accounting=Accounting(causal=False)).prefill(1, 11, 17)
    assert [pairs for pairs, _ in attention_of(phase)] == [11 * 17, 11 * 28, 11 * 23]


def test_decode_reads_what_windows_budgets_and_storage_leave():
    # A token is 2 heads x 10 values, keys and values, float32: 160 bytes.
    assert attention_of(model_of().decode(3, 29)) == [
        (3 * 7, 3 * 7 * 160),
        (3 * 29, 3 * 29 * 160),
        (3 * 13, 3 * 13 * 160),
    ]
    sinks = CacheSpec(Paged(8), "int8", Sinks(11, num_sinks=3))  # 2 x 14, and a position with keys
    assert attention_of(model_of(sinks).decode(1, 29)) == [(7, 7 * 60), (11, 11 * 60)]
    grown = CacheSpec(Paged(8), retention=Sinks(11, "prefill", num_sinks=3))
    pairs = [pairs for pairs, _ in attention_of(model_of(grown).decode(1, 29, prompt=23))]
    assert pairs == [7, 17, 13]
    ring = attention_of(model_of((CacheSpec(Ring(5)), PAGED, CacheSpec(Ring(17)))).decode(1, 29))
    assert [pairs for pairs, _ in ring] == [5, 29, 13]
    # KIVI's closed groups end at the 28 tokens before the step: 1 is in float32.
    closed = 2 * (2 * 5 + 5 * 8 + 5 * 8)
    kivi = attention_of(model_of(CacheSpec(Paged(8), Kivi4(2))).decode(1, 29))
    assert kivi[1] == (29, 28 * closed + 160)


def test_without_a_cache_every_step_computes_the_text_again():
    model = model_of(CacheSpec(Recompute()))
    assert model.decode(2, 29) == model.prefill(2, 29) == model.prefill(2, 12, held=17)
    assert model.decode(2, 29).total.kv_bytes == 0
    cached = model_of().prefill(2, 29).total
    assert model.decode(2, 29).total.flops == cached.flops


def test_a_phase_takes_its_operators_one_by_one_or_overlapped():
    phase = model_of().prefill(2, 29)
    one_by_one = sum(
        one.layers * max(one.flops / 3000, one.moved_bytes / 1000) for one in phase.operators
    )
    assert phase.seconds == pytest.approx(one_by_one)
    total = phase.total
    assert phase.overlapped_seconds == max(total.flops / 3000, total.moved_bytes / 1000)
    assert phase.overlapped_seconds < phase.seconds
    assert phase.attainable == pytest.approx(min(3000, 1000 * total.flops / total.moved_bytes))


def test_time_to_the_first_token_is_that_of_all_chunks():
    model = model_of()
    assert model.ttft_s(29) == model.prefill(1, 29).seconds
    pieces = [model.prefill(2, new, held).seconds for new, held in ((13, 0), (13, 13), (3, 26))]
    assert model.ttft_s(29, 2, chunk=13) == pytest.approx(sum(pieces))
    assert model.ttft_s(29, 2, chunk=13) > model.ttft_s(29, 2)  # weights are read three times
    assert model.tpot_s(29, 3) == model.decode(3, 29).seconds
    half = CostModel(SMALL, PAGED, DEVICE.scaled(0.5))
    assert half.tpot_s(29) == pytest.approx(2 * model.tpot_s(29))


@pytest.mark.parametrize("context", [1, 2, 7, 11, 29])
def test_the_batch_from_which_decode_is_bound_by_compute(context):
    # A sequence alone, without the weights, has 2.95 operations a byte at context 1, 2.53 at 29.
    model = model_of(device=dataclasses.replace(DEVICE, float32_flops=2600.0))
    bounds = [model.decode(batch, context).bound for batch in range(1, 1000)]
    first = bounds.index("compute") + 1 if "compute" in bounds else None
    assert model.compute_bound_batch(context) == first
    assert (first is None) == (context == 29)


def test_long_contexts_keep_decode_bound_by_memory_at_any_batch():
    model = CostModel(LLAMA_2_7B, PAGED_16_BIT, DEVICES["A100-80GB"])
    found = [model.compute_bound_batch(context) for context in (1, 128, 512)]
    assert found[0] is not None
    assert found[0] < found[1]
    assert found[2] is None
    assert model.decode(10**7, 512).bound == "memory"
    # One KV head for all query heads moves 1/32 of the bytes.
    mqa = dataclasses.replace(LLAMA_2_7B, num_kv_heads=kv_heads(LLAMA_2_7B, "mqa"))
    assert CostModel(mqa, PAGED_16_BIT, model.device).compute_bound_batch(512) < 400


def test_variants_move_fewer_bytes_as_their_heads_say():
    moved = {}
    for name in ("mha", "gqa:8", "mqa"):
        config = dataclasses.replace(LLAMA_2_7B, num_kv_heads=kv_heads(LLAMA_2_7B, name))
        phase = CostModel(config, PAGED_16_BIT, DEVICES["A100-80GB"]).decode(1, 2048)
        moved[name] = sum(one.layers * one.kv_bytes for one in phase.operators)
    assert moved["mha"] == 4 * moved["gqa:8"] == 32 * moved["mqa"] == 2049 * 524_288
    # 4,096 values of 2 bytes, keys and values, in 32 layers: 512 KiB a token.
    int8 = CostModel(LLAMA_2_7B, CacheSpec(Paged(16), "int8"), DEVICES["A100-80GB"])
    assert int8.decode(1, 2048).total.kv_bytes / moved["mha"] == (128 + 4) / 256


@pytest.mark.parametrize("spec", [PAGED, CacheSpec(Ring(7)), CacheSpec(Paged(8), "int4")], ids=str)
@pytest.mark.parametrize("context", [1, 40, 41, 211])
def test_the_largest_batch_fits_and_one_more_does_not(spec, context):
    model = model_of(spec)
    batch = model.largest_batch(context)
    assert model.used_bytes(batch, context) <= 5e5 < model.used_bytes(batch + 1, context)
    assert model.largest_batch(context, reserved=5e5) == 0


def test_the_largest_context_fits_and_one_more_does_not():
    model = model_of()
    for batch in (7, 11, 13):
        context = model.largest_context(batch)
        assert context % 8 == 0  # whole pages
        assert model.used_bytes(batch, context) <= 5e5 < model.used_bytes(batch, context + 1)
    assert model.largest_context(1) == 211  # the model's own
    assert model.largest_context(10**4) == 0


def test_without_a_cache_any_batch_fits():
    assert model_of(CacheSpec(Recompute())).largest_batch(29) is None


def test_llama_2_7b_on_an_a100_of_80_gb():
    model = CostModel(LLAMA_2_7B, PAGED_16_BIT, DEVICES["A100-80GB"])
    assert model.param_bytes() == 2 * 6_738_415_616
    assert model.largest_batch(2048) == (80 * 10**9 - model.param_bytes()) // (2048 * 524_288)
    assert model.largest_context(16) == 4096
    assert model.largest_context(32) == 3952
    # Weights alone bind a lone sequence: 13.2 GB over 2,039 GB/s.
    assert model.tpot_s(1) == pytest.approx(13.2e9 / 2039e9, rel=0.01)


def test_published_claims_about_13b_models():
    """Sarathi (arXiv 2308.16369, sections 1 and 3.1), LLaMA-13B on an A6000: a decoded token costs
    200, 100 and 16.7 prefilled ones at batch 1, 2 and 18; 512 tokens of prefill saturate compute;
    decode needs a batch of 256. DistServe (arXiv 2401.09670): 512 tokens bind an A100 as well."""
    config = dataclasses.replace(preset("llama-2-13b"), **HALF)
    model = CostModel(config, PAGED_16_BIT, DEVICES["A6000"])
    prefilled = model.ttft_s(512) / 512
    ratios = [model.tpot_s(512, batch) / batch / prefilled for batch in (1, 2, 18)]
    assert ratios == pytest.approx([188, 96, 13.4], rel=0.01)
    assert ratios == pytest.approx([200, 100, 16.7], rel=0.2)
    assert model.prefill(1, 512).bound == "compute"
    assert model.prefill(1, 128).bound == model.decode(18, 512).bound == "memory"
    assert model.compute_bound_batch(1) == pytest.approx(256, rel=0.1)
    a100 = dataclasses.replace(model, device=DEVICES["A100-80GB"])
    assert a100.prefill(1, 512).bound == "compute"


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="2 cache specs for 3 layers; give one spec, or one per"):
        model_of((PAGED, PAGED))
    with pytest.raises(ValueError, match="no known peak for dtype='float32'"):
        model_of(device=DEVICES["TPU-v5e"])
    for call in (
        lambda: model_of().prefill(0, 3),
        lambda: model_of().prefill(1, 0),
        lambda: model_of().prefill(1, 1, -1),
        lambda: model_of().decode(1, 0),
        lambda: model_of().largest_context(0),
    ):
        with pytest.raises(ValueError, match=r"given: want [01] or more"):
            call()
