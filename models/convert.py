"""Conversion of a model's attention to another number of KV heads.

Axes: D model width, N query heads, K KV heads, H head size.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvlab.models.config import DecoderConfig

METHODS = ("mean", "first", "random")


def convert_attention(
    config: DecoderConfig,
    params: dict,
    num_kv_heads: int | tuple[int, ...],
    method: str = "mean",
    seed: int = 0,
) -> tuple[DecoderConfig, dict]:
    """Gives every layer another number of KV heads; everything else is shared, not copied.

    More heads come from repeating each: the function stays the same, every query head still
    attends to the same keys and values (GQA to MHA). Fewer come from `method`, applied to the
    projections of the heads that become one: a lossy start that the paper repairs by uptraining on
    5 % of the pretraining. Norms of queries and keys (QK-norm) are one vector for all heads and
    stay as they are.

    Source: GQA (arXiv 2305.13245), section 2.1 for mean pooling, Fig. 4 for the three methods.

    Args:
      config: the decoder.
      params: its parameters.
      num_kv_heads: K wanted, for all layers or one per layer.
      method: mean, first (the first head of each group) or random (drawn anew, as at the start of
        training; biases become 0).
      seed: of the draws of `random`.

    Returns:
      The new config and parameters.

    Raises:
      ValueError: an unknown method, a tuple of another length than the model's depth, or a K that
        is neither a multiple nor a divisor of the layer's, or does not divide N.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not known; legal values: {', '.join(METHODS)}")
    new_config = dataclasses.replace(config, num_kv_heads=_per_layer(config, num_kv_heads))
    new_params = dict(params)
    for layer, (old, new) in enumerate(zip(config.kv_heads, new_config.kv_heads, strict=True)):
        if old == new:
            continue
        name = f"layers_{layer}"
        attention = dict(params[name]["attention"])
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), layer))
        for projection, key in zip(("key", "value"), keys, strict=True):
            attention[projection] = _regrouped(attention[projection], old, new, method, key)
        new_params[name] = params[name] | {"attention": attention}
    return new_config, new_params


def _per_layer(config: DecoderConfig, num_kv_heads: int | tuple[int, ...]) -> tuple[int, ...]:
    """Spells the wanted K out and checks it."""
    wanted = num_kv_heads
    if not isinstance(wanted, tuple):
        wanted = (wanted,) * config.num_layers
    if len(wanted) != config.num_layers:
        raise ValueError(
            f"num_kv_heads has {len(wanted)} entries for num_layers={config.num_layers}; give one "
            "value, or one per layer"
        )
    for layer, (old, new) in enumerate(zip(config.kv_heads, wanted, strict=True)):
        legal = legal_kv_heads(config.num_heads, old)
        if new not in legal:
            raise ValueError(
                f"num_kv_heads={new} given for layer {layer}, which has {old} KV heads and "
                f"{config.num_heads} query heads; legal values: {', '.join(map(str, legal))}"
            )
    return wanted


def legal_kv_heads(num_heads: int, num_kv_heads: int) -> list[int]:
    """Numbers of KV heads that a layer can be converted to, ascending.

    Args:
      num_heads: N.
      num_kv_heads: K that the layer has.
    """
    return [
        count
        for count in range(1, num_heads + 1)
        if num_heads % count == 0 and (num_kv_heads % count == 0 or count % num_kv_heads == 0)
    ]


def _regrouped(projection: dict, old: int, new: int, method: str, key: jax.Array) -> dict:
    """A key or value projection, weight [D, K * H] and perhaps bias [K * H], for another K."""
    if method == "random" and new < old:
        width, features = projection["weight"].shape
        shape = (width, features // old * new)
        dtype = projection["weight"].dtype
        drawn = {"weight": jax.nn.initializers.lecun_normal()(key, shape, dtype)}
        return drawn | ({"bias": jnp.zeros(shape[1:], dtype)} if "bias" in projection else {})
    return {name: _heads(array, old, new, method) for name, array in projection.items()}


def _heads(array: jax.Array, old: int, new: int, method: str) -> jax.Array:
    """Repeats or merges the heads in the last axis [..., K * H] of an array."""
    *lead, features = array.shape
    if new > old:
        heads = array.reshape(*lead, old, features // old)
        return jnp.repeat(heads, new // old, axis=-2).reshape(*lead, -1)
    groups = array.reshape(*lead, new, old // new, features // old)
    if method == "first":
        merged = groups[..., 0, :]
    else:
        merged = jnp.mean(groups.astype(jnp.float32), axis=-2).astype(array.dtype)
    return merged.reshape(*lead, -1)
