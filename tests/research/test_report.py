"""The report: one self-contained page whatever the run has so far, and sentences that are true."""

import base64
import html.parser
import itertools
import re

import pytest

from kvlab.research import sweep_report
from kvlab.research.figures import Picture
from kvlab.research.findings import findings
from kvlab.research.grouping import Points
from kvlab.research.report import results_text, write_report
from kvlab.research.results import RunFolder, RunFolderError, make_row
from kvlab.research.tables import divergence, format_table, result_tables, significant

STARTED = "2026-01-02T03:04:05+00:00"
PIXEL = b"\x89PNG\r\n\x1a\n"


def row(attention="gqa", placement="paged", batch_size=1, *, seed=0, error=None, **metrics):
    config = {
        "model": "tiny",
        "attention": attention,
        "placement": placement,
        "batch_size": batch_size,
        "decode_tokens": 4 if placement == "recompute" else 32,
    }
    repeats = {name: value for name, value in metrics.items() if isinstance(value, list)}
    values = {name: value for name, value in metrics.items() if name not in repeats}
    return make_row(
        "sweep",
        config,
        seed,
        metrics=values,
        repeats=repeats,
        started=STARTED,
        wall_s=1,
        error=error,
    )


def sweep_rows():
    rows = []
    for attention, heads in (("mha", 9), ("gqa", 3), ("mqa", 1)):
        for placement, batch_size in itertools.product(
            ("recompute", "contiguous", "paged"), (1, 8)
        ):
            tpot = {"recompute": 0.4, "contiguous": 0.02, "paged": 0.021}[placement]
            tpot *= 1.25 if attention == "mha" else 1.0
            cached = placement != "recompute"
            metrics = {
                "tpot_s": [tpot, tpot * 0.99, tpot * 1.01],
                "ttft_s": [0.3, 0.31, 0.29],
                "decode_tokens_per_s": batch_size / tpot,
                "kv_bytes_per_token": 15360 * heads if cached else 0,
                "compile_count": 2,
            }
            if cached:
                metrics["kv_waste"] = 0.5 if placement == "contiguous" else 0.03
            if batch_size == 1:
                pooled = attention == "mqa"
                metrics |= {
                    "perplexity_en": 5230.0 if pooled else 24.7,
                    "perplexity_tr": 11000.0 if pooled else 61.2,
                    "kl_vs_oracle_en": 5.31 if pooled else 2e-10,
                    "top1_agreement_en": 0.06 if pooled else 1.0,
                }
            rows.append(row(attention, placement, batch_size, **metrics))
    return rows


def run_folder(path, rows, **described):
    settings = {"command": "sweep", "config": {"model": "tiny"}, "argv": ["--model=a b"]}
    with RunFolder.open(path, **settings, **described) as folder:
        for item in rows:
            folder.append(item)
    return path


class Page(html.parser.HTMLParser):
    """Text, sources and balance of a page."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self, path):
        super().__init__()
        self.open, self.words, self.sources = [], [], []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


@pytest.fixture
def quick(monkeypatch):
    """Reports without the time that drawing takes."""
    monkeypatch.setattr(
        sweep_report,
        "draw_figures",
        lambda _: [Picture("a.png", "Speed", "Longer is better.", PIXEL)],
    )


class TestReport:
    def test_whole_report_of_the_default_sweep(self, tmp_path):
        folder = run_folder(
            tmp_path / "run", sweep_rows(), points=18, title="Attention × cache", question="Why?"
        )
        path = write_report([folder])
        assert path == folder / "report.html"
        page = Page(path)
        assert page.text.count("Attention × cache") == 2
        for expected in ("Why?", "run: 18 of 18 points finished", "kvlab sweep '--model=a b'"):
            assert expected in page.text
        assert "mha stores 138,240 bytes" in page.text
        assert len(page.sources) == 5
        names = [
            "decode_speed",
            "kv_bytes_per_token",
            "quality_perplexity",
            "quality_kl",
            "latency",
        ]
        for name, source in zip(names, page.sources, strict=True):
            kind, _, data = source.partition(",")
            assert kind == "data:image/png;base64"
            assert base64.b64decode(data) == (folder / f"{name}.png").read_bytes()

    def test_page_fetches_nothing(self, tmp_path, quick):
        page = Page(write_report([run_folder(tmp_path / "run", sweep_rows())]))
        assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link", page.source)

    def test_text_from_outside_is_escaped(self, tmp_path, quick):
        folder = run_folder(
            tmp_path / "run",
            [
                row("<b>gqa</b>", error="<script>alert(1)</script>\nline two"),
                row("mha", tpot_s=0.1),
            ],
            title="<i>title</i>",
            question="a < b & c",
        )
        page = Page(write_report([folder], notes=["<u>note</u>"]))
        assert not re.search(r"<(b|i|u|script)>", page.source)
        for text in ("<b>gqa</b>", "<script>alert(1)</script>", "<i>title</i>", "a < b & c"):
            assert text in page.text
        assert "<u>note</u>" in page.text
        assert "line two" not in page.text

    def test_notes_of_the_run_and_of_the_caller_are_shown_once(self, tmp_path, quick):
        folder = run_folder(tmp_path / "run", sweep_rows())
        with RunFolder.open(folder, command="sweep", config={"model": "tiny"}) as opened:
            opened.describe(["Stored note.", "Both."])
        page = Page(write_report([folder], notes=["Both.", "Given note."]))
        assert [page.text.count(note) for note in ("Stored note.", "Both.", "Given note.")] == [
            1
        ] * 3

    def test_empty_run_says_so(self, tmp_path):
        page = Page(write_report([run_folder(tmp_path / "run", [], points=18)]))
        assert "No point has finished yet" in page.text
        assert "0 of 18 points finished" in page.text
        assert page.sources == []

    def test_failed_points_are_listed_with_their_errors(self, tmp_path, quick):
        rows = [
            row("mha", tpot_s=0.1),
            row("gqa", error="OutOfMemory: 12 GiB"),
            row("mqa", error=""),
        ]
        page = Page(write_report([run_folder(tmp_path / "run", rows)]))
        assert "1 point finished, 2 failed" in page.text
        assert "gqa OutOfMemory: 12 GiB" in page.text
        assert "mqa no error recorded" in page.text

    def test_run_in_which_everything_failed(self, tmp_path):
        page = Page(write_report([run_folder(tmp_path / "run", [row(error="boom")])]))
        assert "No point has finished yet" in page.text
        assert "boom" in page.text

    def test_what_was_not_finite_is_named(self, tmp_path, quick):
        rows = [row("mha", perplexity_en=float("nan"), tpot_s=0.1), row("gqa", tpot_s=0.1)]
        page = Page(write_report([run_folder(tmp_path / "run", rows)]))
        assert "mha: perplexity_en came out as nan" in page.text

    @pytest.mark.parametrize(
        "metric",
        [
            *("tpot_s", "ttft_s", "decode_tokens_per_s", "kv_bytes_per_token", "kv_waste"),
            *("perplexity_en", "kl_vs_oracle_en", "top1_agreement_en"),
        ],
    )
    def test_any_metric_may_be_missing(self, tmp_path, quick, metric):
        rows = sweep_rows()
        for item in rows[::2]:
            item["metrics"].pop(metric, None)
            item["repeats"].pop(metric, None)
        assert Page(write_report([run_folder(tmp_path / "half", rows)])).text
        for item in rows:
            item["metrics"].pop(metric, None)
            item["repeats"].pop(metric, None)
        assert Page(write_report([run_folder(tmp_path / "none", rows)])).text
        points = Points(rows)
        assert metric not in points.metrics()
        assert findings(points)

    def test_runs_with_points_in_common_are_told_apart(self, tmp_path, quick):
        first = run_folder(tmp_path / "monday", sweep_rows(), title="Same")
        second = run_folder(tmp_path / "friday", sweep_rows(), title="Same")
        page = Page(write_report([first, second], out=tmp_path / "both" / "page.html"))
        assert (tmp_path / "both" / "a.png").read_bytes() == PIXEL
        for expected in ("monday gqa paged", "friday gqa paged", "monday: 18 points finished"):
            assert expected in page.text

    def test_runs_of_different_points_are_one_table(self, tmp_path, quick):
        first = run_folder(tmp_path / "a", [row("mha", tpot_s=0.1)])
        second = run_folder(tmp_path / "b", [row("gqa", tpot_s=0.2)])
        page = Page(write_report([first, second], out=tmp_path))
        assert (tmp_path / "report.html").exists()
        assert "mha 100 gqa 200" in page.text

    def test_rows_of_another_command_are_a_table(self, tmp_path):
        rows = [
            make_row(
                "tokenizers",
                {"tokenizer": name},
                0,
                metrics={"tokens_per_word": value},
                started=STARTED,
                wall_s=1,
            )
            for name, value in (("bytes", 6.1), ("bpe", 1.25))
        ]
        page = Page(write_report([run_folder(tmp_path / "run", rows)]))
        assert "tokens per word bytes 6.10 bpe 1.25" in page.text

    def test_page_that_cannot_be_written(self, tmp_path, quick):
        folder = run_folder(tmp_path / "run", sweep_rows())
        (tmp_path / "file").write_text("x")
        with pytest.raises(RunFolderError, match=r"cannot write .*report.html: .*file is a file"):
            write_report([folder], out=tmp_path / "file" / "report.html")

    def test_what_is_no_run_folder(self, tmp_path):
        with pytest.raises(RunFolderError, match="is not a run folder"):
            write_report([tmp_path])
        with pytest.raises(RunFolderError, match="at least one run folder"):
            write_report([])


class TestFindings:
    def test_sentences_of_the_default_sweep(self):
        assert findings(Points(sweep_rows())) == [
            "mha stores 138,240 bytes of KV cache per token, gqa 1/3 of that (46,080), mqa 1/9 of "
            "that (15,360).",
            "At batch size 1, keeping a KV cache decodes 19 to 20 times as fast as recomputing the "
            "whole text at every step.",
            "At batch size 8, keeping a KV cache decodes 19 to 20 times as fast as recomputing the "
            "whole text at every step.",
            "At batch size 1, with a cache gqa decodes 1.25 times as fast as mha; mqa decodes 1.25 "
            "times as fast as mha.",
            "At batch size 8, with a cache gqa decodes 1.25 times as fast as mha; mqa decodes 1.25 "
            "times as fast as mha.",
            "At batch size 1, a decode step with a paged cache takes 1.05 times as long as with a "
            "contiguous one (mha paged 1.05, gqa paged 1.05, mqa paged 1.05).",
            "At batch size 8, a decode step with a paged cache takes 1.05 times as long as with a "
            "contiguous one (mha paged 1.05, gqa paged 1.05, mqa paged 1.05).",
            "Decoding 8 sequences at a time instead of 1 gives 8.00 times the tokens per second.",
            "Share of the KV memory taken by sequences (their pages, or whole reserved rows) that "
            "held no token: contiguous 50%, paged 3%.",
            "mha/gqa recompute/contiguous/paged give the oracle's predictions up to rounding (KL "
            "at most 1e-8 nats): they change the cost and not the output.",
            "mqa does not give the oracle's predictions: perplexity 5,230 against 24.7 (English), "
            "11,000 against 61.2 (Turkish); KL 5.31 nats (English).",
        ]

    def test_ratio_within_the_noise_is_said_to_be(self):
        rows = [
            row(placement="contiguous", tpot_s=[0.10, 0.12, 0.09]),
            row(placement="paged", tpot_s=[0.11, 0.13, 0.10]),
        ]
        assert findings(Points(rows)) == [
            "A decode step with a paged cache takes 1.10 times as long as with a contiguous one, "
            "with spreads of the repeats that overlap."
        ]

    def test_lossy_variants_of_one_attention_are_given_at_their_worst(self):
        rows = [
            row(placement="contiguous", kl_vs_oracle=0.25),
            row(placement="paged", kl_vs_oracle=0.5),
        ]
        assert findings(Points(rows)) == [
            "gqa does not give the oracle's predictions: at worst KL 0.500 nats."
        ]

    def test_uneven_shares_are_percentages(self):
        rows = [
            row("mha", kv_bytes_per_token=1000),
            row("gqa", kv_bytes_per_token=300),
        ]
        (sentence,) = findings(Points(rows))
        assert "gqa 30% of that (300)" in sentence

    def test_nothing_to_compare_is_nothing_said(self):
        assert findings(Points([])) == []
        assert findings(Points([row(tpot_s=0.1, kv_bytes_per_token=5)])) == []


class TestTables:
    def test_numbers_go_right_and_text_left(self):
        rows = [{"name": "ab", "n": 12345, "x": 0.5}, {"name": "c", "n": None}]
        assert format_table(rows, ["name", "n", "x"]).splitlines() == [
            "name       n      x",
            "────  ──────  ─────",
            "ab    12,345  0.500",
            "c          –      –",
        ]

    def test_table_without_rows_is_its_headings(self):
        assert format_table([], ["a", "bc"]) == "a  bc\n─  ──"

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            *[(0, "0"), (1234.5, "1,234"), (123.4, "123"), (12.34, "12.3"), (1.0, "1.00")],
            *[(0.00123, "0.00123"), (1.234e-9, "1.2e-09"), (-12.34, "-12.3"), (99.96, "100")],
        ],
    )
    def test_numbers_are_short(self, value, text):
        assert significant(value) == text

    def test_rounding_is_no_divergence(self):
        assert [divergence(value) for value in (-1e-9, 0.0, 2e-8, 0.5)] == [
            *("≤1e-8", "≤1e-8", "2.0e-08", "0.500"),
        ]

    def test_speed_memory_and_quality_are_apart_and_brief_is_narrow(self):
        points = Points(sweep_rows())
        titles = [table.title for table in result_tables(points)]
        assert titles == ["Speed, by point", "Memory, by point", "Quality, by variant"]
        brief = result_tables(points, brief=True)
        assert [table.title for table in brief] == [
            "Speed and memory, by point",
            "Quality, by variant",
        ]
        assert "programs" not in brief[0].columns
        assert len(brief[0].rows) == 18
        assert brief[0].rows[2]["TPOT ms"] == "25.0 [24.8–25.2]"
        assert (brief[0].rows[0]["steps"], brief[0].rows[2]["steps"]) == ("4", "32")
        assert len(brief[1].rows) == 9
        assert brief[1].rows[8] == {
            "variant": "mqa paged",
            "KV B/token": "15,360",
            "perplexity en": "5,230",
            "perplexity tr": "11,000",
            "KL nats en": "5.31",
            "top-1 % en": "6.0",
        }

    def test_terminal_text_has_tables_failures_and_findings(self):
        text = results_text([*sweep_rows(), row("gqa:2", error="OutOfMemory\nat x")])
        for expected in (
            "Speed and memory, by point",
            "Failed points",
            "gqa:2 paged, batch size 1  OutOfMemory",
            "- mha stores 138,240",
        ):
            assert expected in text
        assert "at x" not in text
        assert results_text([]) == "No point has finished yet."
