"""A step of training against NumPy: loss, gradient, AdamW, accumulation, devices."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.config import DecoderConfig, RMSNorm
from kvlab.models.random_params import random_params
from kvlab.ops.rope import Rope
from kvlab.research.training import (
    Packed,
    Trainer,
    initial_state,
    schedule_of,
    summed_loss,
)
from kvlab.research.training_config import OptimizerConfig, TrainingConfig

DECODER = DecoderConfig(
    family="llama",
    vocab_size=29,
    num_layers=2,
    embed_dim=13,
    hidden_dim=17,
    num_heads=6,
    num_kv_heads=(3, 1),
    head_dim=10,
    max_length=23,
    norm=RMSNorm(1e-5),
    rope=Rope(),
    tie_embeddings=True,
)
CONFIG = TrainingConfig(
    dataclasses.replace(DECODER, num_layers=1, num_kv_heads=3, windows=None),
    length=11,
    batch=4,
    steps=7,
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2, clip_norm=0.5),
    log_every=1,
    eval_every=1,
    checkpoint_every=1,
)


@pytest.fixture(autouse=True)
def _optax_promotes():
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def trainer_of(config, devices=None):
    """Shared by tests, since each compiles a step."""
    return Trainer(config, None if devices is None else jax.local_devices()[:devices])


def rows(count, seed=0, length=CONFIG.length):
    """Rows of two texts and a place of padding."""
    tokens = np.random.default_rng(seed).integers(0, DECODER.vocab_size, (count, length + 1))
    segments = np.where(np.arange(length + 1) < length // 3, 1, 2)
    segments[-1] = 0
    return Packed(tokens.astype(np.int32), np.tile(segments, (count, 1)).astype(np.int32))


def numpy_loss(params, texts):
    """The decoder and its loss, one text after the other, in float64 and without JAX."""
    total, count = 0.0, 0
    for text in texts:
        x = params["embed"]["weight"][text[:-1]]
        for layer in range(DECODER.num_layers):
            of = params[f"layers_{layer}"]
            x = x + numpy_attention(of["attention"], norm(x, of["attention_norm"]))
            y = norm(x, of["mlp_norm"])
            gate, up = (y @ of["mlp"][name]["weight"] for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ of["mlp"]["down"]["weight"]
        logits = norm(x, params["final_norm"]) @ params["embed"]["weight"].T
        total += (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(x)), text[1:]]).sum()
        count += len(x)
    return total, count


def norm(x, of):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * of["scale"]


def numpy_attention(of, x):
    length, half = len(x), DECODER.head_dim // 2
    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(half) / half)

    def heads(name):
        return (x @ of[name]["weight"]).reshape(length, -1, DECODER.head_dim)

    def turned(y):
        left, right = y[..., :half], y[..., half:]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    query, key, value = turned(heads("query")), turned(heads("key")), heads("value")
    outputs = []
    for head in range(DECODER.num_heads):
        own = head * key.shape[1] // DECODER.num_heads
        scores = query[:, head] @ key[:, own].T / np.sqrt(DECODER.head_dim)
        weights = np.where(np.tri(length, dtype=bool), np.exp(scores), 0.0)
        outputs.append(weights / weights.sum(1, keepdims=True) @ value[:, own])
    return np.concatenate(outputs, 1) @ of["output"]["weight"]


@functools.partial(jax.jit, static_argnames=("decoder", "remat"))
def gradient_of(params, packed, decoder, remat=False):
    """Of the summed loss."""
    return jax.grad(lambda params: summed_loss(params, packed, decoder, remat)[0])(params)


def texts_of(packed):
    return [
        tokens[segments == number]
        for tokens, segments in zip(*packed, strict=True)
        for number in sorted(set(segments) - {0})
    ]


def wide(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def test_the_loss_of_packed_rows_is_that_of_each_text_alone():
    params = random_params(DECODER, 3)
    packed = rows(3)
    loss, count = jax.jit(summed_loss, static_argnums=2)(params, packed, DECODER)
    want, predicted = numpy_loss(wide(params), texts_of(packed))
    assert int(count) == predicted == 3 * (2 + 7)
    np.testing.assert_allclose(loss, want, rtol=1e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_the_gradient_agrees_with_differences_of_numpy(remat):
    params = random_params(DECODER, 3)
    packed = rows(2)
    gradient = gradient_of(params, packed, DECODER, remat)
    random = np.random.default_rng(0)
    exact, texts = wide(params), texts_of(packed)
    leaves, structure = jax.tree.flatten(exact)
    for index, leaf in enumerate(leaves):
        direction = random.standard_normal(leaf.shape)
        direction /= np.linalg.norm(direction)
        ends = []
        for sign in (1, -1):
            moved = [*leaves]
            moved[index] = leaf + sign * 1e-5 * direction
            ends.append(numpy_loss(jax.tree.unflatten(structure, moved), texts)[0])
        slope = (ends[0] - ends[1]) / 2e-5
        came = (np.asarray(jax.tree.leaves(gradient)[index], np.float64) * direction).sum()
        np.testing.assert_allclose(came, slope, rtol=1e-3, atol=1e-4)


def test_a_step_is_clipped_adamw():
    trainer = trainer_of(CONFIG)
    state = trainer.place(initial_state(CONFIG))
    first = initial_state(CONFIG).params
    start = wide(first)
    packed = rows(4)
    gradient = jax.tree.map(
        lambda leaf: leaf / 36, wide(gradient_of(first, packed, CONFIG.decoder))
    )
    length = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))
    state, figures = trainer.step(state, Packed(*(array[None] for array in packed)))
    assert figures.predicted == 36
    assert figures.gradient_norm == pytest.approx(length, rel=1e-4)
    assert length > CONFIG.optimizer.clip_norm
    rate = CONFIG.optimizer.learning_rate / 3
    assert figures.learning_rate == pytest.approx(rate)

    def stepped(param, slope):
        clipped = slope * CONFIG.optimizer.clip_norm / length
        decay = CONFIG.optimizer.weight_decay * param if param.ndim > 1 else 0.0
        return param - rate * (clipped / (np.abs(clipped) + 1e-8) + decay)

    want = jax.tree.map(stepped, start, gradient)
    for name, came, wanted, slope in zip(
        jax.tree_util.tree_leaves_with_path(want),
        jax.tree.leaves(state.params),
        jax.tree.leaves(want),
        jax.tree.leaves(gradient),
        strict=True,
    ):
        sure = np.abs(slope) > 1e-4 * length  # elsewhere the sign is rounding
        np.testing.assert_allclose(
            np.asarray(came)[sure], wanted[sure], atol=1e-5, err_msg=str(name[0])
        )
    assert int(state.step) == 1
    assert int(state.rows_read) == 4


def test_the_learning_rate_warms_up_and_decays():
    options = OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_share=0.25)
    rates = [float(schedule_of(options, 20)(step)) for step in range(21)]
    assert rates[0] == pytest.approx(2 / 5)
    assert rates[4] == pytest.approx(2.0) == max(rates)
    assert rates[12] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[20] == pytest.approx(0.5) == min(rates[4:])


def test_passes_of_unequal_rows_make_one_step():
    whole = rows(4)
    whole.segments[3, 4:] = 0  # fewer tokens than other rows, and the same weight for each
    parts = dataclasses.replace(CONFIG, batch=2, accumulate=2)
    states = []
    for config, shape in ((CONFIG, (1, 4)), (parts, (2, 2))):
        trainer = trainer_of(config)
        state = trainer.place(initial_state(config))
        taken = Packed(*(array.reshape(*shape, -1) for array in whole))
        states.append(trainer.step(state, taken))
    (one, figures), (two, split) = states
    assert split.loss == pytest.approx(figures.loss, rel=1e-6)
    assert split.gradient_norm == pytest.approx(figures.gradient_norm, rel=1e-5)
    assert int(one.rows_read) == int(two.rows_read) == 4


def test_devices_share_the_rows_and_get_the_loss_of_one():
    assert jax.local_device_count() > 1
    curves = []
    for devices in (1, None):
        trainer = trainer_of(CONFIG, devices)
        state, curve = trainer.place(initial_state(CONFIG)), []
        for seed in range(5):
            taken = Packed(*(array[None] for array in rows(4, seed)))
            state, figures = trainer.step(state, taken)
            curve.append(figures.loss)
        curve.append(trainer.score(state.params, [rows(4, 9)])[0])
        curves.append(curve)
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
    assert len({leaf.sharding for leaf in jax.tree.leaves(state)}) == 1


def test_a_batch_that_the_devices_cannot_share():
    with pytest.raises(ValueError, match=r"batch=3 cannot be split over 2 devices.*: 4, for"):
        Trainer(dataclasses.replace(CONFIG, batch=3), jax.local_devices()[:2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 24}, "length=24 given; it must be the decoder's max_length=23 or less"),
        ({"batch": 0}, "batch=0 given; it must be 1 or more"),
        ({"steps": 2}, "steps=2 given; it must be above warmup_steps=2"),
        ({"log_every": 2, "eval_every": 2, "checkpoint_every": 5}, "a multiple of log_every=2: 4"),
        ({"decoder": dataclasses.replace(DECODER, param_dtype="bfloat16")}, "param_dtype=bfloat16"),
    ],
)
def test_runs_that_cannot_be(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 0.0), ("final_share", 2.0), ("beta2", 1.0), ("clip_norm", -1.0)],
)
def test_optimizers_that_cannot_be(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} given; it must be"):
        OptimizerConfig(**{field: value})


def test_first_parameters_follow_the_seed():
    one, two = (initial_state(dataclasses.replace(CONFIG, seed=seed)) for seed in (0, 1))
    assert not jnp.array_equal(one.params["embed"]["weight"], two.params["embed"]["weight"])
    assert not jnp.array_equal(one.key, two.key)


def names_of_transformers(layers):
    """Our flat names, and those of a Llama in transformers; True where a weight is transposed."""
    parts = {"query": "q", "key": "k", "value": "v", "output": "o"}
    yield ("embed", "weight"), "model.embed_tokens.weight", False
    yield ("final_norm", "scale"), "model.norm.weight", False
    for index in range(layers):
        ours, theirs = f"layers_{index}", f"model.layers.{index}"
        yield (ours, "attention_norm", "scale"), f"{theirs}.input_layernorm.weight", False
        yield (ours, "mlp_norm", "scale"), f"{theirs}.post_attention_layernorm.weight", False
        for name, letter in parts.items():
            weight = f"{theirs}.self_attn.{letter}_proj.weight"
            yield (ours, "attention", name, "weight"), weight, True
        for name in ("gate", "up", "down"):
            yield (ours, "mlp", name, "weight"), f"{theirs}.mlp.{name}_proj.weight", True


@pytest.mark.peers
def test_loss_and_gradient_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    decoder = dataclasses.replace(DECODER, embed_dim=18, num_kv_heads=3, windows=None)
    params, packed = random_params(decoder, 3), rows(3)
    config = transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=18,  # its own check wants a multiple of the heads
        intermediate_size=17,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        max_position_embeddings=23,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    theirs = dict(model.named_parameters())
    pairs = list(names_of_transformers(2))
    assert {name for _, name, _ in pairs} == theirs.keys()
    for path, name, transposed in pairs:
        leaf = np.array(functools.reduce(lambda tree, key: tree[key], path, params))
        theirs[name].data = torch.tensor(leaf.T if transposed else leaf).contiguous()
    total = 0.0
    for text in texts_of(packed):
        ids = torch.tensor(text[None].astype(np.int64))
        loss = model(input_ids=ids, labels=ids).loss * (len(text) - 1)
        loss.backward()
        total += loss.item()
    loss, _ = jax.jit(summed_loss, static_argnums=2)(params, packed, decoder)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    gradient = gradient_of(params, packed, decoder)
    for path, name, transposed in pairs:
        came = np.array(functools.reduce(lambda tree, key: tree[key], path, gradient))
        want = theirs[name].grad.numpy()
        np.testing.assert_allclose(came.T if transposed else came, want, atol=2e-4, err_msg=name)


def devices_told(batch, wanted, begun=False, **environment):
    """What a process of its own says after `share_cpu`."""
    code = ["import jax", "from kvlab.research import training"]
    code += ["training.usable_cores = lambda: 4"] + ["jax.devices()"] * begun
    code += [f"training.share_cpu({batch}, {wanted})", "print(jax.local_device_count())"]
    clean = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", "\n".join(code)]
    ended = subprocess.run(
        command, check=False, env=clean | environment, capture_output=True, text=True
    )
    return ended.stdout.strip() or ended.stderr.splitlines()[-1]


def test_cores_of_a_cpu_are_devices_as_far_as_the_batch_can_be_split():
    assert devices_told(6, None) == "3"
    named = "--xla_force_host_platform_device_count=5"
    assert devices_told(8, None, XLA_FLAGS=named) == "5"
    told = devices_told(8, 2, begun=True)
    assert "cpu_devices=2 given, and JAX has begun with 1 here; leave cpu_devices out" in told
