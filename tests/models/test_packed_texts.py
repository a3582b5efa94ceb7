"""Rows of several texts: each gets the logits and the derivative that it has alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.config import DecoderConfig, LayerNorm, RMSNorm
from kvlab.models.decoder import Decoder
from kvlab.models.random_params import random_params
from kvlab.ops.rope import DynamicNTK, Rope

GQA = DecoderConfig(
    family="llama",
    vocab_size=43,
    num_layers=2,
    embed_dim=13,
    hidden_dim=17,
    num_heads=6,
    num_kv_heads=(3, 1),
    head_dim=10,
    max_length=64,
    norm=RMSNorm(1e-5),
    rope=Rope(),
    windows=(3, None),
    soft_cap=5.0,
    tie_embeddings=True,
)
LEARNED = dataclasses.replace(
    GQA, family="gpt2", rope=None, norm=LayerNorm(), windows=None, soft_cap=None
)
LENGTHS = (7, 1, 5)


def packed(seed=0):
    """Three texts and two places of padding in a row, and the texts by themselves."""
    ids = np.random.default_rng(seed).integers(0, GQA.vocab_size, sum(LENGTHS) + 2)
    segments = np.repeat([1, 2, 3, 0], [*LENGTHS, 2])
    texts = [ids[segments == number] for number in (1, 2, 3)]
    return jnp.asarray(ids[None], jnp.int32), jnp.asarray(segments[None], jnp.int32), texts


@pytest.mark.parametrize("config", [GQA, LEARNED], ids=["rope", "learned"])
def test_logits_are_those_of_each_text_alone(config):
    params = random_params(config, 1)
    tokens, segments, texts = packed()
    forward = jax.jit(
        lambda *arrays: Decoder(config).apply({"params": params}, *arrays, method="forward")
    )
    logits = forward(tokens, segments)[0]
    assert np.isfinite(logits).all()
    alone = [forward(jnp.asarray(text[None], jnp.int32))[0] for text in texts]
    np.testing.assert_allclose(logits[: sum(LENGTHS)], np.concatenate(alone), atol=2e-5)


def test_rematerialised_gradients_are_the_same():
    params = random_params(GQA, 1)
    tokens, segments, _ = packed()

    def gradient(remat):
        def loss(params):
            decoder = Decoder(GQA, remat=remat)
            return decoder.apply({"params": params}, tokens, segments, method="forward").var()

        return jax.jit(jax.grad(loss))(params)

    kept, again = gradient(remat=False), gradient(remat=True)
    for left, right in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        assert float(jnp.abs(left).max()) > 0
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-7)


def test_rematerialisation_holds_one_layer_at_a_time():
    config = dataclasses.replace(GQA, num_layers=3, num_kv_heads=3, windows=None, max_length=256)
    tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    params = random_params(config, 1)

    def working_bytes(remat):
        def loss(params, tokens, segments):
            decoder = Decoder(config, remat=remat)
            return decoder.apply({"params": params}, tokens, segments, method="forward").var()

        compiled = jax.jit(jax.grad(loss)).lower(params, tokens, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert working_bytes(remat=True) < 0.6 * working_bytes(remat=False)


def test_padding_changes_no_gradient():
    config = dataclasses.replace(GQA, num_layers=1, num_kv_heads=3, windows=None)
    params = random_params(config, 1)
    tokens, segments, _ = packed()

    @jax.jit
    def gradient(tokens):
        def loss(params):
            logits = Decoder(config).apply({"params": params}, tokens, segments, method="forward")
            return jnp.where(segments[..., None] > 0, logits, 0.0).var()

        return jax.grad(loss)(params)

    other = tokens.at[0, -2:].set((tokens[0, -2:] + 1) % GQA.vocab_size)
    for left, right in zip(
        jax.tree.leaves(gradient(tokens)), jax.tree.leaves(gradient(other)), strict=True
    ):
        assert np.array_equal(left, right)


def test_dynamic_ntk_has_one_base_for_a_row():
    config = dataclasses.replace(GQA, rope=Rope(1e4, DynamicNTK(2.0, 11)))
    tokens, segments, _ = packed()
    with pytest.raises(ValueError, match="DynamicNTK given; use another scaling"):
        Decoder(config).apply(
            {"params": random_params(config, 1)}, tokens, segments, method="forward"
        )
