"""Figures show what the rows say: values, spreads, scales, names that neither clip nor collide."""

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from kvlab.research import bar_chart, figures, scatter_chart
from kvlab.research.bar_chart import Bar, BarPanel, draw_bars, is_logarithmic
from kvlab.research.figures import attention_colours, draw_figures
from kvlab.research.grouping import Points, combined_label
from kvlab.research.results import make_row

STARTED = "2026-01-02T03:04:05+00:00"
KV_HEADS = {"mha": 9, "gqa": 3, "mqa": 1}


def row(attention, placement, batch_size=1, *, metrics=None, repeats=None, seed=0, **settings):
    config = {"attention": attention, "placement": placement, "batch_size": batch_size, **settings}
    return make_row(
        "sweep", config, seed, metrics=metrics, repeats=repeats, started=STARTED, wall_s=1
    )


def sweep_rows():
    """The default sweep in small: quality on the first batch size only."""
    rows = []
    for attention, placement, batch_size in itertools.product(
        KV_HEADS, ("recompute", "contiguous", "paged"), (1, 8)
    ):
        cached = placement != "recompute"
        tpot = (0.03 if cached else 0.4) * (1.1 if placement == "paged" else 1) * batch_size**0.5
        metrics = {"kv_bytes_per_token": 15360 * KV_HEADS[attention] if cached else 0}
        if batch_size == 1:
            pooled = attention == "mqa"
            metrics |= {
                "perplexity_en": 5230.0 if pooled else 24.7,
                "perplexity_tr": 11000.0 if pooled else 61.2,
                "kl_vs_oracle_en": 5.31 if pooled else -2e-10,
                "kl_vs_oracle_tr": 5.9 if pooled else 3e-9,
            }
        repeats = {
            "tpot_s": [tpot * factor for factor in (1.0, 0.9, 1.2)],
            "ttft_s": [0.3 * batch_size * factor for factor in (1.0, 0.95, 1.1)],
            "decode_tokens_per_s": [batch_size / tpot / factor for factor in (1.0, 0.9, 1.2)],
        }
        rows.append(row(attention, placement, batch_size, metrics=metrics, repeats=repeats))
    return rows


@pytest.fixture
def drawn(monkeypatch):
    """What the figures ask to be drawn, by file name, without drawing it."""
    asked = {}

    def remember(panels, *_):
        asked[len(asked)] = panels
        return b"png"

    monkeypatch.setattr(figures, "draw_bars", remember)
    monkeypatch.setattr(figures, "draw_scatter", remember)

    def draw(rows):
        asked.clear()
        pictures = draw_figures(Points(rows))
        return {picture.name: asked[index] for index, picture in enumerate(pictures)}

    return draw


@pytest.fixture
def finished_figures(monkeypatch):
    """The matplotlib figures behind the PNG files."""
    kept: list[Figure] = []

    def keep(figure):
        kept.append(figure)
        return b"png"

    monkeypatch.setattr(bar_chart, "as_png", keep)
    monkeypatch.setattr(scatter_chart, "as_png", keep)
    return kept


def by_label(panel):
    return {bar.label: bar for bar in panel.bars}


class TestWhatIsDrawn:
    def test_full_sweep_draws_every_figure(self, drawn):
        assert list(drawn(sweep_rows())) == [
            "decode_speed.png",
            "kv_bytes_per_token.png",
            "quality_perplexity.png",
            "quality_kl.png",
            "latency.png",
        ]

    def test_decode_speed_has_a_panel_per_batch_size_with_spread(self, drawn):
        ((one, eight),) = drawn(sweep_rows())["decode_speed.png"]
        assert (one.title, eight.title) == (
            "Decode speed, batch size 1",
            "Decode speed, batch size 8",
        )
        assert one.unit == "tokens per second"
        bar = by_label(one)["gqa contiguous"]
        assert bar.value == pytest.approx(1 / 0.03)
        assert bar.low == pytest.approx(1 / 0.03 / 1.2)
        assert bar.high == pytest.approx(1 / 0.03 / 0.9)

    def test_bytes_are_kib_and_zero_is_drawn(self, drawn):
        (((panel,),),) = [drawn(sweep_rows())["kv_bytes_per_token.png"]]
        bars = by_label(panel)
        assert bars["gqa paged"].value == 45.0
        assert bars["gqa recompute"].value == 0.0
        assert "KiB" in panel.unit

    def test_latency_is_in_milliseconds(self, drawn):
        first, each = drawn(sweep_rows())["latency.png"]
        assert by_label(first[1])["mha paged"].value == pytest.approx(2400)
        assert by_label(each[0])["mha recompute"].value == pytest.approx(400)
        assert [panel.title for panel in (*first, *each)] == [
            "TTFT, batch size 1",
            "TTFT, batch size 8",
            "TPOT, batch size 1",
            "TPOT, batch size 8",
        ]

    def test_quality_has_one_mark_per_variant_and_language(self, drawn):
        english, turkish = drawn(sweep_rows())["quality_perplexity.png"]
        assert (english.title, turkish.title) == ("English text", "Turkish text")
        places = {mark.variant.label: (mark.x, mark.y) for mark in turkish.marks}
        assert len(places) == 9
        assert places["gqa paged"] == (45.0, 61.2)
        assert places["mqa recompute"] == (0.0, 11000.0)

    def test_rounding_of_a_divergence_is_drawn_at_the_floor(self, drawn):
        english, _ = drawn(sweep_rows())["quality_kl.png"]
        heights = {mark.variant.label: english.height(mark) for mark in english.marks}
        assert heights["gqa paged"] == 1e-8
        assert heights["mqa paged"] == 5.31

    def test_only_what_was_measured_is_drawn(self, drawn):
        assert drawn([]) == {}
        assert drawn([row("gqa", "paged", metrics={"compile_s": 1.0})]) == {}
        speed_only = [row("gqa", "paged", metrics={"decode_tokens_per_s": 5.0})]
        assert list(drawn(speed_only)) == ["decode_speed.png"]
        no_bytes = [row("gqa", "paged", metrics={"perplexity_en": 5.0})]
        assert drawn(no_bytes) == {}
        mean_only = [row("gqa", "paged", metrics={"perplexity": 5.0, "kv_bytes_per_token": 8})]
        assert drawn(mean_only)["quality_perplexity.png"][0].title == "All texts"

    def test_seeds_of_a_point_are_one_bar_with_their_range(self, drawn):
        rows = [
            row("gqa", "paged", metrics={"decode_tokens_per_s": value}, seed=seed)
            for seed, value in enumerate([5.0, 11.0, 7.0])
        ]
        (((panel,),),) = [drawn(rows)["decode_speed.png"]]
        (bar,) = panel.bars
        assert (bar.value, bar.low, bar.high) == (7.0, 5.0, 11.0)


class TestHowItIsDrawn:
    def test_large_ratios_get_a_log_axis_for_the_whole_group(self):
        def panel(*values):
            return BarPanel("t", "u", tuple(Bar(str(v), "#000", v, v, v) for v in values))

        assert is_logarithmic([panel(3.0, 40.0), panel(2.0, 70.0)])
        assert not is_logarithmic([panel(3.0, 40.0)])
        assert not is_logarithmic([panel(0.0, 5.0)])

    def test_bars_of_a_group_share_their_axis_and_all_labels(self, finished_figures):
        groups = [
            [
                BarPanel("one", "u", (Bar("a", "#0072B2", 3, 2, 4), Bar("b", "#E69F00", 5, 5, 5))),
                BarPanel("two", "u", (Bar("a", "#0072B2", 9, 9, 9),)),
            ]
        ]
        draw_bars(groups, ["a", "b"])
        one, two = finished_figures[0].axes
        assert one.get_xlim() == two.get_xlim()
        written = [[t.get_text() for t in axes.texts] for axes in (one, two)]
        assert written == [["3.00", "5.00"], ["9.00", "not measured"]]
        assert [t.get_text() for t in one.get_yticklabels()] == ["a", "b"]
        (whisker,) = one.lines
        assert list(whisker.get_xdata()) == [2, 4]

    def test_nothing_is_clipped_and_names_do_not_collide(self, finished_figures):
        draw_figures(Points(sweep_rows()))
        assert len(finished_figures) == 5
        for figure in finished_figures:
            figure.canvas.draw()
            page = figure.bbox
            for text in itertools.chain.from_iterable(map(_written, figure.axes)):
                extent = text.get_window_extent()
                assert extent.x0 >= page.x0 - 1, text.get_text()
                assert extent.x1 <= page.x1 + 1, text.get_text()
                assert extent.y0 >= page.y0 - 1, text.get_text()
                assert extent.y1 <= page.y1 + 1, text.get_text()
            for axes in figure.axes:
                extents = [t.get_window_extent() for t in axes.texts]
                for one, other in itertools.combinations(extents, 2):
                    assert not one.padded(-1).overlaps(other.padded(-1))

    def test_marks_of_one_place_stand_side_by_side_under_one_name(self, finished_figures):
        draw_figures(Points(sweep_rows()))
        names = [
            text.get_text().replace("\n", " ")
            for text in finished_figures[2].axes[0].texts
            if isinstance(text, Annotation)
        ]
        assert sorted(names) == [
            "gqa contiguous/paged 24.7",
            "mha contiguous/paged 24.7",
            "mha/gqa recompute 24.7",
            "mqa contiguous/paged 5,230",
            "mqa recompute 5,230",
        ]
        figure = finished_figures[2]
        figure.canvas.draw()
        places = [
            tuple(line.get_transform().transform((line.get_xdata()[0], line.get_ydata()[0])))
            for line in figure.axes[0].lines
        ]
        assert len(places) == 9
        nearest = min(
            abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in itertools.combinations(places, 2)
        )
        assert nearest > 8 * figure.dpi / 72

    def test_many_marks_far_apart_in_memory(self, finished_figures):
        rows = [
            row(
                attention,
                "paged",
                storage=storage,
                metrics={
                    "kv_bytes_per_token": 1e3 * heads * size,
                    "perplexity_en": 20.0 + heads + size,
                    "perplexity_tr": 40.0 + heads,
                },
            )
            for attention, heads in KV_HEADS.items()
            for storage, size in (("float32", 4), ("bfloat16", 2), ("int8", 1.1), ("int4", 0.2))
        ]
        draw_figures(Points(rows))
        english, turkish = finished_figures[1].axes
        assert english.get_xscale() == "symlog"
        assert english.get_yscale() == "linear"
        # More than ten names need the width of the page: one panel below the other.
        assert english.get_position().y0 > turkish.get_position().y1

    def test_png_is_an_image_of_the_common_width(self):
        png = draw_bars([[BarPanel("t", "u", (Bar("a", "#0072B2", 3, 2, 4),))]], ["a"])
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        assert int.from_bytes(png[16:20], "big") == 1428

    def test_figures_are_agg_and_leave_pyplot_alone(self, finished_figures):
        draw_bars([[BarPanel("t", "u", (Bar("a", "#0072B2", 3, 2, 4),))]], ["a"])
        assert isinstance(finished_figures[0].canvas, FigureCanvasAgg)
        assert not hasattr(finished_figures[0], "number")  # pyplot numbers the figures it owns


def _written(axes):
    low, high = sorted(axes.get_ylim())
    ticks = [tick for tick in axes.yaxis.get_major_ticks() if tick.label1.get_visible()]
    return [
        axes.title,
        axes.xaxis.label,
        axes.yaxis.label,
        *axes.texts,
        *(tick.label1 for tick in ticks if low <= tick.get_loc() <= high),
    ]


class TestGrouping:
    def test_labels_name_what_differs(self):
        points = Points(
            [
                row("gqa", "paged", page_size=16, model="m", storage="int8"),
                row("gqa", "paged", page_size=8, model="m", storage="int8"),
                row("gqa", "contiguous", model="m", storage="int8"),
                row("mha", "recompute", model="m", storage="int8"),
            ]
        )
        assert [variant.label for variant in points.variants] == [
            "mha recompute",
            "gqa contiguous",
            "gqa paged 8",
            "gqa paged 16",
        ]
        assert points.held_fixed() == {"batch_size": 1, "model": "m", "storage": "int8"}

    def test_settings_keep_the_order_they_were_asked_in(self):
        rows = [row("gqa", "paged", storage=s) for s in ("float32", "int8", "int4")]
        assert [v.label for v in Points(rows).variants] == ["float32", "int8", "int4"]

    def test_a_lone_variant_is_named_by_its_axes(self):
        (variant,) = Points([row("gqa", "paged", page_size=16)]).variants
        assert variant.label == "gqa paged 16"

    def test_numbers_flags_models_and_long_values_in_words(self):
        rows = [
            row(
                "gqa", "paged", model="a/b/small.gguf", budget=64, soft=True, layers=list(range(40))
            ),
            row("gqa", "paged", model="a/b/large.gguf", budget=128, soft=False, layers=[1]),
        ]
        labels = [variant.label for variant in Points(rows).variants]
        assert labels == [
            "small.gguf budget 64 soft [0, 1, 2, 3, 4, 5, 6, 7, 8,…",
            "large.gguf budget 128 no soft [1]",
        ]

    def test_variants_with_the_same_words_stay_apart(self):
        rows = [
            row("gqa", "paged", layers=["x" * 40 + "a"]),
            row("gqa", "paged", layers=["x" * 40 + "b"]),
        ]
        labels = [variant.label for variant in Points(rows).variants]
        assert len(set(labels)) == 2
        assert labels[1].endswith("(2)")

    def test_workloads_go_from_light_to_heavy(self):
        rows = [row("gqa", "paged", b, prompt_tokens=p) for b in (8, 1) for p in (512, 64)]
        assert [workload.label for workload in Points(rows).workloads] == [
            "batch size 1, prompt tokens 64",
            "batch size 1, prompt tokens 512",
            "batch size 8, prompt tokens 64",
            "batch size 8, prompt tokens 512",
        ]

    def test_combined_label_spells_out_what_is_no_product(self):
        variants = Points(sweep_rows()).variants
        assert combined_label(variants) == "mha/gqa/mqa recompute/contiguous/paged"
        assert combined_label([variants[0], variants[4]]) == "mha recompute, gqa contiguous"
        assert combined_label([*variants[:3], variants[4], variants[8]], limit=3) == (
            "mha recompute, mha contiguous, 3 more"
        )

    def test_colours_do_not_depend_on_what_else_was_run(self):
        few = attention_colours(Points([row("mqa", "paged")]))
        many = attention_colours(Points([*sweep_rows(), row("gqa:4", "paged")]))
        assert few["mqa"] == many["mqa"]
        assert len(set(many.values())) == 4
