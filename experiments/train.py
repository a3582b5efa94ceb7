r"""Train a small decoder on text files, and a tokenizer for it.

    kvlab train --data=shakespeare.txt --out=runs/mha
    kvlab train --data=en.txt,tr.txt --num_kv_heads=2 --steps=2000 --separator='\n\n'
    kvlab train --data=shakespeare.txt --init=runs/mqa --steps=60 --warmup_steps=5
    kvlab generate --model=runs/mha/model --prompt="KING RICHARD:"

The defaults are a Llama of about 0.8 million parameters. The end of every text is held out, and its
loss is measured along the way. The run folder holds rows of loss and speed, checkpoints, and in the
end the model, which every command loads. A run that was stopped, by a kill too, goes on from its
newest good checkpoint when the same command runs again, with the same losses in every bit. Rows of
a pass are shared by all local devices; a CPU's cores count as one each.

--init trains a model further: one that `kvlab convert` gave fewer KV heads (uptraining), say.
"""

import sys
from typing import TYPE_CHECKING, Any

from kvlab.experiments.flags import (
    TEXT_FLAGS,
    Flag,
    choice,
    command_flags,
    number,
    require,
    text,
    whole,
)
from kvlab.experiments.main import execute
from kvlab.experiments.run_folder import run_in_folder

if TYPE_CHECKING:
    from kvlab.models.config import DecoderConfig
    from kvlab.models.load import Model
    from kvlab.research.results import RunFolder
    from kvlab.research.rows import Row
    from kvlab.research.training_config import OptimizerConfig, TrainingConfig
    from kvlab.research.training_data import PackedTexts


FLAGS = command_flags(
    seed="of the first parameters and of the order of rows",
    out="the run folder; runs/train-HASH if not given",
    **TEXT_FLAGS,
    init=Flag(text, "MODEL", "train this model further, with its own shape and tokenizer"),
    vocab_size=Flag(whole(1), "N", "pieces of the SentencePiece tokenizer", 1024),
    num_layers=Flag(whole(1), "N", "layers", 4),
    embed_dim=Flag(whole(1), "N", "width of the model", 128),
    hidden_dim=Flag(whole(1), "N", "width of the MLPs", 320),
    num_heads=Flag(whole(1), "N", "query heads", 8),
    num_kv_heads=Flag(whole(1), "N", "heads of keys and values; as many as query heads if absent"),
    head_dim=Flag(whole(1), "N", "size of a head; embed_dim over num_heads if absent"),
    dtype=Flag(
        choice("float32", "bfloat16"),
        "TYPE",
        "of the computation; parameters and their updates are float32",
        "float32",
    ),
    length=Flag(whole(1), "N", "tokens of a sequence, and the model's context", 256),
    batch=Flag(whole(1), "N", "sequences of a pass, over all devices", 8),
    accumulate=Flag(whole(1), "N", "passes whose gradients make a step", 1),
    steps=Flag(whole(1), "N", "steps of the optimizer", 1200),
    learning_rate=Flag(number, "X", "the highest, after the warm-up", 3e-3),
    final_share=Flag(number, "X", "the last learning rate over the highest", 0.1),
    warmup_steps=Flag(whole(), "N", "steps until the highest learning rate", 100),
    weight_decay=Flag(number, "X", "of matrices, as AdamW decays", 0.1),
    beta1=Flag(number, "X", "of Adam's first moment", 0.9),
    beta2=Flag(number, "X", "of Adam's second moment", 0.95),
    clip_norm=Flag(number, "X", "largest global norm of a gradient", 1.0),
    remat=Flag(bool, "", "compute activations again instead of keeping them: less memory", False),
    cpu_devices=Flag(
        whole(1),
        "N",
        "devices that a CPU counts as; one a core, as far as the batch can be split, if not given",
    ),
    log_every=Flag(whole(1), "N", "steps a row of results", 10),
    eval_every=Flag(whole(1), "N", "steps between held-out losses", 100),
    checkpoint_every=Flag(whole(1), "N", "steps between checkpoints", 100),
    keep=Flag(whole(1), "N", "newest checkpoints that are kept", 2),
)


def main(argv: list[str]) -> int:
    """Trains, prints what came of it and where the model is."""
    del argv
    from kvlab.models.load import params_sha256
    from kvlab.research.training import Trainer, share_cpu
    from kvlab.research.training_data import pack_texts, prepare, read_texts
    from kvlab.research.training_run import MODEL_FOLDER, run_training

    require(FLAGS, ["data"])
    share_cpu(FLAGS.batch, FLAGS.cpu_devices)
    start = _start()
    config = _training_config(start)
    Trainer(config)  # refuses a batch that the devices cannot share
    texts = read_texts(FLAGS.data)
    packing: dict[str, Any] = {
        "length": config.length,
        "held_out": FLAGS.held_out,
        "separator": FLAGS.separator,
    }
    if start is None:
        data: PackedTexts = prepare(texts, vocab_size=FLAGS.vocab_size, **packing)
    else:
        assert start.tokenizer is not None
        data = pack_texts(texts, start.tokenizer, **packing)

    def work(folder: "RunFolder") -> "list[Row]":
        rows = run_training(config, data, folder, start)
        print(f"model: {folder.path / MODEL_FOLDER}\n")
        return rows

    return run_in_folder(
        work,
        command="train",
        config={
            **config.to_json(),
            "data": [one.to_json() for one in texts],
            "separator": FLAGS.separator,
            "held_out": FLAGS.held_out,
            **({} if start is None else {"init": params_sha256(start.params)}),
        },
        seed=config.seed,
        question="How low does the loss of this decoder get on this text?",
        out=FLAGS.out,
    )


_SHAPE = (
    *("vocab_size", "num_layers", "embed_dim", "hidden_dim"),
    *("num_heads", "num_kv_heads", "head_dim"),
)


def _start() -> "Model | None":
    """The model that is trained further, if there is one."""
    from kvlab.models.load import load_model

    if FLAGS.init is None:
        return None
    given = [f"--{name}" for name in _SHAPE if FLAGS[name].present]
    if given:
        raise ValueError(
            f"{given[0]} given, and --init has a shape of its own; leave one of them out (kvlab "
            "convert changes KV heads)"
        )
    start = load_model(FLAGS.init, param_dtype="float32", dtype=FLAGS.dtype)
    if start.tokenizer is None:
        raise ValueError(
            f"model {FLAGS.init} has no tokenizer to cut texts with; give one that has"
        )
    return start


def _training_config(start: "Model | None") -> "TrainingConfig":
    """The run that the flags describe, but for its texts."""
    from kvlab.research.training_config import TrainingConfig

    schedule: dict[str, Any] = {name: FLAGS[name].value for name in _SCHEDULE}
    decoder = _decoder_config() if start is None else start.config
    return TrainingConfig(decoder, optimizer=_optimizer_config(), **schedule)


_SCHEDULE = (
    *("length", "batch", "accumulate", "steps", "remat", "seed"),
    *("log_every", "eval_every", "checkpoint_every", "keep"),
)
_OPTIMIZER = (
    *("learning_rate", "final_share", "warmup_steps", "weight_decay"),
    *("beta1", "beta2", "clip_norm"),
)


def _optimizer_config() -> "OptimizerConfig":
    from kvlab.research.training_config import OptimizerConfig

    settings: dict[str, Any] = {name: FLAGS[name].value for name in _OPTIMIZER}
    return OptimizerConfig(**settings)


def _decoder_config() -> "DecoderConfig":
    """A Llama with a tied head."""
    from kvlab.models.config import DecoderConfig, RMSNorm
    from kvlab.ops.rope import Rope

    width, heads = FLAGS.embed_dim, FLAGS.num_heads
    if FLAGS.head_dim is None and width % heads:
        raise ValueError(
            f"--num_heads={heads} does not divide --embed_dim={width}; give --embed_dim="
            f"{-(-width // heads) * heads}, for example, or --head_dim"
        )
    head_dim = FLAGS.head_dim or width // heads
    return DecoderConfig(
        family="llama",
        vocab_size=FLAGS.vocab_size,
        num_layers=FLAGS.num_layers,
        embed_dim=FLAGS.embed_dim,
        hidden_dim=FLAGS.hidden_dim,
        num_heads=FLAGS.num_heads,
        num_kv_heads=FLAGS.num_kv_heads or FLAGS.num_heads,
        head_dim=head_dim,
        max_length=FLAGS.length,
        norm=RMSNorm(1e-5),
        rope=Rope(),
        tie_embeddings=True,
        dtype=FLAGS.dtype,
    )


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
