"""The contiguous cache: one reserved run of token slots per sequence.

Layout: keys [B, K, H, S], values [B, K, S, H], the same as a page's, with S a multiple of the read
block; scales of quantised storage lie in the same order. Slot equals place in the text.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvlab.ops.attention import READ_BLOCK, AttentionOptions
from kvlab.ops.caches.protocol import Step, Table, array_bytes
from kvlab.ops.caches.reading import attend_in_order, written_indices
from kvlab.ops.storage import Stored, decode, empty, encode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousCache:
    """Keys and values of one layer, `capacity` slots a sequence."""

    __no_type_check__ = True  # as in PageTable

    key: Stored  # [B, K, H, S]
    value: Stored  # [B, K, S, H]
    storage: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(
        cls, num_sequences: int, capacity: int, num_kv_heads: int, head_dim: int, storage: str
    ) -> "ContiguousCache":
        """An empty cache; the capacity is rounded up to the read block."""
        slots = -(-capacity // READ_BLOCK) * READ_BLOCK
        rows = num_sequences, num_kv_heads
        return cls(
            empty((*rows, head_dim, slots), 2, storage),
            empty((*rows, slots, head_dim), 3, storage),
            storage,
        )

    @property
    def capacity(self) -> int:
        """Token slots of a row (S)."""
        return self.key["codes"].shape[3]

    def write(
        self, key: jax.Array, value: jax.Array, step: Step, table: Table
    ) -> "ContiguousCache":
        """Stores the step's written tokens; see `LayerCache.write`."""
        num_sequences = self.key["codes"].shape[0]
        row = jnp.arange(key.shape[0], dtype=jnp.int32) if step.slots is None else step.slots
        slot = jnp.where(step.write, written_indices(step, table), self.capacity)
        row = jnp.broadcast_to(jnp.minimum(row, num_sequences)[:, None], slot.shape)
        return self._set(row, slot, encode(key, self.storage), encode(value, self.storage))

    def _set(
        self, row: jax.Array, slot: jax.Array, key: Stored, value: Stored
    ) -> "ContiguousCache":
        """Stores tokens at slots; those past the end are dropped."""
        return dataclasses.replace(
            self,
            key=jax.tree.map(
                lambda a, new: a.at[row, :, :, slot].set(new, mode="drop"), self.key, key
            ),
            value=jax.tree.map(
                lambda a, new: a.at[row, :, slot, :].set(new, mode="drop"), self.value, value
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
    ) -> tuple[jax.Array, "ContiguousCache"]:
        """Writes, then reads what is stored; see `LayerCache.attend`."""
        cache = self.write(key, value, step, table)

        def block(stored: Stored, index: jax.Array, axis: int, head_axis: int) -> jax.Array:
            def of_rows(array: jax.Array) -> jax.Array:
                part = jax.lax.dynamic_slice_in_dim(array, index * READ_BLOCK, READ_BLOCK, axis)
                return part if step.slots is None else part.at[step.slots].get(mode="clip")

            return decode(jax.tree.map(of_rows, stored), self.storage, head_axis)

        def read(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            return block(cache.key, index, 3, 2), block(cache.value, index, 2, 3)

        def gather() -> tuple[jax.Array, jax.Array]:
            keys, values = cache.gather(table)
            if step.slots is None:
                return keys, values
            return keys.at[step.slots].get(mode="clip"), values.at[step.slots].get(mode="clip")

        output = attend_in_order(
            query, step, table, key.shape[2], options, READ_BLOCK, read, gather
        )
        return output, cache

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] in slot order."""
        del table
        keys, values = decode(self.key, self.storage, 2), decode(self.value, self.storage, 3)
        return keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3)

    def fork(self, source: jax.Array, target: jax.Array) -> "ContiguousCache":
        """Copies the rows `source` to `target` i32[n]."""
        return jax.tree.map(lambda a: a.at[target].set(a[source], mode="drop"), self)

    def reorder(self, parents: jax.Array) -> "ContiguousCache":
        """Sequence b takes over the row of `parents[b]` i32[B]."""
        return jax.tree.map(lambda a: a[parents], self)

    def copy(self, source: jax.Array, target: jax.Array) -> "ContiguousCache":
        """Copies flat token slots (row * capacity + slot) `source` to `target` i32[n]."""
        (row, slot), (to_row, to_slot) = (divmod(flat, self.capacity) for flat in (source, target))
        keys = jax.tree.map(lambda a: a[row, :, :, slot], self.key)
        values = jax.tree.map(lambda a: a[row, :, slot, :], self.value)
        return self._set(to_row, to_slot, keys, values)

    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return array_bytes(self)
