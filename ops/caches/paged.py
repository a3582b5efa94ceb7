"""The paged cache: one pool of pages for all sequences, mapped by a `PageTable`.

Layout: keys [P, K, H, p], values [P, K, p, H]. A page's keys have the token axis last, so that the
scores of a block are a product with contiguous columns (measured: WORKSPACE-notes.md). Keys and
values are read in blocks of the read block or of one page, whichever is larger, and never of a
smaller page: so every page size that divides the read block gives the same bits.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvlab.ops.attention import READ_BLOCK, AttentionOptions, Blocks, block_range
from kvlab.ops.caches.protocol import ReadStored, Step, Table, array_bytes
from kvlab.ops.caches.reading import attend_stored, gather_blocks, written_indices
from kvlab.ops.page_table import PageTable
from kvlab.ops.specs import Kivi4
from kvlab.ops.storage import Stored, decode, empty_keys, empty_values, encode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of one layer in pages."""

    __no_type_check__ = True  # as in PageTable

    k_pages: Stored  # [P, K, H, p]
    v_pages: Stored  # [P, K, p, H]
    storage: str | Kivi4 = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        storage: str | Kivi4,
        notes: Sequence[str] = (),
    ) -> "PagedCache":
        """An empty pool of `num_pages` pages of `page_size` tokens."""
        heads = num_pages, num_kv_heads
        return cls(
            empty_keys((*heads, head_dim, page_size), storage, notes),
            empty_values((*heads, page_size, head_dim), storage),
            storage,
        )

    @property
    def page_size(self) -> int:
        """Tokens a page (p)."""
        return self.k_pages["codes"].shape[3]

    @property
    def num_kv_heads(self) -> int:
        """KV heads (K)."""
        return self.k_pages["codes"].shape[1]

    @property
    def head_dim(self) -> int:
        """Head size (H)."""
        packed = self.storage == "int4" or isinstance(self.storage, Kivi4)
        return self.v_pages["codes"].shape[3] * (2 if packed else 1)

    @property
    def num_slots(self) -> int:
        """Token slots of the pool; as a slot, nowhere."""
        return self.k_pages["codes"].shape[0] * self.page_size

    def write(self, key: jax.Array, value: jax.Array, step: Step, table: Table) -> "PagedCache":
        """Stores the step's written tokens, `key` and `value` [B, T, K, H]."""
        slots = self.slots(step, table, written_indices(step, table))
        return self.set(slots, encode(key, self.storage), encode(value, self.storage))

    def slots(self, step: Step, table: Table, indices: jax.Array) -> jax.Array:
        """Flat slots (page * p + offset) of the step's written tokens, i32[B, T].

        Args:
          step: the tokens' places.
          table: the step's rows of the layer's table.
          indices: i32[B, T], places of the tokens within their sequences.
        """
        return jnp.where(step.write, _paged(table).flat_slots(indices), self.num_slots)

    def set(self, slots: jax.Array, key: Stored, value: Stored) -> "PagedCache":
        """Stores tokens [B, T, K, H] at flat slots i32[B, T]; those past the end are dropped."""
        page, offset = slots // self.page_size, slots % self.page_size

        def set_key(array: jax.Array, new: jax.Array) -> jax.Array:
            tokens = self.page_size // array.shape[3]  # that share an entry
            return array.at[page, :, :, offset // tokens].set(new, mode="drop")

        def set_value(array: jax.Array, new: jax.Array) -> jax.Array:
            return array.at[page, :, offset, :].set(new, mode="drop")

        return dataclasses.replace(
            self,
            k_pages=jax.tree.map(set_key, self.k_pages, key),
            v_pages=jax.tree.map(set_value, self.v_pages, value),
        )

    def reader(self, step: Step, table: Table) -> tuple[ReadStored, int, int]:
        """How the step's rows are read.

        Returns:
          A function from a block's index i32[] to what is stored of its keys [B, K, H, s] and
          values [B, K, s, H]; keys a block (s); and blocks there are.
        """
        del step
        block_pages = -(-READ_BLOCK // self.page_size)
        page_indices = _padded_page_indices(_paged(table), block_pages)

        # Unmapped pages are clamped: they are masked, and a clamped gather needs no fill pass.
        def keys(pool: jax.Array, pages: jax.Array) -> jax.Array:
            read = pool.at[pages].get(mode="clip").transpose(0, 2, 3, 1, 4)  # [B, n, K, H, p]
            return read.reshape(*read.shape[:3], -1)

        def values(pool: jax.Array, pages: jax.Array) -> jax.Array:
            read = pool.at[pages].get(mode="clip").transpose(0, 2, 1, 3, 4)  # [B, n, K, p, H]
            return read.reshape(*read.shape[:2], -1, read.shape[4])

        def read(index: jax.Array) -> tuple[Stored, Stored]:
            start = index * block_pages
            pages = jax.lax.dynamic_slice_in_dim(page_indices, start, block_pages, axis=1)
            return (
                jax.tree.map(lambda pool: keys(pool, pages), self.k_pages),
                jax.tree.map(lambda pool: values(pool, pages), self.v_pages),
            )

        return read, block_pages * self.page_size, page_indices.shape[1] // block_pages

    def note(self, name: str, step: Step, table: Table) -> jax.Array:
        """A note on every slot of the step's rows, [B, S]; unmapped slots have another page's."""
        del step
        pages = _paged(table).page_indices
        notes = self.k_pages[name][:, 0, 0].at[pages].get(mode="clip")
        return notes.reshape(pages.shape[0], -1)

    def stored_note(self, name: str) -> jax.Array:
        """A note on every slot, as it lies beside the keys."""
        return self.k_pages[name]

    def added(
        self, notes: jax.Array, step: Step, table: Table, index: jax.Array, numbers: jax.Array
    ) -> jax.Array:
        """Notes `[.., 1, 1, p]` with `numbers` [B, s] added on the slots of block `index` i32[]."""
        del step
        block_pages = -(-READ_BLOCK // self.page_size)
        page_indices = _padded_page_indices(_paged(table), block_pages)
        start = index * block_pages
        pages = jax.lax.dynamic_slice_in_dim(page_indices, start, block_pages, axis=1)
        numbers = numbers.reshape(*pages.shape, self.page_size)
        return notes.at[pages, 0, 0].add(numbers, mode="drop")

    def with_note(self, name: str, notes: jax.Array) -> "PagedCache":
        """The cache with other notes."""
        return dataclasses.replace(self, k_pages=self.k_pages | {name: notes})

    def blocks(self, step: Step, table: Table, lengths: jax.Array, window: int | None) -> Blocks:
        """The step's rows as attention reads them; see `ContiguousCache.blocks`."""
        read_stored, size, count = self.reader(step, table)

        def read(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            key, value = read_stored(index)
            slots = index * size + jnp.arange(size, dtype=jnp.int32)[None]
            stored = slots < lengths[:, None]
            positions = jnp.broadcast_to(slots, stored.shape)
            return decode(key, self.storage, 2), decode(value, self.storage, 3), positions, stored

        return Blocks(read, *block_range(step.positions, step.valid, window, size), count)

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
        source = cache.blocks(step, table, table.lengths, options.window)
        return attend_stored(query, step, key.shape[2], options, [source])[0], cache

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] in slot order; unmapped slots hold another page's."""
        rows = table.lengths.shape[0]
        nothing = jnp.zeros((rows, 1), bool)
        step = Step(jnp.zeros((rows, 1), jnp.int32), nothing, nothing)
        keys, values, _, _ = gather_blocks([self.blocks(step, table, table.lengths, None)])
        return keys, values

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

        def key_of(pool: jax.Array) -> jax.Array:
            tokens = self.page_size // pool.shape[3]
            return pool.at[page, :, :, offset // tokens].get(mode="clip")

        keys = jax.tree.map(key_of, self.k_pages)
        values = jax.tree.map(lambda a: a.at[page, :, offset, :].get(mode="clip"), self.v_pages)
        return self.set(target, keys, values)

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
