"""Run an attention x cache ablation on a model, one row per point.

    kvlab sweep
    kvlab sweep --attention=mha,gqa --placement=contiguous,paged --page_size=8,16,64
    kvlab sweep --config=per_layer
    kvlab sweep --config=my_ablation.py --out=runs/mine
    kvlab sweep --attention=gqa --placement=paged --retention=all,sinks,h2o --budget=256
    kvlab sweep --config=per_layer --text=my_corpus.txt --passkey_tokens=512,1024

Every point has decode and prefill speed and the cache's measured bytes; quality is scored once per
attention x cache, by one prefill of each text. Where a point has a retention, all points are scored
on windows of the texts instead: a prompt is prefilled, the rest is forced through decode. Without
--config the experiment is attention_cache; other flags change what they name, and axis flags
replace its variants by their product, without what is impossible in it (which is said). A run that
was stopped goes on where it was when the same command runs again.
"""

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from kvlab.experiments.flags import CACHE_AXES, MANY, Flag, comma_list, command_flags, text, whole
from kvlab.experiments.main import execute
from kvlab.experiments.run_folder import run_in_folder

if TYPE_CHECKING:
    from kvlab.research.evaluation_texts import TextFile
    from kvlab.research.experiment import Sweep

_DEFAULT_CONFIG = "attention_cache"
_DEFAULT_PLACEMENTS = ("recompute", "contiguous", "paged")


def _tokens_or_none(written: str) -> tuple[int, ...]:
    return comma_list(whole(1))(written) if written else ()


def _text_file(written: str) -> "TextFile":
    from kvlab.research.evaluation_texts import text_file

    return text_file(written)


def _tokens_or_all(written: str) -> int | str:
    return written if written == "all" else whole()(written)


FLAGS = command_flags(
    axes=MANY,
    model=Flag(text, "MODEL", "as of generate; the config's if not given"),
    config=Flag(text, "NAME", "an experiment by name, or a .py file with one", _DEFAULT_CONFIG),
    out="the run folder; runs/NAME-HASH if not given",
    seed=Flag(whole(), "N", "picks the timed prompts"),
    batch_sizes=Flag(comma_list(whole(1)), "N,...", "sequences decoded together"),
    prompt_tokens=Flag(whole(1), "N", "tokens of each timed prompt"),
    decode_tokens=Flag(whole(1), "N", "tokens decoded after it"),
    recompute_decode_tokens=Flag(whole(1), "N", "as many where placement is recompute"),
    repeats=Flag(whole(1), "N", "timed repetitions of a point"),
    quality_tokens=Flag(
        _tokens_or_all, "N", "tokens of each evaluation text that are scored; all, or 0 for none"
    ),
    text=Flag(_text_file, "FILE", "score this text, not the project's", (), True),
    window_tokens=Flag(
        whole(2), "N", "of a window of text, which are scored where a point has a retention"
    ),
    forced_tokens=Flag(whole(1), "N", "of a window, forced through decode and scored"),
    passkey_tokens=Flag(
        _tokens_or_none, "N,...", "lengths of texts that hide a key to be found; empty for none"
    ),
    max_length="slots that a sequence may grow to",
    chunk="tokens of a prompt that one prefill call takes",
)


def main(argv: list[str]) -> int:
    """Runs the sweep, prints its table and where the report is."""
    del argv
    from kvlab.models.load import load_model
    from kvlab.research.sweep import run_sweep, sweep_points

    sweep = _sweep()
    return run_in_folder(
        lambda folder: run_sweep(sweep, load_model(sweep.model), folder),
        command="sweep",
        config=sweep.to_json(),
        seed=sweep.seed,
        question=sweep.question,
        out=FLAGS.out,
        name=sweep.name,
        points=len(list(sweep_points(sweep))),
    )


def _sweep() -> "Sweep":
    """The experiment that the flags describe."""
    from kvlab.research.cache_axes import cache_specs
    from kvlab.research.experiment import cross, load_experiment

    sweep = load_experiment(FLAGS.config)
    names = {field.name for field in dataclasses.fields(sweep)}
    given: dict[str, Any] = {name: FLAGS[name].value for name in FLAGS if FLAGS[name].present}
    changes = {name: value for name, value in given.items() if name in names}
    if given.get("text"):
        changes["texts"] = tuple(given["text"])
    if changes.get("quality_tokens") == "all":
        changes["quality_tokens"] = None
    axes = {name: given[name] for name in CACHE_AXES if name in given}
    if axes or "attention" in given:
        left_out: list[str] = []
        caches = cache_specs({"placement": _DEFAULT_PLACEMENTS} | axes, left_out)
        for reason in dict.fromkeys(left_out):
            print(f"left out: {reason}", file=sys.stderr)
        changes["variants"] = cross(given.get("attention", ("mha", "gqa", "mqa")), tuple(caches))
    return dataclasses.replace(sweep, **changes)


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
