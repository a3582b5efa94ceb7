"""What a cache holds, reads and takes: tokens of a step and bytes, by the cache's spec.

Bytes come from the shapes of the caches' own arrays (`jax.eval_shape`), so nothing here repeats how
they store. Axes: K KV heads, H head size, S tokens held.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvlab.models.config import DecoderConfig
from kvlab.ops.caches.evicting import notes_of
from kvlab.ops.retention import Retention
from kvlab.ops.specs import CacheSpec, Kivi4, Paged, Recompute, Ring, assign_tables
from kvlab.ops.storage import empty_keys, empty_values
from kvlab.research.cache import init_cache


class TokenBytes(NamedTuple):
    """Bytes of one token in one layer, scales and notes included."""

    key: float
    value: float


@functools.lru_cache(maxsize=512)
def token_bytes(spec: CacheSpec, kv_heads: int, head_dim: int) -> TokenBytes:
    """Bytes of a stored token; a group's scales are shared by its tokens.

    Args:
      spec: the layer's cache. KIVI's newest tokens take more: see `read_bytes`.
      kv_heads: K.
      head_dim: H.
    """
    if isinstance(spec.placement, Recompute):
        return TokenBytes(0, 0)
    policy = spec.retention
    notes = () if policy is None else notes_of(policy)
    rows = kv_heads if policy is not None and policy.by_head else 1
    slots = spec.storage.group if isinstance(spec.storage, Kivi4) else 1
    shape = (rows, kv_heads // rows, head_dim, slots)
    keys = _nbytes(lambda: empty_keys(shape, spec.storage, notes))
    values = _nbytes(lambda: empty_values((*shape[:2], slots, head_dim), spec.storage))
    if slots == 1:
        return TokenBytes(keys, values)
    return TokenBytes(keys / slots, values / slots)


def read_bytes(
    spec: CacheSpec, kv_heads: int, head_dim: int, before: int, after: int, read: int
) -> TokenBytes:
    """Bytes that the attention of a step reads in one layer for one sequence.

    Args:
      spec: the layer's cache.
      kv_heads: K.
      head_dim: H.
      before: tokens of the sequence before the step.
      after: tokens after it; KIVI holds those since its last closed group in float32.
      read: newest tokens that are read.
    """
    stored = token_bytes(spec, kv_heads, head_dim)
    if not isinstance(spec.storage, Kivi4):
        return TokenBytes(read * stored.key, read * stored.value)
    group, residual = spec.storage.group, spec.storage.residual
    recent = min(read, after - max(before - residual, 0) // group * group)
    exact = _exact(kv_heads, head_dim)
    closed = read - recent
    return TokenBytes(
        recent * exact.key + closed * stored.key, recent * exact.value + closed * stored.value
    )


def written_bytes(spec: CacheSpec, kv_heads: int, head_dim: int) -> float:
    """Bytes that a new token writes in one layer; KIVI's enters twice, and is read in between."""
    stored = sum(token_bytes(spec, kv_heads, head_dim))
    if isinstance(spec.storage, Kivi4):
        return stored + 2 * sum(_exact(kv_heads, head_dim))
    return stored


def _exact(kv_heads: int, head_dim: int) -> TokenBytes:
    """In float32, as KIVI holds its newest tokens."""
    return TokenBytes(4 * kv_heads * head_dim, 4 * kv_heads * head_dim)


def layer_window(spec: CacheSpec, window: int | None) -> int | None:
    """Positions that a query sees: the model's window or the ring's, whichever is narrower."""
    if isinstance(spec.placement, Ring):
        return spec.placement.window if window is None else min(window, spec.placement.window)
    return window


def held_tokens(spec: CacheSpec, context: int, prompt: int) -> int:
    """Tokens of a sequence that a layer holds after a decode step.

    Args:
      spec: the layer's cache.
      context: tokens of the text, the newest included.
      prompt: how many of them were prefilled.

    Returns:
      All of them, or what the budget leaves (`Retention.when`).
    """
    policy = spec.retention
    if policy is None:
        return context
    limit = _limit(policy, prompt)
    if policy.when == "both":
        return min(context, limit)
    if policy.when == "decode":
        return min(context, max(limit, prompt))
    return min(prompt, limit) + context - prompt


@functools.lru_cache(maxsize=4096)
def _limit(policy: Retention, prompt: int) -> int:
    return int(policy.limits(jnp.asarray([prompt], jnp.int32))[0])


def sequence_bytes(
    config: DecoderConfig,
    specs: tuple[CacheSpec, ...],
    context: int,
    *,
    prompt: int | None = None,
    chunk: int = 128,
) -> int:
    """Bytes that the caches of all layers take for one sequence, as `init_cache` lays them out.

    Whole pages of what a paged layer holds; a whole row of `context` tokens in a contiguous layer,
    whatever its budget; the slots of a ring.

    Args:
      config: the decoder.
      specs: one per layer.
      context: tokens of the text.
      prompt: how many of them were prefilled; None is all but the newest. While a prompt is
        prefilled an evicting layer holds all of it, which is not counted here.
      chunk: most tokens of a row of one prefill call.
    """
    prompt = context - 1 if prompt is None else prompt
    return sum(
        _layer_bytes(config, heads, spec, context, held_tokens(spec, context, prompt), chunk)
        for spec, heads in zip(specs, config.kv_heads, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def _layer_bytes(
    config: DecoderConfig, kv_heads: int, spec: CacheSpec, context: int, held: int, chunk: int
) -> int:
    if isinstance(spec.placement, Recompute):
        return 0
    one = dataclasses.replace(config, num_layers=1, num_kv_heads=kv_heads, windows=None)
    specs = assign_tables([dataclasses.replace(spec, table=0, place=None)], [kv_heads])
    page = spec.placement.page_size if isinstance(spec.placement, Paged) else 1
    pages = -(-held // page)
    return _nbytes(lambda: init_cache(one, specs, 1, context, chunk, pages).layers)


def _nbytes(make: Callable[[], Any]) -> int:
    """Bytes of the arrays that a function would make."""
    leaves = jax.tree.leaves(jax.eval_shape(make))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
