"""The table of sequences that each own a fixed run of token slots: it only counts.

It has the operations of `kvlab.ops.page_table.PageTable` that need no pages, so that placements
are reserved, forked and released alike. Axes: B sequences, R rows of a prefill.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowTable:
    """Counts the tokens of sequences that each own `capacity` slots."""

    __no_type_check__ = True  # as in PageTable

    lengths: jax.Array  # i32[B]: tokens stored
    capacity: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(cls, num_sequences: int, capacity: int) -> "RowTable":
        """An empty table of `num_sequences` rows of `capacity` tokens."""
        return cls(jnp.zeros(num_sequences, jnp.int32), capacity)

    def reserve(
        self, wanted: jax.Array, max_tokens: int | None = None
    ) -> tuple["RowTable", jax.Array]:
        """Adds `wanted` i32[B] tokens where they fit; ok bool[B] says where."""
        del max_tokens  # bounds the work of a page table; here there is none
        ok = self.lengths + wanted <= self.capacity
        return dataclasses.replace(self, lengths=self.lengths + jnp.where(ok, wanted, 0)), ok

    def release(self, mask: jax.Array) -> "RowTable":
        """Empties the sequences of `mask` bool[B]."""
        return dataclasses.replace(self, lengths=jnp.where(mask, 0, self.lengths))

    def fork(self, source: jax.Array, target: jax.Array) -> "RowTable":
        """Gives `target` i32[n] the lengths of `source` i32[n]."""
        return dataclasses.replace(
            self, lengths=self.lengths.at[target].set(self.lengths[source], mode="drop")
        )

    def reorder(self, parents: jax.Array) -> "RowTable":
        """Sequence b takes over the length of `parents[b]` i32[B]; B empties it."""
        lengths = self.lengths.at[parents].get(mode="fill", fill_value=0)
        return dataclasses.replace(self, lengths=lengths)

    def trim(self, lengths: jax.Array) -> "RowTable":
        """Shortens sequences to `lengths` i32[B]."""
        return dataclasses.replace(self, lengths=jnp.minimum(self.lengths, lengths))

    def rows(self, slots: jax.Array, later: jax.Array) -> "RowTable":
        """The view of sequences `slots` i32[R], each without its last `later` i32[R] tokens.

        A slot past the end is an empty row; slots may repeat.
        """
        lengths = self.lengths.at[slots].get(mode="fill", fill_value=0)
        return dataclasses.replace(self, lengths=lengths - later)
