"""A model whose pages lie as JAX's paged kernels read them, through its own prefill and decode."""

import dataclasses

import jax
import numpy as np
import pytest

from kvlab.models.presets import preset
from kvlab.models.random_params import random_params
from kvlab.ops.caches.evicting import EvictingCache
from kvlab.ops.caches.head_major import HeadMajorPages
from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.jax_kernels import interpreted
from kvlab.ops.retention import Sinks
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.inference import InferenceConfig
from kvlab.research.session import Session

MODEL = dataclasses.replace(
    preset("tiny-gqa"), num_layers=1, num_kv_heads=(2,), windows=(None,), head_dim=128
)
MODEL = dataclasses.replace(MODEL, dtype="bfloat16")
PAGES = CacheSpec(Paged(16), "bfloat16")


def config(specs=PAGES, model=MODEL, **fields):
    shapes = {"slots": 3, "max_length": 64, "rows": 2, "chunk": 16, "decode_steps": 4}
    return InferenceConfig(model, specs, **shapes | fields)


def pages_of(**fields):
    """The classes of the layers' caches."""
    return [type(layer) for layer in jax.eval_shape(config(**fields).init_cache).layers]


def test_a_kernel_decodes_as_xla_does():
    params = random_params(MODEL, 0)
    prompts = {0: list(range(40)), 2: [7]}  # three pieces, and a slot between that stays empty
    forced = {0: [3, 1, 4, 1], 2: [5, 9, 2, 6]}
    logits = {}
    for name in ("chunked", "tpu"):
        with interpreted():
            session = Session(params, config(implementation=name))
            session.prefill(prompts)
            before = np.array(session.logits)
            session.decode(dict.fromkeys(prompts, 4), forced=forced)
        logits[name] = np.stack([before, session.logits])[:, list(prompts)]
    np.testing.assert_array_equal(logits["tpu"][0], logits["chunked"][0])  # both by XLA
    atol = 2**-6 * np.abs(logits["chunked"][1]).max()
    np.testing.assert_allclose(logits["tpu"][1], logits["chunked"][1], rtol=0, atol=atol)
    assert not np.array_equal(logits["tpu"][1], logits["chunked"][1])


def test_pages_lie_as_the_implementation_reads_them(monkeypatch):
    assert pages_of() == pages_of(implementation="tpu") == [PagedCache]  # no TPU here
    with interpreted():
        assert pages_of(implementation="tpu") == [HeadMajorPages]
        assert pages_of(implementation="chunked") == [PagedCache]
        assert pages_of(implementation="tpu", specs=CacheSpec(Paged(16), "int8")) == [PagedCache]
        evicting = dataclasses.replace(PAGES, retention=Sinks(32))
        assert pages_of(implementation="tpu", specs=evicting) == [EvictingCache]
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert pages_of() == [HeadMajorPages]
    windows = dataclasses.replace(
        MODEL, num_layers=2, num_kv_heads=(2, 2), windows=(20, None)
    )  # by layer
    assert pages_of(model=windows) == [PagedCache, HeadMajorPages]
    assert pages_of(model=dataclasses.replace(MODEL, dtype="float32")) == [PagedCache]


def test_a_name_that_cannot_serve_says_why():
    session = Session(random_params(MODEL, 0), config(implementation="triton"))
    with pytest.raises(ValueError, match=r"'triton' cannot serve: it needs the GPU backend, and"):
        session.prefill({0: [1, 2, 3]})
