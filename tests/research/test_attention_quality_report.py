"""What is said of losses by KV heads: rows made by hand, sums by head."""

import math

import pytest

from kvlab.research.attention_quality_report import present_attention_quality
from kvlab.research.attention_quality_scores import Scores, Variant
from kvlab.research.rows import make_row


def row(kind, heads, metrics, seed=0, repeats=None, **settings):
    config = {"kind": kind, "num_heads": 4, "num_kv_heads": heads, **settings}
    if kind not in ("memory", "speed"):
        config |= {"model": f"m{seed}", "sha256": f"{kind == 'trained' and heads < 4}{seed}"}
        config |= {"repeat": seed, "data": [{"file": "story.txt"}]}
    return make_row(
        "attention_quality",
        config,
        0,
        metrics=metrics,
        repeats=repeats,
        started="2026-12-01T00:00:00+00:00",
        wall_s=1.0,
    )


def judged(kind, heads, loss, seed=0, **settings):
    metrics = {
        "held_out_loss": loss,
        "held_out_perplexity": math.exp(loss),
        "held_out_bits_per_byte": loss / 2,
        "parameters": 1000 + heads,
        "kv_bytes_per_token": 8 * heads,
    }
    if kind == "trained":
        metrics |= {"text_tokens": 5000, "held_out_tokens": 500}
    return row(kind, heads, metrics, seed, **settings)


def set_of(shift=0.0, seed=0):
    """Losses of one source; all of them are `shift` higher."""
    losses = [
        (("trained", 4), 3.0),
        (("trained", 1), 3.1 + shift / 2),
        (("converted", 1, "mean"), 4.0),
        (("converted", 1, "first"), 4.5),
        (("control", 4, None, 0.05), 2.9),
        (("control", 4, None, 0.1), 2.8),
        (("uptrained", 1, "mean", 0.05), 3.2),
        (("uptrained", 1, "mean", 0.1), 3.0),
        (("uptrained", 1, "first", 0.05), 3.15),
    ]
    rows = []
    for (kind, heads, *made), loss in losses:
        settings = {k: v for k, v in zip(("pooling", "share"), made, strict=False) if v}
        rows.append(judged(kind, heads, loss + shift, seed, **settings))
    return rows


COSTS = [
    row(
        "memory",
        heads,
        {"kv_bytes_per_token": 8 * heads, "parameters": 9, "max_concurrent_sequences": 40 // heads},
        prompt_tokens=5,
        decode_tokens=3,
        kv_mib=1.0,
    )
    for heads in (4, 1)
] + [
    row(
        "speed",
        heads,
        {},
        repeats={"tpot_s": [s, 3 * s, 2 * s], "decode_tokens_per_s": [8 / s, 8 / s / 3, 4 / s]},
        batch=8,
    )
    for heads, s in ((4, 0.4), (1, 0.1))
]


def test_gaps_are_between_models_of_one_source():
    scores = Scores(set_of())
    assert (scores.num_heads, scores.fewer, scores.poolings) == (4, [1], ["mean", "first"])
    assert scores.common_share == 0.05
    assert scores.opened(1, "mean").mean == pytest.approx(1.0)
    assert scores.left(1, "mean", 0.05).mean == pytest.approx(0.3)
    assert scores.recovered(1, "mean", 0.05).mean == pytest.approx(0.7)
    assert scores.recovered(1, "mean", 0.05, controlled=False).mean == pytest.approx(0.8)
    assert scores.over_scratch(1, "mean", 0.1) == pytest.approx(-0.1)
    assert scores.spread() is None


def test_seeds_cancel_in_differences_and_show_in_means():
    scores = Scores([*set_of(), *set_of(0.2, seed=1)])
    opened = scores.opened(1, "mean")
    assert (opened.mean, opened.margin, opened.count) == pytest.approx((1.0, 0.0, 2))
    mean = scores.mean(Variant("trained", 4))
    assert (mean.mean, mean.margin) == pytest.approx((3.1, 12.706 * 0.1), rel=1e-4)
    assert scores.spread() == pytest.approx(0.3)


def test_a_row_that_was_measured_twice_counts_once():
    scores = Scores([*set_of(), *set_of(0.2)])
    assert scores.mean(Variant("trained", 4)).count == 1


def test_findings_follow_from_the_numbers():
    shown = present_attention_quality([*COSTS, *set_of()])
    recovery, ways, more, scratch, savings, limits = shown.findings
    assert "K=1: +1.000, then +0.300, 70.0 % recovered (80.0 % as it was)." in recovery
    assert recovery.endswith("With 5 % most of the gap is recovered at every K.")
    assert "K=1: -0.050: mean is not as good at any K (the paper scores 55.6 with mean" in ways
    assert "5 %: +0.300, 10 %: +0.200" in more
    assert "K=1 +0.100; one model of each K was trained" in scratch
    assert "4.0 times fewer KV bytes a token, 4.0 times as many sequences at once, " in savings
    assert "x4.00 the decode speed at batch 8" in savings
    assert "1,001 (K=1) to 1,004 parameters (K=4)" in limits
    assert "With one model of each K nothing here has an interval" in limits


def test_findings_of_several_seeds_have_intervals():
    shown = present_attention_quality([*set_of(), *set_of(0.2, seed=1), *set_of(0.1, seed=2)])
    assert "K=1: +1.000 ± 0.000, then +0.300 ± 0.000, 70.0 ± 0.0 % recovered" in shown.findings[0]
    assert "lie up to 0.300 apart; no cost is more" in shown.findings[3]
    assert "Intervals are over 3 models of each K" in shown.findings[-1]


def test_a_gap_that_stays_is_said_to():
    rows = [one for one in set_of() if one["config"]["kind"] != "uptrained"]
    rows.append(judged("uptrained", 1, 3.5, pooling="mean", share=0.05))
    rows = [one for one in rows if one["config"].get("pooling") != "first"]
    said = present_attention_quality(rows).findings[0]
    assert said.endswith(
        "40.0 % recovered (50.0 % as it was). With 5 % most of it is not at any K."
    )


def test_tables_and_figures():
    shown = present_attention_quality([*COSTS, *set_of()])
    quality, gaps, costs, *published = shown.tables
    (scratch,) = [
        r for r in quality.rows if r["model"] == "trained from scratch" and r["KV heads"] == "1"
    ]
    assert scratch["loss"] == "3.100"
    assert scratch["KV B/token"] == "8"
    assert [r["over trained from scratch"] for r in gaps.rows] == ["+0.100", "-0.100", "+0.050"]
    assert costs.rows[1]["sequences of 8 in 1 MiB"] == "40"
    assert costs.rows[1]["decode tok/s, batch 8"] == "40.0 [26.7–80.0]"
    assert "MQA-XXL" in published[0].text()
    names = ["perplexity_against_bytes", "pooling", "uptraining", "decode_time"]
    assert [picture.name for picture in shown.pictures] == [f"{name}.png" for name in names]
    assert all(picture.png.startswith(b"\x89PNG") for picture in shown.pictures)


@pytest.mark.parametrize("rows", [[], COSTS, set_of()[:1], set_of()[:2]])
def test_unfinished_runs_are_presented_too(rows):
    shown = present_attention_quality(rows)
    assert len(shown.labels) == len(rows)
    assert bool(shown.tables) == bool(rows)
