"""What is done to sequences between steps: fork, reorder, attach, evict, release; all jitted.

Axes: B sequences (slots), V vocabulary.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from kvlab.ops.caches.evicting import EvictingCache
from kvlab.ops.caches.protocol import LayerCache, Table
from kvlab.ops.evicting_table import EvictingTable, StackedTable
from kvlab.ops.page_table import CopyPlan, PageTable
from kvlab.ops.row_table import RowTable
from kvlab.ops.specs import Kivi4, Paged
from kvlab.research.cache import Cache, layer_table
from kvlab.research.inference_config import InferenceConfig


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache", "logits"))
def fork(
    config: InferenceConfig,
    cache: Cache,
    logits: jax.Array,
    source: jax.Array,
    target: jax.Array,
) -> tuple[Cache, jax.Array, jax.Array]:
    """Copies sequences; pages are shared until one side writes.

    The partial last page of a shared sequence is made writable at once for every sequence that
    maps it, all but one by a copy, so that decode never meets a shared page.

    Args:
      config: the session's shapes.
      cache: donated; use the returned one.
      logits: [B, V] float32, donated.
      source: [n] int32, sequences to copy.
      target: [n] int32, distinct empty sequences; B for an unused pair.

    Returns:
      The cache, the logits, and ok bool[]: False where the pool had too few free pages for the
      copies, and then nothing has changed.
    """

    def onto(ok: jax.Array) -> jax.Array:
        return jnp.where(ok, target, config.slots)

    return _remapped(
        config,
        cache,
        logits,
        [_with_copies(table.fork(source, target)) for table in cache.tables],
        lambda layer, ok: layer.fork(source, onto(ok)),
        lambda array, ok: array.at[onto(ok)].set(array[source], mode="drop"),
    )


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache", "logits"))
def reorder(
    config: InferenceConfig, cache: Cache, logits: jax.Array, parents: jax.Array
) -> tuple[Cache, jax.Array, jax.Array]:
    """Lets sequences take over others, as beam search does: pages change hands and are shared.

    Partial last pages are made writable as in `fork`.

    Args:
      config: the session's shapes.
      cache: donated; use the returned one.
      logits: [B, V] float32, donated.
      parents: [B] int32, the sequence that each becomes, repeated or not; B empties it.

    Returns:
      The cache, the logits, and ok bool[]: False where the pool had too few free pages for the
      copies, and then nothing has changed.
    """
    unmoved = jnp.arange(config.slots, dtype=jnp.int32)
    return _remapped(
        config,
        cache,
        logits,
        [_with_copies(table.reorder(parents)) for table in cache.tables],
        lambda layer, ok: layer.reorder(jnp.where(ok, parents, unmoved)),
        lambda array, ok: array.at[jnp.where(ok, parents, unmoved)].get(mode="fill", fill_value=0),
    )


def _remapped(
    config: InferenceConfig,
    cache: Cache,
    logits: jax.Array,
    remapped: Sequence[tuple[Table | StackedTable, CopyPlan | None, jax.Array]],
    follow: Callable[[LayerCache, jax.Array], LayerCache],
    moved: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[Cache, jax.Array, jax.Array]:
    """Puts new tables in place, copies the partial pages that they share, and all else follows.

    Args:
      config: the session's shapes.
      cache: as it was.
      logits: [B, V] float32.
      remapped: the cache's tables, mapping what sequences are to hold; what layers have to copy;
        and ok bool[], False where a table found too few pages.
      follow: moves what a layer holds per sequence; with a bool[] that is False, moves nothing.
      moved: the same for an array [B, ...].

    Returns:
      As `fork`.
    """
    ok = functools.reduce(jnp.logical_and, [granted for _, _, granted in remapped])
    tables = tuple(table for table, _, _ in remapped)
    layers = []
    for layer, spec in zip(cache.layers, config.layer_specs, strict=True):
        (_, plan, _), copied = remapped[spec.table], layer
        if plan is not None:
            if spec.place is not None:
                plan = jax.tree.map(operator.itemgetter(spec.place), plan)
            nowhere = jnp.iinfo(jnp.int32).max
            copied = layer.copy(plan.source_slots, jnp.where(ok, plan.target_slots, nowhere))
        layers.append(follow(copied, ok))
    cache = Cache(
        tables=jax.tree.map(functools.partial(jnp.where, ok), tables, cache.tables),
        layers=tuple(layers),
        positions=moved(cache.positions, ok),
        prompt_lengths=moved(cache.prompt_lengths, ok),
        texts=None if cache.texts is None else moved(cache.texts, ok),
    )
    return cache, moved(logits, ok), ok


def _with_copies(
    remapped: PageTable
    | RowTable
    | tuple[EvictingTable | StackedTable, CopyPlan | None, jax.Array],
) -> tuple[Table | StackedTable, CopyPlan | None, jax.Array]:
    """A forked or reordered table, whose partial pages are made writable, and what that takes."""
    if isinstance(remapped, tuple):
        return remapped
    if isinstance(remapped, RowTable):
        return remapped, None, jnp.ones((), bool)
    table, plan, granted = remapped.make_writable(jnp.ones(remapped.num_sequences, bool))
    return table, plan, jnp.all(granted)


@functools.partial(jax.jit, donate_argnames=("cache",))
def release(cache: Cache, mask: jax.Array) -> Cache:
    """Empties the sequences of `mask` bool[B]; their pages are free at once."""
    return cache.release(mask)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def attach(
    config: InferenceConfig,
    cache: Cache,
    slot: jax.Array,
    pages: jax.Array,
    length: jax.Array,
    prompt_tokens: jax.Array,
) -> tuple[Cache, jax.Array]:
    """Starts a sequence on pages that hold the first tokens of its prompt (prefix reuse).

    A partial last page is copied at once, so that decode never meets a shared page.

    Args:
      config: one whose sequences can share prefixes, see `prefix_obstacle`.
      cache: donated; use the returned one.
      slot: [] int32, an empty sequence.
      pages: [pages_per_sequence] int32, pages in use, in the order of the text.
      length: [] int32, tokens that they hold.
      prompt_tokens: [] int32, of the whole prompt.

    Returns:
      The cache, and ok bool[]: False where no page was free for the copy, and then nothing has
      changed.
    """
    (old,) = cache.tables
    assert isinstance(old, PageTable)
    mask = jnp.arange(config.slots, dtype=jnp.int32) == slot
    table = old.attach(slot[None], pages[None], length[None])
    table, plan, granted = table.make_writable(mask)
    ok = jnp.all(granted)
    nowhere = jnp.iinfo(jnp.int32).max
    targets = jnp.where(ok, plan.target_slots, nowhere)
    where = jnp.where(ok, slot, config.slots)
    cache = dataclasses.replace(
        cache,
        tables=(jax.tree.map(functools.partial(jnp.where, ok), table, old),),
        layers=tuple(layer.copy(plan.source_slots, targets) for layer in cache.layers),
        positions=cache.positions.at[where].set(length, mode="drop"),
        prompt_lengths=cache.prompt_lengths.at[where].set(prompt_tokens, mode="drop"),
    )
    return cache, ok


@functools.partial(jax.jit, donate_argnames=("cache",))
def repin(cache: Cache, pinned: jax.Array, unpinned: jax.Array) -> Cache:
    """Lets pages outlive the sequences that map them, and gives others up.

    Args:
      cache: of one page table; donated.
      pinned: [n] int32, pages in use that get a pin; `num_pages` for none.
      unpinned: [n] int32, pages that lose theirs, and are free if no sequence maps them.

    Returns:
      The cache.
    """
    (table,) = cache.tables
    assert isinstance(table, PageTable)
    return dataclasses.replace(cache, tables=(table.pin(pinned).unpin(unpinned),))


def prefix_obstacle(config: InferenceConfig) -> str | None:
    """Why sequences of a configuration cannot share the pages of a prefix; None where they can."""
    for spec in config.layer_specs:
        if not isinstance(spec.placement, Paged):
            return f"placement={spec.placement} has no pages to share; use paged on every layer"
        if spec.retention is not None:
            return "a policy of retention moves tokens out of their pages; use retention=all"
        if isinstance(spec.storage, Kivi4):
            return "storage=kivi4 holds a prompt's end outside its pages; use int8 or int4"
    if len({spec.table for spec in config.layer_specs}) > 1:
        return "layers of several page sizes have tables of their own; use one page_size"
    return None


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def evict(config: InferenceConfig, cache: Cache, mask: jax.Array) -> Cache:
    """Applies the policies of retention to sequences whose prompt is complete.

    Rows over their budget shrink: the survivors move to the front of the row, and the pages behind
    them are free at once. From here on decode keeps rows at their limit (`Retention.when`).

    Args:
      config: the session's shapes.
      cache: donated; use the returned one.
      mask: [B] bool, sequences to shrink.

    Returns:
      The cache.
    """
    tables, layers = list(cache.tables), list(cache.layers)
    lengths: list[list[jax.Array]] = [[] for _ in tables]  # new ones, by table and layer
    limits: list[list[jax.Array]] = [[] for _ in tables]
    for index, spec in enumerate(config.layer_specs):
        policy, layer = spec.retention, layers[index]
        if policy is None:
            continue
        assert isinstance(layer, EvictingCache)
        table = layer_table(cache.tables, spec)
        assert isinstance(table, EvictingTable)
        rows = table.of_rows(mask)
        held, allowed = table.lengths, table.of_rows(policy.limits(cache.prompt_lengths))
        if policy.when == "decode":
            allowed = jnp.maximum(allowed, held)
        else:
            options = config.decoder.attention_options(
                config.decoder.layer_windows[index], config.implementation
            )
            kept, held, allowed = layer.choose(table, cache.positions, allowed, options)
            layers[index] = layer.copy(*layer.survivors(table, rows, kept, held))
        if policy.when == "prefill":
            allowed = table.limits
        lengths[spec.table].append(jnp.where(rows, held, table.lengths))
        limits[spec.table].append(jnp.where(rows, allowed, table.limits))
    for number, whole in enumerate(cache.tables):
        if isinstance(whole, StackedTable):
            tables[number] = whole.shrink(jnp.stack(lengths[number]), jnp.stack(limits[number]))
        elif isinstance(whole, EvictingTable):  # its layers keep equally many tokens
            tables[number] = whole.shrink(lengths[number][0], limits[number][0])
    return dataclasses.replace(cache, tables=tuple(tables), layers=tuple(layers))
