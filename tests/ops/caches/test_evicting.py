"""What an evicting cache holds and sees, step by step, against a NumPy model of each policy.

The model keeps every row's tokens as a list and works out attention, its mass and the choice by
the papers' formulas, one head and one token at a time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.attention import AttentionOptions
from kvlab.ops.caches.contiguous import ContiguousCache
from kvlab.ops.caches.evicting import EvictingCache, notes_of
from kvlab.ops.caches.paged import PagedCache
from kvlab.ops.caches.protocol import Step
from kvlab.ops.evicting_table import UNLIMITED, EvictingTable
from kvlab.ops.page_table import PageTable
from kvlab.ops.retention import H2O, Random, Sinks, SnapKV, Window
from kvlab.ops.rope import Rope, apply_rope
from kvlab.ops.row_table import RowTable
from kvlab.ops.specs import Contiguous, Paged

B, R, CHUNK, N, K, H, MAX_LENGTH = 3, 2, 13, 6, 2, 14, 97
G, BUDGET = N // K, 23
OPTIONS = AttentionOptions(scale=H**-0.5)

POLICIES = [
    Window(BUDGET),
    Sinks(BUDGET, num_sinks=3),
    H2O(BUDGET, recent=5),
    H2O(BUDGET, recent=5, allocation="per_head", safeguard=0.3),
    SnapKV(BUDGET, "both", observation=7),
    SnapKV(BUDGET, observation=7, allocation="per_head"),
    Random(BUDGET),
    Random(0.4, recent=2),
    H2O(BUDGET, "decode", recent=5),
    Sinks(BUDGET, "prefill", num_sinks=3),
]
PLACEMENTS = [Paged(7), pytest.param(Contiguous(), marks=pytest.mark.long)]

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.partial(jit, static_argnames="decodes")
def reserve(table, slots, wanted, decodes):
    if decodes:
        table, ok = table.reserve_next(wanted > 0)
        return table, table, ok
    table, ok = table.reserve(jnp.zeros(B, jnp.int32).at[slots].add(wanted, mode="drop"), CHUNK)
    return table, table.rows(slots, jnp.zeros_like(slots)), ok


@jit
def attend(query, key, value, step, cache, rows):
    return cache.attend(query, key, value, step, rows, OPTIONS)


@jit
def shrink(cache, table, mask, positions, limits):
    """As `sequences.evict` does for one layer."""
    kept, counts, limits = cache.choose(table, positions, limits, OPTIONS)
    cache = cache.copy(*cache.survivors(table, mask, kept, counts))
    return cache, jnp.where(mask, counts, table.lengths), limits


class Model:
    """Rows as lists of tokens in NumPy: (position, key [H], value [H], mass)."""

    def __init__(self, policy):
        self.policy, self.heads = policy, K if policy.by_head else 1
        self.rows = [[] for _ in range(B * self.heads)]
        self.limits = [UNLIMITED] * (B * self.heads)
        self.queries = {}  # (b, position): query [N, H]

    def attend(self, b, position, query, key, value):
        """One token: stored (over another where its row is full), then attended to."""
        output = np.zeros((N, H))
        self.queries[b, position] = query
        for head in range(self.heads):
            row = self.rows[b * self.heads + head]
            if len(row) >= self.limits[b * self.heads + head]:
                scores = self.scores(b, head, position)
                victim = min(range(len(row)), key=lambda i: (scores[i], -row[i]["position"]))
                del row[victim]
            kv = slice(head, head + 1) if self.heads > 1 else slice(None)
            row.append({"position": position, "key": key[kv], "value": value[kv], "mass": 0.0})
            own = range(head * G, (head + 1) * G) if self.heads > 1 else range(N)
            for n in own:
                weights = self.weights(row, query, n, head)
                local = 0 if self.heads > 1 else n // G
                output[n] = sum(
                    w * token["value"][local] for w, token in zip(weights, row, strict=True)
                )
                for weight, token in zip(weights, row, strict=True):
                    token["mass"] += weight / len(own)
        return output

    def weights(self, row, query, n, head, position=None):
        """Softmax over the tokens of a row, those after `position` left out."""
        local = 0 if self.heads > 1 else n // G
        del head
        scores = np.array([token["key"][local] @ query[n] for token in row]) * H**-0.5
        if position is not None:
            scores[[token["position"] > position for token in row]] = -np.inf
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()

    def scores(self, b, head, next_position):
        """The policy's score of each token of a row; infinite where it is protected."""
        policy, row = self.policy, self.rows[b * self.heads + head]
        positions = np.array([token["position"] for token in row])
        if isinstance(policy, Window):
            return positions.astype(float)
        if isinstance(policy, Sinks):
            return np.where(positions < policy.num_sinks, np.inf, positions)
        if isinstance(policy, H2O):
            mass = np.array([token["mass"] for token in row])
            return np.where(positions >= next_position - policy.recent, np.inf, mass)
        assert isinstance(policy, SnapKV)
        observed = np.zeros(len(row))
        last = range(max(next_position - policy.observation, 0), next_position)
        for position in last:
            for n in range(head * G, (head + 1) * G):
                query = self.queries[b, position]
                observed += self.weights(row, query, n, head, position) / (G * len(last))
        window = positions >= next_position - policy.observation
        observed[window] = 0.0
        padded = np.pad(observed, 2)
        pooled = [padded[i : i + 5].sum() / 5 for i in range(len(row))]
        return np.where(window, np.inf, pooled)

    def shrink(self, b, prompt_length):
        """After the prompt."""
        policy, heads = self.policy, self.heads
        rows = range(b * heads, (b + 1) * heads)
        budget = policy.budget
        budget = budget if isinstance(budget, int) else max(int(budget * prompt_length), 1)
        if policy.when == "decode":
            for r in rows:
                self.limits[r] = max(budget, len(self.rows[r]))
            return
        ranked = {}
        for head, r in enumerate(rows):
            scores = self.scores(b, head, prompt_length)
            order = sorted(
                range(len(scores)), key=lambda i: (-scores[i], self.rows[r][i]["position"])
            )
            ranked[r] = [(scores[i], self.rows[r][i]["position"], i) for i in order]
        kept = {r: ranked[r][:budget] for r in rows}
        if policy.shared_safeguard is not None:
            safe = int(policy.shared_safeguard * budget)
            kept = {r: ranked[r][:safe] for r in rows}
            rest = [(-s, p, r, i) for r in rows for s, p, i in ranked[r][safe:]]
            for score, position, r, i in sorted(rest)[: heads * (budget - safe)]:
                kept[r].append((-score, position, i))
        full = sum(map(len, kept.values())) == heads * budget
        for r in rows:
            self.rows[r] = [self.rows[r][i] for i in sorted(i for _, _, i in kept[r])]
            if policy.when == "both":
                shared = policy.shared_safeguard is not None and full
                self.limits[r] = max(len(kept[r]), 1) if shared else budget


class Layer:
    """An evicting cache in use beside its model."""

    def __init__(self, policy, placement, rope=None):
        heads = K if policy.by_head else 1
        if isinstance(placement, Paged):
            per_sequence = -(-MAX_LENGTH // placement.page_size)
            table = PageTable.init(
                B * heads, B * heads * per_sequence, placement.page_size, per_sequence
            )
            inner = PagedCache.init(
                B * heads * per_sequence,
                placement.page_size,
                K // heads,
                H,
                "float32",
                notes_of(policy),
            )
        else:
            table = RowTable.init(B * heads, MAX_LENGTH)
            inner = ContiguousCache.init(
                B * heads, MAX_LENGTH, K // heads, H, "float32", notes_of(policy)
            )
        self.policy = policy
        self.table = EvictingTable.init(table, heads)
        self.cache = EvictingCache.init(inner, policy, 5, B, heads, N // heads, rope)
        self.model = Model(policy)
        self.positions = np.zeros(B, np.int32)
        self.random = np.random.default_rng(41)

    def step(self, counts, slots=None):
        """Feeds tokens to rows, and holds the outputs against the model's."""
        counts = np.asarray(counts, np.int32)
        decodes = slots is None
        sequences = np.arange(B) if decodes else np.asarray(slots)
        chunk = 1 if decodes else CHUNK
        valid = np.arange(chunk)[None] < counts[:, None]
        starts = np.append(self.positions, 0)[sequences]
        positions = np.where(valid, starts[:, None] + np.arange(chunk)[None], 0).astype(np.int32)
        query, key, value = (
            self.random.standard_normal((len(counts), chunk, n, H)).astype(np.float32) * scale
            for n, scale in ((N, 3), (K, 3), (K, 1))
        )
        step = Step(positions, valid, valid, None if decodes else np.asarray(slots, np.int32))
        self.table, rows, ok = reserve(self.table, step.slots, counts, decodes)
        assert np.all(ok)
        output, self.cache = attend(query, key, value, step, self.cache, rows)
        for r, b in enumerate(sequences):
            for t in range(counts[r]):
                arguments = (query[r, t], key[r, t], value[r, t])
                expected = self.model.attend(b, int(positions[r, t]), *arguments)
                np.testing.assert_allclose(output[r, t], expected, rtol=0, atol=2e-5)
            if counts[r]:
                self.positions[b] += counts[r]

    def finish_prompt(self, b):
        mask = self.table.of_rows(jnp.arange(B) == b)
        prompts = jnp.asarray(self.positions)
        budget = self.table.of_rows(self.policy.limits(prompts))
        lengths = self.table.lengths
        if self.policy.when == "decode":
            limits = jnp.where(mask, jnp.maximum(budget, lengths), self.table.limits)
        else:
            self.cache, lengths, limits = shrink(self.cache, self.table, mask, prompts, budget)
            limits = jnp.where(mask, limits, self.table.limits)
            limits = self.table.limits if self.policy.when == "prefill" else limits
        self.table = self.table.shrink(lengths, limits)
        self.model.shrink(b, int(self.positions[b]))
        self.check_rows()

    def check_rows(self):
        """Every row holds the tokens of the model, in whatever slots."""
        step = Step.of_none(self.table.lengths.shape[0])
        positions = np.asarray(self.cache.inner.note("position", step, self.table.table))
        lengths = np.asarray(self.table.lengths)
        held = [sorted(positions[r, : lengths[r]].tolist()) for r in range(len(lengths))]
        assert held == [sorted(token["position"] for token in row) for row in self.model.rows]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("policy", [p for p in POLICIES if not isinstance(p, Random)], ids=repr)
def test_rows_hold_and_see_what_the_papers_formulas_say(policy, placement):
    layer = Layer(policy, placement)
    layer.step([13, 13], [2, 0])
    layer.step([13, 4], [2, 0])
    layer.finish_prompt(0)  # 17 tokens: within the budget
    layer.step([13, 1], [2, 1])
    layer.finish_prompt(1)  # one token
    layer.step([2, 0], [2, B])
    layer.finish_prompt(2)  # 41 tokens
    for step in range(9):
        observes = policy.observes and policy.when != "prefill"
        if observes and step:  # decode of snapkv evicts by queries: the model's are its own
            break
        layer.step([1, step % 2, 1])
        layer.check_rows()
    if policy.when == "prefill":
        assert max(layer.table.lengths) > (BUDGET if isinstance(policy.budget, int) else 0)
    if policy.when == "both":
        assert int(layer.table.lengths.sum()) <= B * layer.table.heads * BUDGET


def test_positions_of_the_cache_are_the_places_of_the_kept_tokens(numpy_attention):
    """StreamingLLM, section 3.2: keys are turned by their place among those that are kept."""
    rope, policy = Rope(), Sinks(BUDGET, num_sinks=3, positions="cache")
    layer = Layer(policy, Paged(7), rope)
    random = np.random.default_rng(43)
    keys, values = (random.standard_normal((1, 70, K, H)).astype(np.float32) for _ in range(2))
    queries = 3 * random.standard_normal((1, 70, N, H)).astype(np.float32)

    def fed(start, end, slots):
        """Feeds tokens start to end to sequence 1, turned by their places in the text."""
        rows, chunk = (R, CHUNK) if slots else (B, 1)
        place = 0 if slots else 1
        padded = [np.zeros((rows, chunk, n, H), np.float32) for n in (N, K, K)]
        positions, valid = np.zeros((rows, chunk), np.int32), np.zeros((rows, chunk), bool)
        count = end - start
        positions[place, :count], valid[place, :count] = np.arange(start, end), True
        for array, source in zip(padded, (queries, keys, values), strict=True):
            array[place, :count] = source[0, start:end]
        query, key, value = map(jnp.asarray, padded)
        query, key = (apply_rope(array, jnp.asarray(positions), rope) for array in (query, key))
        step = Step(positions, valid, valid, jnp.asarray([1, B], jnp.int32) if slots else None)
        wanted = jnp.asarray(valid.sum(1), jnp.int32)
        layer.table, view, ok = reserve(layer.table, step.slots, wanted, not slots)
        assert np.all(ok)
        output, layer.cache = attend(query, key, value, step, layer.cache, view)
        return np.asarray(output)[place, :count]

    def expected(kept):
        """Attention of the newest of `kept` with every token turned by its place in the list."""
        places = jnp.arange(len(kept), dtype=jnp.int32)[None]
        query = apply_rope(jnp.asarray(queries[:, kept]), places, rope)[:, -1:]
        key = apply_rope(jnp.asarray(keys[:, kept]), places, rope)
        valid = np.ones((1, len(kept)), bool)
        arguments = (query, key, values[:, kept], places[:, -1:], places, valid[:, :1], valid)
        return numpy_attention(*map(np.asarray, arguments), scale=H**-0.5)[0, 0]

    for start in range(0, 39, CHUNK):
        fed(start, start + CHUNK, slots=True)
    layer.positions[1] = 39
    layer.model = Model(Sinks(BUDGET, num_sinks=3))
    layer.model.rows[1] = [
        {"position": i, "key": keys[0, i], "value": values[0, i], "mass": 0.0} for i in range(39)
    ]
    layer.finish_prompt(1)
    for position in range(39, 70):
        output = fed(position, position + 1, slots=False)[0]
        kept = [0, 1, 2, *range(position - BUDGET + 4, position + 1)]
        np.testing.assert_allclose(output, expected(kept), rtol=0, atol=3e-5)
