"""Generate text from prompts.

    kvlab generate --chat --prompt="What is a KV cache?"
    kvlab generate --prompt="The capital of France is" --num_samples=3 --temperature=0.8 --json
    kvlab generate --prompt="The KV cache is" --num_beams=4 --length_penalty=1.0 --early_stopping
    kvlab generate --model=FOLDER --prompt_ids=1,15,27

A text ends at the model's end-of-text token, at a --stop string, or after --max_tokens. More
sequences than --slots run one group after another. With --json every continuation is a line: its
prompt, token ids, text, log-probabilities (natural, of the model without temperature or filters),
why it ended (stop, length, max_length, out_of_pages), its time to first token and per token after
that (seconds, without compilation), and seconds of compiling so far. A beam search gives the best
beam of each prompt and its score, the sum of its log-probabilities over its length to the power of
--length_penalty.
"""

import json
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvlab.experiments import flags
from kvlab.experiments.flags import Flag, command_flags
from kvlab.experiments.main import execute

if TYPE_CHECKING:
    from kvlab.models.tokenizers import Tokenizer
    from kvlab.research.beam import Beam
    from kvlab.research.generation import Completion
    from kvlab.research.prompts import Prompt
    from kvlab.research.session import Session

FLAGS = command_flags(
    "model",
    "prompt",
    "prompt_file",
    "prompt_ids",
    "max_tokens",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "num_samples",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "json",
    "slots",
    "chunk",
    "max_length",
    "weights",
    axes=flags.ONE,
    chat=Flag(bool, "", "lay each prompt out as a user's message, with the model's own template"),
)


def main(argv: list[str]) -> None:
    """Continues the prompts of the flags and prints what comes."""
    from kvlab.models.load import load_model
    from kvlab.ops.sampling import Sampling
    from kvlab.research import generation
    from kvlab.research.fitting import fitting_config
    from kvlab.research.session import Session
    from kvlab.research.variants import with_attention

    _refuse_what_beams_leave_out()
    sampling = Sampling(FLAGS.temperature, FLAGS.top_k, FLAGS.top_p, FLAGS.min_p, FLAGS.seed)
    spec = flags.cache_point(FLAGS)
    encode_prompts = _read_prompts()
    model = with_attention(load_model(FLAGS.model), FLAGS.attention)
    tokenizer = model.tokenizer
    prompts = encode_prompts(tokenizer)
    config = fitting_config(
        model.config,
        spec,
        sequences=len(prompts) * FLAGS.num_samples * FLAGS.num_beams,
        needed=max(len(prompt.ids) for prompt in prompts) + FLAGS.max_tokens,
        group=FLAGS.num_beams,
        slots=FLAGS.slots,
        max_length=FLAGS.max_length,
        chunk=FLAGS.chunk,
        implementation=FLAGS.implementation,
        weights=FLAGS.weights,
    )
    generation.check_prompts(prompts, config)
    session = Session(model.params, config)
    if FLAGS.num_beams > 1:
        _search(session, prompts, tokenizer)
        return
    options = generation.Options(
        max_tokens=FLAGS.max_tokens,
        sampling=sampling,
        num_samples=FLAGS.num_samples,
        stop_ids=tokenizer.eos_ids if tokenizer else (),
        stop=tuple(FLAGS.stop),
    )
    single = len(prompts) * FLAGS.num_samples == 1
    streams = single and tokenizer is not None and not FLAGS.json
    if FLAGS.json:
        generation.warm_up(session, forks=FLAGS.num_samples > 1)
    on_text = _stream if streams else None
    for completion in generation.generate(session, prompts, options, tokenizer, on_text):
        if FLAGS.json:
            line = _as_json(completion) | {"compile_s": session.compile_s}
            print(json.dumps(line, ensure_ascii=False), flush=True)
        elif streams:
            print()
        else:
            label = f"{completion.prompt_index + 1}.{completion.sample_index + 1}"
            shown = _as_text(completion.tokens, completion.text)
            print(shown if single else _under_prompt(completion.prompt, label, shown), flush=True)


def _refuse_what_beams_leave_out() -> None:
    """Raises ValueError where flags of beam search and of sampling meet, or the first stand alone.

    A beam search draws nothing, and ends beams at token ids.
    """
    told = "it is of beam search, which needs 2 beams or more"
    refused = ["length_penalty", "early_stopping"]
    if FLAGS.num_beams > 1:
        told = (
            "beam search takes the likeliest continuation and ends at the model's own end of text"
        )
        refused = ["temperature", "top_k", "top_p", "min_p", "num_samples", "stop"]
    for name in refused:
        if FLAGS[name].value != FLAGS[name].default:
            given = f"--num_beams={FLAGS.num_beams} with --{name}"
            raise ValueError(f"{given}: {told}; leave one out")


def _search(session: "Session", prompts: "list[Prompt]", tokenizer: "Tokenizer | None") -> None:
    """Prints the best beam of each prompt."""
    from kvlab.research import beam, generation

    options = beam.BeamOptions(
        num_beams=FLAGS.num_beams,
        max_tokens=FLAGS.max_tokens,
        length_penalty=FLAGS.length_penalty,
        early_stopping=FLAGS.early_stopping,
        stop_ids=tokenizer.eos_ids if tokenizer else (),
    )
    found = beam.beam_search(session, prompts, options)
    for index, (prompt, (best,)) in enumerate(zip(prompts, found, strict=True)):
        text = None
        if tokenizer is not None:
            stream = generation.detokenizer(tokenizer, prompt)
            stopped = best.finish_reason == "stop"
            text = stream.push(best.tokens[: -1 if stopped else None]) + stream.finish()
        if FLAGS.json:
            line = _beam_json(index, prompt, best, text)
            print(json.dumps(line, ensure_ascii=False), flush=True)
        else:
            label = f"{index + 1}, score {best.score:.4f}"
            shown = _as_text(best.tokens, text)
            print(_under_prompt(prompt, label, shown), flush=True)


def _read_prompts() -> "Callable[[Tokenizer | None], list[Prompt]]":
    """Reads the prompts that the flags name; encodes them when the model's tokenizer is known."""
    from kvlab.research import prompts

    ids = [prompt for written in FLAGS.prompt_ids for prompt in prompts.parse_ids(written)]
    texts = [*FLAGS.prompt, *map(prompts.read_prompt, FLAGS.prompt_file)]
    if not (texts or ids):
        raise ValueError("no prompt given; use --prompt, --prompt_file or --prompt_ids")
    if FLAGS.chat and ids:
        raise ValueError("--chat lays out texts, and --prompt_ids has none; use one of them")
    chat = FLAGS.chat
    return lambda tokenizer: [*prompts.encode_prompts(texts, tokenizer, chat=chat), *ids]


def _stream(_: int, text: str) -> None:
    print(text, end="", flush=True)


def _as_json(completion: "Completion") -> dict[str, Any]:
    """The line of one continuation; what there is not is absent."""
    line = {
        "prompt": completion.prompt.text,
        "prompt_ids": completion.prompt.ids,
        "prompt_index": completion.prompt_index,
        "sample_index": completion.sample_index,
        "tokens": completion.tokens,
        "text": completion.text,
        "log_probs": completion.log_probs,
        "cumulative_log_prob": sum(completion.log_probs),
        "finish_reason": completion.finish_reason,
        "ttft_s": completion.ttft_s,
        "tpot_s": completion.tpot_s,
    }
    return _present(line)


def _beam_json(index: int, prompt: "Prompt", beam: "Beam", text: str | None) -> dict[str, Any]:
    """The line of one prompt's best beam."""
    line = {
        "prompt": prompt.text,
        "prompt_ids": prompt.ids,
        "prompt_index": index,
        "tokens": beam.tokens,
        "text": text,
        "score": beam.score,
        "cumulative_log_prob": beam.log_prob,
        "finish_reason": beam.finish_reason,
    }
    return _present(line)


def _present(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if value is not None}


def _as_text(tokens: tuple[int, ...], text: str | None) -> str:
    """A continuation for a reader: ids where there is no text."""
    return ",".join(map(str, tokens)) if text is None else text


def _under_prompt(prompt: "Prompt", label: str, shown: str) -> str:
    """A continuation below its prompt."""
    head = ",".join(map(str, prompt.ids)) if prompt.text is None else prompt.text
    return f"[{label}] {textwrap.shorten(head, 80)}\n{shown}\n"


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
