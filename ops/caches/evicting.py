"""The cache of a layer that evicts: a placement's cache, and what its policy needs to choose.

Axes as in `kvlab.ops.caches.protocol`; rows = B * heads of the table, S slots of a row. Where KV
heads choose (`Retention.by_head`), each KV head of a sequence is a row, and the cache inside has
one KV head, which G query heads read: the same attention as everywhere.

Slots carry no order. Beside its key each token keeps its position in the text, and the attention
that it has received if the policy asks for that. Two moves: `choose` and `copy` shrink a sequence
(survivors go to the front of its row), and in decode a row at its limit puts the new token in the
slot of the one that it evicts.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvlab.ops.attention import AttentionOptions, Blocks, received_attention
from kvlab.ops.caches.protocol import Step, Table, array_bytes
from kvlab.ops.caches.reading import attend_stored, gather_blocks, written_indices
from kvlab.ops.caches.token_slots import TokenSlots
from kvlab.ops.evicting_table import EvictingTable, rows_of
from kvlab.ops.eviction import judged, kept_tokens, victims
from kvlab.ops.retention import Evidence, Retention
from kvlab.ops.rope import Rope, attention_factor, rotation
from kvlab.ops.storage import decode, encode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvictingCache:
    """Keys and values of one layer, of which a policy keeps some."""

    __no_type_check__ = True  # as in PageTable

    inner: TokenSlots  # its keys carry notes: `notes_of(policy)`
    queries: jax.Array | None  # f32[rows, n, G, H]: the last n, at position modulo n, if observed
    layer: jax.Array  # i32[]: index of the layer
    policy: Retention = dataclasses.field(metadata={"static": True})
    heads: int = dataclasses.field(metadata={"static": True})  # rows a sequence
    rope: Rope | None = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(
        cls,
        inner: TokenSlots,
        policy: Retention,
        layer: int,
        num_sequences: int,
        heads: int,
        group_size: int,
        rope: Rope | None = None,
    ) -> "EvictingCache":
        """An empty cache.

        Args:
          inner: holds the rows' tokens, with the notes that `notes_of` names.
          policy: which tokens stay.
          layer: index of the layer.
          num_sequences: B.
          heads: rows of a sequence in the layer's table.
          group_size: query heads of a row (G, or N where a row is a sequence).
          rope: how keys were turned; used by policies with `placed_sinks` alone.
        """
        queries = None
        if policy.observes:
            shape = (num_sequences * heads, policy.observes, group_size, inner.head_dim)
            queries = jnp.zeros(shape, jnp.float32)
        return cls(inner, queries, jnp.asarray(layer, jnp.int32), policy, heads, rope)

    def _write(
        self,
        key: jax.Array,
        value: jax.Array,
        step: Step,
        table: EvictingTable,
        options: AttentionOptions,
    ) -> "EvictingCache":
        """Stores the step's written tokens, in decode over those that they replace; all by row."""
        indices = written_indices(step, table)
        if step.slots is None and self.policy.when != "prefill":
            most = self._most_tokens(table)
            evidence = self._evidence(step, table, step.positions[:, -1], most, options)
            scores = judged(self.policy, evidence)
            victim = victims(scores, evidence.positions, evidence.stored)
            indices = jnp.where(table.replaces, victim, indices[:, -1])[:, None]
        slots = self.inner.slots(step, table.table, indices)
        notes = {"position": step.positions[:, :, None, None]}
        if self.policy.observes == 0:
            notes["mass"] = jnp.zeros(notes["position"].shape, jnp.float32)
        stored = encode(key, self.inner.storage) | notes
        inner = self.inner.set(slots, stored, encode(value, self.inner.storage))
        return dataclasses.replace(self, inner=inner)

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        step: Step,
        table: Table,
        options: AttentionOptions,
    ) -> tuple[jax.Array, "EvictingCache"]:
        """Writes, over an evicted token where the row is full, then reads; see `LayerCache`."""
        table, shape = _evicting(table), query.shape
        query, key, value = map(table.split, (query, key, value))
        step = _by_row(step, table)
        cache = self._write(key, value, step, table, options)
        source, num_kv_heads = cache._blocks(step, table), key.shape[2]
        output, log_normaliser = attend_stored(query, step, num_kv_heads, options, [source])
        if self.policy.observes == 0:
            cache = cache._accumulate(query, step, table, source, log_normaliser, options)
        elif self.policy.observes:
            cache = cache._remember(query, step)
        return table.join(output, shape), cache

    def _blocks(self, step: Step, table: EvictingTable) -> Blocks:
        """The step's rows as attention reads them, each token at its own position."""
        read_stored, size, count = self.inner.reader(step, table.table)
        lengths, storage = table.lengths[:, None], self.inner.storage
        turn_sinks = self._sink_turner(step, table)

        def read(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            key, value = read_stored(index)
            stored = index * size + jnp.arange(size, dtype=jnp.int32)[None] < lengths
            positions = key["position"][:, 0, 0]
            keys = turn_sinks(decode(key, storage, 2), positions)
            return keys, decode(value, storage, 3), positions, stored

        end = (jnp.max(table.lengths) + size - 1) // size
        pool = None
        if self.policy.placed_sinks is None:
            positions = self.inner.note("position", step, table.table)
            pool = self.inner.pool(step, table.table, table.lengths, positions)
        return Blocks(read, jnp.zeros_like(end), end, count, pool)

    def _sink_turner(
        self, step: Step, table: EvictingTable
    ) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Turns keys [rows, K, H, s] at positions [rows, s] to their places in the cache.

        Keys are stored turned by their place in the text, and so is the query. Places in the cache
        are those in the text less the tokens evicted, for all but the sinks, which stay where they
        were: between the newest tokens nothing changes, and a sink comes nearer by as many tokens
        as are gone. So turning the sinks forward by that many is all there is to do.
        """
        num_sinks = self.policy.placed_sinks
        if num_sinks is None:
            return lambda keys, positions: keys
        assert self.rope is not None
        newest = jnp.max(jnp.where(step.valid, step.positions, -1), axis=1)
        gone = jnp.maximum(newest + 1 - table.lengths, 0)
        head_dim = self.inner.head_dim
        cos, sin = rotation(gone[:, None], self.rope, head_dim)
        # YaRN's factor is in the stored keys already.
        cos, sin = (part[:, :, :, None] / attention_factor(self.rope) for part in (cos, sin))

        def turned(keys: jax.Array, positions: jax.Array) -> jax.Array:
            first, second = jnp.split(keys, 2, axis=2)
            parts = first * cos - second * sin, second * cos + first * sin
            is_sink = (positions < num_sinks)[:, None, None]
            return jnp.where(is_sink, jnp.concatenate(parts, axis=2), keys)

        return turned

    def _accumulate(
        self,
        query: jax.Array,
        step: Step,
        table: EvictingTable,
        source: Blocks,
        log_normaliser: jax.Array,
        options: AttentionOptions,
    ) -> "EvictingCache":
        """Adds the attention that the step's queries give to every token's mass."""
        received = _receiver(query, step, log_normaliser, options)

        def body(index: jax.Array, mass: jax.Array) -> jax.Array:
            given = received(source.read(index))
            return self.inner.added(mass, step, table.table, index, given)

        mass = jax.lax.fori_loop(source.first, source.end, body, self.inner.key["mass"])
        return dataclasses.replace(self, inner=self.inner.with_note("mass", mass))

    def _remember(self, query: jax.Array, step: Step) -> "EvictingCache":
        """Keeps the step's last queries."""
        assert self.queries is not None
        rows, kept = self.queries.shape[:2]
        newest = jnp.max(jnp.where(step.valid, step.positions, -1), axis=1, keepdims=True)
        if step.later is not None:
            newest = newest + step.later[:, None]
        last = step.valid & (step.positions > newest - kept)
        place = jnp.where(last, step.positions % kept, kept)
        queries = self.queries.at[jnp.minimum(step.rows, rows)[:, None], place].set(
            query.astype(jnp.float32), mode="drop"
        )
        return dataclasses.replace(self, queries=queries)

    def choose(
        self,
        table: EvictingTable,
        next_positions: jax.Array,
        limits: jax.Array,
        options: AttentionOptions,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Which tokens of every row survive a shrink.

        Args:
          table: the layer's table.
          next_positions: i32[B], where each sequence stands in its text.
          limits: i32[rows], tokens that each row may keep.
          options: the layer's; policies that observe queries attend with them once more.

        Returns:
          Indices of the survivors within their rows, i32[rows, n], in ascending order, n being the
          most that a row can keep; how many of them are real, i32[rows]; and the tokens that each
          row may hold from now on, i32[rows].
        """
        step = Step.of_none(table.lengths.shape[0])
        next_positions = table.of_rows(next_positions)
        evidence = self._evidence(step, table, next_positions, None, options)
        keep = kept_tokens(
            judged(self.policy, evidence),
            evidence.positions,
            evidence.stored,
            limits,
            table.heads,
            self.policy.shared_safeguard,
        )
        columns = keep.shape[1]
        places = jnp.where(keep, jnp.arange(columns, dtype=jnp.int32)[None], columns)
        most = min(self._most_tokens(table) or columns, columns)
        counts = jnp.sum(keep, axis=1, dtype=jnp.int32)
        if self.policy.shared_safeguard is not None:
            # Rows keep the parts of a shared budget that they won, once all of it is taken.
            spent, budget = (jnp.sum(n.reshape(-1, table.heads), axis=1) for n in (counts, limits))
            limits = jnp.where(table.of_rows(spent == budget), jnp.maximum(counts, 1), limits)
        return jnp.sort(places, axis=1)[:, :most], counts, limits

    def _most_tokens(self, table: EvictingTable) -> int | None:
        """Tokens of a row at its limit at most, where that is known without running."""
        budget = self.policy.budget
        if isinstance(budget, float) or self.policy.when == "decode":
            return None
        return budget if self.policy.shared_safeguard is None else budget * table.heads

    def _evidence(
        self,
        step: Step,
        table: EvictingTable,
        next_positions: jax.Array,
        most: int | None,
        options: AttentionOptions,
    ) -> Evidence:
        """What the policy may know of the first `most` slots of every row."""
        positions = self.inner.note("position", step, table.table)[:, :most]
        places = jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
        stored = places < table.lengths[:, None]
        if self.policy.observes == 0:
            mass = self.inner.note("mass", step, table.table)[:, :most]
        elif self.policy.observes:
            mass = self._observed(table, next_positions, options)[:, : positions.shape[1]]
        else:
            mass = jnp.zeros(positions.shape, jnp.float32)
        row = jnp.arange(positions.shape[0], dtype=jnp.int32)
        return Evidence(positions, stored, next_positions, mass, row % table.heads, self.layer)

    def _observed(
        self, table: EvictingTable, next_positions: jax.Array, options: AttentionOptions
    ) -> jax.Array:
        """Mean attention that the kept queries give to every slot, f32[rows, S]."""
        assert self.queries is not None
        rows, kept = self.queries.shape[:2]
        # The query at place i of the ring is the last one whose position is i modulo the size.
        newest = next_positions[:, None] - 1
        positions = newest - (newest - jnp.arange(kept, dtype=jnp.int32)[None]) % kept
        step = Step(positions, positions >= 0, jnp.zeros((rows, kept), bool))
        num_kv_heads = self.inner.num_kv_heads
        source = self._blocks(step, table)
        _, log_normaliser = attend_stored(self.queries, step, num_kv_heads, options, [source])

        received = _receiver(self.queries, step, log_normaliser, options)
        index = jnp.arange(source.count, dtype=jnp.int32)
        mass = jax.lax.map(lambda block: received(source.read(block)), index)
        mass = mass.swapaxes(0, 1).reshape(rows, -1)
        return mass / jnp.maximum(jnp.sum(step.valid, axis=1), 1)[:, None].astype(mass.dtype)

    def survivors(
        self, table: EvictingTable, mask: jax.Array, kept: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The plan of a shrink, for `copy`: flat slots to read and to write, i32[rows * n] each.

        Args:
          table: the layer's table, before it is cut.
          mask: bool[rows], rows that shrink.
          kept: what `choose` gave.
          counts: what `choose` gave.
        """
        places = jnp.broadcast_to(jnp.arange(kept.shape[1], dtype=jnp.int32), kept.shape)
        real = mask[:, None] & (places < counts[:, None])
        step = Step(places, real, real)
        source, target = (
            self.inner.slots(step, table.table, indices).reshape(-1) for indices in (kept, places)
        )
        return source, target

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Keys and values [rows, S, K, H] in slot order; K is 1 where KV heads are rows."""
        table = _evicting(table)
        step = Step.of_none(table.lengths.shape[0])
        keys, values, _, _ = gather_blocks([self._blocks(step, table)])
        return keys, values

    def fork(self, source: jax.Array, target: jax.Array) -> "EvictingCache":
        """Copies what sequences hold, `source` to `target` i32[n]; pages by the table's plan."""
        source, target = rows_of(source, self.heads), rows_of(target, self.heads)
        queries = self.queries
        if queries is not None:
            queries = queries.at[target].set(queries[source], mode="drop")
        return dataclasses.replace(self, inner=self.inner.fork(source, target), queries=queries)

    def reorder(self, parents: jax.Array) -> "EvictingCache":
        """Sequence b takes over what `parents[b]` i32[B] holds; pages by the table's plan."""
        parents = rows_of(parents, self.heads)
        queries = self.queries
        if queries is not None:
            queries = queries.at[parents].get(mode="clip")
        return dataclasses.replace(self, inner=self.inner.reorder(parents), queries=queries)

    def copy(self, source: jax.Array, target: jax.Array) -> "EvictingCache":
        """Copies token slots and their notes, `source` to `target` i32[n]."""
        return dataclasses.replace(self, inner=self.inner.copy(source, target))

    def nbytes(self) -> int:
        """Bytes of tokens, notes and queries."""
        return array_bytes(self)


def _receiver(
    query: jax.Array, step: Step, log_normaliser: jax.Array, options: AttentionOptions
) -> Callable[[tuple[jax.Array, ...]], jax.Array]:
    """From a block to the attention that queries [rows, T, G, H] give to its slots, [rows, s].

    A mean over KV heads where a row has several.
    """

    def received(block: tuple[jax.Array, ...]) -> jax.Array:
        return received_attention(
            query,
            step.positions,
            step.valid,
            log_normaliser.shape[1],
            log_normaliser,
            block,
            options,
        ).mean(axis=1)

    return received


def notes_of(policy: Retention) -> tuple[str, ...]:
    """What a policy has kept beside each key."""
    return ("position", "mass") if policy.observes == 0 else ("position",)


def _evicting(table: Table) -> EvictingTable:
    if not isinstance(table, EvictingTable):
        raise TypeError(f"an evicting cache needs an EvictingTable, got {type(table).__name__}")
    return table


def _by_row(step: Step, table: EvictingTable) -> Step:
    """A step whose rows are those of the table."""
    if table.heads == 1:
        return step
    return Step(
        table.of_rows(step.positions),
        table.of_rows(step.valid),
        table.of_rows(step.write),
        None if step.slots is None else rows_of(step.slots, table.heads),
        None if step.later is None else table.of_rows(step.later),
    )
