"""The table of layers that evict: which rows may still grow, and which replace a token by another.

Axes: B sequences, rows = B * heads (a row is a sequence, or one KV head of a sequence), R rows of
a prefill call. It wraps the table of the placement, and has the same operations. No page of it is
ever shared: an evicting row writes into any of its pages.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvlab.ops.page_pool import forbid, rank_among_equals
from kvlab.ops.page_table import CopyPlan, PageTable
from kvlab.ops.row_table import RowTable

UNLIMITED = jnp.iinfo(jnp.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvictingTable:
    """Rows with a limit on the tokens they hold.

    Attributes:
      table: maps the rows.
      limits: [rows] int32, tokens at which decode replaces instead of adding; `UNLIMITED` until
        the sequence's prompt is complete.
      replaces: [rows] bool, rows whose token of this step takes the slot of an evicted one.
      heads: rows of a sequence (static).
    """

    __no_type_check__ = True  # as in PageTable

    table: PageTable | RowTable
    limits: jax.Array
    replaces: jax.Array
    heads: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(cls, table: PageTable | RowTable, heads: int) -> "EvictingTable":
        """Wraps an empty table of B * heads rows."""
        rows = table.lengths.shape
        if isinstance(table, PageTable):
            table = dataclasses.replace(table, heads=heads)
        return cls(table, jnp.full(rows, UNLIMITED, jnp.int32), jnp.zeros(rows, bool), heads)

    @property
    def lengths(self) -> jax.Array:
        """Tokens stored, [rows] int32."""
        return self.table.lengths

    @property
    def capacity(self) -> int:
        """Tokens that a row can store at most."""
        return self.table.capacity

    def of_rows(self, per_sequence: jax.Array) -> jax.Array:
        """[B, ...] given to each row of a sequence, [rows, ...]."""
        return jnp.repeat(per_sequence, self.heads, axis=0)

    def split(self, heads: jax.Array) -> jax.Array:
        """Heads by row: [B, T, n, H] to [rows, T, n / heads, H]."""
        batch, length, count, head_dim = heads.shape
        split = heads.reshape(batch, length, self.heads, count // self.heads, head_dim)
        return split.swapaxes(1, 2).reshape(batch * self.heads, length, -1, head_dim)

    def join(self, by_row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undoes `split`: [rows, T, n / heads, H] to `shape` [B, T, n, H]."""
        batch, length, _, _ = shape
        joined = by_row.reshape(batch, self.heads, length, *by_row.shape[2:])
        return joined.swapaxes(1, 2).reshape(shape)

    def reserve(
        self, wanted: jax.Array, max_tokens: int | None = None
    ) -> tuple["EvictingTable", jax.Array]:
        """Adds `wanted` i32[B] tokens to every row of a sequence; see `PageTable.reserve`."""
        return self._reserve(self.of_rows(wanted), jnp.zeros_like(self.replaces), max_tokens)

    def reserve_next(self, mask: jax.Array) -> tuple["EvictingTable", jax.Array]:
        """Makes room for the next token of sequences `mask` bool[B].

        Rows at their limit take no slot: the token will replace one (`replaces`).
        """
        mask = self.of_rows(mask)
        full = self.lengths >= self.limits
        return self._reserve((mask & ~full).astype(jnp.int32), mask & full, 1)

    def _reserve(
        self, wanted: jax.Array, replaces: jax.Array, max_tokens: int | None
    ) -> tuple["EvictingTable", jax.Array]:
        table, granted = self.table.reserve(wanted, max_tokens)
        ok = self._of_sequences(granted)
        if self.heads > 1:  # a sequence gets all of its rows or none
            table, _ = self.table.reserve(jnp.where(self.of_rows(ok), wanted, 0), max_tokens)
        return dataclasses.replace(self, table=table, replaces=replaces & self.of_rows(ok)), ok

    def shrink(self, lengths: jax.Array, limits: jax.Array) -> "EvictingTable":
        """Cuts rows to `lengths` i32[rows], survivors being in front, and sets their limits."""
        return dataclasses.replace(self, table=self.table.trim(lengths), limits=limits)

    def release(self, mask: jax.Array) -> "EvictingTable":
        """Empties the sequences of `mask` bool[B]."""
        rows = self.of_rows(mask)
        forbid(
            mask & jnp.all(self.lengths.reshape(-1, self.heads) == 0, axis=1),
            "sequence {sequence} is released twice: none of its rows holds a token; release "
            "sequences that hold some",
            sequence=jnp.arange(mask.shape[0], dtype=jnp.int32),
        )
        table = self.table.release(rows & (self.lengths > 0))
        return dataclasses.replace(
            self, table=table, limits=jnp.where(rows, UNLIMITED, self.limits)
        )

    def fork(
        self, source: jax.Array, target: jax.Array
    ) -> tuple["EvictingTable", CopyPlan | None, jax.Array]:
        """Gives empty sequences `target` i32[n] what `source` i32[n] hold, in pages of their own.

        Returns:
          The table; what a paged layer has to copy; and ok bool[]: the pool had room for all.
        """
        source, target = rows_of(source, self.heads), rows_of(target, self.heads)
        limits = self.limits.at[target].set(
            self.limits.at[source].get(mode="fill", fill_value=0), mode="drop"
        )
        if isinstance(self.table, RowTable):
            counted = self.table.fork(source, target)
            return dataclasses.replace(self, table=counted, limits=limits), None, jnp.ones((), bool)
        lengths = self.lengths.at[source].get(mode="fill", fill_value=0)
        wanted = jnp.zeros_like(self.lengths).at[target].set(lengths, mode="drop")
        table, granted = self.table.reserve(wanted)
        plan = CopyPlan(_all_slots(self.table, source), _all_slots(table, target))
        return dataclasses.replace(self, table=table, limits=limits), plan, jnp.all(granted)

    def reorder(self, parents: jax.Array) -> tuple["EvictingTable", CopyPlan | None, jax.Array]:
        """Sequence b takes over what `parents[b]` i32[B] holds; B empties it.

        The first child of a parent has its pages, the others get copies.

        Returns:
          As `fork`.
        """
        rows = rows_of(parents, self.heads)
        limits = self.limits.at[rows].get(mode="fill", fill_value=UNLIMITED)
        if isinstance(self.table, RowTable):
            counted = self.table.reorder(rows)
            return dataclasses.replace(self, table=counted, limits=limits), None, jnp.ones((), bool)
        first = rank_among_equals(rows) == 0
        moved = self.table.reorder(jnp.where(first, rows, self.table.num_sequences))
        lengths = self.lengths.at[rows].get(mode="fill", fill_value=0)
        table, granted = moved.reserve(jnp.where(first, 0, lengths))
        copies = jnp.where(first, table.num_sequences, jnp.arange(rows.shape[0], dtype=jnp.int32))
        plan = CopyPlan(_all_slots(self.table, rows), _all_slots(table, copies))
        return dataclasses.replace(self, table=table, limits=limits), plan, jnp.all(granted)

    def rows(self, slots: jax.Array, later: jax.Array) -> "EvictingTable":
        """The view of sequences as rows of a step; see `PageTable.rows`."""
        rows = rows_of(slots, self.heads)
        return EvictingTable(
            self.table.rows(rows, self.of_rows(later)),
            self.limits.at[rows].get(mode="fill", fill_value=UNLIMITED),
            jnp.zeros(rows.shape, bool),
            self.heads,
        )

    def _of_sequences(self, granted: jax.Array) -> jax.Array:
        """Whether all rows of each sequence were granted, [B] bool."""
        return jnp.all(granted.reshape(-1, self.heads), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedTable:
    """Tables of layers that each map their own tokens, as one: every operation runs on all of them.

    A model of 30 layers would otherwise compile every operation 30 times over.

    Attributes:
      tables: an `EvictingTable` whose arrays have a leading axis of layers.
    """

    __no_type_check__ = True  # as in PageTable

    tables: EvictingTable

    @classmethod
    def init(cls, table: EvictingTable, num_layers: int) -> "StackedTable":
        """As many empty tables like this one."""
        return cls(jax.tree.map(lambda array: jnp.stack([array] * num_layers), table))

    @property
    def num_layers(self) -> int:
        """Tables that are stacked."""
        return self.tables.limits.shape[0]

    def layer(self, place: int) -> EvictingTable:
        """The table of one layer."""
        return jax.tree.map(lambda array: array[place], self.tables)

    def reserve(
        self, wanted: jax.Array, max_tokens: int | None = None
    ) -> tuple["StackedTable", jax.Array]:
        """See `EvictingTable.reserve`; ok where every layer has room."""
        return self._granted(lambda table: table.reserve(wanted, max_tokens))

    def reserve_next(self, mask: jax.Array) -> tuple["StackedTable", jax.Array]:
        """See `EvictingTable.reserve_next`; ok where every layer has room."""
        return self._granted(lambda table: table.reserve_next(mask))

    def _granted(
        self, reserve: Callable[[EvictingTable], tuple[EvictingTable, jax.Array]]
    ) -> tuple["StackedTable", jax.Array]:
        tables, ok = jax.vmap(reserve)(self.tables)
        return StackedTable(tables), jnp.all(ok, axis=0)

    def shrink(self, lengths: jax.Array, limits: jax.Array) -> "StackedTable":
        """See `EvictingTable.shrink`, both [layers, rows]."""
        return StackedTable(jax.vmap(EvictingTable.shrink)(self.tables, lengths, limits))

    def release(self, mask: jax.Array) -> "StackedTable":
        """See `EvictingTable.release`."""
        return StackedTable(jax.vmap(lambda table: table.release(mask))(self.tables))

    def rows(self, slots: jax.Array, later: jax.Array) -> "StackedTable":
        """See `EvictingTable.rows`."""
        return StackedTable(jax.vmap(lambda table: table.rows(slots, later))(self.tables))

    def fork(
        self, source: jax.Array, target: jax.Array
    ) -> tuple["StackedTable", CopyPlan | None, jax.Array]:
        """See `EvictingTable.fork`; the plan has a leading axis of layers."""
        tables, plan, ok = jax.vmap(lambda table: table.fork(source, target))(self.tables)
        return StackedTable(tables), plan, jnp.all(ok)

    def reorder(self, parents: jax.Array) -> tuple["StackedTable", CopyPlan | None, jax.Array]:
        """See `EvictingTable.reorder`; the plan has a leading axis of layers."""
        tables, plan, ok = jax.vmap(lambda table: table.reorder(parents))(self.tables)
        return StackedTable(tables), plan, jnp.all(ok)


def rows_of(sequences: jax.Array, heads: int) -> jax.Array:
    """The rows of sequences i32[n], `heads` each, [n * heads] int32; B gives rows past the end."""
    heads_of_one = jnp.arange(heads, dtype=jnp.int32)
    return (sequences[:, None] * heads + heads_of_one[None]).reshape(-1)


def _all_slots(table: PageTable, rows: jax.Array) -> jax.Array:
    """Flat slots of all that rows i32[n] may hold, `[n * capacity] int32`."""
    view = table.rows(rows, jnp.zeros_like(rows))
    indices = jnp.arange(table.capacity, dtype=jnp.int32)[None]
    return view.flat_slots(jnp.broadcast_to(indices, (rows.shape[0], table.capacity))).reshape(-1)
