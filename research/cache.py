"""A model's cache: one pytree of page tables, layer caches and where each sequence stands."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.models.config import DecoderConfig
from kvlab.ops.caches.contiguous import ContiguousCache
from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.caches.protocol import LayerCache, Table
from kvlab.ops.caches.recompute import RecomputeCache
from kvlab.ops.page_table import PageTable
from kvlab.ops.row_table import RowTable
from kvlab.ops.specs import CacheSpec, Paged, Placement, Recompute, table_placements


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The state of all sequences of a model.

    Tables are apart from layers because layers with the same mapping share one, and a donated
    pytree may hold a buffer once.
    """

    tables: tuple[Table, ...]
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

    def nbytes(self) -> int:
        """Bytes of every array in the layers' caches."""
        return sum(layer.nbytes() for layer in self.layers)


@dataclasses.dataclass(frozen=True)
class CacheUse:
    """What a cache takes against what it holds, over all its layers."""

    allocated_bytes: int  # of every array in the layers' caches
    bytes_per_token: float  # allocated, over the tokens that fit
    used_bytes: float  # of the token slots that hold a token; a shared one counts once
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
        table = cache.tables[spec.table]
        if isinstance(table, PageTable):
            slots = capacity = table.num_slots
            taken, filled = _page_slots(table)
        else:
            assert isinstance(layer, ContiguousCache)
            num_sequences, row = len(layer.key["codes"]), layer.capacity  # whole read blocks
            slots, capacity = num_sequences * row, num_sequences * table.capacity
            lengths = np.asarray(table.lengths)
            taken, filled = int((lengths > 0).sum()) * row, int(lengths.sum())
        layer_bytes = layer.nbytes()
        allocated += layer_bytes
        per_token += layer_bytes / capacity
        taken_bytes += layer_bytes / slots * taken
        used_bytes += layer_bytes / slots * filled
    waste = 1.0 - used_bytes / taken_bytes if taken_bytes else 0.0
    return CacheUse(allocated, per_token, used_bytes, waste)


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
    num_pages: int | None,
) -> Cache:
    """An empty cache.

    Args:
      model: the decoder whose layers it serves.
      specs: one per layer, tables assigned (`kvlab.ops.specs.assign_tables`).
      slots: sequences (B).
      max_length: most tokens of a sequence.
      num_pages: pages of each paged pool; None lets every slot reach `max_length`.
    """

    def pages(page_size: int) -> tuple[int, int]:
        per_sequence = -(-max_length // page_size)
        return slots * per_sequence if num_pages is None else num_pages, per_sequence

    def table(placement: Placement) -> Table:
        if isinstance(placement, Paged):
            count, per_sequence = pages(placement.page_size)
            return PageTable.init(slots, count, placement.page_size, per_sequence)
        return RowTable.init(slots, max_length)

    def layer(spec: CacheSpec, num_kv_heads: int) -> LayerCache:
        if isinstance(spec.placement, Paged):
            page_size = spec.placement.page_size
            count, _ = pages(page_size)
            return PagedCache.init(count, page_size, num_kv_heads, model.head_dim, spec.storage)
        if isinstance(spec.placement, Recompute):
            return RecomputeCache()
        return ContiguousCache.init(slots, max_length, num_kv_heads, model.head_dim, spec.storage)

    recomputes = isinstance(specs[0].placement, Recompute)
    return Cache(
        tables=tuple(table(placement) for placement in table_placements(specs)),
        layers=tuple(layer(spec, k) for spec, k in zip(specs, model.kv_heads, strict=True)),
        positions=jnp.zeros(slots, jnp.int32),
        prompt_lengths=jnp.zeros(slots, jnp.int32),
        texts=jnp.zeros((slots, max_length), jnp.int32) if recomputes else None,
    )
