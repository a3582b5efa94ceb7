"""KIVI's cache: closed groups of tokens in 4 bits, and the newest tokens in full precision.

Axes as in `kvlab.ops.caches.protocol`; g tokens a group. New tokens enter `recent`, a ring, and are
read there; only then the groups that are complete, and `residual` tokens old, are quantised and
moved to `closed`. So no query sees a scale that a later token made. Groups lie at absolute
multiples of g in the sequence, whatever pieces it came in. Source: KIVI (arXiv 2402.02750),
section 3.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvlab.ops.attention import AttentionOptions, Blocks
from kvlab.ops.caches.contiguous import ContiguousCache
from kvlab.ops.caches.protocol import Step, Table, array_bytes
from kvlab.ops.caches.reading import gather_blocks, read_stored, written_indices
from kvlab.ops.caches.token_slots import TokenSlots
from kvlab.ops.specs import Kivi4
from kvlab.ops.storage import encode, encode_group


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KiviCache:
    """Keys and values of one layer, in two parts."""

    __no_type_check__ = True  # as in PageTable

    closed: TokenSlots
    recent: ContiguousCache
    storage: Kivi4 = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(
        cls,
        closed: TokenSlots,
        num_sequences: int,
        chunk: int,
        num_kv_heads: int,
        head_dim: int,
        storage: Kivi4,
    ) -> "KiviCache":
        """An empty cache.

        Args:
          closed: where closed groups go, of storage `storage`.
          num_sequences: B.
          chunk: most tokens that a step writes for one sequence.
          num_kv_heads: K.
          head_dim: H.
          storage: the sizes.
        """
        held = storage.residual + storage.group - 1 + chunk
        recent = ContiguousCache.init(num_sequences, held, num_kv_heads, head_dim, "float32")
        return cls(closed, recent, storage)

    def num_closed(self, lengths: jax.Array) -> jax.Array:
        """Tokens in closed groups of sequences of `lengths` i32[B], between steps."""
        group, residual = self.storage.group, self.storage.residual
        return jnp.maximum(lengths - residual, 0) // group * group

    def _enter(self, key: jax.Array, value: jax.Array, step: Step, table: Table) -> "KiviCache":
        """New tokens into `recent`."""
        slots = self.recent.slots(step, table, written_indices(step, table))
        recent = self.recent.set(slots, encode(key, "float32"), encode(value, "float32"))
        return dataclasses.replace(self, recent=recent)

    def _close(
        self, step: Step, table: Table, before: jax.Array, after: jax.Array, tokens: int
    ) -> "KiviCache":
        """Moves the groups that sequences complete between two lengths i32[B], `tokens` apart."""
        group, recent = self.storage.group, self.recent
        start, end = self.num_closed(before), self.num_closed(after)
        most = -(-tokens // group) * group
        indices = start[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        slots = step.rows[:, None] * recent.capacity + indices % recent.capacity

        def groups(array: jax.Array) -> jax.Array:  # [B, most, K, H] to [B, n, g, K, H]
            return array.reshape(array.shape[0], -1, group, *array.shape[2:])

        keys, values = (groups(stored["codes"]) for stored in recent.at(slots))
        stored = encode_group(keys, values, self.storage)
        key, value = jax.tree.map(lambda a: a.reshape(a.shape[0], most, *a.shape[3:]), stored)
        written = dataclasses.replace(step, write=indices < end[:, None])
        target = self.closed.slots(written, table, indices)
        return dataclasses.replace(self, closed=self.closed.set(target, key, value))

    def _close_last(self, step: Step, table: Table, lengths: jax.Array) -> "KiviCache":
        """Moves the group that the last token of sequences of `lengths` i32[B] completed, if any.

        Done again it changes nothing: `recent` still holds those tokens.
        """
        return self._close(step, table, jnp.maximum(lengths - 1, 0), lengths, 1)

    def _sources(
        self, step: Step, table: Table, before: jax.Array, window: int | None
    ) -> list[Blocks]:
        """Closed groups as they were at `before` i32[B] tokens, and what came after."""
        return [
            self.closed.blocks(step, table, before, window),
            self.recent.blocks(step, table, table.lengths, window, first_position=before),
        ]

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        step: Step,
        table: Table,
        options: AttentionOptions,
    ) -> tuple[jax.Array, "KiviCache"]:
        """Enters new tokens and reads; groups are closed after that; see `LayerCache.attend`.

        The group that a decode step completes is closed when the next step begins. To its queries
        that is the same, and a pool that is written before it is read needs no copy: XLA makes one
        of the whole pool otherwise, which a prefill call can afford.
        """
        before = _lengths_before(step, table)
        cache = self._close_last(step, table, before)._enter(key, value, step, table)
        sources = cache._sources(step, table, self.num_closed(before), options.window)
        output = read_stored(query, step, key.shape[2], options, sources)
        tokens = step.write.shape[1]
        if tokens > 1:
            cache = cache._close(step, table, before, table.lengths, tokens)
        return output, cache

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] in the order of the sequence; S as of `closed`."""
        step = Step.of_none(table.lengths.shape[0])
        whole = self._close_last(step, table, table.lengths)
        before = self.num_closed(table.lengths)
        closed, recent = whole._sources(step, table, before, None)
        keys, values, _, _ = gather_blocks([closed])
        new_keys, new_values, positions, stored = gather_blocks([recent])
        columns = jnp.where(stored, positions % keys.shape[1], keys.shape[1])
        row = step.rows[:, None]
        return (
            keys.at[row, columns].set(new_keys, mode="drop"),
            values.at[row, columns].set(new_values, mode="drop"),
        )

    def fork(self, source: jax.Array, target: jax.Array) -> "KiviCache":
        """Copies the newest tokens of `source` to `target` i32[n], and rows of closed groups."""
        closed, recent = self.closed.fork(source, target), self.recent.fork(source, target)
        return dataclasses.replace(self, closed=closed, recent=recent)

    def reorder(self, parents: jax.Array) -> "KiviCache":
        """Sequence b takes over what is held per sequence of `parents[b]` i32[B]."""
        closed, recent = self.closed.reorder(parents), self.recent.reorder(parents)
        return dataclasses.replace(self, closed=closed, recent=recent)

    def copy(self, source: jax.Array, target: jax.Array) -> "KiviCache":
        """Copies slots of closed groups, `source` to `target` i32[n], group by group."""
        return dataclasses.replace(self, closed=self.closed.copy(source, target))

    def nbytes(self) -> int:
        """Bytes of both parts."""
        return array_bytes(self)


def _lengths_before(step: Step, table: Table) -> jax.Array:
    """Tokens that each row held before this step, i32[B]."""
    return table.lengths - jnp.sum(step.write, axis=1, dtype=jnp.int32)
