"""Progress: a bar with the time left on a terminal, plain complete lines elsewhere."""

import io
import re

import pytest

from kvlab.research import progress as progress_module
from kvlab.research.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


class TestPlainLines:
    def test_each_noted_step_is_a_line_with_the_time_left(self, clock):
        stream = io.StringIO()
        with progress(3, "sweep", stream=stream) as shown:
            clock[0] += 20
            shown.advance("gqa paged")
            clock[0] += 100
            shown.advance("mqa paged")
        assert stream.getvalue().splitlines() == [
            "sweep: 0/3",
            "sweep: 1/3 gqa paged (0:00:20 elapsed, about 0:00:40 left)",
            "sweep: 2/3 mqa paged (0:02:00 elapsed, about 0:01:00 left)",
        ]

    def test_points_of_an_earlier_run_do_not_count_towards_the_rate(self, clock):
        stream = io.StringIO()
        with progress(12, "sweep", done=10, stream=stream) as shown:
            clock[0] += 30
            shown.advance("a")
        first, last = stream.getvalue().splitlines()
        assert first == "sweep: 10/12"
        assert last == "sweep: 11/12 a (0:00:30 elapsed, about 0:00:30 left)"

    def test_many_small_steps_are_few_lines(self, clock):
        stream = io.StringIO()
        with progress(1_000_000, "fetch", unit="B", stream=stream) as shown:
            for _ in range(1000):
                clock[0] += 0.025
                shown.advance(amount=1000)
        lines = stream.getvalue().splitlines()
        assert len(lines) == 4
        assert lines[0] == "fetch: 0.0/1.0 MB"
        assert lines[-1].startswith("fetch: 1.0/1.0 MB (0:00:25 elapsed, about 0:00:00 left)")

    def test_messages_are_lines(self):
        stream = io.StringIO()
        with progress(2, "sweep", stream=stream) as shown:
            shown.say("gqa paged failed: out of memory")
        assert stream.getvalue() == "sweep: 0/2\ngqa paged failed: out of memory\n"


class TestTerminal:
    def test_bar_shows_share_count_note_and_time_left(self):
        stream = Terminal()
        with progress(4, "sweep", stream=stream) as shown:
            shown.advance("gqa paged")
            shown.advance("mqa paged")
        last = stream.getvalue().rstrip("\n").split("\r")[-1]
        assert re.search(r"sweep:  50%\|.*\| 2/4 \[00:0\d, .* left\], mqa paged", last)

    def test_message_does_not_break_the_bar(self):
        stream = Terminal()
        with progress(4, "sweep", stream=stream) as shown:
            shown.say("a point failed")
            shown.advance("x")
        assert "a point failed\n" in stream.getvalue()

    def test_a_terminal_without_a_width_gets_lines(self, monkeypatch):
        stream, size = Terminal(), progress_module.os.terminal_size((0, 0))
        monkeypatch.setattr(stream, "fileno", lambda: 2)
        monkeypatch.setattr(progress_module.os, "get_terminal_size", lambda descriptor: size)
        with progress(1, "sweep", stream=stream) as shown:
            shown.advance("gqa paged")
        assert stream.getvalue().splitlines()[0] == "sweep: 0/1"

    def test_bar_is_closed_when_the_work_raises(self):
        stream = Terminal()
        with pytest.raises(KeyError), progress(4, "sweep", stream=stream):
            raise KeyError
        assert stream.getvalue().endswith("\n")
