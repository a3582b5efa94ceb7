"""The report of roofline: findings of constructed rows, tables and figures."""

import pytest

from kvlab.research.report import presentation, results_text
from kvlab.research.results import make_row
from kvlab.research.roofline_chart import (
    RooflinePanel,
    RooflinePoint,
    TimePair,
    draw_against,
    draw_rooflines,
)
from kvlab.research.roofline_findings import bound, limits_of, roofline_findings, variant_namer

WORKLOAD = {"model": "m", "dtype": "float32", "placement": "paged", "page_size": 16}
WORKLOAD |= {"storage": "float32"}
PNG = b"\x89PNG"


def row(config, metrics, repeats=None, **more):
    return make_row(
        "roofline",
        config,
        0,
        metrics=metrics,
        repeats=repeats,
        started="2026-12-01T00:00:00+00:00",
        wall_s=1.0,
        **more,
    )


def limit(name, by, rate, turn=0):
    metric = "bytes_per_s" if name == "bandwidth" else "flops_per_s"
    samples = {metric: [0.8 * rate, 0.9 * rate, rate]}
    return row(
        {"kind": "limit", "limit": name, "by": by, "turn": turn},
        {"memory_bytes": 2**30, "size": 2**20},
        samples,
    )


# 20 GB/s and 200 GFLOP/s: the ridge is at 10 operations a byte.
LIMITS = [
    limit("bandwidth", "sums", 15e9),
    limit("bandwidth", "vectors", 20e9),
    limit("float32_flops", "dot", 200e9),
]


def phase(name, batch, prompt, seconds, intensity, share, attention="gqa", turning=None, **more):
    """A phase whose operations are those that fit its time and share of the limit of 10 FLOP/B."""
    config = {"kind": "phase", "attention": attention, **WORKLOAD, **more}
    config |= {"batch_size": batch, "prompt_tokens": prompt, "phase": name}
    attainable = min(200e9, intensity * 20e9)
    flops = share * attainable * seconds
    metrics = {
        "flops": flops,
        "moved_bytes": flops / intensity,
        "arithmetic_intensity": intensity,
        "ridge": 10.0,
        "mfu": share * attainable / 200e9,
        "mbu": share * attainable / intensity / 20e9,
        "limit_share": share,
        "predicted_s": 0.9 * seconds * share,
        "compile_s": 1.5,
        "compile_count": 2,
    }
    if turning is not None:
        metrics["compute_bound_batch"] = turning
    time, rate = ("ttft_s", "prefill") if name == "prefill" else ("tpot_s", "decode")
    tokens = batch * prompt if name == "prefill" else batch
    repeats = {time: [seconds, seconds, 2 * seconds]}
    repeats[f"{rate}_tokens_per_s"] = [tokens / one for one in repeats[time]]
    return row(config, metrics, repeats)


PHASES = [
    phase("prefill", 1, 64, 1.0, 40.0, 0.5),
    phase("prefill", 8, 64, 7.0, 80.0, 0.6),
    phase("decode", 1, 64, 0.1, 0.5, 0.62, turning=21),
    phase("decode", 8, 64, 0.2, 4.0, 0.41, turning=21),
    phase("decode", 32, 64, 0.4, 12.0, 0.3, turning=21),
    phase("decode", 32, 512, 0.5, 8.0, 0.35),
]


def operator(phase, number, name, layers, seconds, weight, kv):
    config = {"kind": "operator", "attention": "gqa", **WORKLOAD, "batch_size": 1}
    config |= {"prompt_tokens": 64, "phase": phase, "number": number, "operator": name}
    moved = weight + kv + 5e6
    metrics = {"layers": layers, "flops": 3 * moved, "moved_bytes": moved, "predicted_s": seconds}
    metrics |= {"weight_bytes": weight, "kv_bytes": kv, "ridge": 10.0}
    return row(config, metrics | {"arithmetic_intensity": 3.0})


OPERATORS = [
    operator("decode", 0, "query", 4, 0.01, 45e6, 0.0),
    operator("decode", 1, "attention", 4, 0.03, 0.0, 20e6),
]
DEVICES = [
    row(
        {"kind": "device", "device": name, "attention": "gqa", "batch_size": 1} | more,
        {"predicted_ttft_s": 0.5, "predicted_tpot_s": 0.02, "ridge": 153.0}
        | {"largest_context": 2048}
        | metrics,
    )
    for name, metrics, more in (
        ("this machine", {"largest_batch": 11, "compute_bound_batch": 21}, {"prompt_tokens": 64}),
        ("L4-24GB", {}, {"prompt_tokens": 64}),
    )
]
LINEAR = row(
    {
        "kind": "linear_times",
        "device": "L4-24GB",
        "files": [{"model": "llama-2-7b", "path": "mlp.csv"}],
    },
    {"efficiency": 0.7, "measurements": 9, "median_error": 0.04, "p90_error": 0.12}
    | {"largest_error": 0.4},
    series={
        "last": [(1, 8), (9, 64)],
        "count": [(1, 4), (9, 5)],
        "bias": [(1, 0.05), (9, -0.3)],
        "median": [(1, 0.05), (9, 0.3)],
        "p90": [(1, 0.06), (9, 0.35)],
        "largest": [(1, 0.07), (9, 0.4)],
    },
)
ROWS = [*LIMITS, *PHASES, *OPERATORS, *DEVICES, LINEAR]


def test_the_machine_is_its_fastest_probes():
    assert limits_of(LIMITS) == {"bandwidth": 20e9, "float32_flops": 200e9}
    assert [bound(one) for one in PHASES] == ["compute"] * 2 + ["memory"] * 2 + [
        "compute",
        "memory",
    ]


def test_findings_say_what_binds_and_how_far_the_limit_is():
    machine, prefill, decode, turning, ratio, operators, linear = roofline_findings(ROWS)
    assert machine == (
        "This machine reads 20.0 GB/s (vectors; samples from 16.0) and computes 200 GFLOP/s in "
        "float32 (dot; samples from 160): its ridge is at 10.0 operations a byte."
    )
    assert prefill == (
        "gqa: prefill is compute-bound at every batch (40.0 to 80.0 FLOP/byte, ridge 10.0), "
        "reaching 0.50 of the matrix peak at batch 1, 0.60 at batch 8."
    )
    assert decode == (
        "gqa: decode is compute-bound at batch 32 with prompts of 64 (12.0 FLOP/byte, ridge 10.0), "
        "reaching 0.30 of the matrix peak at batch 32; memory-bound at batch 1, 8 and batch 32 "
        "with prompts of 512 (0.500 to 8.00 FLOP/byte, ridge 10.0), reaching 0.62 of the bandwidth "
        "limit at batch 1, 0.41 at batch 8, 0.35 at batch 32."
    )
    assert turning == (
        "gqa: decode turns compute-bound from batch 21 on at 64 tokens; at no batch at 512 tokens, "
        "where keys and values of its own cost a sequence more time than operations (predicted)."
    )
    assert ratio.startswith("Measured over predicted times, median over all points: x2.04 for pre")
    assert "x2.94 for decode (x1.79 to x3.70)" in ratio
    # Bytes of all layers: 4 x 50 MB and 4 x 25 MB, of which 4 x 45 are weights, 4 x 20 the cache.
    assert "weights are 60.0 %, keys and values 26.7 %" in operators
    assert "attention, 75.0 %" in operators
    assert linear == (
        "Linear layers of L4-24GB: with one efficiency of 0.700 the median error of 9 predicted "
        "times is 4.0 % (p90 12.0 %); it is furthest off from 9 to 64 tokens, where predictions "
        "are 30.0 % too fast."
    )


def test_variants_are_named_by_what_differs():
    assert {*map(variant_namer(PHASES), PHASES)} == {"gqa"}
    eight = phase("decode", 1, 64, 0.1, 0.5, 0.6, attention="mha", storage="int8")
    name_of = variant_namer([*PHASES, eight])
    assert name_of(eight) == "mha int8"
    assert name_of(PHASES[0]) == "gqa float32"


def test_tables_and_figures_of_all_kinds():
    shown = presentation("roofline", ROWS)
    titles = [table.title for table in shown.tables]
    assert titles[:3] == [
        "Limits of this machine",
        "Phases against the limits",
        "Compiling, apart from the times",
    ]
    assert titles[3] == "Operators of decode: gqa, batch 1, 64 tokens"
    assert titles[5].endswith("llama-2-7b on L4-24GB, one efficiency of 0.700")
    vectors = shown.tables[0].rows[1]
    assert (vectors["best"], vectors["median"]) == ("20.0 GB/s", "18.0 GB/s")
    first = shown.tables[1].rows[0]
    assert first["ms"] == "1,000 [1,000\N{EN DASH}2,000]"
    assert (first["MFU %"], first["of the limit %"], first["bound"]) == ("50.0", "50.0", "compute")
    assert first["tok/s"] == "64.0"
    query = shown.tables[3].rows[0]
    assert (query["MB"], query["at best GFLOP/s"], query["all layers ms"]) == (
        "50.0",
        "15.0",
        "40.0",
    )
    here, other = shown.tables[4].rows
    assert (here["decode compute-bound from batch"], here["largest batch that fits"]) == (
        "21",
        "11",
    )
    assert (other["decode compute-bound from batch"], other["largest batch that fits"]) == (
        "none",
        "any",
    )
    assert [picture.name for picture in shown.pictures] == [
        "roofline.png",
        "measured_predicted.png",
        "utilisation.png",
    ]
    assert all(picture.png.startswith(PNG) for picture in shown.pictures)
    assert len(shown.labels) == len(ROWS)


@pytest.mark.parametrize("rows", [[], LIMITS, [*LIMITS, *DEVICES], PHASES])
def test_an_unfinished_run_shows_what_there_is(rows):
    shown = presentation("roofline", rows)
    assert len(shown.pictures) == (2 if rows is PHASES else 0)
    assert results_text(rows, "roofline")


def test_a_limit_is_the_best_of_all_turns():
    later = limit("bandwidth", "sums", 25e9, turn=1)
    assert limits_of([*LIMITS, later])["bandwidth"] == 25e9
    shown = presentation("roofline", [*LIMITS, later, *PHASES])
    sums, vectors, _ = shown.tables[0].rows
    assert (sums["best"], sums["median"], vectors["best"]) == (
        *("25.0 GB/s", "17.5 GB/s"),
        "20.0 GB/s",
    )
    assert shown.findings[0].startswith("This machine reads 25.0 GB/s (sums; ")


def test_a_failed_row_is_named():
    failed = row(
        {"kind": "limit", "limit": "int8_flops", "by": "XLA's dot", "turn": 0},
        {},
        error="no int8 here",
    )
    text = results_text([*ROWS, failed], "roofline")
    assert "int8 products by XLA's dot, turn 0" in text
    assert "no int8 here" in text


def test_two_runs_have_a_roofline_each():
    rows = []
    for run in ("one", "two"):
        for each in ROWS:
            copy = each.copy()
            copy["config"] = {**each["config"], "run": run}
            rows.append(copy)
    shown = presentation("roofline", rows)
    variants = {cells["variant"] for cells in shown.tables[1].rows}
    assert variants == {"gqa one", "gqa two"}
    assert shown.findings[0].startswith("The machine of one reads")
    assert sum("perators of decode" in table.title for table in shown.tables) == 2
    assert {cells["run"] for cells in shown.tables[0].rows} == {"one", "two"}


def test_a_roofline_of_any_scale_is_drawn():
    points = tuple(
        RooflinePoint("gqa", f"batch {b}", b / 2, b * 1e11, b * 3e11) for b in (1, 2, 64)
    )
    assert draw_rooflines([RooflinePanel("Decode", 4.8e12, 989e12, points)]).startswith(PNG)
    assert draw_against([TimePair("gqa", "decode", 1e-3, 1e-3)]).startswith(PNG)
