"""Every cache variant against one list of invariants; a new variant is one entry of `VARIANTS`.

The caches start full of NaN: nothing that was not written may reach an output. Over 400 lines,
because the invariants, and the model in NumPy that they are held against, are one suite.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.attention import READ_BLOCK, AttentionOptions
from kvlab.ops.caches.contiguous import ContiguousCache
from kvlab.ops.caches.evicting import EvictingCache, notes_of
from kvlab.ops.caches.head_major import HeadMajorPages
from kvlab.ops.caches.kivi import KiviCache
from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.caches.protocol import Step, array_bytes
from kvlab.ops.evicting_table import EvictingTable
from kvlab.ops.page_table import PageTable
from kvlab.ops.retention import H2O, Random, Retention, Sinks, SnapKV
from kvlab.ops.row_table import RowTable
from kvlab.ops.specs import Contiguous, Kivi4, Paged, Ring

# Sequences, rows and tokens of a prefill call, query heads, KV heads, head size, most tokens.
B, R, CHUNK, N, K, H, MAX_LENGTH = 5, 2, 29, 6, 2, 14, 151
FLOAT32 = 1e-5  # of the largest output: scores reach 50, and a last bit of 50 is 4e-6


@dataclasses.dataclass(frozen=True)
class Variant:
    """A placement, a storage and an implementation of attention."""

    placement: Contiguous | Paged | Ring
    storage: str | Kivi4 = "float32"
    implementation: str | None = None
    retention: Retention | None = None
    pages: type[PagedCache] = PagedCache

    def __str__(self):
        point = f"{self.placement}-{self.storage}-{self.retention or 'all'}"
        point += "-head_major" if self.pages is HeadMajorPages else ""
        return f"{point}-{self.implementation or 'default'}"

    @property
    def heads(self):
        """Rows of the table that a sequence has."""
        return K if self.retention is not None and self.retention.by_head else 1

    @property
    def window(self):
        return self.placement.window if isinstance(self.placement, Ring) else None

    @property
    def row(self):
        """Slots of a row, in whole read blocks."""
        needed = MAX_LENGTH if self.window is None else self.window + CHUNK - 1
        return -(-needed // READ_BLOCK) * READ_BLOCK

    def table(self):
        if isinstance(self.placement, Paged):
            page_size = self.placement.page_size
            per_sequence = -(-MAX_LENGTH // page_size)
            num_pages = (B * per_sequence + 3) * self.heads
            table = PageTable.init(B * self.heads, num_pages, page_size, per_sequence)
            # Pages of a sequence do not lie side by side, nor in order.
            mixed = np.random.default_rng(37).permutation(num_pages).astype(np.int32)
            table = dataclasses.replace(table, free_pages=jnp.asarray(mixed))
        else:
            table = RowTable.init(B * self.heads, MAX_LENGTH)
        return table if self.retention is None else EvictingTable.init(table, self.heads)

    def cache(self, fill=np.nan):
        notes = () if self.retention is None else notes_of(self.retention)
        stored = K // self.heads, H, self.storage, notes
        if isinstance(self.placement, Paged):
            num_pages = (B * -(-MAX_LENGTH // self.placement.page_size) + 3) * self.heads
            cache = self.pages.init(num_pages, self.placement.page_size, *stored)
        else:
            cache = ContiguousCache.init(B * self.heads, self.row, *stored)
        if isinstance(self.storage, Kivi4):
            cache = KiviCache.init(cache, B, CHUNK, K, H, self.storage)
        if self.retention is not None:
            cache = EvictingCache.init(cache, self.retention, 3, B, self.heads, N // self.heads)

        def filled(array):
            is_int = np.issubdtype(array.dtype, np.integer)  # it has no NaN, but its scale has
            return np.full(array.shape, 77 if is_int and np.isnan(fill) else fill, array.dtype)

        return jax.tree.map(filled, cache)

    def flat_slots(self, table, cache, sequence, indices):
        """Slots, as `copy` numbers them, of some tokens of a sequence."""
        del cache
        rows = np.arange(sequence * self.heads, (sequence + 1) * self.heads)[:, None]
        table = table.table if self.retention is not None else table
        if isinstance(table, PageTable):
            shape = (B * self.heads, len(indices))
            everywhere = jnp.broadcast_to(jnp.asarray(indices, jnp.int32), shape)
            return np.asarray(table.flat_slots(everywhere))[rows[:, 0]].reshape(-1)
        return (rows * self.row + np.asarray(indices, np.int32) % self.row).reshape(-1)


VARIANTS = [
    Variant(Contiguous()),
    Variant(Contiguous(), "float8_e4m3fn"),
    Variant(Paged(1)),
    Variant(Paged(7)),
    Variant(Paged(16)),
    Variant(Paged(16), "int8"),
    Variant(Paged(128)),
    Variant(Paged(7), implementation="chunked", pages=HeadMajorPages),
    Variant(Paged(7), "int4", implementation="reference"),
    Variant(Ring(37)),
    Variant(Ring(11)),  # a chunk is longer than the window
    Variant(Contiguous(), Kivi4(32, 0)),
    Variant(Paged(16), Kivi4(16, 11)),
    Variant(Ring(37), Kivi4(16, 3)),
    # With a budget that nothing exceeds; what is evicted is in test_evicting.py.
    Variant(Paged(7), retention=Sinks(MAX_LENGTH)),
    Variant(Paged(16), retention=H2O(MAX_LENGTH)),
    Variant(Paged(16), retention=SnapKV(MAX_LENGTH, observation=7)),
]
LONG_VARIANTS = [
    Variant(Contiguous(), "bfloat16"),
    Variant(Contiguous(), "int8"),
    Variant(Contiguous(), "int4"),
    Variant(Contiguous(), implementation="reference"),
    Variant(Paged(16), "bfloat16"),
    Variant(Paged(16), "float8_e4m3fn"),
    Variant(Paged(16), "int4"),
    Variant(Paged(64)),
    Variant(Paged(7), implementation="reference"),
    Variant(Ring(37), "int8"),
    Variant(Ring(37), implementation="reference"),
    Variant(Paged(64), Kivi4(2, 0), implementation="reference"),
    Variant(Contiguous(), retention=Sinks(MAX_LENGTH)),
    Variant(Contiguous(), "int8", retention=H2O(MAX_LENGTH, allocation="per_head")),
    Variant(Paged(128), "int4", "reference", Random(MAX_LENGTH)),
]
EVERY_VARIANT = [*VARIANTS, *(pytest.param(it, marks=pytest.mark.long) for it in LONG_VARIANTS)]

MASKS = {"causal": {}, "windowed": {"window": 37, "soft_cap": 3.0}}  # fields of AttentionOptions


# Compiles twice as fast, and the interpreter of single operations would take longer still.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.partial(jit, static_argnames="max_tokens")
def reserve(table, slots, wanted, max_tokens):
    """Room for a step's tokens: the table, the step's rows of it, and whether each row got it."""
    if slots is None:
        table, ok = table.reserve(wanted, max_tokens)
        return table, table, ok
    table, ok = table.reserve(
        jnp.zeros(B, jnp.int32).at[slots].add(wanted, mode="drop"), max_tokens
    )
    return (
        table,
        table.rows(slots, jnp.zeros_like(slots)),
        ok.at[slots].get(mode="fill", fill_value=True),
    )


@functools.partial(jit, static_argnames="options")
def attend(query, key, value, step, cache, rows, options):
    return cache.attend(query, key, value, step, rows, options)


@jit
def fork(table, cache, source, target):
    """Copies sequences, a shared partial page included."""
    if isinstance(table, EvictingTable):
        table, plan, ok = table.fork(source, target)
    else:
        table, plan, ok = table.fork(source, target), None, True
        if isinstance(table, PageTable):
            table, plan, ok = table.make_writable(jnp.ones(B, bool))
    if plan is not None:
        cache = cache.copy(plan.source_slots, plan.target_slots)
    return table, cache.fork(source, target), ok


@jit
def reorder(table, cache, parents):
    if not isinstance(table, EvictingTable):
        return table.reorder(parents), cache.reorder(parents)
    table, plan, _ = table.reorder(parents)
    if plan is not None:
        cache = cache.copy(plan.source_slots, plan.target_slots)
    return table, cache.reorder(parents)


@jit
def copy(cache, source, target):
    return cache.copy(source, target)


@jit
def gather(table, cache):
    return cache.gather(table)


class Layer:
    """A cache in use, and beside it in NumPy all that was written."""

    def __init__(self, variant, mask="causal", fill=np.nan):
        self.variant, self.mask = variant, MASKS[mask]
        if variant.window is not None:
            self.mask = self.mask | {"window": variant.window}
        self.options = AttentionOptions(
            scale=H**-0.5, implementation=variant.implementation, **self.mask
        )
        self.table, self.cache = variant.table(), variant.cache(fill)
        self.keys = [np.zeros((0, K, H), np.float32) for _ in range(B)]
        self.values = [np.zeros((0, K, H), np.float32) for _ in range(B)]
        self.random = np.random.default_rng(29)

    def normal(self, *shape):
        return self.random.standard_normal(shape).astype(np.float32)

    def stored(self, array):
        """What the storage keeps of an array [.., H]: one scale for each token and head."""
        if isinstance(self.variant.storage, Kivi4):
            return array  # until its group is closed: `closed`
        largest = {"float8_e4m3fn": 448, "int8": 127, "int4": 7}.get(self.variant.storage)
        if largest is None:
            return np.asarray(array.astype(jnp.dtype(self.variant.storage)), np.float32)
        scale = np.abs(array).max(-1, keepdims=True) * np.float32(1 / largest)
        codes = np.clip(array / scale, -largest, largest)
        if self.variant.storage == "float8_e4m3fn":
            codes = codes.astype(jnp.float8_e4m3fn).astype(np.float32)
        else:
            codes = np.round(codes)
        return codes * scale

    def seen(self, b, length):
        """Keys and values of sequence b as its queries see them after `length` tokens of it."""
        keys, values, storage = self.keys[b].copy(), self.values[b].copy(), self.variant.storage
        if not isinstance(storage, Kivi4):
            return keys, values

        def quantised(array):  # [.., n]: the n entries share a scale and a zero point
            zero = array.min(-1, keepdims=True)
            scale = (array.max(-1, keepdims=True) - zero) * np.float32(1 / 15)
            codes = np.clip(np.round((array - zero) / scale), 0, 15)
            return codes * scale + zero

        channels = min(storage.group, H)
        for start in range(0, max(length - storage.residual, 0) // storage.group * storage.group):
            if start % storage.group == 0:  # keys [g, K, H] by channel, over the tokens of a group
                group = slice(start, start + storage.group)
                keys[group] = np.moveaxis(quantised(np.moveaxis(keys[group], 0, -1)), -1, 0)
            values[start] = quantised(values[start].reshape(K, -1, channels)).reshape(K, H)
        return keys, values

    def step(self, counts, slots=None, write=True, chunk=CHUNK):
        """Feeds `counts[r]` tokens to each row; returns all that a test may want to see."""
        counts = np.asarray(counts, np.int32)
        sequences = np.arange(B, dtype=np.int32) if slots is None else np.asarray(slots, np.int32)
        lengths = np.array([0 if b == B else len(self.keys[b]) for b in sequences], np.int32)
        valid = np.arange(chunk)[None] < counts[:, None]
        # A token that is not written is the last one of the text, asked once more.
        positions = (lengths - (not write))[:, None] + np.arange(chunk, dtype=np.int32)[None]
        positions = np.where(valid, positions, 0).astype(np.int32)
        query, key, value = (3 * self.normal(len(counts), chunk, n, H) for n in (N, K, K))
        step = Step(positions, valid, valid & write, None if slots is None else sequences)
        self.before = lengths
        self.table, rows, ok = reserve(self.table, step.slots, counts * write, chunk)
        assert np.all(ok)
        output, self.cache = attend(query, key, value, step, self.cache, rows, self.options)
        if write:
            for b, n, k, v in zip(sequences, counts, key, value, strict=True):
                if n:
                    self.keys[b] = np.concatenate([self.keys[b], self.stored(k[:n])])
                    self.values[b] = np.concatenate([self.values[b], self.stored(v[:n])])
        return np.asarray(output), query, positions, valid, sequences

    def prefill(self, counts, slots, write=True):
        return self.step(counts, slots, write)

    def decode(self, rows, write=True):
        """One token for each of `rows`."""
        return self.step([int(b in rows) for b in range(B)], None, write, chunk=1)

    def expected(self, numpy_attention, query, positions, valid, sequences):
        """Attention over everything written so far."""
        outputs = []
        for r, b in enumerate(sequences):
            if b == B or not valid[r].any():
                outputs.append(np.zeros_like(query[r], np.float64))
                continue
            places = np.arange(len(self.keys[b]))[None]
            rows = (query[r], *self.seen(b, self.before[r]), positions[r])
            outputs.append(
                numpy_attention(
                    *(array[None] for array in rows),
                    places,
                    valid[r][None],
                    np.ones_like(places, bool),
                    scale=H**-0.5,
                    **self.mask,
                )[0]
            )
        return np.stack(outputs)

    def check(self, numpy_attention, step):
        output, query, positions, valid, sequences = step
        assert output.shape == query.shape
        assert output.dtype == query.dtype
        assert not output[~valid].any()
        expected = self.expected(numpy_attention, query, positions, valid, sequences)
        tolerance = FLOAT32 * np.abs(expected).max()
        np.testing.assert_allclose(output, expected, rtol=0, atol=tolerance)

    def check_stored(self):
        """`gather` gives every token that was written, in order; a ring gives the last ones."""
        gathered = list(map(np.asarray, gather(self.table, self.cache)))
        if (heads := self.variant.heads) > 1:  # [B * K, S, 1, H]
            gathered = [a.reshape(B, heads, -1, H).swapaxes(1, 2) for a in gathered]
        lengths = [len(stored) for stored in self.keys for _ in range(heads)]
        assert self.table.lengths.tolist() == lengths
        for b in range(B):
            n = len(self.keys[b])
            kept = np.arange(max(n - (self.variant.window or MAX_LENGTH), 0), n)
            slots = kept % gathered[0].shape[1]
            for array, expected in zip(gathered, self.seen(b, n), strict=True):
                stored = array[b, slots].astype(np.float32)
                # A quantised code may be one off where NumPy rounds a quotient otherwise.
                exact = not isinstance(self.variant.storage, Kivi4)
                np.testing.assert_allclose(
                    stored, expected[kept], rtol=0, atol=0 if exact else 1e-6
                )

    def leaves(self):
        return [np.asarray(leaf).astype(np.float32) for leaf in jax.tree.leaves(self.cache)]

    def token_leaves(self):
        """What is stored of keys and of values, without notes."""
        cache = self.cache.inner if self.variant.retention is not None else self.cache
        stored = cache.key, cache.value
        return [
            [np.asarray(one[name]).astype(np.float32) for name in ("codes", "scale") if name in one]
            for one in stored
        ]


def filled(variant, **options):
    """Sequences of 40, 1, 17, 64 and 0 tokens, written in pieces, rows and slots mixed."""
    layer = Layer(variant, **options)
    layer.prefill([29, 1], [3, 1])
    layer.prefill([11, 17], [0, 2])
    layer.prefill([29, 29], [0, 3])
    layer.prefill([6, 0], [3, B])
    return layer


@pytest.fixture(scope="module", params=EVERY_VARIANT, ids=str)
def variant(request):
    return request.param


@pytest.mark.parametrize("mask", MASKS)
def test_every_step_attends_to_all_that_was_written(variant, mask, numpy_attention):
    layer = Layer(variant, mask)

    def prefill(counts, slots):
        layer.check(numpy_attention, layer.prefill(counts, slots))

    def decode(*rows):
        layer.check(numpy_attention, layer.decode(rows))

    prefill([1, 0], [1, B])  # one token alone: the last read block holds no other
    prefill([29, 7], [3, 0])
    prefill([29, 29], [0, 3])
    prefill([0, 0], [B, B])  # nothing at all
    decode(0, 1, 3)
    prefill([5, 29], [3, 0])  # a text goes on after decode
    prefill([29, 2], [3, 1])
    prefill([29, 0], [3, 2])  # slot 2 stays empty
    prefill([27, 1], [3, 1])
    decode(1)
    decode(0, 1, 3)
    decode(3)
    assert [len(keys) for keys in layer.keys] == [67, 7, 0, MAX_LENGTH, 0]
    layer.check_stored()


def test_what_lay_in_the_slots_before_changes_no_bit(variant):
    outputs = []
    for fill in (np.nan, 0.0):
        layer = filled(variant, fill=fill)
        outputs.append([layer.prefill([29, 5], [4, 1])[0], layer.decode([0, 1, 3, 4])[0]])
    for poisoned, clean in zip(*outputs, strict=True):
        np.testing.assert_array_equal(poisoned.view(np.uint32), clean.view(np.uint32))


def test_gather_gives_what_was_written_in_order(variant):
    layer = filled(variant)
    layer.check_stored()
    assert [len(keys) for keys in layer.keys] == [40, 1, 17, 64, 0]


def test_a_step_changes_the_slots_of_its_own_tokens_alone(variant):
    if isinstance(variant.storage, Kivi4):
        pytest.skip("tokens wait until their group is complete; test_kivi.py")
    if variant.pages is HeadMajorPages:
        pytest.skip("a page's first token clears it; test_jax_kernels.py")
    layer = filled(variant)
    for step, written in [
        (lambda: layer.prefill([3, 29], [2, 4]), 32),
        (lambda: layer.decode([1, 3]), 2),
        (lambda: layer.prefill([0, 0], [B, 1]), 0),
        (lambda: layer.decode([]), 0),
    ]:
        before = layer.token_leaves()
        step()
        # Keys are [.., K, H, slots], values [.., K, slots, H].
        for old_leaves, new_leaves, axes in zip(
            before, layer.token_leaves(), ((1, 2), (1, 3)), strict=True
        ):
            for old, new in zip(old_leaves, new_leaves, strict=True):
                changed = ~((old == new) | (np.isnan(old) & np.isnan(new)))
                assert changed.any(axes).sum() == written * layer.variant.heads
    layer.check_stored()


def test_a_token_can_be_asked_without_being_stored(variant, numpy_attention):
    layer = filled(variant)
    before = layer.leaves()
    layer.check(numpy_attention, layer.decode([0, 3], write=False))
    layer.check(numpy_attention, layer.prefill([1, 1], [2, 1], write=False))
    if variant.retention is None or variant.retention.observes is None:  # else it counts as seen
        for old, new in zip(before, layer.leaves(), strict=True):
            np.testing.assert_array_equal(old, new)
    layer.check_stored()


def test_a_fork_holds_the_same_and_goes_its_own_way(variant, numpy_attention):
    layer = filled(variant)
    source, target = jnp.array([0, B], jnp.int32), jnp.array([4, B], jnp.int32)
    layer.table, layer.cache, ok = fork(layer.table, layer.cache, source, target)
    assert np.all(ok)
    layer.keys[4], layer.values[4] = layer.keys[0], layer.values[0]
    layer.check_stored()
    layer.check(numpy_attention, layer.decode([0, 3, 4]))
    layer.check(numpy_attention, layer.prefill([29, 11], [4, 0]))
    assert not np.array_equal(layer.keys[0][40:], layer.keys[4][40:51])
    layer.check_stored()


def test_sequences_can_be_reordered(variant):
    layer = filled(variant)
    parents = [3, 0, 0, 1, 3]
    layer.table, layer.cache = reorder(layer.table, layer.cache, jnp.asarray(parents, jnp.int32))
    layer.keys = [layer.keys[parent] for parent in parents]
    layer.values = [layer.values[parent] for parent in parents]
    layer.check_stored()


def test_token_slots_can_be_copied_and_none_is_where_there_is_none(variant):
    if isinstance(variant.storage, Kivi4):
        pytest.skip("groups are copied whole; forks do that")
    layer = filled(variant)
    table, cache = layer.table, layer.cache
    source = layer.variant.flat_slots(table, cache, 0, [3, 39, 17])
    target = layer.variant.flat_slots(table, cache, 3, [31, 63, 50])
    nowhere = np.iinfo(np.int32).max
    layer.cache = copy(
        cache,
        jnp.asarray([*source, source[0], nowhere], jnp.int32),
        jnp.asarray([*target, nowhere, nowhere], jnp.int32),
    )
    for array in (layer.keys, layer.values):
        array[3] = array[3].copy()
        array[3][[31, 63, 50]] = array[0][[3, 39, 17]]
    layer.check_stored()


def test_nbytes_is_the_bytes_of_its_arrays(variant):
    cache, storage, policy = variant.cache(), variant.storage, variant.retention
    if isinstance(variant.placement, Paged):
        page_size = variant.placement.page_size
        slots = (B * -(-MAX_LENGTH // page_size) + 3) * page_size
    else:
        slots = B * variant.row
    if isinstance(storage, Kivi4):  # keys share 8 bytes a channel, values 8 bytes a token
        per_token = H // 2 + H * 8 / storage.group + H // 2 + 8 * H / min(storage.group, H)
        held = -(-(storage.residual + storage.group - 1 + CHUNK) // READ_BLOCK) * READ_BLOCK
        expected = slots * K * per_token + B * held * K * 2 * 4 * H
    else:
        sizes = {"float32": 4 * H, "bfloat16": 2 * H, "int4": H // 2 + 4}
        size = sizes.get(storage, H + 4)  # with a float32 scale for each token and head
        expected = 2 * slots * K * size
    if policy is not None:
        expected += slots * variant.heads * 4 * len(notes_of(policy)) + 4  # and the layer's index
        expected += B * (policy.observes or 0) * N * H * 4
    assert cache.nbytes() == expected
    assert cache.nbytes() == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert array_bytes({"cache": cache, "more": jnp.zeros(3, jnp.int32)}) == cache.nbytes() + 12


def test_a_paged_cache_refuses_a_table_without_pages():
    cache = PagedCache.init(3, 7, K, H, "float32")
    with pytest.raises(TypeError, match="a paged cache needs a PageTable, got RowTable"):
        cache.gather(RowTable.init(B, MAX_LENGTH))
