"""Figures of hand-made requests and histories, worked out by hand."""

import dataclasses

import numpy as np
import pytest

from kvlab.research.cache_usage import Usage, over_time
from kvlab.research.request_metrics import (
    RequestFigures,
    Targets,
    inter_token_gaps,
    request_figures,
    serving_metrics,
    usage_metrics,
    weighted_percentile,
)
from kvlab.research.requests import Burst, Times

# Arrives at 10, waits 2, gets tokens at 15; 17, 18, 19; and 24, after a preemption.
ONE = Times(
    10.0, 12.0, 15.0, 24.5, [[Burst(15, 15, 1), Burst(17, 19, 3), Burst(24, 24, 1)]], preemptions=1
)
# Two samples: tokens at 21, 22 and 23, 25; then one that ends at once, at 22.
TWO = Times(20.0, 20.0, 21.0, 25.0, [[Burst(21, 22, 2), Burst(23, 25, 2)], [Burst(22, 22, 1)]])
SINGLE = Times(11.0, 12.0, 13.0, 13.0, [[Burst(13, 13, 1)]])
WAITS = Times(30.0, bursts=[[]])
RUNS = Times(14.0, 15.0, 16.0, None, [[Burst(16, 17, 2)]])
CANCELLED_EARLY = Times(15.0, 16.0, None, 17.0, [[]])


def test_a_request_is_timed_from_its_arrival():
    assert request_figures(ONE) == RequestFigures(
        queue_s=2.0,
        ttft_s=5.0,
        tpot_s=(24 - 15) / 4,
        e2e_s=14.5,
        output_tokens=5,
        preemptions=1,
    )
    assert request_figures(ONE).normalized_latency_s == 14.5 / 5


def test_time_per_token_is_the_mean_of_the_samples_that_have_a_second_token():
    figures = request_figures(TWO)
    assert figures.tpot_s == pytest.approx((25 - 21) / 3)
    assert figures.output_tokens == 5
    both = dataclasses.replace(TWO, bursts=[TWO.bursts[0], [Burst(22, 22, 1), Burst(24, 24, 1)]])
    assert request_figures(both).tpot_s == pytest.approx(((25 - 21) / 3 + 2) / 2)


def test_one_token_has_no_time_per_token():
    assert request_figures(SINGLE) == RequestFigures(1.0, 2.0, None, 2.0, 1, 0)


def test_a_request_without_an_end_or_a_token_has_no_figures():
    assert [request_figures(times) for times in (WAITS, RUNS, CANCELLED_EARLY)] == [None] * 3


def test_gaps_lie_between_bursts_and_inside_them():
    gaps, counts = inter_token_gaps([ONE, TWO, SINGLE, WAITS])
    # ONE: 15 to 17, twice 1 second, 19 to 24. TWO: 21 to 22, 22 to 23, 23 to 25.
    assert gaps.tolist() == [2, 1, 5, 1, 1, 2]
    assert counts.tolist() == [1, 2, 1, 1, 1, 1]
    assert sum(counts) == (5 - 1) + (4 - 1)


def test_a_burst_of_several_tokens_weighs_as_much_as_its_gaps():
    slow, fast = [Burst(0, 4, 2)], [Burst(0, 98, 99)]
    gaps, counts = inter_token_gaps([Times(0.0, bursts=[slow, fast])])
    assert weighted_percentile(gaps, counts, 50) == 1
    assert weighted_percentile(gaps, counts, 98.9) == 1
    assert weighted_percentile(gaps, counts, 99.5) == 4


def test_a_percentile_is_the_smallest_value_that_holds_so_much_weight():
    values, weights = np.array([7.0, 1.0, 3.0]), np.array([2, 5, 3])  # sorted: 5, 8, 10 of 10
    percents = (0, 10, 50, 50.1, 80, 80.1, 100)
    found = [weighted_percentile(values, weights, percent) for percent in percents]
    assert found == [1, 1, 1, 3, 3, 7, 7]
    assert weighted_percentile(np.array([4.0]), np.array([9]), 99) == 4


@pytest.mark.parametrize("percent", [7, 29, 50, 55, 57, 99])
@pytest.mark.parametrize("count", [100, 700, 2300])
def test_a_percentile_at_a_whole_number_of_weights_is_exact(percent, count):
    values, weights = np.arange(1.0, count + 1), np.ones(count, int)
    assert weighted_percentile(values, weights, percent) == percent * count // 100


@pytest.mark.parametrize("seed", range(10))
def test_a_weighted_percentile_is_that_of_every_value_repeated(seed):
    random = np.random.default_rng(seed)
    values, weights = random.random(50), random.integers(1, 9, 50)
    repeated = np.repeat(values, weights)
    for percent in (0, 25, 50, 75, 100):
        expected = np.percentile(repeated, percent, method="inverted_cdf")
        assert weighted_percentile(values, weights, percent) == expected


def test_targets_want_both_times_and_one_token_has_no_second():
    targets = Targets(ttft_s=2.0, tpot_s=1.0)
    figures = RequestFigures(0.0, 2.0, 1.0, 9.0, 9, 0)
    assert targets.met_by(figures)
    assert not targets.met_by(dataclasses.replace(figures, ttft_s=2.1))
    assert not targets.met_by(dataclasses.replace(figures, tpot_s=1.1))
    assert targets.met_by(dataclasses.replace(figures, tpot_s=None))


def test_a_run_is_summed_up_from_its_first_arrival_to_its_end():
    times = {"one": ONE, "two": TWO, "single": SINGLE}
    metrics = serving_metrics(times, [])
    assert metrics["requests"] == metrics["requests_ended"] == 3
    assert metrics["preemptions"] == 1
    assert metrics["output_tokens"] == 11
    assert metrics["duration_s"] == 15.0  # 10 to 25
    assert metrics["output_tokens_per_s"] == pytest.approx(11 / 15)
    assert metrics["requests_per_s"] == pytest.approx(3 / 15)
    for name, values in {
        "queue": (2.0, 0.0, 1.0),
        "ttft": (5.0, 1.0, 2.0),
        "tpot": (9 / 4, 4 / 3),
        "e2e": (14.5, 5.0, 2.0),
        "normalized_latency": (14.5 / 5, 1.0, 2.0),
    }.items():
        ordered = sorted(values)
        assert metrics[f"{name}_mean_s"] == pytest.approx(sum(values) / len(values))
        middle = ordered[1] if len(values) == 3 else sum(values) / 2
        assert metrics[f"{name}_p50_s"] == pytest.approx(middle)
        last, before = ordered[-1], ordered[-2]
        share = 0.99 * (len(values) - 1) % 1  # of the way from the last but one to the last
        assert metrics[f"{name}_p99_s"] == pytest.approx(before + share * (last - before))
    assert (metrics["itl_p50_s"], metrics["itl_p99_s"]) == (1, 5)  # 1 1 1 1 2 2 5
    assert not [name for name in metrics if name.startswith(("goodput", "kv", "running"))]


def test_goodput_counts_requests_that_meet_both_targets():
    times = {"one": ONE, "two": TWO, "single": SINGLE, "waits": WAITS}
    metrics = serving_metrics(times, [], Targets(ttft_s=2.0, tpot_s=4 / 3))
    assert metrics["goodput_requests_per_s"] == pytest.approx(2 / 15)  # not the first
    assert metrics["goodput_share"] == 2 / 4
    strict = serving_metrics(times, [], Targets(ttft_s=0.5, tpot_s=9.0))
    assert strict["goodput_requests_per_s"] == strict["goodput_share"] == 0


def test_requests_that_have_not_ended_count_as_asked_alone():
    metrics = serving_metrics({"single": SINGLE, "waits": WAITS, "runs": RUNS}, [])
    assert (metrics["requests"], metrics["requests_ended"]) == (3, 1)
    assert metrics["output_tokens"] == 1
    assert metrics["ttft_p50_s"] == metrics["ttft_p99_s"] == 2.0


def test_what_was_cut_short_has_not_ended_and_a_run_ends_with_its_last_token():
    cancelled = dataclasses.replace(ONE, finished_s=100.0, cut_short=True)
    waited = dataclasses.replace(WAITS, finished_s=100.0, cut_short=True)
    metrics = serving_metrics({"single": SINGLE, "one": cancelled, "waits": waited}, [])
    assert (metrics["requests"], metrics["requests_ended"]) == (3, 1)
    assert metrics["duration_s"] == ONE.bursts[0][-1].last_s - ONE.arrival_s


def test_a_figure_that_cannot_be_formed_is_absent():
    assert serving_metrics({"waits": WAITS}, []) == {
        **{"requests": 1, "requests_ended": 0, "preemptions": 0}
    }
    assert serving_metrics({}, []) == {"requests": 0, "requests_ended": 0, "preemptions": 0}
    metrics = serving_metrics({"single": SINGLE}, [])
    assert not [name for name in metrics if name.startswith(("tpot", "itl", "goodput", "kv"))]
    assert {"ttft_p50_s", "e2e_p99_s", "queue_mean_s"} <= metrics.keys()


def usage(time_s, running, waiting, filled, reserved, internal, cached, samples=None, step_s=1.0):
    total, samples = 100, running if samples is None else samples
    free = total - filled - reserved - internal - cached
    counts = running, samples, waiting, running + waiting, total, filled, reserved, internal
    return Usage(time_s, step_s, *counts, cached, free)


def test_a_curve_is_0_where_there_was_no_request_and_holds_where_one_waited():
    history = [
        usage(2.0, 3, 0, 10, 0, 0, 0)._replace(left=1),
        usage(5.0, 1, 0, 20, 0, 0, 0)._replace(left=0),  # began at 4: its request waited for it
        usage(9.0, 2, 0, 30, 0, 0, 0)._replace(left=0),
    ]
    curve = over_time(history, 1.0, lambda use: use.running)
    assert curve == [(0.0, 3), (3.0, 1), (4.0, 0.0), (7.0, 2), (8.0, 0.0)]
    assert over_time([], 0.0, lambda use: use.running) == []


# A step of 1 second, one of 3 while two wait, one of 4.
HISTORY = [
    usage(11.0, 1, 0, filled=10, reserved=4, internal=2, cached=0),
    usage(14.0, 4, 2, filled=60, reserved=20, internal=8, cached=8, samples=6, step_s=3.0),
    usage(18.0, 2, 0, filled=30, reserved=0, internal=4, cached=16, step_s=4.0),
]


def test_use_is_averaged_over_time_and_over_the_time_in_which_requests_wait():
    metrics = usage_metrics(HISTORY, 10.0, 18.0)
    assert metrics == pytest.approx(
        {
            "running_max": 4,
            "running_mean": (1 + 3 * 4 + 4 * 2) / 8,
            "samples_mean": (1 + 3 * 6 + 4 * 2) / 8,
            "waiting_mean": 3 * 2 / 8,
            "kv_filled": (0.1 + 3 * 0.6 + 4 * 0.3) / 8,
            "kv_reserved": (0.04 + 3 * 0.2) / 8,
            "kv_internal": (0.02 + 3 * 0.08 + 4 * 0.04) / 8,
            "kv_cached": (3 * 0.08 + 4 * 0.16) / 8,
            "kv_free": (0.84 + 3 * 0.04 + 4 * 0.5) / 8,
            "running_mean_waiting": 4,
            "samples_mean_waiting": 6,
            "waiting_mean_waiting": 2,
            "kv_filled_waiting": 0.6,
            "kv_reserved_waiting": 0.2,
            "kv_internal_waiting": 0.08,
            "kv_cached_waiting": 0.08,
            "kv_free_waiting": 0.04,
            "waiting_share": 3 / 8,
        }
    )
    for suffix in ("", "_waiting"):
        names = ("filled", "reserved", "internal", "cached", "free")
        assert sum(metrics[f"kv_{name}{suffix}"] for name in names) == pytest.approx(1)


def test_steps_outside_the_run_do_not_count():
    whole = usage_metrics(HISTORY, 10.0, 18.0)
    late = usage(25.0, 9, 9, filled=100, reserved=0, internal=0, cached=0)
    assert usage_metrics([*HISTORY, late], 10.0, 18.0) == whole
    early = [usage(time_s, 9, 9, 100, 0, 0, 0) for time_s in (9.0, 10.0)]
    assert usage_metrics([*early, *HISTORY], 10.0, 18.0) == whole


def test_between_steps_nothing_runs_and_a_step_counts_as_far_as_it_lies_in_the_run():
    idle = usage_metrics(HISTORY[:1], 10.0, 20.0)
    assert idle["running_mean"] == pytest.approx(1 / 10)
    assert idle["kv_filled"] == pytest.approx(0.1 / 10)
    assert idle["kv_free"] == pytest.approx((9 + 0.84) / 10)
    cut = usage_metrics(HISTORY, 12.0, 16.0)  # two seconds of the second step, two of the third
    assert cut["running_mean"] == pytest.approx((2 * 4 + 2 * 2) / 4)
    assert cut["waiting_share"] == 0.5


def test_where_nobody_waits_there_is_no_average_of_waiting():
    metrics = usage_metrics(HISTORY[:1], 10.0, 18.0)
    assert not [name for name in metrics if name.endswith("_waiting")]
    assert metrics["waiting_share"] == 0
    assert usage_metrics([], 10.0, 18.0) == {}
    assert usage_metrics(HISTORY, 18.0, 30.0) == {}


def test_a_run_has_the_averages_of_its_own_time():
    metrics = serving_metrics({"one": ONE, "two": TWO}, HISTORY)
    expected = usage_metrics(HISTORY, 10.0, 20.0)  # first arrival to last
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["waiting_share"] == pytest.approx(3 / 10)
