"""Random programs of prefill, decode, fork, reorder and release on real caches, against a model.

The model knows texts, the pages that hold them as plain Python objects, and who shares them. It
says what each operation must do, refusals included; nothing may leak. Variants that evict do so in
prefill and decode. The long mode (`pytest -m long`) runs 2,500 programs.
"""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.decoder import Decoder
from kvlab.ops.page_table import PageTable
from kvlab.ops.retention import H2O, Random, Sinks, SnapKV, Window
from kvlab.ops.specs import CacheSpec, Contiguous, Kivi4, Paged, Ring
from kvlab.research.cache import unwrapped
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.session import Session

SLOTS, MAX_LENGTH, CHUNK, PAGES, BUDGET, WINDOW = 4, 61, 13, 11, 17, 19


@dataclasses.dataclass(frozen=True)
class Variant:
    """A cache of one layer; `exact` where its logits are those of the whole text computed anew."""

    spec: CacheSpec
    page_size: int | None = None
    exact: bool = True
    window: int | None = None


VARIANTS = {
    "contiguous": Variant(CacheSpec(Contiguous())),
    "paged": Variant(CacheSpec(Paged(8)), 8),
    "ring": Variant(CacheSpec(Ring(WINDOW)), window=WINDOW),
    "kivi": Variant(CacheSpec(Paged(8), Kivi4(2, 3)), 8, exact=False),
    "window": Variant(CacheSpec(Paged(8), "int8", Window(BUDGET)), 8, exact=False),
    "sinks": Variant(CacheSpec(Contiguous(), retention=Sinks(BUDGET, num_sinks=3)), exact=False),
    "h2o": Variant(CacheSpec(Paged(8), retention=H2O(BUDGET, recent=5)), 8, exact=False),
    "snapkv": Variant(
        CacheSpec(Paged(8), retention=SnapKV(BUDGET, "prefill", observation=5)), 8, exact=False
    ),
    "random": Variant(CacheSpec(Paged(8), "int4", Random(BUDGET)), 8, exact=False),
}


class Page:
    """A page of the pool; sequences that share it hold the same object."""


class Model:
    """Texts by slot, and for every row of the table its tokens and pages."""

    def __init__(self, variant):
        self.variant, self.policy = variant, variant.spec.retention
        self.heads = 2 if self.policy is not None and self.policy.by_head else 1
        self.texts = [[] for _ in range(SLOTS)]
        self.held = [0] * SLOTS  # tokens of each of a sequence's rows
        self.pages = [[[] for _ in range(self.heads)] for _ in range(SLOTS)]

    @property
    def free(self):
        used = {page for rows in self.pages for row in rows for page in row}
        return PAGES * self.heads - len(used)

    def missing(self, slot, tokens):
        """Pages that a sequence needs for so many more tokens."""
        if self.variant.page_size is None:
            return 0
        size = self.variant.page_size
        return (-(-(self.held[slot] + tokens) // size) - -(-self.held[slot] // size)) * self.heads

    def grow(self, slot, tokens):
        for row in self.pages[slot]:
            row += [Page() for _ in range(self.missing(slot, tokens) // self.heads)]
        self.held[slot] += tokens

    def shrink(self, slot):
        """A prompt is complete."""
        if self.policy is not None and self.policy.when != "decode":
            self.held[slot] = min(self.held[slot], BUDGET)
            if self.variant.page_size is not None:
                for row in self.pages[slot]:
                    del row[-(-self.held[slot] // self.variant.page_size) :]

    def step(self, slot):
        """One token of decode; False where there is no room."""
        if len(self.texts[slot]) >= MAX_LENGTH:
            return False
        full = self.policy is not None and self.policy.when == "both"
        if not (full and self.held[slot] >= BUDGET):
            if self.missing(slot, 1) > self.free:
                return False
            self.grow(slot, 1)
        return True

    def copied(self, slot, first):
        """Pages of a sequence that takes over `slot`: its own, shared, or copies."""
        if self.policy is not None:
            return [list(row) if first else [Page() for _ in row] for row in self.pages[slot]]
        size = self.variant.page_size
        partial = size is not None and self.held[slot] % size > 0 and not first
        rows = [list(row) for row in self.pages[slot]]
        for row in rows if partial else ():
            row[-1] = Page()
        return rows

    def take_over(self, parents):
        """Slot b becomes `parents[b]`, SLOTS an empty one; False (and nothing) without room."""
        before = self.texts, self.held, self.pages
        first = [parents.index(parent) == slot for slot, parent in enumerate(parents)]
        none = [[] for _ in range(self.heads)]
        pages = [
            none if parent == SLOTS else self.copied(parent, is_first)
            for parent, is_first in zip(parents, first, strict=True)
        ]
        self.texts = [[] if p == SLOTS else list(before[0][p]) for p in parents]
        self.held = [0 if p == SLOTS else before[1][p] for p in parents]
        self.pages = [[list(row) for row in rows] for rows in pages]
        if self.free >= 0:
            return True
        self.texts, self.held, self.pages = before
        return False


class Machine:
    """A session and its model, told the same."""

    def __init__(self, variant, session):
        self.variant, self.session, self.model = variant, session, Model(variant)
        self.random = np.random.default_rng(53)

    def prefill(self, slot, count):
        model, tokens = self.model, self.random.integers(0, 101, count).tolist()
        fits = len(model.texts[slot]) + count <= MAX_LENGTH
        if not fits or model.missing(slot, count) > model.free:
            with pytest.raises(ValueError, match="past max_length" if not fits else "more pages"):
                self.session.prefill({slot: tokens})
            return
        self.session.prefill({slot: tokens})
        model.grow(slot, count)
        model.texts[slot] += tokens
        model.shrink(slot)

    def decode(self, slots, count):
        model = self.model
        slots = [slot for slot in sorted(slots) if model.texts[slot]]
        forced = {slot: self.random.integers(0, 101, count).tolist() for slot in slots}
        results = self.session.decode(dict.fromkeys(slots, count), forced=forced)
        running = set(slots)
        for step in range(count):
            for slot in sorted(running):
                if model.step(slot):
                    model.texts[slot].append(forced[slot][step])
                else:
                    running.discard(slot)
        assert {slot for slot in slots if not results[slot].stalled} == running
        for slot in slots:
            done = len(results[slot].tokens)
            assert list(results[slot].tokens) == forced[slot][:done]
            assert model.texts[slot][len(model.texts[slot]) - done :] == forced[slot][:done]

    def fork(self, source, target):
        model = self.model
        if source == target or not model.texts[source] or model.texts[target]:
            with pytest.raises(ValueError, match=r"nothing to fork|distinct empty slots"):
                self.session.fork(source, [target])
            return
        parents = [slot if model.texts[slot] else SLOTS for slot in range(SLOTS)]
        parents[target] = source
        self.expect(model.take_over(parents), lambda: self.session.fork(source, [target]))

    def reorder(self, parents):
        parents = [p if p < SLOTS and self.model.texts[p] else SLOTS for p in parents]
        self.expect(self.model.take_over(parents), lambda: self.session.reorder(parents))

    def expect(self, done, act):
        if done:
            act()
        else:
            with pytest.raises(ValueError, match="free page"):
                act()

    def release(self, slots):
        slots = [slot for slot in slots if self.model.texts[slot]]
        self.session.release(slots)
        parents = [
            SLOTS if slot in slots or not self.model.texts[slot] else slot for slot in range(SLOTS)
        ]
        assert self.model.take_over(parents)

    def check(self):
        model, session = self.model, self.session
        assert session.lengths.tolist() == [len(text) for text in model.texts]
        table, heads = unwrapped(session.cache.tables[0])
        assert table.lengths.tolist() == [held for held in model.held for _ in range(heads)]
        if isinstance(table, PageTable):
            assert int(table.num_free) == model.free
            references = np.zeros(table.num_pages + 1, int)
            np.add.at(references, np.asarray(table.page_indices).ravel(), 1)
            assert table.ref_counts.tolist() == references[:-1].tolist()

    def check_content(self):
        """Logits of every sequence, and the positions that a window keeps."""
        model, session = self.model, self.session
        if isinstance(model.policy, Window):
            layer, table = session.cache.layers[0], session.cache.tables[0].table
            positions = np.asarray(layer.inner.key["position"])[:, 0, 0]
            for slot, text in enumerate(model.texts):
                pages = np.asarray(table.page_indices)[slot, : len(model.pages[slot][0])]
                held = positions[pages].ravel()[: model.held[slot]]
                assert sorted(held.tolist()) == [*range(len(text) - len(held), len(text))]
        if not self.variant.exact:
            assert np.isfinite(np.asarray(session.logits)).all()
            return
        padded = np.zeros((SLOTS, MAX_LENGTH), np.int32)
        for slot, text in enumerate(model.texts):
            padded[slot, : len(text)] = text
        whole = np.asarray(forward(session.config.decoder, session.params, padded))
        for slot, text in enumerate(model.texts):
            if text:
                expected = whole[slot, len(text) - 1]
                difference = np.abs(np.asarray(session.logits)[slot] - expected).max()
                assert difference <= 1e-4 * np.abs(expected).max()


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, tokens):
    return Decoder(config).apply({"params": params}, tokens, method="forward")


slot = st.integers(0, SLOTS - 1)
operations = st.one_of(
    st.tuples(st.just("prefill"), slot, st.integers(1, 40)),
    st.tuples(st.just("decode"), st.sets(slot, min_size=1), st.integers(1, 7)),
    st.tuples(st.just("fork"), slot, slot),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, SLOTS), min_size=SLOTS, max_size=SLOTS)),
    st.tuples(st.just("release"), st.sets(slot, min_size=1)),
)


@pytest.fixture(scope="module")
def sessions(tiny):
    made = {}
    for name, variant in VARIANTS.items():
        model = dataclasses.replace(
            tiny.model("gqa"), num_layers=1, num_kv_heads=2, windows=variant.window
        )
        config = InferenceConfig(
            model,
            variant.spec,
            slots=SLOTS,
            max_length=MAX_LENGTH,
            rows=2,
            chunk=CHUNK,
            num_pages=PAGES if variant.page_size else None,
            decode_steps=7,
        )
        made[name] = Session(tiny.params("gqa"), config)
        made[name].warm_up()
    return made


@pytest.mark.parametrize("programs", [60, pytest.param(2500, marks=pytest.mark.long)])
def test_random_programs(programs, sessions):
    @hypothesis.settings(max_examples=programs, deadline=None, database=None, derandomize=True)
    @hypothesis.given(
        name=st.sampled_from(sorted(VARIANTS)),
        program=st.lists(operations, min_size=1, max_size=14),
    )
    def run(name, program):
        session = sessions[name]
        machine = Machine(VARIANTS[name], session)
        try:
            for operation, *arguments in program:
                getattr(machine, operation)(*arguments)
                machine.check()
            machine.check_content()
        finally:
            session.release()
        for table in session.cache.tables:
            inner, _ = unwrapped(table)
            assert not np.asarray(inner.lengths).any()
            if isinstance(inner, PageTable):
                assert int(inner.num_free) == inner.num_pages
                assert not np.asarray(inner.ref_counts).any()

    run()


def test_the_model_refuses_what_the_pool_cannot_hold():
    """The model is not lenient: a program that must be refused is."""
    model = Model(VARIANTS["paged"])
    model.grow(0, 61)
    assert model.free == PAGES - 8
    assert model.missing(1, 30) == 4 > model.free
    assert model.take_over([0, 0, SLOTS, SLOTS])  # 61 tokens: a partial page is copied
    assert model.free == PAGES - 9
    assert not jnp.any(jnp.asarray(model.held[2:]))
