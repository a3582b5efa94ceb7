"""The contiguous cache: one reserved run of token slots per sequence; a ring where it is short.

A row is a unit of S token slots, a multiple of the read block. A token's slot is its place in the
sequence modulo S: where a sequence may grow past S, its last S tokens are there.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvlab.ops.attention import READ_BLOCK, Blocks, block_range
from kvlab.ops.caches.protocol import ReadStored, Step, Table
from kvlab.ops.caches.token_slots import TokenSlots
from kvlab.ops.cpu_kernels.attention import NOWHERE
from kvlab.ops.specs import Kivi4
from kvlab.ops.storage import Stored, decode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousCache(TokenSlots):
    """Keys and values of one layer, `capacity` slots a sequence."""

    @classmethod
    def init(
        cls,
        num_sequences: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        storage: str | Kivi4,
        notes: Sequence[str] = (),
    ) -> "ContiguousCache":
        """An empty cache; the capacity is rounded up to the read block."""
        slots = -(-capacity // READ_BLOCK) * READ_BLOCK
        return super().init(num_sequences, slots, num_kv_heads, head_dim, storage, notes)

    @property
    def capacity(self) -> int:
        """Token slots of a row (S)."""
        return self.unit_size

    def slots(self, step: Step, table: Table, indices: jax.Array) -> jax.Array:
        """Row times S plus place modulo S; see `TokenSlots.slots`."""
        del table
        row = jnp.minimum(step.rows, self.num_units)[:, None]
        return jnp.where(step.write, row * self.capacity + indices % self.capacity, self.num_slots)

    def units(self, step: Step, table: Table) -> jax.Array:
        """One row; see `TokenSlots.units`."""
        del table
        return step.rows[:, None]

    def reader(self, step: Step, table: Table) -> tuple[ReadStored, int, int]:
        """Slices of the rows; see `TokenSlots.reader`."""
        del table

        def block(array: jax.Array, index: jax.Array, axis: int) -> jax.Array:
            size = READ_BLOCK * array.shape[axis] // self.capacity
            part = jax.lax.dynamic_slice_in_dim(array, index * size, size, axis)
            return part if step.slots is None else part.at[step.slots].get(mode="clip")

        def read(index: jax.Array) -> tuple[Stored, Stored]:
            return (
                jax.tree.map(lambda array: block(array, index, 3), self.key),
                jax.tree.map(lambda array: block(array, index, 2), self.value),
            )

        return read, READ_BLOCK, self.capacity // READ_BLOCK

    def blocks(
        self,
        step: Step,
        table: Table,
        lengths: jax.Array,
        window: int | None,
        first_position: jax.Array | None = None,
    ) -> Blocks:
        """See `TokenSlots.blocks`; tokens before `first_position` i32[B] are not to be seen."""
        read_stored, size, count = self.reader(step, table)
        wraps = self.capacity < table.capacity
        newest = lengths[:, None] - 1

        def read(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            key, value = read_stored(index)
            slots = index * size + jnp.arange(size, dtype=jnp.int32)[None]
            if wraps:
                positions = newest - (newest - slots) % self.capacity
                stored = positions >= 0
            else:
                stored = slots <= newest
                positions = jnp.broadcast_to(slots, stored.shape)
            if first_position is not None:
                stored &= positions >= first_position[:, None]
            return decode(key, self.storage, 2), decode(value, self.storage, 3), positions, stored

        if wraps:
            end = jnp.minimum((jnp.max(lengths) + size - 1) // size, count)
            seen = jnp.zeros_like(end), end
        else:
            seen = block_range(step.positions, step.valid, window, size)
        pool = None
        if first_position is None:
            positions = None
            if wraps:
                slots = jnp.arange(self.capacity, dtype=jnp.int32)[None]
                positions = newest - (newest - slots) % self.capacity
                positions = jnp.where(positions >= 0, positions, NOWHERE)
            pool = self.pool(step, table, jnp.minimum(lengths, self.capacity), positions)
        return Blocks(read, *seen, count, pool)

    def note(self, name: str, step: Step, table: Table) -> jax.Array:
        """See `TokenSlots.note`."""
        del table
        notes = self.key[name][:, 0, 0]
        return notes if step.slots is None else notes.at[step.slots].get(mode="clip")

    def added(
        self, notes: jax.Array, step: Step, table: Table, index: jax.Array, numbers: jax.Array
    ) -> jax.Array:
        """See `TokenSlots.added`."""
        del table
        slots = index * READ_BLOCK + jnp.arange(READ_BLOCK, dtype=jnp.int32)
        return notes.at[step.rows[:, None], 0, 0, slots[None]].add(numbers, mode="drop")

    def fork(self, source: jax.Array, target: jax.Array) -> "ContiguousCache":
        """Copies the rows `source` to `target` i32[n]."""
        return jax.tree.map(lambda a: a.at[target].set(a[source], mode="drop"), self)

    def reorder(self, parents: jax.Array) -> "ContiguousCache":
        """Sequence b takes over the row of `parents[b]` i32[B]."""
        return jax.tree.map(lambda a: a[parents], self)
