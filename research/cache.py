"""A model's cache: one pytree of page tables, layer caches and where each sequence stands."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.models.config import DecoderConfig
from kvlab.ops import jax_kernels
from kvlab.ops.caches.contiguous import ContiguousCache
from kvlab.ops.caches.evicting import EvictingCache, notes_of
from kvlab.ops.caches.head_major import HeadMajorPages
from kvlab.ops.caches.kivi import KiviCache
from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.caches.protocol import LayerCache, Table
from kvlab.ops.caches.recompute import RecomputeCache
from kvlab.ops.caches.token_slots import TokenSlots
from kvlab.ops.evicting_table import EvictingTable, StackedTable
from kvlab.ops.page_table import PageTable
from kvlab.ops.row_table import RowTable
from kvlab.ops.specs import CacheSpec, Kivi4, Paged, Recompute, Ring


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The state of all sequences of a model.

    Tables are apart from layers because layers with the same mapping share one, and a donated
    pytree may hold a buffer once.
    """

    tables: tuple[Table | StackedTable, ...]
    layers: tuple[LayerCache, ...]
    positions: jax.Array  # i32[B]: place in the text of each sequence's next token
    prompt_lengths: jax.Array  # i32[B]: the base of dynamic NTK, known at admission and kept
    texts: jax.Array | None  # i32[B, S]: tokens so far, kept where every step recomputes

    def release(self, mask: jax.Array) -> "Cache":
        """Empties the sequences of `mask` bool[B]; their pages are free at once."""
        return dataclasses.replace(
            self,
            tables=tuple(table.release(mask) for table in self.tables),
            positions=jnp.where(mask, 0, self.positions),
        )

    def all_tables(self) -> list[Table]:
        """Every table, stacked ones one by one."""
        return [
            single
            for table in self.tables
            for single in (
                map(table.layer, range(table.num_layers))
                if isinstance(table, StackedTable)
                else (table,)
            )
        ]

    def nbytes(self) -> int:
        """Bytes of every array in the layers' caches."""
        return sum(layer.nbytes() for layer in self.layers)


def layer_table(tables: Sequence[Table | StackedTable], spec: CacheSpec) -> Table:
    """The table of a layer, by its assigned spec."""
    table = tables[spec.table]
    if isinstance(table, StackedTable):
        assert spec.place is not None
        return table.layer(spec.place)
    return table


@dataclasses.dataclass(frozen=True)
class CacheUse:
    """What a cache takes against what it holds, over all its layers."""

    allocated_bytes: int  # of every array in the layers' caches
    bytes_per_token: float  # allocated, over the tokens that fit
    used_bytes: float  # of the token slots that hold a token; a shared one counts once
    taken_bytes: float  # of the slots that sequences have taken: pages, or whole rows
    waste: float  # share of the slots that sequences have taken (pages, whole rows) and not filled


def cache_use(cache: Cache, specs: Sequence[CacheSpec]) -> CacheUse | None:
    """Measures a cache from its arrays; None where nothing is stored.

    Args:
      cache: any cache.
      specs: the layers' specs, tables assigned.
    """
    if isinstance(specs[0].placement, Recompute):
        return None
    allocated, per_token, taken_bytes, used_bytes = 0, 0.0, 0.0, 0.0
    for layer, spec in zip(cache.layers, specs, strict=True):
        table = layer_table(cache.tables, spec)
        slots, capacity, taken, filled = _slots(table, layer)
        layer_bytes = layer.nbytes()
        allocated += layer_bytes
        per_token += layer_bytes / capacity
        taken_bytes += layer_bytes / slots * taken
        used_bytes += layer_bytes / slots * filled
    waste = 1.0 - used_bytes / taken_bytes if taken_bytes else 0.0
    return CacheUse(allocated, per_token, used_bytes, taken_bytes, waste)


def _slots(table: Table, layer: LayerCache) -> tuple[int, float, int, int]:
    """Token slots of a layer: all; tokens they can hold; in what sequences have taken; filled.

    Where KV heads are rows, a slot holds a token of one head, and a token of text takes as many.
    """
    table, heads = unwrapped(table)
    if isinstance(table, PageTable):
        taken, filled = _page_slots(table)
        return table.num_slots, table.num_slots / heads, taken, filled
    row = _row_capacity(layer)  # whole read blocks
    lengths = np.minimum(np.asarray(table.lengths), row)
    held = min(table.capacity, row)
    taken, filled = int((lengths > 0).sum()) * row, int(lengths.sum())
    return len(lengths) * row, len(lengths) * held / heads, taken, filled


def unwrapped(table: Table) -> tuple[PageTable | RowTable, int]:
    """The table of the placement, and the rows that a sequence has in it."""
    return (table.table, table.heads) if isinstance(table, EvictingTable) else (table, 1)


def _row_capacity(layer: LayerCache) -> int:
    """Slots of a row of a layer whose sequences each own one."""
    if isinstance(layer, KiviCache):
        return _row_capacity(layer.closed)
    if isinstance(layer, EvictingCache):
        return _row_capacity(layer.inner)
    assert isinstance(layer, ContiguousCache)
    return layer.capacity


def _page_slots(table: PageTable) -> tuple[int, int]:
    """Token slots in pages that are in use, and those of them that hold a token."""
    columns = np.arange(table.pages_per_sequence)[None]
    held = np.asarray(table.lengths)[:, None] - columns * table.page_size
    filled = np.zeros(table.num_pages + 1, np.int64)  # the last entry takes unmapped columns
    np.maximum.at(filled, np.asarray(table.page_indices), np.clip(held, 0, table.page_size))
    return int(table.pages_in_use) * table.page_size, int(filled[:-1].sum())


def init_cache(
    model: DecoderConfig,
    specs: Sequence[CacheSpec],
    slots: int,
    max_length: int,
    chunk: int,
    num_pages: int | None,
    implementation: str | None = None,
) -> Cache:
    """An empty cache.

    Args:
      model: the decoder whose layers it serves.
      specs: one per layer, tables assigned (`kvlab.ops.specs.assign_tables`).
      slots: sequences (B).
      max_length: most tokens of a sequence.
      chunk: most tokens of a row of one prefill call.
      num_pages: pages of each paged pool; None lets every slot reach `max_length`. Where KV heads
        choose their tokens a page holds one head's, and a pool has K times as many.
      implementation: of attention; pages lie as its kernel reads them, where it can serve.
    """
    sizes = _Sizes(model, slots, max_length, chunk, num_pages, implementation)
    tables: dict[int, Table | StackedTable] = {}
    for spec, num_kv_heads in zip(specs, model.kv_heads, strict=True):
        if spec.table not in tables:
            table = sizes.table(spec, num_kv_heads)
            if spec.place is not None:
                assert isinstance(table, EvictingTable)
                stacked = sum(other.table == spec.table for other in specs)
                tables[spec.table] = StackedTable.init(table, stacked)
            else:
                tables[spec.table] = table
    recomputes = isinstance(specs[0].placement, Recompute)
    return Cache(
        tables=tuple(tables[index] for index in sorted(tables)),
        layers=tuple(sizes.layer(index, spec) for index, spec in enumerate(specs)),
        positions=jnp.zeros(slots, jnp.int32),
        prompt_lengths=jnp.zeros(slots, jnp.int32),
        texts=jnp.zeros((slots, max_length), jnp.int32) if recomputes else None,
    )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What fixes the arrays of tables and layers."""

    model: DecoderConfig
    slots: int
    max_length: int
    chunk: int
    num_pages: int | None
    implementation: str | None

    def _pages(self, page_size: int) -> tuple[int, int]:
        """Pages of a pool, and of one sequence."""
        per_sequence = -(-self.max_length // page_size)
        all_pages = self.slots * per_sequence if self.num_pages is None else self.num_pages
        return all_pages, per_sequence

    def table(self, spec: CacheSpec, num_kv_heads: int) -> Table:
        """The empty table of a layer."""
        heads = _rows_per_sequence(spec, num_kv_heads)
        if isinstance(spec.placement, Paged):
            page_size = spec.placement.page_size
            num_pages, per_sequence = self._pages(page_size)
            inner: PageTable | RowTable = PageTable.init(
                self.slots * heads, num_pages * heads, page_size, per_sequence
            )
        else:
            inner = RowTable.init(self.slots * heads, self.max_length)
        return inner if spec.retention is None else EvictingTable.init(inner, heads)

    def _paged_cache(self, index: int, spec: CacheSpec, page_size: int) -> type[PagedCache]:
        """The pages of a layer: those of JAX's kernel where that can serve."""
        kernel = self.implementation or jax_kernels.BEST.get(jax.default_backend())
        if kernel not in jax_kernels.PAGED or (spec.storage, spec.retention) != ("bfloat16", None):
            return PagedCache
        model = self.model
        reason = jax_kernels.obstacle(
            kernel,
            model.compute_dtype,
            model.head_dim,
            model.layer_windows[index],
            model.soft_cap,
            page_size,
        )
        return HeadMajorPages if reason is None else PagedCache

    def layer(self, index: int, spec: CacheSpec) -> LayerCache:
        """The empty cache of a layer."""
        num_kv_heads, head_dim = self.model.kv_heads[index], self.model.head_dim
        if isinstance(spec.placement, Recompute):
            return RecomputeCache()
        heads = _rows_per_sequence(spec, num_kv_heads)
        notes = () if spec.retention is None else notes_of(spec.retention)
        stored = num_kv_heads // heads, head_dim, spec.storage, notes
        inner: TokenSlots
        if isinstance(spec.placement, Paged):
            page_size = spec.placement.page_size
            num_pages, _ = self._pages(page_size)
            pages = self._paged_cache(index, spec, page_size)
            inner = pages.init(num_pages * heads, page_size, *stored)
        else:
            capacity = self.max_length
            if isinstance(spec.placement, Ring):
                # KIVI's ring holds closed groups alone: what a step reads is still beside it.
                needed = spec.placement.window
                needed += 0 if isinstance(spec.storage, Kivi4) else self.chunk - 1
                capacity = min(needed, capacity)
            inner = ContiguousCache.init(self.slots * heads, capacity, *stored)
        if isinstance(spec.storage, Kivi4):
            return KiviCache.init(
                inner, self.slots, self.chunk, num_kv_heads, head_dim, spec.storage
            )
        if spec.retention is None:
            return inner
        group_size = self.model.num_heads // heads
        return EvictingCache.init(
            inner, spec.retention, index, self.slots, heads, group_size, self.model.rope
        )


def _rows_per_sequence(spec: CacheSpec, num_kv_heads: int) -> int:
    """Rows of the table that a sequence has: its KV heads where they choose their tokens."""
    return num_kv_heads if spec.retention is not None and spec.retention.by_head else 1
