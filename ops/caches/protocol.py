"""How a layer meets its cache: the step it hands over and the methods every cache has.

Axes: B rows of the step, T query positions, S key positions, N query heads, K KV heads, G = N/K,
H head size. A step's rows are sequences; in prefill they are some of the cache's sequences
(`Step.slots`), in decode all of them.
"""

import dataclasses
from typing import Protocol, Self

import jax

from kvlab.ops.attention import AttentionOptions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What the tokens of one forward pass are.

    `write` is apart from `valid` because a token may be queried without being stored: a prompt
    whose keys are all in the cache already still has to ask for its last position.
    """

    positions: jax.Array  # i32[B, T]: place in the text
    valid: jax.Array  # bool[B, T]: the query is real, not padding
    write: jax.Array  # bool[B, T]: its key and value are to be stored
    slots: jax.Array | None = None  # i32[B]: the sequence of each row; None: row b is sequence b


class Table(Protocol):
    """Maps the tokens of sequences to storage, and counts them.

    `lengths` are tokens stored. A step reserves first, so inside a layer `lengths` already
    counts the tokens that the step writes.
    """

    @property
    def lengths(self) -> jax.Array:
        """i32[B], tokens stored."""
        ...

    def reserve(self, wanted: jax.Array, max_tokens: int | None = None) -> tuple[Self, jax.Array]:
        """Makes room for `wanted` i32[B] more tokens; returns the table and ok bool[B]."""
        ...

    def release(self, mask: jax.Array) -> Self:
        """Empties the sequences of `mask` bool[B]."""
        ...

    def rows(self, slots: jax.Array) -> Self:
        """The view of sequences `slots` i32[R]; an entry past the end is an empty row."""
        ...

    def with_rows(self, slots: jax.Array, rows: Self) -> Self:
        """The table with a view that `rows` made put back."""
        ...


class LayerCache(Protocol):
    """The keys and values of one layer. Values in, values out: nothing is changed in place."""

    def write(self, key: jax.Array, value: jax.Array, step: Step, table: Table) -> Self:
        """Stores `key`, `value` [B, T, K, H] of the step's written tokens."""
        ...

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        step: Step,
        table: Table,
        options: AttentionOptions,
    ) -> tuple[jax.Array, Self]:
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

    def fork(self, source: jax.Array, target: jax.Array) -> Self:
        """Copies what is held per sequence from `source` to `target` i32[n]; pages are shared."""
        ...

    def reorder(self, parents: jax.Array) -> Self:
        """Sequence b takes over what is held per sequence of `parents[b]` i32[B]."""
        ...

    def copy(self, source: jax.Array, target: jax.Array) -> Self:
        """Copies token slots `source` to `target` i32[n]; slots past the end are dropped."""
        ...

    def nbytes(self) -> int:
        """Bytes of every array of this cache."""
        ...


def array_bytes(tree: object) -> int:
    """Bytes of every array in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
