r"""Show what fewer KV heads cost in quality, and what they save.

    kvlab attention_quality --data=tinyshakespeare.txt
    kvlab attention_quality --data=tinyshakespeare.txt --shares=0.05 --pooling=mean
    kvlab attention_quality --data=my.txt --models=runs/mha/model,runs/mqa/model --steps=600

The models differ in their KV heads alone, and were trained on the text, whose end judges them; of
the same number of KV heads, several are repeats. Those with as many KV heads as query heads are
converted to the others' by pooling and trained on for shares of their training, and so are they
themselves, unconverted. The GQA paper (arXiv 2305.13245), Table 1 and Fig. 4 to 6, stands beside.
"""

import sys
from typing import Any

from kvlab.experiments.flags import (
    POOLINGS,
    TEXT_FLAGS,
    Flag,
    choice,
    comma_list,
    command_flags,
    number,
    positive,
    require,
    text,
    whole,
)
from kvlab.experiments.main import execute
from kvlab.experiments.run_folder import run_in_folder
from kvlab.models.named import MATCHED_MODELS

FLAGS = command_flags(
    seed="of random pooling and of the order of rows",
    out="the run folder; runs/NAME-HASH if not given",
    **TEXT_FLAGS,
    models=Flag(comma_list(text), "MODEL,...", "that were trained on these texts", MATCHED_MODELS),
    pooling=Flag(
        comma_list(choice(*POOLINGS)),
        "HOW,...",
        f"heads become one, the main way first: {', '.join(POOLINGS)}",
        POOLINGS,
    ),
    shares=Flag(
        comma_list(number),
        "X,...",
        "of the models' steps, that the main way's conversions are uptrained for",
        (0.01, 0.05, 0.1),
    ),
    pooling_share=Flag(number, "X", "share at which the ways to pool are compared", 0.05),
    steps=Flag(whole(1), "N", "steps that the models were trained for", 1200),
    batch=Flag(whole(1), "N", "sequences of such a step, over all devices", 8),
    length=Flag(whole(1), "N", "tokens of a sequence; the models' context if absent"),
    learning_rate=Flag(
        positive(1e6), "X", "the highest of uptraining; the default is that of train", 3e-3
    ),
    batches=Flag(comma_list(whole(1)), "N,...", "sequences that decode is timed with", (1, 64)),
    prompt_tokens=Flag(whole(1), "N", "tokens of each, before decode is timed", 192),
    decode_tokens=Flag(whole(1), "N", "tokens of each that are decoded", 32),
    repeats=Flag(whole(1), "N", "rounds of timing", 7),
    kv_mib=Flag(positive(1e6), "MIB", "memory for keys and values that sequences fit into", 64.0),
    page_size=Flag(whole(1), "N", "tokens a page", 16),
)

_SETTINGS = (
    *("separator", "held_out", "shares", "pooling_share", "steps", "batch", "learning_rate"),
    *("batches", "prompt_tokens", "decode_tokens", "repeats", "kv_mib", "page_size", "seed"),
)


def main(argv: list[str]) -> int:
    """Runs the study, prints its tables and where the report is."""
    del argv
    from kvlab.research.attention_quality_run import AttentionQuality
    from kvlab.research.attention_quality_study import AttentionQualityStudy
    from kvlab.research.matched_models import load_matched
    from kvlab.research.training import share_cpu
    from kvlab.research.training_data import pack_texts, read_texts, split_texts

    require(FLAGS, ["data"])
    share_cpu(FLAGS.batch)
    texts = read_texts(FLAGS.data)
    _, held_out = split_texts(texts, FLAGS.held_out)
    models = load_matched(FLAGS.models, "\n".join(held_out))
    first = next(iter(models.values()))
    assert first.tokenizer is not None
    settings: dict[str, Any] = {name: FLAGS[name].value for name in _SETTINGS}
    study = AttentionQualityStudy(
        members=tuple(models),
        num_heads=first.config.num_heads,
        data=tuple(one.to_json() for one in texts),
        length=FLAGS.length or first.config.max_length,
        poolings=FLAGS.pooling,
        **settings,
    )
    data = pack_texts(
        texts,
        first.tokenizer,
        length=study.length,
        held_out=study.held_out,
        separator=study.separator,
    )
    return run_in_folder(
        AttentionQuality(study, models, data).run,
        command="attention_quality",
        config=study.to_json(),
        seed=study.seed,
        question="What do fewer KV heads cost in quality, and what do they save?",
        out=FLAGS.out,
        points=len([*study.cost_points(), *study.quality_points()]),
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
