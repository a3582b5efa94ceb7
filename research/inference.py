"""Prefill and decode: jitted pure functions over a model's cache.

Axes: B sequences (slots), R rows of a prefill call, T positions, D model width, V vocabulary, n
tokens of a decode call.

A session compiles two programs, whatever the lengths: `prefill` in its one shape [rows, chunk], and
`decode`, a loop on the device; the host loop is `decode` asked for one step. (Forks and evictions
are programs of their own: `kvlab.research.sequences`.) `logits` carries
what the model predicts next for every sequence: decode samples from it, feeds the token, and
leaves the next prediction there. Within one `InferenceConfig` a sequence's numbers do not depend
on its neighbours, its slot or its pages (WORKSPACE-notes.md, batch invariance).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder
from kvlab.ops.caches.protocol import LayerCache, Step, Table
from kvlab.ops.evicting_table import EvictingTable, StackedTable
from kvlab.ops.sampling import SamplingParams, sample, token_log_prob
from kvlab.research.cache import Cache, layer_table
from kvlab.research.inference_config import InferenceConfig

Params = Any  # the parameter tree at the top of kvlab.models.decoder
MAX_STOP_IDS = 8
AnyTable = Table | StackedTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """What one decode call gave each sequence."""

    tokens: jax.Array  # i32[B, n]: the first num_tokens[b] of a row are real
    log_probs: jax.Array  # f32[B, n]: of each token, under the model without sampling filters
    num_tokens: jax.Array  # i32[B]: a stop token counts
    stopped: jax.Array  # bool[B]: ended with a stop token, which is not fed
    stalled: jax.Array  # bool[B]: no room for its next token; state as before that step


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache", "logits"))
def prefill(
    params: Params,
    config: InferenceConfig,
    cache: Cache,
    logits: jax.Array,
    tokens: jax.Array,
    counts: jax.Array,
    slots: jax.Array,
    prompt_lengths: jax.Array,
    stored: jax.Array,
) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
    """Appends pieces of text to some sequences.

    Rows of one sequence are pieces of its text that follow each other: every row writes before any
    reads, and reads up to its own end. So one long prompt fills all rows of a call.

    A prompt that is all in the cache already (prefix reuse) still has to ask what follows it: its
    last tokens are given again in a row that is `stored`, which reads and does not write.

    Args:
      params: the decoder's parameters.
      config: the session's shapes.
      cache: donated; use the returned one.
      logits: [B, V] float32, donated: what the model predicts next for each sequence.
      tokens: [R, chunk] int32; the first `counts[r]` of a row are real.
      counts: [R] int32; a row of 0 does nothing.
      slots: [R] int32, the sequence of each row; B for a row without one.
      prompt_lengths: [R] int32, tokens of the whole prompt (the base of dynamic NTK RoPE).
      stored: [R] bool, rows whose tokens are the last that their sequence holds; such a row is its
        sequence's only one in the call.

    Returns:
      The cache; the logits [B, V], updated at `slots` with those of the last position; ok [R] bool,
      False where there was no room and the sequence is unchanged; and the hidden states
      [R, chunk, D] after the final norm, which `head` turns into logits where all are wanted.
    """
    added = jnp.where(stored, 0, counts)
    wanted = jnp.zeros(config.slots, jnp.int32).at[slots].add(added, mode="drop")
    granted, cache = _reserve(config, cache, wanted, config.rows_per_sequence * config.chunk)
    ok = granted.at[slots].get(mode="fill", fill_value=True)
    counts = jnp.where(ok, counts, 0)
    same = slots[:, None] == slots[None, :]
    earlier = jnp.sum(jnp.where(jnp.tril(same, -1), counts, 0), axis=1, dtype=jnp.int32)
    later = jnp.sum(jnp.where(jnp.triu(same, 1), counts, 0), axis=1, dtype=jnp.int32)
    held = cache.positions.at[slots].get(mode="fill", fill_value=0)
    start = held + earlier - jnp.where(stored, counts, 0)
    offsets = jnp.arange(config.chunk, dtype=jnp.int32)[None]
    valid = offsets < counts[:, None]
    positions = jnp.where(valid, start[:, None] + offsets, 0)
    known = cache.prompt_lengths.at[slots].get(mode="fill", fill_value=0)
    lengths = jnp.where(held == 0, prompt_lengths, known)
    cache = dataclasses.replace(
        cache,
        positions=cache.positions.at[slots].add(jnp.where(stored, 0, counts), mode="drop"),
        prompt_lengths=cache.prompt_lengths.at[slots].set(lengths, mode="drop"),
    )
    step = Step(positions, valid, valid & ~stored[:, None], slots, later)
    hidden, cache = _forward(params, config, cache, tokens, step)
    last = jnp.clip(counts - 1, 0, None)
    row_logits = head(
        params, config.model, jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    )
    updated = jnp.where((counts > 0) & (later == 0), slots, config.slots)
    return cache, logits.at[updated].set(row_logits[:, 0], mode="drop"), ok, hidden


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache", "logits"))
def decode(
    params: Params,
    config: InferenceConfig,
    cache: Cache,
    logits: jax.Array,
    sampling: SamplingParams,
    limits: jax.Array,
    stop_ids: jax.Array,
    forced: jax.Array,
    num_forced: jax.Array,
) -> tuple[Cache, jax.Array, Decoded]:
    """Continues sequences by up to `limits` tokens each, in one loop on the device.

    Each step samples a token from `logits`, reserves room for it, feeds it, and takes the next
    logits. A sequence ends at a stop token; one that finds no room pauses as it was.

    Args:
      params: the decoder's parameters.
      config: the session's shapes.
      cache: donated; use the returned one.
      logits: [B, V] float32, donated: the model's prediction for each sequence's next token.
      sampling: per-sequence parameters, arrays of [B].
      limits: [B] int32, most tokens for each sequence, at most `config.decode_steps`; 0 leaves it
        alone.
      stop_ids: [B, MAX_STOP_IDS] int32, -1 for none. Forced tokens never stop.
      forced: [B, n] int32, n = `config.decode_steps`: fed instead of sampled tokens.
      num_forced: [B] int32, how many of a row's forced tokens are real.

    Returns:
      The cache, the logits and what was decoded.
    """
    zeros = jnp.zeros((config.slots, config.decode_steps), jnp.int32)
    false = jnp.zeros(config.slots, bool)
    decoded = Decoded(zeros, zeros.astype(jnp.float32), zeros[:, 0], false, false)

    def running(index: jax.Array, decoded: Decoded) -> jax.Array:
        return (index < limits) & ~decoded.stopped & ~decoded.stalled

    def condition(state: tuple[jax.Array, Cache, jax.Array, Decoded]) -> jax.Array:
        index, _, _, decoded = state
        return (index < config.decode_steps) & jnp.any(running(index, decoded))

    def body(
        state: tuple[jax.Array, Cache, jax.Array, Decoded],
    ) -> tuple[jax.Array, Cache, jax.Array, Decoded]:
        index, cache, logits, decoded = state
        active = running(index, decoded)
        is_forced = index < num_forced
        token = jnp.where(is_forced, forced[:, index], sample(logits, sampling, cache.positions))
        stops = active & ~is_forced & jnp.any(token[:, None] == stop_ids, axis=1)
        feed = active & ~stops
        ok, cache = _reserve(config, cache, feed.astype(jnp.int32), None)
        feed &= ok
        emit = feed | stops
        decoded = Decoded(
            decoded.tokens.at[:, index].set(jnp.where(emit, token, 0)),
            decoded.log_probs.at[:, index].set(jnp.where(emit, token_log_prob(logits, token), 0.0)),
            decoded.num_tokens + emit.astype(jnp.int32),
            decoded.stopped | stops,
            decoded.stalled | (active & ~emit),
        )
        step = Step(cache.positions[:, None], feed[:, None], feed[:, None])
        cache = dataclasses.replace(cache, positions=cache.positions + feed.astype(jnp.int32))
        hidden, cache = _forward(params, config, cache, token[:, None], step)
        new_logits = head(params, config.model, hidden)[:, 0]
        return index + 1, cache, jnp.where(feed[:, None], new_logits, logits), decoded

    state = (jnp.zeros((), jnp.int32), cache, logits, decoded)
    _, cache, logits, decoded = jax.lax.while_loop(condition, body, state)
    return cache, logits, decoded


def _reserve(
    config: InferenceConfig, cache: Cache, wanted: jax.Array, max_tokens: int | None
) -> tuple[jax.Array, Cache]:
    """Makes room in every table; a sequence that one table refuses gets nothing from any.

    `max_tokens` bounds what a prefill adds; None is decode, where full rows replace a token.
    """
    # A table's last page may reach further than max_length.
    fits = cache.positions + wanted <= config.max_length
    if max_tokens is not None:
        fits &= wanted <= max_tokens
    wanted = jnp.where(fits, wanted, 0)

    def reserved(table: AnyTable, wanted: jax.Array) -> tuple[AnyTable, jax.Array]:
        if max_tokens is None and isinstance(table, EvictingTable | StackedTable):
            return table.reserve_next(wanted > 0)
        return table.reserve(wanted, max_tokens or 1)

    def attempt(wanted: jax.Array) -> tuple[tuple[AnyTable, ...], jax.Array]:
        results = [reserved(table, wanted) for table in cache.tables]
        granted = functools.reduce(jnp.logical_and, [ok for _, ok in results])
        return tuple(table for table, _ in results), granted

    tables, granted = attempt(wanted)
    if len(cache.tables) > 1 or any(isinstance(table, StackedTable) for table in cache.tables):
        tables, _ = attempt(jnp.where(granted, wanted, 0))
    return granted & fits, dataclasses.replace(cache, tables=tables)


def _forward(
    params: Params, config: InferenceConfig, cache: Cache, tokens: jax.Array, step: Step
) -> tuple[jax.Array, Cache]:
    """Hidden states [rows, T, D] of the step's tokens, and the cache with them stored."""
    lengths = cache.prompt_lengths
    if step.slots is not None:
        lengths = lengths.at[step.slots].get(mode="fill", fill_value=0)
    if cache.texts is not None:
        return _recompute(params, config, cache, tokens, step, lengths)
    views: list[AnyTable] = list(cache.tables)
    if step.slots is not None:
        assert step.later is not None
        views = [table.rows(step.slots, step.later) for table in cache.tables]
    tables = [layer_table(views, spec) for spec in config.layer_specs]
    hidden, layers = _apply(params, config, tokens, step, cache.layers, tables, lengths)
    return hidden, dataclasses.replace(cache, layers=layers)


def _recompute(
    params: Params,
    config: InferenceConfig,
    cache: Cache,
    tokens: jax.Array,
    step: Step,
    prompt_lengths: jax.Array,
) -> tuple[jax.Array, Cache]:
    """As `_forward`, by computing the whole texts of the step's sequences again."""
    assert cache.texts is not None
    sequences, capacity = cache.texts.shape
    slots = jnp.arange(sequences, dtype=jnp.int32) if step.slots is None else step.slots
    columns = jnp.where(step.write, step.positions, capacity)
    texts = cache.texts.at[slots[:, None], columns].set(tokens, mode="drop")
    whole = texts.at[slots].get(mode="fill", fill_value=0)
    lengths = cache.positions.at[slots].get(mode="fill", fill_value=0)
    places = jnp.arange(capacity, dtype=jnp.int32)[None]
    positions = jnp.broadcast_to(places, whole.shape)
    valid = places < lengths[:, None]
    text_step = Step(positions, valid, valid, step.slots)
    tables = [layer_table(cache.tables, spec) for spec in config.layer_specs]
    hidden, layers = _apply(params, config, whole, text_step, cache.layers, tables, prompt_lengths)
    hidden = jnp.take_along_axis(hidden, step.positions[:, :, None], axis=1)
    return hidden, dataclasses.replace(cache, layers=layers, texts=texts)


def _apply(
    params: Params,
    config: InferenceConfig,
    tokens: jax.Array,
    step: Step,
    layers: tuple[LayerCache, ...],
    tables: Sequence[Table],
    prompt_lengths: jax.Array,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    decoder = Decoder(config.decoder, config.implementation)
    output: Any = decoder.apply({"params": params}, tokens, step, layers, tables, prompt_lengths)
    return output


@functools.partial(jax.jit, static_argnames=("config",))
def head(params: Params, config: DecoderConfig, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., V] of the hidden states [..., D] that prefill gave."""
    logits: Any = Decoder(config).apply({"params": params}, hidden, method="logits")
    return logits
