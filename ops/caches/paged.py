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
from kvlab.ops.storage import Stored, decode, empty, encode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of one layer in pages."""

    __no_type_check__ = True  # as in PageTable

    k_pages: Stored  # [P, K, H, p]
    v_pages: Stored  # [P, K, p, H]
    storage: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(
        cls, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, storage: str
    ) -> "PagedCache":
        """An empty pool of `num_pages` pages of `page_size` tokens."""
        heads = num_pages, num_kv_heads
        return cls(
            empty((*heads, head_dim, page_size), 2, storage),
            empty((*heads, page_size, head_dim), 3, storage),
            storage,
        )

    @property
    def page_size(self) -> int:
        """Tokens a page (p)."""
        return self.k_pages["codes"].shape[3]

    def write(self, key: jax.Array, value: jax.Array, step: Step, table: Table) -> "PagedCache":
        """Stores the step's written tokens; see `LayerCache.write`."""
        num_slots = self.k_pages["codes"].shape[0] * self.page_size
        slots = _paged(table).flat_slots(written_indices(step, table))
        slots = jnp.where(step.write, slots, num_slots)
        return self._set(slots, encode(key, self.storage), encode(value, self.storage))

    def _set(self, slots: jax.Array, key: Stored, value: Stored) -> "PagedCache":
        """Stores tokens at flat slots (page * p + offset); those past the end are dropped."""
        page, offset = slots // self.page_size, slots % self.page_size
        return dataclasses.replace(
            self,
            k_pages=jax.tree.map(
                lambda a, new: a.at[page, :, :, offset].set(new, mode="drop"), self.k_pages, key
            ),
            v_pages=jax.tree.map(
                lambda a, new: a.at[page, :, offset, :].set(new, mode="drop"), self.v_pages, value
            ),
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
        num_kv_heads = key.shape[2]
        block_pages = -(-READ_BLOCK // self.page_size)
        block = block_pages * self.page_size
        page_indices = _padded_page_indices(_paged(table), block_pages)

        def read(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            start = index * block_pages
            pages = jax.lax.dynamic_slice_in_dim(page_indices, start, block_pages, axis=1)

            # Unmapped pages are clamped: they are masked, and a clamped gather needs no fill pass.
            def keys(pool: jax.Array) -> jax.Array:  # [B, n, K, H, p] to [B, K, H, n * p]
                read = pool.at[pages].get(mode="clip").transpose(0, 2, 3, 1, 4)
                return read.reshape(*read.shape[:3], block)

            def values(pool: jax.Array) -> jax.Array:  # [B, n, K, p, H] to [B, K, n * p, H]
                read = pool.at[pages].get(mode="clip").transpose(0, 2, 1, 3, 4)
                return read.reshape(*read.shape[:2], block, read.shape[4])

            return (
                decode(jax.tree.map(keys, cache.k_pages), self.storage, 2),
                decode(jax.tree.map(values, cache.v_pages), self.storage, 3),
            )

        output = attend_in_order(
            query, step, table, num_kv_heads, options, block, read, lambda: cache.gather(table)
        )
        return output, cache

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] in slot order; unmapped slots hold 0."""
        pages = _paged(table).page_indices

        def of_rows(pool: jax.Array) -> jax.Array:
            return pool.at[pages].get(mode="fill", fill_value=0)

        keys = decode(jax.tree.map(of_rows, self.k_pages), self.storage, 3)  # [B, n, K, H, p]
        values = decode(jax.tree.map(of_rows, self.v_pages), self.storage, 4)  # [B, n, K, p, H]
        batch, _, num_kv_heads, head_dim, _ = keys.shape
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
        page, offset = divmod(source, self.page_size)
        keys = jax.tree.map(lambda a: a.at[page, :, :, offset].get(mode="clip"), self.k_pages)
        values = jax.tree.map(lambda a: a.at[page, :, offset, :].get(mode="clip"), self.v_pages)
        return self._set(target, keys, values)

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
