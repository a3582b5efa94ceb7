"""The flags of the commands, each defined once.

A command takes those it wants at import, into a set of its own:

    FLAGS = command_flags("model", "seed", axes=ONE, wheel=Flag(text, "FILE", "the wheel"))

Nothing here imports jax, so that `--help` is quick; values that need it are checked when parsed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from absl import flags as absl_flags

from kvlab.ops.specs import PLACEMENTS, RETENTIONS, STORAGES, CacheSpec, Recompute

ONE: Literal["one"] = "one"
MANY: Literal["many"] = "many"

DEFAULT_MODEL = "smollm2-135m"
_MODEL_HELP = (
    "a fetched model (smollm2-135m), one that comes with kvlab (shakespeare-gqa4), a Hugging Face "
    "folder, a .gguf file, a kvlab checkpoint, or random:<preset> (random:tiny-gqa)"
)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
      parse: turns what was written into the value, or raises ValueError saying what is wanted;
        `bool` makes a switch (`--name`, `--noname`).
      shown: what stands for the value in the help (N, FILE).
      help: what it means, one sentence without a full stop.
      default: the value when it is not given.
      repeatable: given several times, it collects its values in a list.
      words: what a switch may be set to beside true and false (`--name=word`).
    """

    parse: Callable[[str], Any]
    shown: str
    help: str
    default: Any = None
    repeatable: bool = False
    words: tuple[str, ...] = ()


def text(written: str) -> str:
    """Takes the value as it is."""
    return written


def path(written: str) -> str:
    """Takes the path of a file or folder."""
    if not written:
        raise ValueError("a path is wanted")
    return written


def whole(minimum: int = 0, maximum: int | None = None) -> Callable[[str], int]:
    """Makes a parser of whole numbers from `minimum` on, to `maximum` where there is one."""

    def parse(written: str) -> int:
        try:
            value = int(written)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise ValueError(f"a whole number, {minimum} or more, is wanted")
        if maximum is not None and value > maximum:
            raise ValueError(f"a whole number, {maximum:,} or less, is wanted")
        return value

    return parse


def number(written: str) -> float:
    """Parses a decimal number."""
    try:
        return float(written)
    except ValueError:
        raise ValueError("a number is wanted") from None


def positive(maximum: float) -> Callable[[str], float]:
    """Makes a parser of decimal numbers above 0, to `maximum`; as far below 1 as it is above."""

    def parse(written: str) -> float:
        value = number(written)
        if not value > 0:
            raise ValueError("a number above 0 is wanted")
        if not 1 / maximum <= value <= maximum:
            raise ValueError(f"a number from {1 / maximum:g} to {maximum:,.0f} is wanted")
        return value

    return parse


def choice(*legal: str) -> Callable[[str], str]:
    """Makes a parser that takes one of the legal values."""

    def parse(written: str) -> str:
        if written not in legal:
            raise ValueError(f"legal values: {', '.join(legal)}")
        return written

    return parse


def comma_list(parse_item: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Makes a parser of comma lists; a value that is given twice counts once."""

    def parse(written: str) -> tuple[Any, ...]:
        items = [item.strip() for item in written.split(",")]
        if not all(items):
            raise ValueError("a comma list is wanted, with a value between any two commas")
        return tuple(dict.fromkeys(parse_item(item) for item in items))

    return parse


def _single(parse_item: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser that refuses comma lists, for commands that run one point."""

    def parse(written: str) -> Any:
        if "," in written:
            raise ValueError("this command runs one point; give one value (sweep takes lists)")
        return parse_item(written)

    return parse


def _attention(written: str) -> str:
    from kvlab.research.variants import parse_attention

    return parse_attention(written)


def _retention(written: str) -> str:
    if written not in RETENTIONS:
        from kvlab.research.cache_axes import load_policy

        load_policy(written)
    return written


def _budget(written: str) -> int | float:
    value = number(written)
    if not 0 < value < 2**31:
        raise ValueError("a number of tokens, or a share of the prompt (0.5), is wanted")
    return int(value) if value == int(value) and "." not in written else value


def _implementation(written: str) -> str:
    from kvlab.ops.implementations import IMPLEMENTATIONS

    return choice(*IMPLEMENTATIONS)(written)


def _weights(written: str) -> str:
    from kvlab.ops.packed_weight import FORMATS

    return choice(*FORMATS)(written)


_AXES = {
    "attention": Flag(
        _attention, "NAME", "mha, gqa (the model's own KV heads), gqa:K (K KV heads) or mqa"
    ),
    "placement": Flag(
        choice(*PLACEMENTS), "NAME", f"where keys and values lie: {', '.join(PLACEMENTS)}"
    ),
    "page_size": Flag(whole(1), "N", "tokens a page, with placement paged; 16"),
    "window": Flag(whole(1), "N", "positions that a query sees, with placement ring"),
    "storage": Flag(choice(*STORAGES), "FORM", f"of keys and values: {', '.join(STORAGES)}"),
    "group": Flag(whole(1), "N", "tokens that share a scale, with storage kivi4; 32"),
    "residual": Flag(whole(), "N", "newest tokens in full precision, with storage kivi4; 0"),
    "retention": Flag(
        _retention,
        "NAME",
        f"which tokens stay: {', '.join(RETENTIONS)}, or module:Class for a policy of your own",
    ),
    "budget": Flag(
        _budget, "N", "tokens that retention keeps, or a share of the prompt (0.5); 256"
    ),
    "when": Flag(
        choice("prefill", "decode", "both"), "WHEN", "retention applies: prefill, decode or both"
    ),
    "num_sinks": Flag(whole(), "N", "first tokens that stay, with retention sinks; 4"),
    "positions": Flag(
        choice("text", "cache"), "WHERE", "keys are turned by, with retention sinks: text or cache"
    ),
    "recent": Flag(whole(), "N", "newest tokens that stay, with retention h2o (32) or random (0)"),
    "observation": Flag(whole(1), "N", "last queries that judge, with retention snapkv; 32"),
    "kernel": Flag(whole(1), "N", "slots that snapkv averages over, an odd number; 5"),
    "allocation": Flag(
        choice("uniform", "per_head"),
        "HOW",
        "heads share the budget, with retention h2o, snapkv or random: uniform or per_head",
    ),
    "safeguard": Flag(number, "X", "share of the budget that per_head leaves every head; 0.2"),
}
_IMPLEMENTATION = Flag(
    _implementation,
    "NAME",
    "of attention: cpu (a C++ kernel), chunked or reference; the best one if not given",
)
_ONE_POINT: dict[str, Any] = {
    "placement": "paged",
    "storage": "float32",
    "retention": "all",
}
CACHE_AXES = tuple(name for name in _AXES if name != "attention")
"""The axis flags that `kvlab.research.cache_axes.cache_specs` crosses."""

_SHARED = {
    "model": Flag(text, "MODEL", _MODEL_HELP, DEFAULT_MODEL),
    "slots": Flag(whole(1), "N", "sequences side by side; all of them, up to 8, if not given"),
    "chunk": Flag(
        whole(1),
        "N",
        "tokens of a prompt that one prefill call takes; 128, or fewer if texts are shorter",
    ),
    "max_length": Flag(
        whole(1),
        "N",
        "most tokens of a sequence, prompt and continuation; what is needed if not given",
    ),
    "weights": Flag(
        _weights,
        "FORMAT",
        "of the projections and the head: float32, bfloat16, int8, int4; as loaded if not given",
    ),
    "seed": Flag(whole(0, 2**32 - 1), "N", "of every random draw", 0),
    "out": Flag(path, "PATH", "where to write"),
    "tokens": Flag(path, "FILE", "token ids: a JSON list of lists"),
    "prompt": Flag(text, "TEXT", "a prompt", (), True),
    "prompt_file": Flag(path, "FILE", "a file whose whole text is a prompt", (), True),
    "prompt_ids": Flag(
        text, "IDS", "a prompt as token ids: 1,2,3; or a JSON list of several", (), True
    ),
    "max_tokens": Flag(whole(1), "N", "most new tokens of a sequence", 64),
    "stop": Flag(text, "TEXT", "ends a text before this string", (), True),
    "temperature": Flag(number, "X", "of sampling; 0 always takes the likeliest token", 0.0),
    "top_k": Flag(whole(), "N", "sample from the N likeliest tokens; 0 is off", 0),
    "top_p": Flag(
        number, "X", "sample from the likeliest tokens that hold this probability; 1 is off", 1.0
    ),
    "min_p": Flag(
        number, "X", "drop tokens less likely than this share of the likeliest; 0 is off", 0.0
    ),
    "num_samples": Flag(whole(1), "N", "continuations of each prompt", 1),
    "num_beams": Flag(
        whole(1), "N", "beam search for the likeliest continuation, with N beams; 1 is off", 1
    ),
    "length_penalty": Flag(
        number,
        "X",
        "of beams: the power of their length that log-probabilities are divided by",
        1.0,
    ),
    "early_stopping": Flag(
        bool,
        "",
        "end a beam search when N beams have ended; =never goes on while a better one is possible",
        False,
        words=("never",),
    ),
    "json": Flag(bool, "", "one JSON object a line instead of text", False),
}


def _separator(written: str) -> str:
    if not written:
        raise ValueError(r"a text is wanted, as \n\n for an empty line")
    return written.replace("\\n", "\n")


# As `kvlab.models` has them; importing that would make --help wait for JAX.
POOLINGS = ("mean", "first", "random")

TEXT_FLAGS: dict[str, Any] = {
    "data": Flag(comma_list(text), "FILE,...", "texts to train on, UTF-8"),
    "separator": Flag(
        _separator,
        "TEXT",
        r"between the documents of a text (\n is a line end); a text is one if absent",
    ),
    "held_out": Flag(number, "X", "share of each text that is held out, from its end", 0.1),
}


def command_flags(
    *names: str, axes: Literal["one", "many"] | None = None, **own: Flag | str
) -> absl_flags.FlagValues:
    """The flags of one command, apart from those of any other.

    Args:
      *names: shared flags that it takes, or single axes.
      axes: ONE adds the axis flags for one point, with its defaults; MANY adds them as comma lists
        that are None until given. A command has one implementation either way.
      **own: flags of the command's own, or a shared one with this help text.

    Returns:
      The flags; `--help` and `--debug` are among them.
    """
    chosen = {name: (_AXES | _SHARED)[name] for name in names}
    for name, flag in own.items():
        known = flag if isinstance(flag, Flag) else dataclasses.replace(_SHARED[name], help=flag)
        chosen[name] = known
    for name, flag in _AXES.items() if axes else ():
        parse = _single(flag.parse) if axes == ONE else comma_list(flag.parse)
        shown = flag.shown if axes == ONE else f"{flag.shown},..."
        default = _ONE_POINT.get(name) if axes == ONE else None
        chosen[name] = dataclasses.replace(flag, parse=parse, shown=shown, default=default)
    if axes:
        chosen["implementation"] = _IMPLEMENTATION
    chosen["debug"] = Flag(bool, "", "show where in the code an error comes from", False)
    chosen["help"] = Flag(bool, "", "show this", False)
    values = absl_flags.FlagValues()
    for name, flag in chosen.items():
        _define(values, name, flag)
    values.set_gnu_getopt(True)  # flags may follow arguments
    return values


def cache_point(values: absl_flags.FlagValues) -> CacheSpec:
    """The point on the cache axes that the flags of `command_flags(axes=ONE)` name.

    Raises:
      ValueError: an impossible value or combination, or a parameter that the point does not use.
    """
    from kvlab.research.cache_axes import cache_specs, load_policy

    given: dict[str, Any] = {name: values[name].value for name in CACHE_AXES}
    if given["placement"] == "recompute":  # which a product lets pass whatever the other axes are
        policy = load_policy(given["retention"])
        CacheSpec(Recompute(), given["storage"], None if policy is None else policy())
    (point,) = cache_specs({name: (value,) for name, value in given.items() if value is not None})
    return point


class _Parser(absl_flags.ArgumentParser):
    """Lets a function parse what is written; defaults are values already."""

    def __init__(self, flag: Flag) -> None:
        self._parse = flag.parse
        self.syntactic_help = flag.shown

    def parse(self, argument: Any) -> Any:
        return self._parse(argument) if isinstance(argument, str) else argument


class _Switch(absl_flags.BooleanParser):
    """absl's own, with words of the flag's and an error that a reader understands."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def parse(self, argument: Any) -> Any:
        if argument in self._words:
            return argument
        try:
            return super().parse(argument)
        except (TypeError, ValueError):
            legal = ", ".join(("true", "false", *self._words))
            raise ValueError(f"legal values: {legal}") from None


def _define(values: absl_flags.FlagValues, name: str, flag: Flag) -> None:
    if flag.parse is bool:
        switch = absl_flags.BooleanFlag(name, flag.default, flag.help)
        switch.parser = _Switch(flag.words)
        absl_flags.DEFINE_flag(switch, flag_values=values)
        return
    parser: absl_flags.ArgumentParser[Any] = _Parser(flag)
    serializer: absl_flags.ArgumentSerializer[Any] = absl_flags.ArgumentSerializer()
    if flag.repeatable:
        absl_flags.DEFINE_multi(
            parser, serializer, name, list(flag.default), flag.help, flag_values=values
        )
        values[name].help = f"{flag.help}; may be repeated"  # absl adds a longer sentence
    else:
        absl_flags.DEFINE(
            parser, name, flag.default, flag.help, flag_values=values, serializer=serializer
        )


def require(values: absl_flags.FlagValues, names: Sequence[str]) -> None:
    """Raises ValueError naming the first of these flags that was not given."""
    for name in names:
        if values[name].value in (None, [], ()):
            raise ValueError(f"--{name} is missing: {values[name].help}")
