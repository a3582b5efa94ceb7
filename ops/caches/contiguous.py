"""The contiguous cache: one reserved run of token slots per sequence; a ring where it is short.

Layout: keys [B, K, H, S], values [B, K, S, H], the same as a page's, with S a multiple of the read
block; scales and other things kept of a token lie in the same order. A token's slot is its place in
the sequence modulo S: where a sequence may grow past S, its last S tokens are there.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvlab.ops.attention import READ_BLOCK, AttentionOptions, Blocks, block_range
from kvlab.ops.caches.protocol import ReadStored, Step, Table, array_bytes
from kvlab.ops.caches.reading import attend_stored, gather_blocks, written_indices
from kvlab.ops.specs import Kivi4
from kvlab.ops.storage import Stored, decode, empty_keys, empty_values, encode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousCache:
    """Keys and values of one layer, `capacity` slots a sequence."""

    __no_type_check__ = True  # as in PageTable

    key: Stored  # [B, K, H, S]
    value: Stored  # [B, K, S, H]
    storage: str | Kivi4 = dataclasses.field(metadata={"static": True})

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
        rows = num_sequences, num_kv_heads
        return cls(
            empty_keys((*rows, head_dim, slots), storage, notes),
            empty_values((*rows, slots, head_dim), storage),
            storage,
        )

    @property
    def num_rows(self) -> int:
        """Sequences (B)."""
        return self.key["codes"].shape[0]

    @property
    def capacity(self) -> int:
        """Token slots of a row (S)."""
        return self.key["codes"].shape[3]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a row (K)."""
        return self.key["codes"].shape[1]

    @property
    def head_dim(self) -> int:
        """Head size (H)."""
        packed = self.storage == "int4" or isinstance(self.storage, Kivi4)
        return self.value["codes"].shape[3] * (2 if packed else 1)

    @property
    def num_slots(self) -> int:
        """Token slots of all rows; as a slot, nowhere."""
        return self.num_rows * self.capacity

    def write(
        self, key: jax.Array, value: jax.Array, step: Step, table: Table
    ) -> "ContiguousCache":
        """Stores the step's written tokens, `key` and `value` [B, T, K, H]."""
        slots = self.slots(step, table, written_indices(step, table))
        return self.set(slots, encode(key, self.storage), encode(value, self.storage))

    def slots(self, step: Step, table: Table, indices: jax.Array) -> jax.Array:
        """Flat slots (row * S + slot) of the step's written tokens, i32[B, T].

        Args:
          step: the tokens' places.
          table: the step's rows of the layer's table.
          indices: i32[B, T], places of the tokens within their sequences.
        """
        del table
        count = indices.shape[0]
        row = jnp.arange(count, dtype=jnp.int32) if step.slots is None else step.slots
        row = jnp.minimum(row, self.num_rows)[:, None]
        return jnp.where(step.write, row * self.capacity + indices % self.capacity, self.num_slots)

    def set(self, slots: jax.Array, key: Stored, value: Stored) -> "ContiguousCache":
        """Stores tokens [B, T, K, H] at flat slots i32[B, T]; those past the end are dropped."""
        row, slot = divmod(slots, self.capacity)

        def set_key(array: jax.Array, new: jax.Array) -> jax.Array:
            tokens = self.capacity // array.shape[3]  # that share an entry
            return array.at[row, :, :, slot // tokens].set(new, mode="drop")

        def set_value(array: jax.Array, new: jax.Array) -> jax.Array:
            return array.at[row, :, slot, :].set(new, mode="drop")

        return dataclasses.replace(
            self,
            key=jax.tree.map(set_key, self.key, key),
            value=jax.tree.map(set_value, self.value, value),
        )

    def reader(self, step: Step, table: Table) -> tuple[ReadStored, int, int]:
        """How the step's rows are read.

        Returns:
          A function from a block's index i32[] to what is stored of its keys [B, K, H, s] and
          values [B, K, s, H]; keys a block (s); and blocks there are.
        """
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

    def note(self, name: str, step: Step, table: Table) -> jax.Array:
        """A note on every slot of the step's rows, [B, S]."""
        del table
        notes = self.key[name][:, 0, 0]
        return notes if step.slots is None else notes.at[step.slots].get(mode="clip")

    def stored_note(self, name: str) -> jax.Array:
        """A note on every slot, as it lies beside the keys."""
        return self.key[name]

    def added(
        self, notes: jax.Array, step: Step, table: Table, index: jax.Array, numbers: jax.Array
    ) -> jax.Array:
        """Notes `[.., 1, 1, S]` with `numbers` [B, s] added on the slots of block `index` i32[]."""
        del table
        count, size = numbers.shape
        row = jnp.arange(count, dtype=jnp.int32) if step.slots is None else step.slots
        slots = index * size + jnp.arange(size, dtype=jnp.int32)
        return notes.at[row[:, None], 0, 0, slots[None]].add(numbers, mode="drop")

    def with_note(self, name: str, notes: jax.Array) -> "ContiguousCache":
        """The cache with other notes."""
        return dataclasses.replace(self, key=self.key | {name: notes})

    def blocks(
        self,
        step: Step,
        table: Table,
        lengths: jax.Array,
        window: int | None,
        first_position: jax.Array | None = None,
    ) -> Blocks:
        """The step's rows as attention reads them.

        Args:
          step: the tokens' places.
          table: the step's rows of the layer's table.
          lengths: i32[B], tokens that each row has been given so far.
          window: of attention.
          first_position: i32[B], earlier tokens are not to be seen; None is all.
        """
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
            return Blocks(read, jnp.zeros_like(end), end, count)
        return Blocks(read, *block_range(step.positions, step.valid, window, size), count)

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
        source = cache.blocks(step, table, table.lengths, options.window)
        return attend_stored(query, step, key.shape[2], options, [source])[0], cache

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] in slot order."""
        lengths = table.lengths
        nothing = jnp.zeros((self.num_rows, 1), bool)
        step = Step(jnp.zeros((self.num_rows, 1), jnp.int32), nothing, nothing)
        keys, values, _, _ = gather_blocks([self.blocks(step, table, lengths, None)])
        return keys, values

    def fork(self, source: jax.Array, target: jax.Array) -> "ContiguousCache":
        """Copies the rows `source` to `target` i32[n]."""
        return jax.tree.map(lambda a: a.at[target].set(a[source], mode="drop"), self)

    def reorder(self, parents: jax.Array) -> "ContiguousCache":
        """Sequence b takes over the row of `parents[b]` i32[B]."""
        return jax.tree.map(lambda a: a[parents], self)

    def copy(self, source: jax.Array, target: jax.Array) -> "ContiguousCache":
        """Copies flat token slots (row * capacity + slot) `source` to `target` i32[n]."""
        row, slot = divmod(source, self.capacity)

        def key_of(array: jax.Array) -> jax.Array:
            tokens = self.capacity // array.shape[3]
            return array.at[row, :, :, slot // tokens].get(mode="clip")

        keys = jax.tree.map(key_of, self.key)
        values = jax.tree.map(lambda a: a.at[row, :, slot, :].get(mode="clip"), self.value)
        return self.set(target, keys, values)

    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return array_bytes(self)
