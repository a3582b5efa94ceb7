"""Streams of tokens: whole characters, and stop strings that tokens cut."""

import hypothesis
import hypothesis.strategies as st
import pytest

from kvlab.models.tokenizers import ByteTokenizer, Detokenizer, StopStrings


def test_bytes_wait_until_they_are_a_character():
    stream = Detokenizer(ByteTokenizer())

    assert [stream.push([byte]) for byte in "a🙂ı".encode()] == ["a", "", "", "", "🙂", "", "ı"]
    assert stream.finish() == ""


def test_an_unfinished_character_ends_as_a_replacement():
    stream = Detokenizer(ByteTokenizer())

    assert stream.push("🙂".encode()[:3]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_written_only_on_request():
    ids = [256, *b"hi", 257]

    assert Detokenizer(ByteTokenizer()).push(ids) == "hi"
    assert Detokenizer(ByteTokenizer(), keep_special=True).push(ids) == "<bos>hi<eos>"


def test_text_that_may_begin_a_stop_string_is_held_back():
    stops = StopStrings(["\n\nUser:", "END"])

    assert [stops.push(t) for t in ("one\n", "\nUse", "ful EN", "D two")] == [
        "one",
        "",
        "\n\nUseful ",
        "",
    ]
    assert stops.stopped
    assert stops.push("more") == ""
    assert stops.finish() == ""


def test_the_earliest_stop_string_wins():
    assert StopStrings(["cd", "bc"]).push("abcd") == "a"


def test_held_text_is_given_out_at_the_end():
    stops = StopStrings(["END"])

    assert stops.push("the EN") == "the "
    assert stops.finish() == "EN"
    assert not stops.stopped


def test_without_stop_strings_nothing_is_held():
    assert StopStrings([]).push("text") == "text"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop string is empty"):
        StopStrings(["a", ""])


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.text("abc", max_size=3), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_of_the_text_stops_at_the_same_place(parts, strings):
    text = "".join(parts)
    stops = StopStrings(strings)

    shown = "".join([*map(stops.push, parts), stops.finish()])

    ends = [text.find(stop) for stop in strings if stop in text]
    assert shown == text[: min(ends)] if ends else shown == text
    assert stops.stopped == bool(ends)
