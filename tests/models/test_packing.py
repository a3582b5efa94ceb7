"""Packed parameters: numbers stay, quantised ones are near, each weight is packed once."""

import dataclasses
import gc
import pathlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.gguf import load_gguf
from kvlab.models.checkpoints.huggingface import load_huggingface
from kvlab.models.checkpoints.orbax import save_checkpoint
from kvlab.models.decoder import Decoder
from kvlab.models.packing import pack_params, param_bytes
from kvlab.models.presets import preset
from kvlab.models.random_params import random_params
from kvlab.models.tokenizers import load_tokenizer
from kvlab.ops.cpu_kernels import library
from kvlab.ops.packed_weight import FORMATS, PackedWeight

TOLERANCE = 2e-4  # max |logit difference|, float32, as in test_families.py
GOLDENS = np.load(pathlib.Path(__file__).parents[1] / "goldens" / "families.npz")
KERNELS = [False, True] if library.available() else [False]
needs_kernel = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")


def forward(config, params, tokens):
    apply = jax.jit(
        lambda p, t: Decoder(config).apply({"params": p}, t, method="forward"),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return np.asarray(apply(params, jnp.asarray(tokens)), np.float64)


def weights_of(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, PackedWeight))
    return [leaf for leaf in leaves if isinstance(leaf, PackedWeight)]


CASES = [
    pytest.param(case, marks=[pytest.mark.long] * (number % 3 > 0))
    for number, case in enumerate(sorted(GOLDENS.files))
]


@needs_kernel
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, tiny_families, tiny_folder):
    config, params = load_huggingface(tiny_folder(case))
    packed = pack_params(params, config)
    assert all(weight.format == "float32" for weight in weights_of(packed))
    logits = forward(config, packed, tiny_families.tokens(case))
    assert np.abs(logits - GOLDENS[case]).max() <= TOLERANCE


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("weights", "bound"), [("bfloat16", 0.02), ("int8", 0.03), ("int4", 0.4)])
def test_rounded_weights_are_near(weights, bound, kernel):
    config = dataclasses.replace(preset("tiny-gqa"), tie_embeddings=True)
    params = random_params(config, 0)
    tokens = np.arange(20, dtype=np.int32)[None]
    exact = forward(config, params, tokens)
    packed = pack_params(params, config, weights, kernel)
    ours = forward(config, packed, tokens)
    distance = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
    assert bound / 100 < distance < bound
    assert weights_of(packed)[0].implementation == ("cpu" if kernel else "xla")


def test_what_is_packed():
    config = preset("tiny-gqa")
    for tied in (False, True):
        config = dataclasses.replace(config, tie_embeddings=tied)
        params = random_params(config, 0)
        packed = pack_params(params, config, "int8")
        # Seven projections a layer, and the head or the embedding that stands for it.
        assert len(weights_of(packed)) == 7 * config.num_layers + 1
        assert isinstance(packed["embed"]["weight"], PackedWeight) == tied
        again = pack_params(packed, config, "int8")
        assert all(map(lambda a, b: a is b, weights_of(packed), weights_of(again)))
        assert weights_of(pack_params(packed, config)) == weights_of(packed)
        with pytest.raises(ValueError, match="is packed as int8, and weights=int4 are wanted"):
            pack_params(packed, config, "int4")


def test_without_a_kernel_nothing_is_packed_for_layout_alone():
    config = preset("tiny-gqa")
    params = random_params(config, 0)
    for weights in (None, "float32"):
        assert pack_params(params, config, weights, kernel=False) is params


@needs_kernel
@pytest.mark.parametrize(
    ("param_dtype", "dtype", "weights"),
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
        ("float16", "float32", None),
    ],
)
def test_as_loaded_changes_no_number(param_dtype, dtype, weights):
    config = dataclasses.replace(preset("tiny-mqa"), param_dtype=param_dtype, dtype=dtype)
    params = random_params(config, 0)
    packed = pack_params(params, config)
    assert {weight.format for weight in weights_of(packed)} == ({weights} if weights else set())
    tokens = np.arange(20, dtype=np.int32)[None]
    distance = np.abs(forward(config, packed, tokens) - forward(config, params, tokens)).max()
    assert distance <= (TOLERANCE if dtype == "float32" else 0.1)


def test_a_weight_is_packed_once_while_it_lives():
    config = preset("tiny-gqa")
    params = random_params(config, 0)
    first, second = (pack_params(params, config, "int8") for _ in range(2))
    assert all(map(lambda a, b: a is b, weights_of(first), weights_of(second)))
    packed = weakref.ref(weights_of(first)[0])
    del first, second, params
    gc.collect()
    assert packed() is None


def test_a_packed_weight_of_another_shape_is_refused():
    config = preset("tiny-gqa")
    packed = pack_params(random_params(config, 0), config, "int8")
    wider = dataclasses.replace(config, hidden_dim=config.hidden_dim + 1)
    with pytest.raises(ValueError, match=r"mlp/up holds a packed weight"):
        forward(wider, packed, np.zeros((1, 3), np.int32))


def test_an_unknown_format_is_refused():
    config = preset("tiny-gqa")
    with pytest.raises(ValueError, match=r"weights='int3'.*legal values: " + ", ".join(FORMATS)):
        pack_params({}, config, "int3")


def test_packed_parameters_are_not_saved(tmp_path):
    config = preset("tiny-gqa")
    packed = pack_params(random_params(config, 0), config, "int8")
    with pytest.raises(CheckpointError, match="is packed for products"):
        save_checkpoint(tmp_path / "x", config, packed)


@pytest.mark.real_model
def test_smollm2_says_the_same_with_packed_weights(smollm2_path):
    config, params = load_gguf(smollm2_path)
    text = (pathlib.Path(__file__).parents[2] / "research" / "texts" / "english.txt").read_text()
    tokens = np.asarray(load_tokenizer(smollm2_path).encode(text)[:256], np.int32)[None]
    exact = jax.nn.log_softmax(forward(config, params, tokens)[0])

    def distance(weights):
        packed = pack_params(params, config, weights)
        ours = jax.nn.log_softmax(forward(config, packed, tokens)[0])
        agreed = float((ours.argmax(-1) == exact.argmax(-1)).mean())
        return float((np.exp(exact) * (exact - ours)).sum(-1).mean()), agreed

    kl, agreed = distance(None)
    assert abs(kl) < 1e-7
    assert agreed == 1
    # The weights that Q8_0 of the gguf package stands for give 1.2e-3 on 512 tokens.
    kl, agreed = distance("int8")
    assert 1e-5 < kl < 2e-3
    assert agreed > 0.95


@pytest.mark.parametrize("name", ["tiny-gqa", "gpt2"])
@pytest.mark.parametrize("weights", FORMATS)
def test_bytes_are_counted_as_they_are_packed_but_for_the_last_panel(name, weights):
    """32 columns fill panels of 16; 36, and 258 and 77 tokens of vocabulary, do not."""
    small = {"num_layers": 2, "vocab_size": 77, "embed_dim": 36, "num_heads": 2, "head_dim": 18}
    small |= {"num_kv_heads": 2, "hidden_dim": 50, "max_length": 19, "windows": None}
    config = preset(name) if name == "tiny-gqa" else dataclasses.replace(preset(name), **small)
    packed = pack_params(random_params(config, 0), config, weights, kernel=False)
    leaves = weights_of(packed)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(packed))
    padding = 0
    for leaf in leaves:
        if isinstance(leaf, PackedWeight):
            columns = leaf.panels.shape[0] * leaf.panels.shape[2]
            padding += leaf.nbytes * (columns - leaf.shape[1]) // columns
    if weights == "float32":  # XLA takes it as it is
        assert padding == 0
    else:
        assert padding > 0
    assert param_bytes(config, weights) == stored - padding
    assert param_bytes(config) == 4 * sum(
        leaf.size for leaf in jax.tree.leaves(random_params(config, 0))
    )
