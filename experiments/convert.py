"""Write a model in another form, with other attention if asked for.

    kvlab convert --format=huggingface --out=smollm2
    kvlab convert --attention=mqa --pooling=first --format=gguf --out=mqa.gguf --dtype=bfloat16

kvlab's own form and a Hugging Face folder are folders, GGUF is one file; the tokenizer comes along.
Fewer KV heads are made by pooling the projections of each group: their mean, the first of them, or
random ones (GQA, arXiv 2305.13245, Fig. 4). That costs quality until the model is trained further.
What a form cannot hold is an error that names it; what is written is there whole or not at all.
"""

import sys

from kvlab.experiments import flags
from kvlab.experiments.flags import POOLINGS, Flag, choice, command_flags
from kvlab.experiments.main import execute

# As `kvlab.models` has them; importing that would make --help wait for JAX.
_FORMATS = ("kvlab", "huggingface", "gguf")
FLAGS = command_flags(
    "model",
    "attention",
    "seed",
    out="the folder to write, or the .gguf file",
    format=Flag(choice(*_FORMATS), "NAME", f"to write: {', '.join(_FORMATS)}", "kvlab"),
    pooling=Flag(
        choice(*POOLINGS), "HOW", f"a group becomes one KV head: {', '.join(POOLINGS)}", "mean"
    ),
    dtype=Flag(
        choice("float32", "bfloat16"),
        "DTYPE",
        "of what is written: float32 or bfloat16; as in a kvlab checkpoint, else float32, if not "
        "given",
    ),
    overwrite=Flag(bool, "", "replace a model that is there already", False),
)


def main(argv: list[str]) -> None:
    """Loads the model that the flags name, converts it, and writes it."""
    del argv
    flags.require(FLAGS, ("out",))
    from kvlab.models.checkpoints.writing import check_free
    from kvlab.models.export import export_model
    from kvlab.models.load import load_model
    from kvlab.models.presets import parameter_count
    from kvlab.models.tokenizers import ByteTokenizer
    from kvlab.research.variants import with_attention

    if (FLAGS.format == "gguf") != FLAGS.out.endswith(".gguf"):
        raise ValueError(
            f"--out={FLAGS.out} does not fit --format={FLAGS.format}: names of GGUF files end in "
            ".gguf, those of folders do not"
        )
    check_free(FLAGS.out, FLAGS.overwrite)  # first, so that no work is lost to a wrong path
    loaded = load_model(FLAGS.model)
    model = with_attention(loaded, FLAGS.attention, FLAGS.pooling, FLAGS.seed)
    export_model(FLAGS.out, model, FLAGS.format, dtype=FLAGS.dtype, overwrite=FLAGS.overwrite)
    config = model.config
    heads = ", ".join(str(count) for count in dict.fromkeys(config.kv_heads))
    # The tokenizer of bytes has no counterpart there.
    bare = FLAGS.format == "gguf" and isinstance(model.tokenizer, ByteTokenizer)
    print(
        f"{FLAGS.out}: {config.family}, {parameter_count(config):,} parameters in "
        f"{FLAGS.dtype or config.param_dtype}, {heads} KV "
        f"{'head' if heads == '1' else 'heads'} of {config.num_heads}"
        + (", for token ids: GGUF has no tokenizer of bytes" if bare else "")
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
