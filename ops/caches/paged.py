"""The paged cache: one pool of pages for all sequences, mapped by a `PageTable`.

A page is a unit of p token slots. XLA reads keys and values in blocks of the read block or of one
page, whichever is larger, and never of a smaller page: so every page size that divides the read
block gives the same bits. The kernel for CPU reads blocks of one size whatever the page.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvlab.ops.attention import READ_BLOCK, Blocks, block_range
from kvlab.ops.caches.protocol import ReadStored, Step, Table
from kvlab.ops.caches.token_slots import TokenSlots
from kvlab.ops.page_table import PageTable
from kvlab.ops.storage import Stored, decode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache(TokenSlots):
    """Keys and values of one layer in pages."""

    @property
    def page_size(self) -> int:
        """Tokens a page (p)."""
        return self.unit_size

    def slots(self, step: Step, table: Table, indices: jax.Array) -> jax.Array:
        """Page times p plus offset; see `TokenSlots.slots`."""
        return jnp.where(step.write, _paged(table).flat_slots(indices), self.num_slots)

    def units(self, step: Step, table: Table) -> jax.Array:
        """The mapped pages; see `TokenSlots.units`."""
        del step
        return _paged(table).page_indices

    def reader(self, step: Step, table: Table) -> tuple[ReadStored, int, int]:
        """Pages side by side; see `TokenSlots.reader`."""
        del step
        pages_of, block_pages, count = self._block_pages(table)

        # Unmapped pages are clamped: they are masked, and a clamped gather needs no fill pass.
        def keys(pool: jax.Array, pages: jax.Array) -> jax.Array:
            read = pool.at[pages].get(mode="clip").transpose(0, 2, 3, 1, 4)  # [B, n, K, H, p]
            return read.reshape(*read.shape[:3], -1)

        def values(pool: jax.Array, pages: jax.Array) -> jax.Array:
            read = pool.at[pages].get(mode="clip").transpose(0, 2, 1, 3, 4)  # [B, n, K, p, H]
            return read.reshape(*read.shape[:2], -1, read.shape[4])

        def read(index: jax.Array) -> tuple[Stored, Stored]:
            pages = pages_of(index)
            return (
                jax.tree.map(lambda pool: keys(pool, pages), self.key),
                jax.tree.map(lambda pool: values(pool, pages), self.value),
            )

        return read, block_pages * self.page_size, count

    def blocks(self, step: Step, table: Table, lengths: jax.Array, window: int | None) -> Blocks:
        """See `TokenSlots.blocks`."""
        read_stored, size, count = self.reader(step, table)

        def read(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            key, value = read_stored(index)
            slots = index * size + jnp.arange(size, dtype=jnp.int32)[None]
            stored = slots < lengths[:, None]
            positions = jnp.broadcast_to(slots, stored.shape)
            return decode(key, self.storage, 2), decode(value, self.storage, 3), positions, stored

        seen = block_range(step.positions, step.valid, window, size)
        return Blocks(read, *seen, count, self.pool(step, table, lengths))

    def note(self, name: str, step: Step, table: Table) -> jax.Array:
        """See `TokenSlots.note`."""
        del step
        pages = _paged(table).page_indices
        notes = self.key[name][:, 0, 0].at[pages].get(mode="clip")
        return notes.reshape(pages.shape[0], -1)

    def added(
        self, notes: jax.Array, step: Step, table: Table, index: jax.Array, numbers: jax.Array
    ) -> jax.Array:
        """See `TokenSlots.added`."""
        del step
        pages = self._block_pages(table)[0](index)
        numbers = numbers.reshape(*pages.shape, self.page_size)
        return notes.at[pages, 0, 0].add(numbers, mode="drop")

    def _block_pages(self, table: Table) -> tuple[Callable[[jax.Array], jax.Array], int, int]:
        """From a block's index i32[] to its pages [B, n] (n); pages a block; blocks there are."""
        page_indices = _paged(table).page_indices
        block_pages = -(-READ_BLOCK // self.page_size)
        missing = -page_indices.shape[1] % block_pages  # up to a whole number of blocks
        unmapped = self.num_units
        padded = jnp.pad(page_indices, ((0, 0), (0, missing)), constant_values=unmapped)

        def pages_of(index: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(padded, index * block_pages, block_pages, axis=1)

        return pages_of, block_pages, padded.shape[1] // block_pages

    def fork(self, source: jax.Array, target: jax.Array) -> "PagedCache":
        """Nothing is held per sequence: the table shares the pages."""
        del source, target
        return self

    def reorder(self, parents: jax.Array) -> "PagedCache":
        """Nothing is held per sequence: the table permutes the mapping."""
        del parents
        return self


def _paged(table: Table) -> PageTable:
    if not isinstance(table, PageTable):
        raise TypeError(f"a paged cache needs a PageTable, got {type(table).__name__}")
    return table
