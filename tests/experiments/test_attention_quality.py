"""`kvlab attention_quality`: a whole study of tiny models, resumed, and bad input."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder
from kvlab.models.load import Model, save_model
from kvlab.models.random_params import random_params
from kvlab.models.tokenizers import ByteTokenizer
from kvlab.ops.rope import Rope
from kvlab.research import attention_quality_run
from kvlab.research.results import read_rows
from kvlab.research.training import initial_state
from kvlab.research.training_config import OptimizerConfig
from kvlab.research.training_data import Text, pack_texts

DECODER = DecoderConfig(
    family="llama",
    vocab_size=259,
    num_layers=1,
    embed_dim=12,
    hidden_dim=7,
    num_heads=6,
    num_kv_heads=6,
    head_dim=2,
    max_length=16,
    rope=Rope(),
    tie_embeddings=True,
)
TEXT = Text("story.txt", "decode reads a prompt\n" * 40)
SMALL = (
    *("--pooling=mean,first", "--shares=0.5", "--pooling_share=0.5", "--steps=8", "--batch=4"),
    *("--held_out=0.2", "--learning_rate=0.02", "--batches=2", "--prompt_tokens=5"),
    *("--decode_tokens=3", "--repeats=3", "--kv_mib=0.00390625", "--page_size=4", "--seed=5"),
)


@pytest.fixture(autouse=True)
def _promotion():
    """Optax promotes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def rounded(params):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models, with their parameters as they are judged: a and b are MHA, c is not."""
    folder = tmp_path_factory.mktemp("models")
    saved = {}
    for name, heads, seed in (("a", 6, 0), ("b", 6, 1), ("c", 2, 0)):
        config = dataclasses.replace(DECODER, num_kv_heads=heads)
        params = random_params(config, seed)
        save_model(folder / name, Model(name, config, params, ByteTokenizer(259), None))
        saved[name] = (str(folder / name), rounded(params))
    (folder / TEXT.name).write_text(TEXT.content)
    return saved, folder / TEXT.name


@functools.partial(jax.jit, static_argnames="config")
def forward(params, config, tokens):
    return Decoder(config).apply({"params": params}, tokens, method="forward")


def loss_of(config, params):
    """Mean loss of the held-out text, the slow way."""
    packed = pack_texts([TEXT], ByteTokenizer(259), length=16, held_out=0.2)
    losses = []
    for tokens, segments in zip(*packed.held_out, strict=True):
        count = int((segments > 0).sum())
        logits = np.asarray(forward(params, config, tokens[None, :-1]), np.float64)[0, : count - 1]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses += [-row[token] for row, token in zip(log_probs, tokens[1:count], strict=True)]
    return np.mean(losses)


def pooled(params, heads, way):
    """Key and value projections [D, 6 * 2] with groups of heads merged, rounded to bfloat16."""
    attention = dict(params["layers_0"]["attention"])
    for name in ("key", "value"):
        weight = np.asarray(attention[name]["weight"]).reshape(12, heads, 6 // heads, 2)
        merged = weight.mean(2) if way == "mean" else weight[:, :, 0]
        rounded = jnp.asarray(merged.reshape(12, -1)).astype(jnp.bfloat16).astype(jnp.float32)
        attention[name] = {"weight": rounded}
    return params | {"layers_0": params["layers_0"] | {"attention": attention}}


def test_a_study_to_its_end(kvlab, models, monkeypatch, tmp_path):
    begun = []

    def spied(config, params=None):
        begun.append((config.seed, config.steps, config.optimizer))
        return initial_state(config, params)

    monkeypatch.setattr(attention_quality_run, "initial_state", spied)
    saved, text = models
    paths = {path: name for name, (path, _) in saved.items()}
    command = (
        *("attention_quality", f"--data={text}", f"--models={','.join(paths)}", *SMALL),
        f"--out={tmp_path}/run",
    )
    shown = kvlab(*command)
    assert shown.status == 0, shown.err
    rows = read_rows(tmp_path / "run")
    found = {}
    for row in rows:
        config = row["config"]
        others = map(config.get, ("num_kv_heads", "pooling", "share"))
        found[config["kind"], paths.get(config.get("model")), *others] = row["metrics"]
    mha, own = saved["a"][1], saved["c"][1]
    fewer = dataclasses.replace(DECODER, num_kv_heads=2)

    def loss(*key):
        return found[key]["held_out_loss"]

    as_it_was = loss_of(DECODER, mha)
    assert loss("trained", "a", 6, None, None) == pytest.approx(as_it_was, 1e-5)
    assert loss("trained", "c", 2, None, None) == pytest.approx(loss_of(fewer, own), 1e-5)
    for way in ("mean", "first"):
        wanted = loss_of(fewer, pooled(mha, 2, way))
        assert loss("converted", "a", 2, way, None) == pytest.approx(wanted, 1e-5)
        assert loss("uptrained", "a", 2, way, 0.5) < wanted - 0.05
    assert loss("control", "a", 6, None, 0.5) < as_it_was - 0.05
    assert loss("control", "b", 6, None, 0.5) != loss("control", "a", 6, None, 0.5)
    curves = [row["series"]["loss"] for row in rows if "share" in row["config"]]
    assert [[step for step, _ in curve] for curve in curves] == [[1, 2, 3, 4]] * 6
    # The source, then what each way made of it; rows in the order of the seed plus the repeat.
    optimizer = OptimizerConfig(0.02, warmup_steps=0)
    assert begun == [(5, 4, optimizer)] * 3 + [(6, 4, optimizer)] * 3

    for heads, trained in ((6, "a"), (2, "c")):
        size = 2 * heads * 2 * 4  # keys and values of 2 numbers in float32
        memory = found["memory", None, heads, None, None]
        assert memory["kv_bytes_per_token"] == size
        # 8 tokens take 2 pages of 4.
        assert memory["max_concurrent_sequences"] == 4096 // (size * 4) // 2
        assert found["trained", trained, heads, None, None]["kv_bytes_per_token"] == size
        speed = found["speed", None, heads, None, None]
        assert speed["decode_tokens_per_s"] == pytest.approx(2 / speed["tpot_s"])
    samples = [r["repeats"]["tpot_s"] for r in rows if r["config"]["kind"] == "speed"]
    assert [len(some) for some in samples] == [3, 3]

    assert "Findings" in shown.out
    assert "What a set this small can show" in shown.out
    assert "Fig. 4" in (tmp_path / "run" / "report.html").read_text()
    before = (tmp_path / "run" / "results.jsonl").read_text()
    assert kvlab(*command).status == 0
    assert (tmp_path / "run" / "results.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--data is missing: texts to train on"),
        (("--data=absent.txt",), "absent.txt: No such file or directory"),
        (("--data=EMPTY",), "is empty; give a file of text to train on"),
        (("--data=TEXT", "--models=absent"), "model 'absent' does not exist"),
        (("--data=TEXT", "--models=C"), "no model of the set has as many KV heads as query heads"),
        (("--data=TEXT", "--models=A,C", "--shares=0.05,2"), "shares=2 given"),
        (("--data=TEXT", "--models=A,C", "--batch=3"), "batch=3 cannot be split over 2 devices"),
        (("--data=TEXT", "--models=A,C", "--length=17"), "prompt_tokens=192 and decode_tokens=32"),
        (
            (
                *("--data=TEXT", "--models=A,C", "--length=17", "--prompt_tokens=4"),
                "--decode_tokens=4",
            ),
            "length=17 given; it must be the decoder's max_length=16 or less",
        ),
    ],
)
def test_bad_input_is_one_line(kvlab, models, tmp_path, arguments, words):
    saved, text = models
    (tmp_path / "empty.txt").write_text("\n")
    short = ("--prompt_tokens=4", "--decode_tokens=4") if "--batch=3" in arguments else ()
    written = [
        one.replace("TEXT", str(text))
        .replace("EMPTY", str(tmp_path / "empty.txt"))
        .replace("A,C", f"{saved['a'][0]},{saved['c'][0]}")
        .replace("models=C", f"models={saved['c'][0]}")
        for one in (*arguments, *short)
    ]
    refused = kvlab("attention_quality", *written, f"--out={tmp_path}/run")
    assert refused.status == 1
    assert words in refused.error
    assert not (tmp_path / "run").exists()
