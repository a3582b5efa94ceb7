"""Figures of retention: quality by policy against the bytes kept, memory over a text."""

import pytest

from kvlab.research import memory_figures
from kvlab.research.figures import draw_figures
from kvlab.research.grouping import Points
from kvlab.research.results import make_row


def rows():
    budgets = {"all": [None], "window": [64, 128], "sinks": [64, 128], "h2o": [64]}
    for retention, sizes in budgets.items():
        for budget in sizes:
            kept = 256 if budget is None else budget
            settings = {"retention": retention} | ({} if budget is None else {"budget": budget})
            taken = [[200 + 8 * step, 1000.0 * kept] for step in range(5)]
            if budget is None:
                taken = [[x, y + 8000 * step] for step, (x, y) in enumerate(taken)]
            metrics = {
                "perplexity_en": 20 + 300 / kept,
                "perplexity": 21 + 300 / kept,
                "kv_bytes_window": taken[-1][1],
                "passkey_accuracy_512": kept / 256,
            }
            config = {"attention": "gqa", "placement": "paged", "batch_size": 8, **settings}
            yield make_row(
                "sweep",
                config,
                0,
                metrics=metrics,
                started="2026-01-02T03:04:05+00:00",
                wall_s=1,
                series={"kv_bytes_taken": taken},
            )


@pytest.fixture
def lines(monkeypatch):
    asked = []
    monkeypatch.setattr(memory_figures, "draw_lines", asked.append)
    return asked


def test_a_curve_is_a_policy_and_a_mark_a_budget(lines):
    memory_figures.quality_by_policy(Points(list(rows())))
    ((english, passkey),) = lines
    assert (english.title, passkey.title) == ("English text", "Passkey retrieval, 512 tokens")
    curves = {line.label: line for line in english.lines}
    assert list(curves) == ["all", "window", "sinks", "h2o"]
    assert curves["all"].level
    assert not curves["window"].level
    mib = 2**20
    assert curves["window"].points == (
        (64e3 / mib, 20 + 300 / 64),
        (128e3 / mib, 20 + 300 / 128),
    )
    assert passkey.y_label == "share of keys found"


def test_variants_that_take_the_same_share_a_curve(lines):
    memory_figures.memory_over_length(Points(list(rows())))
    (((panel,)),) = lines
    labels = [line.label for line in panel.lines]
    assert labels[0] == "all"
    assert len(labels) == 3
    assert "window" in labels[1]
    assert "sinks" in labels[1]
    assert panel.lines[0].points[1] == (208, 264e3 / 2**20)


def test_they_are_drawn_where_something_evicts_and_only_there():
    names = [picture.name for picture in draw_figures(Points(list(rows())))]
    assert {"quality_by_policy.png", "memory_over_length.png"} <= set(names)
    for picture in draw_figures(Points(list(rows()))):
        assert picture.png.startswith(b"\x89PNG")
    full = [row for row in rows() if row["config"]["retention"] == "all"]
    assert memory_figures.quality_by_policy(Points(full)) is None
    del full[0]["series"]
    assert memory_figures.memory_over_length(Points(full)) is None
