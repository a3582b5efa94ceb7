"""Workloads by name: traces from files, and mixes whose lengths are drawn.

All requests of a drawn mix arrive at 0 s; `arrivals.poisson` gives them times.
"""

import dataclasses
import difflib
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from kvlab.research.arrivals import (
    MAX_LENGTH,
    Arrival,
    Workload,
    fitting,
    generator,
    taken,
)
from kvlab.research.traces import file_sha256, first_turns, read_azure, read_mooncake, read_sharegpt

_T = TypeVar("_T")

_LENGTHS = 2  # what a seed is used for, beside the gaps of `arrivals`
_MAX_SIGMA = 5.0


@dataclasses.dataclass(frozen=True)
class LognormalMix:
    """Lengths in tokens whose logarithms are normal, prompt and output independent.

    Attributes:
      mean_prompt: before clipping, at least 1.
      mean_output: before clipping, at least 1.
      sigma: standard deviation of the log lengths, of prompts and of outputs, 0 to 5.
    """

    mean_prompt: float
    mean_output: float
    sigma: tuple[float, float]

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
          ValueError: a mean below 1 or above `MAX_LENGTH`, or a sigma out of 0 to 5.
        """
        for name in ("mean_prompt", "mean_output"):
            if not 1 <= getattr(self, name) <= MAX_LENGTH:
                raise ValueError(
                    f"{name}={getattr(self, name)}, wanted a number of tokens from 1 to "
                    f"{MAX_LENGTH:,}"
                )
        if not all(0 <= sigma <= _MAX_SIGMA for sigma in self.sigma):
            raise ValueError(f"sigma={self.sigma}, wanted 0 to {_MAX_SIGMA:g}")


MIXES = {
    "sharegpt-like": LognormalMix(161.31, 337.99, sigma=(1.28, 1.08)),
    "alpaca-like": LognormalMix(19.31, 58.45, sigma=(0.6, 1.0)),
}
"""Mixes with the mean lengths of figure 11 of the vLLM paper (SOSP'23, arXiv 2309.06180).

The paper gives no spread. That of sharegpt-like is the standard deviation of the log lengths of the
5,498 first turns of up to 2,048 tokens that `first_turns` finds in sarathi-serve's ShareGPT counts
(1.276 and 1.081); their outputs are flatter than a lognormal and end at 1,024. That of alpaca-like
is assumed: of instructions, 95 % between 5 and 52 tokens, and of answers between 5 and 252.
"""


def lognormal(
    num_requests: int,
    mean_prompt: float,
    mean_output: float,
    sigma: float | tuple[float, float],
    seed: int,
    max_length: int | None = None,
) -> Workload:
    """Requests of lognormal lengths.

    A length is drawn, rounded, and at least 1. A prompt is cut to `max_length` - 1, then the output
    to what the prompt leaves, so no request is dropped or drawn again. Cutting lowers the means:
    with `max_length` 2,048, sharegpt-like comes out at 156 in and 317 out (of 161 and 338; 2.3 % of
    its requests are cut), alpaca-like at its own 19 and 58.

    Args:
      num_requests: at least 1.
      mean_prompt: mean of the prompts before cutting, in tokens.
      mean_output: mean of the outputs before cutting, in tokens.
      sigma: standard deviation of the log lengths, 0 to 5; of both, or of prompts and of outputs.
      seed: 0 to 2**32 - 1. A larger workload begins with the requests of a smaller one.
      max_length: most tokens of prompt and output together, at least 2; None cuts nothing.

    Raises:
      ValueError: an argument out of its range.
    """
    sigmas = sigma if isinstance(sigma, tuple) else (float(sigma), float(sigma))
    mix = LognormalMix(mean_prompt, mean_output, sigmas)
    return _drawn_mix("lognormal", mix, num_requests, seed, max_length)


def uniform(
    num_requests: int, prompt: tuple[int, int], output: tuple[int, int], seed: int
) -> Workload:
    """Requests whose lengths are equally likely within a range, prompt and output independent.

    Args:
      num_requests: at least 1.
      prompt: shortest and longest prompt, both included, in tokens.
      output: shortest and longest output.
      seed: 0 to 2**32 - 1. A larger workload begins with the requests of a smaller one.

    Raises:
      ValueError: an argument out of its range.
    """
    _check_count(num_requests)
    for name, (low, high) in (("prompt", prompt), ("output", output)):
        if not 1 <= low <= high <= MAX_LENGTH:
            raise ValueError(
                f"{name}={low}-{high}, wanted LOW-HIGH with 1 <= LOW <= HIGH <= {MAX_LENGTH:,}"
            )
    low, high = np.transpose([prompt, output])
    lengths = generator(seed, _LENGTHS).integers(low, high, (num_requests, 2), endpoint=True)
    return _at_once("uniform", lengths)


def split_words(written: str) -> list[str]:
    """The words of a comma list of workloads.

    A comma inside a path is part of it: behind `KIND:` a comma ends the word only where another
    word for a workload follows.

    Args:
      written: words that `load_workload` takes, as in `alpaca-like,uniform:5-9/5-9,azure:a,b.csv`,
        which are three.

    Raises:
      ValueError: nothing stands between two commas.
    """
    words: list[str] = []
    for part in written.split(","):
        if words and ":" in words[-1] and part.strip().partition(":")[0] not in _WORDS:
            words[-1] += f",{part}"
        else:
            words.append(part)
    words = [word.strip() for word in words]
    if not all(words):
        raise ValueError("a comma list is wanted, with a value between any two commas")
    return words


def is_trace(text: str) -> bool:
    """Whether a word that `load_workload` takes names a file."""
    return text.partition(":")[0] in _READERS


def trace_sha256(text: str) -> str | None:
    """What the file of a word that `load_workload` takes holds; None of one that names no file.

    Raises:
      ValueError: the file cannot be read.
    """
    _, _, path = text.partition(":")
    return file_sha256(path) if is_trace(text) and path else None


def load_workload(
    text: str,
    *,
    num_requests: int | None = None,
    seed: int = 0,
    max_length: int | None = None,
    skip_bad_rows: bool = False,
    sha256: str | None = None,
) -> Workload:
    """Reads or draws the workload that one word of a command line names.

    Args:
      text: one of
        `azure:PATH`, `mooncake:PATH`: a trace;
        `sharegpt:PATH`: the first turn of every conversation;
        `lognormal:MEAN_PROMPT/MEAN_OUTPUT/SIGMA`, as in `lognormal:128/128/1`;
        `uniform:LOW-HIGH/LOW-HIGH`, prompts and outputs, as in `uniform:64-192/64-192`;
        `sharegpt-like`, `alpaca-like`: see `MIXES`.
        `lognormal` and `uniform` alone are these two examples.
      num_requests: how many; None is a whole trace, and an error for a drawn mix.
      seed: of drawn lengths.
      max_length: most tokens of prompt and output. Requests of a trace that do not fit are left out
        before any are taken, and counted in `too_long`; lognormal lengths are cut; uniform ranges
        must fit.
      skip_bad_rows: leave malformed rows of a file out; see `read_azure`.
      sha256: of a trace's file, as `trace_sha256` gave it; None takes any.

    Raises:
      ValueError: an unknown word, with the legal ones, the nearest first; or what the reader or the
        mix refuses.
    """
    kind, _, rest = text.partition(":")
    if is_trace(text):
        if not rest:
            raise ValueError(f"{text!r} names no file: write {kind}:PATH")
        workload = _READERS[kind](rest, skip_bad_rows=skip_bad_rows, sha256=sha256)
        select = first_turns if kind == "sharegpt" else fitting
        workload = select(workload, max_length)
        return workload if num_requests is None else taken(workload, num_requests)
    if kind not in _WORDS:
        known = difflib.get_close_matches(kind, _WORDS, n=len(_WORDS), cutoff=0.0)
        raise ValueError(
            f"workload {text!r} is not known; legal values, nearest first: "
            + ", ".join(_WORDS[word] for word in known)
        )
    if num_requests is None:
        raise ValueError(f"workload {text!r} is drawn: say how many requests (num_requests)")
    return _drawn(text, num_requests, seed, max_length)


_READERS: dict[str, Callable[..., Workload]] = {
    "azure": read_azure,
    "mooncake": read_mooncake,
    "sharegpt": read_sharegpt,
}
_WORDS = {
    **{kind: f"{kind}:PATH" for kind in _READERS},
    "lognormal": "lognormal[:MEAN_PROMPT/MEAN_OUTPUT/SIGMA]",
    "uniform": "uniform[:LOW-HIGH/LOW-HIGH]",
    **{name: name for name in MIXES},
}


def _drawn(text: str, num_requests: int, seed: int, max_length: int | None) -> Workload:
    """The workload of a word that names no file."""
    kind, colon, rest = text.partition(":")
    if kind == "uniform":
        prompt, output = _parsed(text, rest if colon else "64-192/64-192", _range, 2)
        if max_length is not None and prompt[1] + output[1] > max_length:
            raise ValueError(
                f"{text!r} draws up to {prompt[1] + output[1]} tokens of prompt and output, and "
                f"max_length={max_length}; lower the ranges"
            )
        return uniform(num_requests, prompt, output, seed)
    if kind == "lognormal":
        mean_prompt, mean_output, sigma = _parsed(text, rest if colon else "128/128/1", float, 3)
        return lognormal(num_requests, mean_prompt, mean_output, sigma, seed, max_length)
    if colon:
        raise ValueError(f"{text!r}: {kind} takes nothing after a colon; write {kind}")
    return _drawn_mix(kind, MIXES[kind], num_requests, seed, max_length)


def _drawn_mix(
    name: str, mix: LognormalMix, num_requests: int, seed: int, max_length: int | None
) -> Workload:
    _check_count(num_requests)
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length={max_length}, wanted at least 2: a token in and a token out")
    limit = 2 * MAX_LENGTH if max_length is None else max_length
    sigma = np.asarray(mix.sigma)
    mu = np.log([mix.mean_prompt, mix.mean_output]) - sigma**2 / 2
    normal = generator(seed, _LENGTHS).standard_normal((num_requests, 2))
    lengths = np.rint(np.exp(mu + sigma * normal)).clip(1, MAX_LENGTH)
    prompt = np.minimum(lengths[:, 0], limit - 1)
    output = np.minimum(lengths[:, 1], limit - prompt)
    return _at_once(name, np.stack([prompt, output], axis=1))


def _at_once(name: str, lengths: np.ndarray) -> Workload:
    """Requests at 0 s from lengths [requests, 2]."""
    arrivals = tuple(
        Arrival(number, 0.0, int(prompt), int(output))
        for number, (prompt, output) in enumerate(lengths)
    )
    return Workload(name, arrivals, block_tokens=None, skipped_rows=0)


def _check_count(num_requests: int) -> None:
    if num_requests < 1:
        raise ValueError(f"num_requests={num_requests}, wanted at least 1")


def _parsed(text: str, parameters: str, parse: Callable[[str], _T], count: int) -> list[_T]:
    """What stands after the colon, by its parts."""
    try:
        parts = [parse(part) for part in parameters.split("/")]
    except ValueError:
        parts = []
    if len(parts) != count:
        raise ValueError(f"{text!r} cannot be read; write {_WORDS[text.partition(':')[0]]}")
    return parts


def _range(text: str) -> tuple[int, int]:
    low, high = map(int, text.split("-"))
    return low, high
