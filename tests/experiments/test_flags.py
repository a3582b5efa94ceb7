"""Flags: one place for each, sets apart from each other, values parsed once."""

import pytest
from absl import flags as absl_flags

from kvlab.experiments.flags import (
    MANY,
    ONE,
    Flag,
    cache_point,
    choice,
    comma_list,
    command_flags,
    number,
    require,
    text,
    whole,
)
from kvlab.ops.retention import H2O, Sinks
from kvlab.ops.specs import CacheSpec, Contiguous, Kivi4, Paged, Recompute, Ring
from kvlab.research.cache_axes import cache_specs


def parsed(values: absl_flags.FlagValues, *arguments: str) -> absl_flags.FlagValues:
    values(["kvlab", *arguments])
    return values


def test_axes_of_a_sweep_are_lists_that_are_none_until_given():
    flags = parsed(command_flags(axes=MANY))
    names = ("attention", "placement", "page_size", "storage", "implementation")
    assert [flags[name].value for name in names] == [None] * 5
    flags = parsed(
        command_flags(axes=MANY),
        "--attention=mha, gqa:2,mqa,mha",
        "--placement=contiguous,paged",
        "--page_size=8,16,64",
        "--implementation=reference",
    )
    assert flags.attention == ("mha", "gqa:2", "mqa")
    assert flags.page_size == (8, 16, 64)
    assert flags.implementation == "reference"
    assert (
        len(flags.attention)
        * len(cache_specs({name: flags[name].value for name in ("placement", "page_size")}))
        == 12
    )


@pytest.mark.parametrize(
    ("arguments", "point"),
    [
        ([], CacheSpec(Paged(16))),
        (["--page_size=3", "--storage=bfloat16"], CacheSpec(Paged(3), "bfloat16")),
        (["--placement=contiguous"], CacheSpec(Contiguous())),
        (["--placement=recompute"], CacheSpec(Recompute())),
        (["--placement=ring", "--window=37"], CacheSpec(Ring(37))),
        (["--storage=kivi4", "--group=8", "--residual=5"], CacheSpec(Paged(16), Kivi4(8, 5))),
        (
            ["--retention=h2o", "--budget=0.5", "--recent=7", "--allocation=per_head"],
            CacheSpec(retention=H2O(0.5, recent=7, allocation="per_head")),
        ),
        (
            ["--retention=sinks", "--budget=64", "--num_sinks=2", "--when=decode"],
            CacheSpec(retention=Sinks(64, "decode", 2)),
        ),
    ],
)
def test_one_point_has_defaults(arguments, point):
    assert cache_point(parsed(command_flags(axes=ONE), *arguments)) == point


def test_a_storage_for_what_stores_nothing_is_refused():
    flags = parsed(command_flags(axes=ONE), "--placement=recompute", "--storage=bfloat16")
    with pytest.raises(ValueError, match="storage=bfloat16 means nothing there"):
        cache_point(flags)
    flags = parsed(command_flags(axes=ONE), "--placement=recompute", "--retention=h2o")
    with pytest.raises(ValueError, match="retention=h2o:256 means nothing there"):
        cache_point(flags)


def test_a_retention_is_named_or_imported():
    with pytest.raises(absl_flags.IllegalFlagValueError, match=r"'h20' is not known; .*module:C"):
        parsed(command_flags(axes=ONE), "--retention=h20")
    with pytest.raises(absl_flags.IllegalFlagValueError, match="nowhere:P cannot be imported"):
        parsed(command_flags(axes=ONE), "--retention=nowhere:P")


def test_a_command_takes_the_flags_it_wants_and_words_them():
    flags = command_flags("seed", out="the page", extra=Flag(whole(3), "N", "more", 7))
    assert set(flags) == {"seed", "out", "extra", "debug", "help"}
    assert flags["out"].help == "the page"
    parsed(flags, "--extra", "9")
    assert (flags.seed, flags.extra, flags.out) == (0, 9, None)
    with pytest.raises(absl_flags.IllegalFlagValueError, match="3 or more"):
        parsed(flags, "--extra=2")


def test_repeatable_flags_collect_and_others_take_the_last():
    flags = parsed(command_flags("prompt", "seed"), "--prompt=a,b", "--prompt=c", "--seed=1")
    assert flags.prompt == ["a,b", "c"]
    assert "may be repeated" in flags["prompt"].help
    assert parsed(command_flags("prompt")).prompt == []


def test_sets_do_not_share_values():
    one, other = command_flags("prompt", "seed"), command_flags("prompt", "seed")
    parsed(one, "--prompt=a", "--seed=3")
    parsed(other)
    assert (other.prompt, other.seed) == ([], 0)


def test_switches_can_be_turned_off():
    assert parsed(command_flags("json"), "--json").json is True
    assert parsed(command_flags("json"), "--json", "--nojson").json is False


@pytest.mark.parametrize(
    ("arguments", "value"),
    [([], False), (["--early_stopping"], True), (["--early_stopping=never"], "never")],
)
def test_a_switch_may_take_words(arguments, value):
    assert parsed(command_flags("early_stopping"), *arguments).early_stopping == value
    with pytest.raises(absl_flags.IllegalFlagValueError, match="values: true, false, never"):
        parsed(command_flags("early_stopping"), "--early_stopping=always")


def test_required_flags_are_named_with_their_meaning():
    flags = parsed(command_flags("tokens", "out"), "--tokens=x")
    require(flags, ("tokens",))
    with pytest.raises(ValueError, match="--out is missing: where to write"):
        require(flags, ("tokens", "out"))


def test_a_seed_is_what_a_key_holds():
    assert parsed(command_flags("seed"), "--seed=4294967295").seed == 2**32 - 1
    with pytest.raises(absl_flags.IllegalFlagValueError, match="4,294,967,295 or less"):
        parsed(command_flags("seed"), "--seed=4294967296")


def test_an_empty_path_is_none():
    for name in ("out", "tokens", "prompt_file"):
        with pytest.raises(absl_flags.IllegalFlagValueError, match="a path is wanted"):
            parsed(command_flags(name), f"--{name}=")


def test_parsers():
    assert number("0.5") == 0.5
    assert text(" a ") == " a "
    assert choice("a", "b")("b") == "b"
    assert comma_list(whole())("3, 0,3") == (3, 0)
    for parse, wrong in [
        (number, "x"),
        (choice("a"), "c"),
        (whole(), "-1"),
        (whole(), "1.5"),
        (comma_list(text), "a,"),
    ]:
        with pytest.raises(ValueError, match=r"wanted|legal"):
            parse(wrong)
