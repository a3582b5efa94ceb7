"""The paged cache: one pool of pages for all sequences, mapped by a `PageTable`.

Layout: keys [P, K, H, p], values [P, K, p, H]. A page's keys have the token axis last, so that the
scores of a block are a product with contiguous columns (measured: WORKSPACE-notes.md). Keys and
values are read in blocks of the read block or of one page, whichever is larger, and never of a
smaller page: so every page size that divides the read block gives the same bits.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvlab.ops.attention import READ_BLOCK, AttentionOptions
from kvlab.ops.caches.protocol import Step, Table, array_bytes
from kvlab.ops.caches.reading import attend_in_order, written_indices
from kvlab.ops.page_table import PageTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of one layer in pages."""

    __no_type_check__ = True  # as in PageTable

    k_pages: jax.Array  # [P, K, H, p]
    v_pages: jax.Array  # [P, K, p, H]

    @classmethod
    def init(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: jnp.dtype,
    ) -> "PagedCache":
        """An empty pool of `num_pages` pages of `page_size` tokens."""
        return cls(
            jnp.zeros((num_pages, num_kv_heads, head_dim, page_size), dtype),
            jnp.zeros((num_pages, num_kv_heads, page_size, head_dim), dtype),
        )

    def write(self, key: jax.Array, value: jax.Array, step: Step, table: Table) -> "PagedCache":
        """Stores the step's written tokens; see `LayerCache.write`."""
        num_pages, _, _, page_size = self.k_pages.shape
        slots = _paged(table).flat_slots(written_indices(step, table))
        slots = jnp.where(step.write, slots, num_pages * page_size)
        page, offset = slots // page_size, slots % page_size
        dtype = self.k_pages.dtype
        return type(self)(
            self.k_pages.at[page, :, :, offset].set(key.astype(dtype), mode="drop"),
            self.v_pages.at[page, :, offset, :].set(value.astype(dtype), mode="drop"),
        )

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        step: Step,
        table: Table,
        options: AttentionOptions,
    ) -> tuple[jax.Array, "PagedCache"]:
        """Writes, then reads what is stored; see `LayerCache.attend`."""
        cache = self.write(key, value, step, table)
        _, num_kv_heads, head_dim, page_size = self.k_pages.shape
        block_pages = -(-READ_BLOCK // page_size)
        block = block_pages * page_size
        page_indices = _padded_page_indices(_paged(table), block_pages)

        def read(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            start = index * block_pages
            pages = jax.lax.dynamic_slice_in_dim(page_indices, start, block_pages, axis=1)
            # Unmapped pages are clamped: they are masked, and a clamped gather needs no fill pass.
            keys = cache.k_pages.at[pages].get(mode="clip")  # [B, n, K, H, p]
            values = cache.v_pages.at[pages].get(mode="clip")  # [B, n, K, p, H]
            return (
                keys.transpose(0, 2, 3, 1, 4).reshape(-1, num_kv_heads, head_dim, block),
                values.transpose(0, 2, 1, 3, 4).reshape(-1, num_kv_heads, block, head_dim),
            )

        output = attend_in_order(
            query, step, table, num_kv_heads, options, block, read, lambda: cache.gather(table)
        )
        return output, cache

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] in slot order; unmapped slots hold 0."""
        _, num_kv_heads, head_dim, _ = self.k_pages.shape
        pages = _paged(table).page_indices
        keys = self.k_pages.at[pages].get(mode="fill", fill_value=0)  # [B, n, K, H, p]
        values = self.v_pages.at[pages].get(mode="fill", fill_value=0)  # [B, n, K, p, H]
        batch = pages.shape[0]
        return (
            keys.transpose(0, 1, 4, 2, 3).reshape(batch, -1, num_kv_heads, head_dim),
            values.transpose(0, 1, 3, 2, 4).reshape(batch, -1, num_kv_heads, head_dim),
        )

    def fork(self, source: jax.Array, target: jax.Array) -> "PagedCache":
        """Nothing is held per sequence: the table shares the pages."""
        del source, target
        return self

    def reorder(self, parents: jax.Array) -> "PagedCache":
        """Nothing is held per sequence: the table permutes the mapping."""
        del parents
        return self

    def copy(self, source: jax.Array, target: jax.Array) -> "PagedCache":
        """Copies flat token slots (page * p + offset) `source` to `target` i32[n]."""
        page_size = self.k_pages.shape[3]
        (page, offset), (to_page, to_offset) = divmod(source, page_size), divmod(target, page_size)
        keys = self.k_pages.at[page, :, :, offset].get(mode="clip")
        values = self.v_pages.at[page, :, offset, :].get(mode="clip")
        return type(self)(
            self.k_pages.at[to_page, :, :, to_offset].set(keys, mode="drop"),
            self.v_pages.at[to_page, :, to_offset, :].set(values, mode="drop"),
        )

    def nbytes(self) -> int:
        """Bytes of the pools."""
        return array_bytes(self)


def _paged(table: Table) -> PageTable:
    if not isinstance(table, PageTable):
        raise TypeError(f"a paged cache needs a PageTable, got {type(table).__name__}")
    return table


def _padded_page_indices(table: PageTable, multiple: int) -> jax.Array:
    """Page indices with unmapped entries appended up to a whole number of read blocks."""
    missing = -table.page_indices.shape[1] % multiple
    return jnp.pad(table.page_indices, ((0, 0), (0, missing)), constant_values=table.num_pages)
