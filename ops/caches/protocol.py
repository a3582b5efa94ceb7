"""How a layer meets its cache: the step it hands over and the methods every cache has.

Axes: B rows of the step, T query positions, S key positions, N query heads, K KV heads, G = N/K,
H head size. A step's rows are sequences; in prefill they are some of the cache's sequences
(`Step.slots`), in decode all of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from kvlab.ops.attention import AttentionOptions
from kvlab.ops.evicting_table import EvictingTable
from kvlab.ops.page_table import PageTable
from kvlab.ops.row_table import RowTable
from kvlab.ops.storage import Stored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What the tokens of one forward pass are.

    `write` is apart from `valid` because a token may be queried without being stored: a prompt
    whose keys are all in the cache already still has to ask for its last position.
    """

    __no_type_check__ = True  # as in PageTable

    positions: jax.Array  # i32[B, T]: place in the text
    valid: jax.Array  # bool[B, T]: the query is real, not padding
    write: jax.Array  # bool[B, T]: its key and value are to be stored
    slots: jax.Array | None = None  # i32[B]: the sequence of each row; None: row b is sequence b
    later: jax.Array | None = None  # i32[B], with slots: tokens of its sequence in rows after it

    @classmethod
    def of_none(cls, num_rows: int) -> "Step":
        """A step of no token, for reading all rows."""
        nothing = jnp.zeros((num_rows, 1), bool)
        return cls(jnp.zeros((num_rows, 1), jnp.int32), nothing, nothing)

    @property
    def rows(self) -> jax.Array:
        """The sequence of each row, i32[B]."""
        if self.slots is not None:
            return self.slots
        return jnp.arange(self.positions.shape[0], dtype=jnp.int32)


# Maps the tokens of sequences to storage, and counts them. A step reserves first, so inside a layer
# `lengths` already counts the tokens that the step writes.
Table = PageTable | RowTable | EvictingTable

# From a block's index i32[] to what is stored of its keys and values.
ReadStored = Callable[[jax.Array], tuple[Stored, Stored]]


@runtime_checkable
class LayerCache(Protocol):
    """The keys and values of one layer. Values in, values out: nothing is changed in place."""

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        step: Step,
        table: Table,
        options: AttentionOptions,
    ) -> tuple[jax.Array, "LayerCache"]:
        """Writes, then reads what is stored.

        Args:
          query: [B, T, N, H] float, rotated.
          key: [B, T, K, H] float, rotated.
          value: [B, T, K, H] float.
          step: the tokens' places.
          table: the step's rows of the layer's table, already reserved.
          options: scale, window, soft cap and implementation.

        Returns:
          The output [B, T, N, H] in the query's dtype (0 where not valid) and the new cache.
        """
        ...

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] of every sequence in slot order, as stored."""
        ...

    def fork(self, source: jax.Array, target: jax.Array) -> "LayerCache":
        """Copies what is held per sequence from `source` to `target` i32[n]; pages are shared."""
        ...

    def reorder(self, parents: jax.Array) -> "LayerCache":
        """Sequence b takes over what is held per sequence of `parents[b]` i32[B].

        A parent of B empties the sequence: what is then held of it means nothing.
        """
        ...

    def copy(self, source: jax.Array, target: jax.Array) -> "LayerCache":
        """Copies token slots `source` to `target` i32[n]; slots past the end are dropped."""
        ...

    def nbytes(self) -> int:
        """Bytes of every array of this cache."""
        ...


def array_bytes(tree: object) -> int:
    """Bytes of every array in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
