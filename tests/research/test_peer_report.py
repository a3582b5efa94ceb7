"""What counts beside other systems, and by how much: rows made by hand."""

import pytest

from kvlab.research.peer_report import counts, present_peers, ratio
from kvlab.research.rows import make_row

SPEEDS = {
    "kvlab": [10.0, 30.0, 20.0],
    "kvlab-f32": [5.0, 10.0, 20.0],
    "llama.cpp": [5.0, 10.0, 40.0],
}


def row(system, precision="float32", error=None, **metrics):
    speeds = [] if error else SPEEDS[system]
    return make_row(
        "peers",
        {"system": system, "precision": precision, "batch": 8, "threads": 2},
        0,
        metrics=metrics,
        repeats={"prefill_tokens_per_s": speeds, "decode_tokens_per_s": speeds[::-1]},
        started="2026-12-01T00:00:00+00:00",
        wall_s=1.0,
        error=error,
    )


def test_a_ratio_is_the_median_of_pairs():
    pair = row("kvlab"), row("llama.cpp")
    assert ratio(*pair, "prefill_tokens_per_s") == 2.0  # of 2, 3 and 0.5; medians' would be 2 too
    assert ratio(pair[1], pair[0], "prefill_tokens_per_s") == 0.5


@pytest.mark.parametrize(("theirs", "wanted"), [(1.0, True), (0.99, False)])
def test_float32_counts_where_all_greedy_tokens_agree(theirs, wanted):
    pair = row("kvlab", greedy_agreement=1.0), row("llama.cpp", greedy_agreement=theirs)
    assert counts(*pair) is wanted


@pytest.mark.parametrize(("ours", "wanted"), [(0.015, True), (0.0151, False)])
def test_fewer_bits_count_up_to_one_and_a_half_times_the_peers_divergence(ours, wanted):
    pair = row("kvlab", "int8", kl_vs_float32=ours), row("llama.cpp", "int8", kl_vs_float32=0.01)
    assert counts(*pair) is wanted


def test_what_was_not_compared_does_not_count():
    assert not counts(row("kvlab"), row("llama.cpp"))
    assert not counts(row("kvlab", "int8"), row("llama.cpp", "int8", kl_vs_float32=0.01))


def test_a_peer_is_held_against_the_first_of_ours_that_counts():
    ours = [
        row("kvlab", "bfloat16", kl_vs_float32=1e-3),
        row("kvlab-f32", "bfloat16", kl_vs_float32=1e-4),
    ]
    shown = present_peers([*ours, row("llama.cpp", "bfloat16", kl_vs_float32=1e-4)])
    assert shown.findings == [
        "bfloat16 weights, batch 8: kvlab-f32 is prefill x1.00, decode x1.00 of llama.cpp."
    ]
    assert shown.tables[0].rows[-1]["beside"] == "kvlab-f32"


def test_wins_losses_and_absences_are_all_said():
    shown = present_peers(
        [
            row("kvlab", greedy_agreement=1.0),
            row("llama.cpp", greedy_agreement=0.5),
            row("kvlab", "int8", kl_vs_float32=0.01),
            row("llama.cpp", "int8", error="llama.cpp is not installed"),
        ]
    )
    assert shown.findings == [
        "float32 weights, batch 8: kvlab is prefill x2.00, decode x2.00 of llama.cpp (does not "
        "count: the predictions differ).",
        "int8 weights, batch 8: llama.cpp has no figure: llama.cpp is not installed.",
    ]
    (table,) = shown.tables
    assert [one["counts"] for one in table.rows if "counts" in one] == ["no", "no figure"]
    assert table.rows[0]["prefill tok/s"] == "20.0 (10.0-30.0)"
    assert [picture.name for picture in shown.pictures] == ["peers_float32.png", "peers_int8.png"]
    assert shown.held_fixed == {"batch": 8, "threads": 2}
