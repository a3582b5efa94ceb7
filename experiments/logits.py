"""Write the logits of every position of given token lists.

    kvlab logits --tokens=tokens.json --out=logits.npz
    kvlab logits --tokens=tokens.json --out=logits.npz --placement=paged --decode_from=16

The file of --tokens holds a JSON list of lists of token ids. The result is an npz file with
float32 arrays logits_0, logits_1, ..., one per list, each [tokens, vocabulary]: row t is what the
model predicts after token t. With --decode_from=N the tokens from place N on (counted from 0) go
through decode one at a time, as in generation; without it all go through prefill.
"""

import sys

from kvlab.experiments import flags
from kvlab.experiments.flags import Flag, command_flags
from kvlab.experiments.main import execute

FLAGS = command_flags(
    "model",
    "tokens",
    "weights",
    axes=flags.ONE,
    out="the npz file to write",
    decode_from=Flag(flags.whole(1), "N", "decode the tokens from place N on, one at a time"),
    slots="lists computed side by side",
    chunk="tokens that one prefill call takes",
    max_length="most tokens of a list",
)


def main(argv: list[str]) -> None:
    """Computes the logits of the lists that the flags name, and writes them."""
    del argv
    flags.require(FLAGS, ("tokens", "out"))
    from kvlab.models.load import load_model
    from kvlab.research.fitting import fitting_config
    from kvlab.research.positions import check_lists, npz_writer, position_logits
    from kvlab.research.progress import progress
    from kvlab.research.prompts import read_token_lists
    from kvlab.research.session import Session
    from kvlab.research.variants import with_attention

    spec = flags.cache_point(FLAGS)
    lists = read_token_lists(FLAGS.tokens)
    with npz_writer(FLAGS.out) as write:  # first, so that no work is lost to a wrong path
        model = with_attention(load_model(FLAGS.model), FLAGS.attention)
        config = fitting_config(
            model.config,
            spec,
            sequences=len(lists),
            needed=max(map(len, lists)),
            slots=FLAGS.slots,
            max_length=FLAGS.max_length,
            chunk=FLAGS.chunk,
            implementation=FLAGS.implementation,
            weights=FLAGS.weights,
        )
        session = Session(model.params, config)
        check_lists(session, lists)
        total = sum(map(len, lists))
        with progress(total, "logits", unit="tokens") as bar:
            computed = position_logits(
                session, lists, FLAGS.decode_from, lambda count: bar.advance(amount=count)
            )
            for index, logits in enumerate(computed):
                write(f"logits_{index}", logits)
    print(f"{FLAGS.out}: {len(lists)} lists, {total} tokens, {model.config.vocab_size} logits each")


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
