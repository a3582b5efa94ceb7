"""Reports of simulated studies: no finished row is hidden, and none shares a name with another."""

import pytest

from kvlab.research.allocation_names import row_labels, workload_names
from kvlab.research.allocation_report import present_memory_waste, present_page_size
from kvlab.research.concurrency_report import present_concurrency
from kvlab.research.rows import make_row

WAITED = {"kv_filled": 0.2, "kv_reserved": 0.1, "kv_internal": 0.3, "kv_free": 0.4}
FIGURES = {"requests": 9, "preemptions": 0, "running_mean": 3.5, "normalized_latency_mean_s": 0.02}


def row(workload="sharegpt-like", allocator="max", rate=None, seed=0, waited=True, **more):
    config = {"workload": workload, "allocator": allocator, "rate": rate, "max_length": 64}
    if allocator == "paged":
        config["page_size"] = 16
    metrics = {**FIGURES, **WAITED, **more.pop("metrics", {})}
    if waited:
        metrics |= {f"{name}_waiting": share for name, share in WAITED.items()}
        metrics["running_mean_waiting"] = 5.0
    return make_row("memory_waste", config | more, seed, metrics=metrics, started="now", wall_s=1.0)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("azure:x/w.csv", "azure:x/v.csv"), ["azure:w", "azure:v"]),
        (("azure:x/w.csv", "azure:y/w.csv"), ["azure:x/w.csv", "azure:y/w.csv"]),
        (("azure:a/x/w.csv", "azure:b/x/w.csv"), ["azure:a/x/w.csv", "azure:b/x/w.csv"]),
        (("azure:/d/x/w.csv", "azure:/d/x/w.txt"), ["azure:w.csv", "azure:w.txt"]),
        (("azure:w.csv", "azure:x/w.csv", "azure:./w.csv"), None),
        (("azure:w.csv", "mooncake:w.csv"), ["azure:w", "mooncake:w"]),
        (("uniform:5-9/5-9", "uniform:5-9/7-9"), ["uniform:5-9/5-9", "uniform:5-9/7-9"]),
    ],
)
def test_workloads_have_the_shortest_names_that_differ(words, names):
    found = workload_names([row(word) for word in words])
    assert len(set(found)) == len(words)
    assert names in (None, found)


def test_runs_that_differ_in_a_setting_alone_are_told_apart_by_it():
    rows = [row(seed=seed, allocator=name) for seed in (3, 5) for name in ("max", "oracle")]
    assert workload_names(rows) == ["sharegpt-like, seed=3"] * 2 + ["sharegpt-like, seed=5"] * 2
    assert len(set(row_labels(rows))) == 4
    shown = present_memory_waste(rows)
    assert [len(table.rows) for table in shown.tables] == [2, 2]


@pytest.mark.parametrize("present", [present_memory_waste, present_concurrency, present_page_size])
def test_every_finished_row_of_files_of_one_name_is_shown(present):
    rows = [row(f"azure:{place}/w.csv", "paged", rate=2.0) for place in "xy"]
    shown = present(rows)
    assert sum(len(table.rows) for table in shown.tables) == 2
    text = " ".join(table.text() for table in shown.tables)
    assert "azure:x/w.csv" in text
    assert "azure:y/w.csv" in text


def test_published_figures_stand_beside_rows_whatever_their_name():
    rows = [row(allocator="paged", rate=rate, seed=seed) for seed in (0, 1) for rate in (2.0, None)]
    table = present_concurrency(rows).tables[0].text()
    assert table.count("30.42") == 2
    assert all("96.3" in table.text() for table in present_memory_waste(rows).tables)


def test_where_nobody_waited_the_cells_are_absent_and_a_finding_says_why():
    rows = [row(allocator="max"), row(allocator="oracle", waited=False)]
    shown = present_memory_waste(rows)
    (table,) = shown.tables
    assert [cells["allocator"] for cells in table.rows] == ["max", "oracle"]
    assert table.rows[0]["token states %"] == "20.0"
    assert "token states %" not in table.rows[1]
    (told,) = [sentence for sentence in shown.findings if "no request ever waited" in sentence]
    assert "with oracle" in told
    assert "--num_requests" in told
    assert "--kv_slots" in told
    nobody = present_memory_waste([row(waited=False)])
    assert len(nobody.tables[0].rows) == 1
    assert not nobody.pictures


@pytest.mark.parametrize("present", [present_memory_waste, present_concurrency, present_page_size])
def test_requests_that_were_left_out_are_said(present):
    lost = {"skipped_rows": 1, "requests_too_long": 2000, "requests_refused": 3, "requests": 6}
    rows = [row(allocator="paged", rate=rate, metrics=lost) for rate in (1.0, 2.0)]
    told = present(rows).findings[-2:]
    assert told == [
        "sharegpt-like: 1 malformed row and 2,000 requests longer than max_length=64 of the "
        "workload were left out before any was taken.",
        "sharegpt-like: with paged-16 3 of 9 requests had no room even alone and were left out; "
        "give more --kv_slots.",
    ]
    assert not any(
        "left out" in sentence for sentence in present([row(allocator="paged")]).findings
    )
