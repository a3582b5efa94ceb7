"""The decoder: thin, stateless Linen modules over `kvlab.ops`.

Axes: B rows of the step, T positions, N query heads, K KV heads, H head size, D model width,
V vocabulary. The cache is an argument and a result; modules hold parameters alone.

Parameters (weights are [in, out], used as x @ weight, and may be packed: `kvlab.models.packing`):
  embed/weight [V, D]; position_embed/weight [C, D] (learned positions)
  layers_i/attention_norm, layers_i/mlp_norm, final_norm: scale [D], and bias [D] for LayerNorm
  layers_i/attention_post_norm, layers_i/mlp_post_norm: scale [D] (post_norms)
  layers_i/attention/{query [D, N*H], key [D, K*H], value [D, K*H], output [N*H, D]}/weight, bias
  layers_i/attention/{query_norm, key_norm}/scale [H] (qk_norm)
  layers_i/mlp/{gate [D, F], up [D, F], down [F, D]}/weight, bias
  head/weight [D, V] (untied)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvlab.models.config import DecoderConfig, LayerNorm, RMSNorm
from kvlab.models.rematerialisation import rematerialised
from kvlab.ops import norms
from kvlab.ops.attention import soft_capped
from kvlab.ops.caches.protocol import LayerCache, Step, Table
from kvlab.ops.caches.recompute import RecomputeCache
from kvlab.ops.linear import embed, linear, linear_transposed, linears
from kvlab.ops.packed_weight import PackedWeight
from kvlab.ops.rope import DynamicNTK, Rope, rotate, rotation
from kvlab.ops.row_table import RowTable
from kvlab.ops.segments import PADDING, segment_positions

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def _weight(
    module: nn.Module,
    initializer: Callable[..., jax.Array],
    shape: tuple[int, int],
    dtype: str,
    transposed: bool = False,
) -> jax.Array | PackedWeight:
    """The module's parameter `weight`, which Linen checks, or as it was packed."""
    given: Any = None
    if module.has_variable("params", "weight"):
        given = module.get_variable("params", "weight")
    if not isinstance(given, PackedWeight):
        return module.param("weight", initializer, shape, dtype)
    stored = shape[::-1] if transposed else shape
    if given.shape != stored:
        where = "/".join(module.path)
        raise ValueError(f"{where} holds a packed weight {given.shape}; the config wants {stored}")
    return given


class Linear(nn.Module):
    """x @ weight + bias through `kvlab.ops.linear`."""

    features: int
    use_bias: bool
    param_dtype: str

    @nn.compact
    def parameters(self, length: int) -> tuple[jax.Array | PackedWeight, jax.Array | None]:
        """The weight [length, features], and the bias [features] if there is one."""
        shape = (length, self.features)
        weight = _weight(self, nn.initializers.lecun_normal(), shape, self.param_dtype)
        if not self.use_bias:
            return weight, None
        return weight, self.param("bias", nn.initializers.zeros, shape[1:], self.param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] to [..., features]."""
        return linear(x, *self.parameters(x.shape[-1]))


def _project(x: jax.Array, *layers: Linear) -> list[jax.Array]:
    """Applies several linear layers to one x."""
    weights, biases = zip(*(layer.parameters(x.shape[-1]) for layer in layers), strict=True)
    return linears(x, weights, biases)


class Embedding(nn.Module):
    """A table of vectors, looked up by id, or used as a tied head."""

    num_embeddings: int
    features: int
    param_dtype: str

    def setup(self) -> None:
        """Declares the weight [V, D]; packed, it is [D, V]."""
        shape = (self.num_embeddings, self.features)
        initializer = nn.initializers.normal(0.02)
        self.weight = _weight(self, initializer, shape, self.param_dtype, transposed=True)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[B, T] int32 to [B, T, D]."""
        return embed(ids, self.weight)

    def attend(self, x: jax.Array) -> jax.Array:
        """[..., D] to [..., V]."""
        return linear_transposed(x, self.weight)


class Norm(nn.Module):
    """The config's norm over the last axis, in float32 inside."""

    norm: RMSNorm | LayerNorm
    param_dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to [..., D]."""
        shape = (x.shape[-1],)
        if isinstance(self.norm, LayerNorm):
            scale = self.param("scale", nn.initializers.ones, shape, self.param_dtype)
            bias = self.param("bias", nn.initializers.zeros, shape, self.param_dtype)
            return norms.layer_norm(x, scale, bias, self.norm.epsilon)
        initial = nn.initializers.constant(1.0 - self.norm.scale_offset)
        scale = self.param("scale", initial, shape, self.param_dtype)
        return norms.rms_norm(x, scale, self.norm.epsilon, self.norm.scale_offset)


class Attention(nn.Module):
    """Grouped-query attention of one layer over its cache."""

    config: DecoderConfig
    num_kv_heads: int
    window: int | None
    implementation: str | None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        step: Step,
        cache: LayerCache,
        table: Table,
        rotation: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, LayerCache]:
        """[B, T, D] and the layer's cache to [B, T, D] and the new cache."""
        config = self.config

        counts = {"query": config.num_heads, "key": self.num_kv_heads, "value": self.num_kv_heads}
        layers = (
            Linear(count * config.head_dim, config.qkv_bias, config.param_dtype, name=name)
            for name, count in counts.items()
        )
        query, key, value = (
            y.reshape(*x.shape[:-1], count, config.head_dim)
            for y, count in zip(_project(x, *layers), counts.values(), strict=True)
        )
        if config.qk_norm:
            query = Norm(config.norm, config.param_dtype, name="query_norm")(query)
            key = Norm(config.norm, config.param_dtype, name="key_norm")(key)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        options = config.attention_options(self.window, self.implementation)
        output, cache = cache.attend(query, key, value, step, table, options)
        output = output.reshape(*x.shape[:-1], config.num_heads * config.head_dim)
        project = Linear(config.embed_dim, config.output_bias, config.param_dtype, name="output")
        return project(output), cache


class MLP(nn.Module):
    """The feed-forward half of a layer, gated or plain."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to [..., D]."""
        config = self.config

        def layer(name: str, features: int) -> Linear:
            return Linear(features, config.mlp_bias, config.param_dtype, name=name)

        activation = _ACTIVATIONS[config.activation]
        up, down = layer("up", config.hidden_dim), layer("down", config.embed_dim)
        if config.gated_mlp:
            hidden, gate = _project(x, up, layer("gate", config.hidden_dim))
            return down(activation(gate) * hidden)
        return down(activation(up(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each with its norms, on the residual stream."""

    config: DecoderConfig
    num_kv_heads: int
    window: int | None
    implementation: str | None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        step: Step,
        cache: LayerCache,
        table: Table,
        rotation: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, LayerCache]:
        """[B, T, D] and the layer's cache to [B, T, D] and the new cache."""
        config = self.config

        def norm(name: str, y: jax.Array) -> jax.Array:
            return Norm(config.norm, config.param_dtype, name=name)(y)

        attend = Attention(
            config, self.num_kv_heads, self.window, self.implementation, name="attention"
        )
        y, cache = attend(norm("attention_norm", x), step, cache, table, rotation)
        x = x + (norm("attention_post_norm", y) if config.post_norms else y)
        y = MLP(config, name="mlp")(norm("mlp_norm", x))
        x = x + (norm("mlp_post_norm", y) if config.post_norms else y)
        return x, cache


class Decoder(nn.Module):
    """A decoder-only transformer: tokens and a cache to hidden states and the new cache.

    With `remat` a layer's activations are not kept for its derivative but computed again: memory
    of one layer instead of L, for one more forward pass.
    """

    config: DecoderConfig
    implementation: str | None = None
    remat: bool = False

    def setup(self) -> None:
        """Declares the submodules."""
        config = self.config
        self.embed = Embedding(config.vocab_size, config.embed_dim, config.param_dtype)
        if config.rope is None:
            self.position_embed = Embedding(config.max_length, config.embed_dim, config.param_dtype)
        self.layers = [
            DecoderLayer(config, num_kv_heads, window, self.implementation)
            for num_kv_heads, window in zip(config.kv_heads, config.layer_windows, strict=True)
        ]
        self.final_norm = Norm(config.norm, config.param_dtype)
        if not config.tie_embeddings:
            self.head = Linear(config.vocab_size, False, config.param_dtype)

    def __call__(
        self,
        tokens: jax.Array,
        step: Step,
        caches: Sequence[LayerCache],
        tables: Sequence[Table],
        prompt_lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Runs every layer over its cache.

        Args:
          tokens: [B, T] int32.
          step: the tokens' places.
          caches: one per layer.
          tables: the step's rows of each layer's table, already reserved; one per layer.
          prompt_lengths: [B] int32, the base of dynamic NTK; unused by other RoPE scalings.

        Returns:
          Hidden states after the final norm [B, T, D], and the new caches.
        """
        x = self.embed(tokens).astype(self.config.compute_dtype)
        turns = None
        if self.config.rope is None:
            x = x + self.position_embed(step.positions).astype(x.dtype)
        else:
            rope, head_dim = self.config.rope, self.config.head_dim
            turns = _rotation_once(step, rope, head_dim, prompt_lengths)
        if self.config.embed_scale is not None:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        new_caches = []
        apply = _apply_layer_again if self.remat else _apply_layer
        for index, (cache, table) in enumerate(zip(caches, tables, strict=True)):
            layer = self.layers[index]
            if self.is_initializing():
                x, new_cache = layer(x, step, cache, table, turns)
            else:
                params = self.variables["params"][f"layers_{index}"]
                pure = layer.clone(parent=None, name=None)
                x, new_cache = apply(pure, params, x, step, cache, table, turns)
            new_caches.append(new_cache)
        return self.final_norm(x), tuple(new_caches)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The head: hidden states [..., D] to float32 logits [..., V]."""
        head = self.embed.attend if self.config.tie_embeddings else self.head
        logits = head(hidden).astype(jnp.float32)
        return soft_capped(logits, self.config.final_soft_cap)

    def forward(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Logits [B, T, V] of whole texts, without a cache.

        Args:
          tokens: [B, T] int32.
          segments: [B, T] int32, where a row holds several texts: the text of each token
            (`kvlab.ops.segments`). Each is read alone and from position 0, and the result has a
            derivative. None: a row is a text.

        Raises:
          ValueError: segments with dynamic NTK, whose base is one for a row.
        """
        batch, length = tokens.shape
        if segments is None:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], tokens.shape)
            valid = jnp.ones_like(tokens, dtype=bool)
        else:
            if self.config.rope is not None and isinstance(self.config.rope.scaling, DynamicNTK):
                raise ValueError("rows of several texts and DynamicNTK given; use another scaling")
            positions, valid = segment_positions(segments), segments != PADDING
        caches = [RecomputeCache(segments) for _ in self.layers]
        lengths = jnp.full(batch, length, jnp.int32)
        tables = [RowTable(lengths, length) for _ in self.layers]
        hidden, _ = self(tokens, Step(positions, valid, valid), caches, tables, lengths)
        return self.logits(hidden)


def _rotation_once(
    step: Step, rope: Rope, head_dim: int, prompt_lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`rotation` of the step's positions, computed once.

    XLA's CPU compiler moves the sines into the fusions of every layer (6 % of a prefill), past an
    optimization barrier too, but not out of a branch.
    """

    def compute(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotation(positions, rope, head_dim, prompt_lengths)

    def branch(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        nothing = jnp.zeros((*positions.shape, head_dim // 2), jnp.float32)
        return jax.lax.cond(step.valid.any(), compute, lambda _: (nothing, nothing), positions)

    turns: tuple[jax.Array, jax.Array] = jax.lax.platform_dependent(
        step.positions, cpu=branch, default=compute
    )
    return turns


@functools.partial(jax.jit, static_argnums=0)
def _apply_layer(
    layer: DecoderLayer,
    params: dict,
    x: jax.Array,
    step: Step,
    cache: LayerCache,
    table: Table,
    rotation: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, LayerCache]:
    """One layer as a function of its parameters: equal layers are traced once, not L times."""
    output: Any = layer.apply({"params": params}, x, step, cache, table, rotation)
    return output


_apply_layer_again = rematerialised(_apply_layer)


def param_shapes(config: DecoderConfig) -> dict:
    """The parameter tree of a config as `jax.ShapeDtypeStruct`s; nothing is allocated.

    One layer of each number of KV heads is traced, and stands for all of them.
    """
    shapes: dict = {}
    for num_kv_heads in dict.fromkeys(config.kv_heads):
        single = dataclasses.replace(config, num_layers=1, num_kv_heads=num_kv_heads, windows=None)
        tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
        initialise = functools.partial(Decoder(single).init, method="forward")
        traced = jax.eval_shape(initialise, jax.random.key(0), tokens)["params"]
        layer = traced.pop("layers_0")
        same = [i for i, heads in enumerate(config.kv_heads) if heads == num_kv_heads]
        shapes |= traced | {f"layers_{index}": layer for index in same}
    return shapes
