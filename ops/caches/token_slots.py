"""Token slots in units of one size, with what is stored of a token: what placements share.

Axes: n units (rows of a contiguous cache, pages of a pool), p slots of a unit, K KV heads, H head
size; else as in `kvlab.ops.caches.protocol`. Layout: keys [n, K, H, p], values [n, K, p, H]; scales
and notes of a token lie in the same order. Keys have the token axis last, so that the scores of a
block are a product with contiguous columns (measured: WORKSPACE-notes.md); pages for JAX's kernels
lie otherwise (`kvlab.ops.caches.head_major`). A slot has the flat number `unit * p + offset`, and
`num_slots` is nowhere.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import jax

from kvlab.ops.attention import AttentionOptions, Blocks
from kvlab.ops.caches.protocol import ReadStored, Step, Table, array_bytes
from kvlab.ops.caches.reading import gather_blocks, read_stored, written_indices
from kvlab.ops.cpu_kernels.attention import Pool
from kvlab.ops.jax_kernels import Pages
from kvlab.ops.specs import Kivi4
from kvlab.ops.storage import Stored, empty_keys, empty_values, encode, values_in_a_byte

Slots = TypeVar("Slots", bound="TokenSlots")


@dataclasses.dataclass(frozen=True)
class TokenSlots:
    """Keys and values of one layer. Placements say which slots a sequence has, and read them."""

    __no_type_check__ = True  # as in PageTable

    key: Stored  # [n, K, H, p]
    value: Stored  # [n, K, p, H]
    storage: str | Kivi4 = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(
        cls: type[Slots],
        num_units: int,
        unit_size: int,
        num_kv_heads: int,
        head_dim: int,
        storage: str | Kivi4,
        notes: Sequence[str] = (),
    ) -> Slots:
        """An empty cache of `num_units` units of `unit_size` token slots."""
        heads = num_units, num_kv_heads
        return cls(
            empty_keys((*heads, head_dim, unit_size), storage, notes),
            empty_values((*heads, unit_size, head_dim), storage),
            storage,
        )

    @property
    def num_units(self) -> int:
        """Units (n)."""
        return self.key["codes"].shape[0]

    @property
    def unit_size(self) -> int:
        """Token slots of a unit (p)."""
        return self.key["codes"].shape[3]

    @property
    def num_slots(self) -> int:
        """Token slots of all units; as a slot, nowhere."""
        return self.num_units * self.unit_size

    @property
    def num_kv_heads(self) -> int:
        """KV heads (K)."""
        return self.key["codes"].shape[1]

    @property
    def head_dim(self) -> int:
        """Head size (H)."""
        return self.value["codes"].shape[3] * values_in_a_byte(self.storage)

    def slots(self, step: Step, table: Table, indices: jax.Array) -> jax.Array:
        """Flat slots of the step's written tokens, i32[B, T].

        Args:
          step: the tokens' places.
          table: the step's rows of the layer's table.
          indices: i32[B, T], places of the tokens within their sequences.
        """
        raise NotImplementedError

    def reader(self, step: Step, table: Table) -> tuple[ReadStored, int, int]:
        """How the step's rows are read.

        Returns:
          A function from a block's index i32[] to what is stored of its keys [B, K, H, s] and
          values [B, K, s, H]; keys a block (s); and blocks there are.
        """
        raise NotImplementedError

    def units(self, step: Step, table: Table) -> jax.Array:
        """Units of each of the step's rows, in order, i32[B, U]; out of range for none."""
        raise NotImplementedError

    def pool(
        self,
        step: Step,
        table: Table,
        lengths: jax.Array,
        positions: jax.Array | None = None,
    ) -> Pool | Pages:
        """The step's rows as kernels read them.

        Args:
          step: the tokens' places.
          table: the step's rows of the layer's table.
          lengths: i32[B], slots of each row that hold tokens.
          positions: i32[B, S], of the tokens in the slots, `NOWHERE` for none; None where slots lie
            in the order of the text.
        """
        units = self.units(step, table)
        return Pool(self.key, self.value, self.storage, units, lengths, positions)

    def blocks(self, step: Step, table: Table, lengths: jax.Array, window: int | None) -> Blocks:
        """The step's rows as attention reads them, tokens in the order of the text.

        Args:
          step: the tokens' places.
          table: the step's rows of the layer's table.
          lengths: i32[B], tokens that each row has been given so far.
          window: of attention.
        """
        raise NotImplementedError

    def note(self, name: str, step: Step, table: Table) -> jax.Array:
        """A note on every slot of the step's rows, [B, S]; slots without a token hold anything."""
        raise NotImplementedError

    def added(
        self, notes: jax.Array, step: Step, table: Table, index: jax.Array, numbers: jax.Array
    ) -> jax.Array:
        """Notes [n, 1, 1, p] with `numbers` [B, s] added on the slots of block `index` i32[]."""
        raise NotImplementedError

    def write(self: Slots, key: jax.Array, value: jax.Array, step: Step, table: Table) -> Slots:
        """Stores the step's written tokens, `key` and `value` [B, T, K, H]."""
        slots = self.slots(step, table, written_indices(step, table))
        return self.set(slots, encode(key, self.storage), encode(value, self.storage))

    def set(self: Slots, slots: jax.Array, key: Stored, value: Stored) -> Slots:
        """Stores tokens [.., K, H] at flat slots i32[..]; those past the end are dropped."""
        unit, offset = divmod(slots, self.unit_size)

        def set_key(array: jax.Array, new: jax.Array) -> jax.Array:
            shared_by = self.unit_size // array.shape[3]  # tokens that share an entry
            return array.at[unit, :, :, offset // shared_by].set(new, mode="drop")

        def set_value(array: jax.Array, new: jax.Array) -> jax.Array:
            return array.at[unit, :, offset, :].set(new, mode="drop")

        return dataclasses.replace(
            self,
            key=jax.tree.map(set_key, self.key, key),
            value=jax.tree.map(set_value, self.value, value),
        )

    def at(self, slots: jax.Array) -> tuple[Stored, Stored]:
        """What is stored of tokens at flat slots i32[..], as `set` takes it."""
        unit, offset = divmod(slots, self.unit_size)

        def key_of(array: jax.Array) -> jax.Array:
            shared_by = self.unit_size // array.shape[3]
            return array.at[unit, :, :, offset // shared_by].get(mode="clip")

        def value_of(array: jax.Array) -> jax.Array:
            return array.at[unit, :, offset, :].get(mode="clip")

        return jax.tree.map(key_of, self.key), jax.tree.map(value_of, self.value)

    def with_note(self: Slots, name: str, notes: jax.Array) -> Slots:
        """The cache with other notes."""
        return dataclasses.replace(self, key=self.key | {name: notes})

    def attend(
        self: Slots,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        step: Step,
        table: Table,
        options: AttentionOptions,
    ) -> tuple[jax.Array, Slots]:
        """Writes, then reads what is stored; see `LayerCache.attend`."""
        cache = self.write(key, value, step, table)
        source = cache.blocks(step, table, table.lengths, options.window)
        return read_stored(query, step, key.shape[2], options, [source]), cache

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] in slot order; slots without a token hold anything."""
        step = Step.of_none(table.lengths.shape[0])
        keys, values, _, _ = gather_blocks([self.blocks(step, table, table.lengths, None)])
        return keys, values

    def fork(self: Slots, source: jax.Array, target: jax.Array) -> Slots:
        """See `LayerCache.fork`."""
        raise NotImplementedError

    def reorder(self: Slots, parents: jax.Array) -> Slots:
        """See `LayerCache.reorder`."""
        raise NotImplementedError

    def copy(self: Slots, source: jax.Array, target: jax.Array) -> Slots:
        """Copies flat token slots `source` to `target` i32[n]; those past the end are dropped."""
        return self.set(target, *self.at(source))

    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return array_bytes(self)
