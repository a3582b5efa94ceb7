"""The contiguous cache: one reserved run of token slots per sequence.

Layout: keys [B, K, H, S], values [B, K, S, H], the same as a page's, with S a multiple of the read
block. Slot equals place in the text.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvlab.ops.attention import READ_BLOCK, AttentionOptions
from kvlab.ops.caches.protocol import Step, Table, array_bytes
from kvlab.ops.caches.reading import attend_in_order, written_indices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousCache:
    """Keys and values of one layer, `capacity` slots a sequence."""

    __no_type_check__ = True  # as in PageTable

    key: jax.Array  # [B, K, H, S]
    value: jax.Array  # [B, K, S, H]

    @classmethod
    def init(
        cls,
        num_sequences: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: jnp.dtype,
    ) -> "ContiguousCache":
        """An empty cache; the capacity is rounded up to the read block."""
        slots = -(-capacity // READ_BLOCK) * READ_BLOCK
        return cls(
            jnp.zeros((num_sequences, num_kv_heads, head_dim, slots), dtype),
            jnp.zeros((num_sequences, num_kv_heads, slots, head_dim), dtype),
        )

    def write(
        self, key: jax.Array, value: jax.Array, step: Step, table: Table
    ) -> "ContiguousCache":
        """Stores the step's written tokens; see `LayerCache.write`."""
        num_sequences, _, _, capacity = self.key.shape
        row = jnp.arange(key.shape[0], dtype=jnp.int32) if step.slots is None else step.slots
        slot = jnp.where(step.write, written_indices(step, table), capacity)
        row = jnp.broadcast_to(jnp.minimum(row, num_sequences)[:, None], slot.shape)
        dtype = self.key.dtype
        return type(self)(
            self.key.at[row, :, :, slot].set(key.astype(dtype), mode="drop"),
            self.value.at[row, :, slot, :].set(value.astype(dtype), mode="drop"),
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

        def of_rows(array: jax.Array) -> jax.Array:
            return array if step.slots is None else array.at[step.slots].get(mode="clip")

        def read(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            start = index * READ_BLOCK
            keys = jax.lax.dynamic_slice_in_dim(cache.key, start, READ_BLOCK, axis=3)
            values = jax.lax.dynamic_slice_in_dim(cache.value, start, READ_BLOCK, axis=2)
            return of_rows(keys), of_rows(values)

        def gather() -> tuple[jax.Array, jax.Array]:
            keys, values = cache.gather(table)
            return of_rows(keys), of_rows(values)

        output = attend_in_order(
            query, step, table, key.shape[2], options, READ_BLOCK, read, gather
        )
        return output, cache

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] in slot order."""
        del table
        return self.key.transpose(0, 3, 1, 2), self.value.transpose(0, 2, 1, 3)

    def fork(self, source: jax.Array, target: jax.Array) -> "ContiguousCache":
        """Copies the rows `source` to `target` i32[n]."""
        return jax.tree.map(lambda a: a.at[target].set(a[source], mode="drop"), self)

    def reorder(self, parents: jax.Array) -> "ContiguousCache":
        """Sequence b takes over the row of `parents[b]` i32[B]."""
        return jax.tree.map(lambda a: a[parents], self)

    def copy(self, source: jax.Array, target: jax.Array) -> "ContiguousCache":
        """Copies flat token slots (row * capacity + slot) `source` to `target` i32[n]."""
        capacity = self.key.shape[3]
        (row, slot), (to_row, to_slot) = divmod(source, capacity), divmod(target, capacity)
        return type(self)(
            self.key.at[to_row, :, :, to_slot].set(self.key[row, :, :, slot], mode="drop"),
            self.value.at[to_row, :, to_slot, :].set(self.value[row, :, slot, :], mode="drop"),
        )

    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return array_bytes(self)
