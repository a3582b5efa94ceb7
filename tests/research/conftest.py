"""Tiny random models, sessions over them, and their oracle: the whole text at once, no cache.

Equal configs share their compiled programs, so tests build sessions freely but from few configs.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.config import DecoderConfig, LayerNorm, RMSNorm
from kvlab.models.decoder import Decoder, param_shapes
from kvlab.ops.caches.protocol import Step
from kvlab.ops.caches.recompute import RecomputeCache
from kvlab.ops.rope import DynamicNTK, Rope
from kvlab.ops.row_table import RowTable
from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Recompute
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.session import Session

SLOTS, MAX_LENGTH, CHUNK, DECODE_STEPS, VOCAB_SIZE = 5, 139, 17, 7, 101

_GQA = DecoderConfig(
    family="llama",
    vocab_size=VOCAB_SIZE,
    num_layers=2,
    embed_dim=23,
    hidden_dim=31,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    max_length=151,
    rope=Rope(),
)

MODELS = {
    "gqa": _GQA,
    # One layer of each kind; windows, caps, norms and biases as Gemma 2 and the Qwens have them,
    # and RoPE whose base follows the length of the prompt.
    "mixed": dataclasses.replace(
        _GQA,
        family="gemma2",
        num_layers=3,
        num_kv_heads=(1, 6, 2),
        rope=Rope(100.0, DynamicNTK(3.0, 16)),
        windows=(13, None, 71),
        norm=RMSNorm(scale_offset=1.0),
        soft_cap=3.0,
        final_soft_cap=5.0,
        query_scale=0.3,
        embed_scale=4.7,
        qkv_bias=True,
        qk_norm=True,
        post_norms=True,
        tie_embeddings=True,
    ),
    "learned": dataclasses.replace(
        _GQA,
        family="gpt2",
        norm=LayerNorm(),
        rope=None,
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
}

# A placement by this name gives each of three layers its own.
PER_LAYER = "per layer"
PER_LAYER_SPECS = (CacheSpec(Paged(8)), CacheSpec(Paged(16)), CacheSpec(Contiguous()))
FEW_PAGES = 24  # of 8 tokens, which a test can exhaust; other pools hold every slot at MAX_LENGTH


def _draw_params(config, seed):
    """Parameters that all count: biases are not 0 and norms not neutral."""
    random = np.random.default_rng(seed)

    def draw(path, shape):
        name = jax.tree_util.keystr(path)
        values = random.standard_normal(shape.shape).astype(np.float32)
        if "scale" in name:
            neutral = 1 - getattr(config.norm, "scale_offset", 0.0)
            return jnp.asarray(np.float32(neutral) + np.float32(0.2) * values)
        if "bias" in name:
            return jnp.asarray(np.float32(0.3) * values)
        scale = 1.0 if "embed" in name else shape.shape[0] ** -0.5
        return jnp.asarray(np.float32(scale) * values)

    return jax.tree_util.tree_map_with_path(draw, param_shapes(config))


@functools.partial(jax.jit, static_argnames="config")
def _forward(params, config, tokens):
    return Decoder(config).apply({"params": params}, tokens, method="forward")


@functools.partial(jax.jit, static_argnames="config")
def _forward_of_prompts(params, config, tokens, prompt_lengths):
    """`forward` of texts whose prompts were shorter: dynamic NTK keeps the prompt's base."""

    def forward(decoder, tokens):
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(places, tokens.shape)
        valid = jnp.ones_like(tokens, dtype=bool)
        step = Step(positions, valid, valid)
        tables = [RowTable.init(tokens.shape[0], tokens.shape[1])] * config.num_layers
        caches = [RecomputeCache()] * config.num_layers
        hidden, _ = decoder(tokens, step, caches, tables, prompt_lengths)
        return decoder.logits(hidden)

    return Decoder(config).apply({"params": params}, tokens, method=forward)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Prompts and their continuations, one token a call."""

    tokens: dict[int, tuple[int, ...]]
    logits: np.ndarray  # [steps + 1, B, V]: before the first token, and after each

    def row(self, slot):
        """Everything that one request saw."""
        return self.tokens[slot], self.logits[:, slot]


class Tiny:
    """Sessions and oracles of the tiny models, by name."""

    slots, max_length, chunk, decode_steps = SLOTS, MAX_LENGTH, CHUNK, DECODE_STEPS
    vocab_size, few_pages = VOCAB_SIZE, FEW_PAGES

    def __init__(self):
        self._warm, self._generation = set(), 0

    def meet(self, generation):
        """Forgets which programs are compiled where they have been freed since."""
        if generation != self._generation:
            self._warm, self._generation = set(), generation

    def model(self, name) -> DecoderConfig:
        return MODELS[name]

    @functools.cache  # noqa: B019 (one object a session)
    def params(self, name):
        return _draw_params(MODELS[name], seed=sorted(MODELS).index(name))

    def config(self, name="gqa", placement: object = Paged(16), **fields) -> InferenceConfig:
        """`placement` is one, "per layer", or a tuple of specs."""
        fields = {
            "slots": SLOTS,
            "max_length": MAX_LENGTH,
            "rows": 2,
            "chunk": MAX_LENGTH if placement == Recompute() else CHUNK,
            "num_pages": FEW_PAGES if placement in (Paged(8), PER_LAYER) else None,
            "decode_steps": DECODE_STEPS,
            **fields,
        }
        specs = PER_LAYER_SPECS if placement == PER_LAYER else placement
        specs = specs if isinstance(specs, tuple | CacheSpec) else CacheSpec(specs)
        return InferenceConfig(MODELS[name], specs, **fields)

    def session(self, name="gqa", placement: object = Paged(16), **fields) -> Session:
        session = Session(self.params(name), self.config(name, placement, **fields))
        if session.config not in self._warm:
            self._warm.add(session.config)
            session.warm_up()  # side by side: half the time of one after the other
        return session

    def prompt(self, length, seed=0) -> list[int]:
        random = np.random.default_rng([length, seed])
        return random.integers(0, VOCAB_SIZE, length).tolist()

    @property
    def prompts(self) -> dict[int, list[int]]:
        """One prompt a slot, with lengths around a page, a piece of a prefill and a read block."""
        return dict(enumerate(map(self.prompt, (1, 15, 16, 17, 70))))

    def trace(self, session: Session, prompts: Mapping[int, list[int]], steps=9) -> Trace:
        """Prefills and decodes greedily, keeping every logit."""
        session.prefill(prompts)
        return self.continued(session, prompts, steps)

    def continued(self, session: Session, slots, steps=9, **options) -> Trace:
        """Decodes some slots one token a call; `forced` tokens are given as for `decode`."""
        forced = options.pop("forced", {})
        tokens = dict.fromkeys(slots, ())
        logits = [np.array(session.logits)]
        for index in range(steps):
            now = {slot: ids[index : index + 1] for slot, ids in forced.items()}
            results = session.decode(dict.fromkeys(slots, 1), forced=now, **options)
            tokens = {slot: tokens[slot] + result.tokens for slot, result in results.items()}
            logits.append(np.array(session.logits))
        return Trace(tokens, np.stack(logits))

    def oracle(self, name, texts, prompt_lengths=None) -> list[np.ndarray]:
        """Logits [T, V] of each text, computed whole; texts are prompts unless told otherwise."""
        padded, lengths = np.zeros((SLOTS, MAX_LENGTH), np.int32), np.ones(SLOTS, np.int32)
        lengths[: len(texts)] = prompt_lengths or [len(text) for text in texts]
        for row, text in zip(padded, texts, strict=False):
            row[: len(text)] = text
        if name == "mixed":
            logits = _forward_of_prompts(self.params(name), MODELS[name], padded, lengths)
        else:
            logits = _forward(self.params(name), MODELS[name], padded)
        return [np.asarray(logits)[row, : len(text)] for row, text in enumerate(texts)]


@pytest.fixture(scope="session")
def _tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="module")
def tiny(_tiny: Tiny, generation: int) -> Tiny:
    _tiny.meet(generation)
    return _tiny
