"""Random programs of page table operations against a plain Python model of pages and texts."""

import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from kvlab.ops.page_table import PageTable

B, P, PAGE_SIZE, PAGES_PER_SEQUENCE = 5, 13, 3, 7
CAPACITY, NUM_SLOTS = PAGES_PER_SEQUENCE * PAGE_SIZE, P * PAGE_SIZE
MAX_TOKENS = 8
STEPS, WIDTH = 24, 1 + B

# A random program is bytes; here they become the arguments of every operation, and each step uses
# those of its own.


class Instruction(NamedTuple):
    operation: np.ndarray  # []
    wanted: np.ndarray  # [B], sometimes more than MAX_TOKENS
    mask: np.ndarray  # [B]
    source: np.ndarray  # [2]
    target: np.ndarray  # [2], distinct where used, not always empty
    parents: np.ndarray  # [B]
    lengths: np.ndarray  # [B], sometimes longer than the row
    pages: np.ndarray  # [2], of any kind
    tokens: np.ndarray  # [B, MAX_TOKENS], distinct and above 0: what is written


def decode_program(encoded):
    """Instructions with a leading axis of STEPS from `STEPS * WIDTH` bytes."""
    code = np.frombuffer(encoded, np.uint8).reshape(STEPS, WIDTH).astype(np.int32)
    operation, args = code[:, 0] % len(OPERATIONS), code[:, 1:]
    target = args[:, 2:4] % (B + 1)
    target[target[:, 0] == target[:, 1], 1] = B
    return Instruction(
        operation=operation,
        wanted=args % (MAX_TOKENS + 2),
        mask=args % 3 > 0,
        source=args[:, :2] % (B + 1),
        target=target,
        parents=args % (B + 1),
        lengths=args % (CAPACITY + 1),
        pages=args[:, :2] % (P + 1),
        tokens=TOKENS,
    )


TOKENS = 1 + np.arange(STEPS * B * MAX_TOKENS, dtype=np.int32).reshape(STEPS, B, MAX_TOKENS)


class Model:
    """One page and one row at a time: references counted from scratch, and each row's text."""

    def __init__(self):
        self.pages = [[] for _ in range(B)]
        self.texts = [[] for _ in range(B)]
        self.pins = []
        self.free = list(range(P))[::-1]

    def references(self, page):
        return sum(row.count(page) for row in self.pages) + self.pins.count(page)

    def all_references(self):
        return [page for row in self.pages for page in row] + self.pins

    def free_if_unused(self, page):
        if self.references(page) == 0:
            self.free.append(page)

    def on_shared_page(self, row):
        partial = len(self.texts[row]) % PAGE_SIZE != 0
        return partial and self.references(self.pages[row][-1]) > 1

    def reserve(self, wanted, tokens, limit):
        ok, blocked = np.ones(B, bool), False
        for row, count in enumerate(wanted):
            if count == 0:
                continue
            length = len(self.texts[row]) + count
            need = -(-length // PAGE_SIZE) - len(self.pages[row])
            if count > limit or length > CAPACITY or self.on_shared_page(row):
                ok[row] = False
            elif need and (blocked or need > len(self.free)):
                ok[row], blocked = False, True
            else:
                self.pages[row] += [self.free.pop() for _ in range(need)]
                self.texts[row] = [*self.texts[row], *tokens[row][:count]]
        return ok

    def make_writable(self, mask):
        ok = np.ones(B, bool)
        for row in np.flatnonzero(mask):
            if self.on_shared_page(row):
                ok[row] = bool(self.free)
                if self.free:
                    self.pages[row][-1] = self.free.pop()
        return ok

    def trim(self, lengths):
        for row, length in enumerate(lengths):
            self.texts[row] = self.texts[row][:length]
            kept = -(-len(self.texts[row]) // PAGE_SIZE)
            while len(self.pages[row]) > kept:
                self.free_if_unused(self.pages[row].pop(kept))

    def fork(self, source, target):
        pages, texts = list(self.pages), list(self.texts)
        for origin, row in zip(source, target, strict=True):
            if origin < B and row < B and not texts[row]:
                self.pages[row], self.texts[row] = list(pages[origin]), texts[origin]

    def attach(self, source, target, lengths):
        pages, texts = list(self.pages), list(self.texts)
        for origin, row, length in zip(source, target, lengths, strict=False):
            if origin < B and row < B and not texts[row] and length <= len(texts[origin]):
                self.pages[row] = pages[origin][: -(-length // PAGE_SIZE)]
                self.texts[row] = texts[origin][:length]

    def reorder(self, parents):
        old, texts = self.pages, self.texts
        self.pages = [list(old[parent]) if parent < B else [] for parent in parents]
        self.texts = [texts[parent] if parent < B else [] for parent in parents]
        dropped = [page for row in old for page in row]
        for index, page in enumerate(dropped):
            if page not in dropped[index + 1 :]:
                self.free_if_unused(page)

    def pin(self, pages):
        self.pins += [page for page in pages if page < P and self.references(page)]

    def unpin(self, pages):
        for page in pages:
            if page in self.pins:
                self.pins.remove(page)
                self.free_if_unused(page)

    def run(self, step):
        match OPERATIONS[step.operation].__name__:
            case "decode":
                writable = self.make_writable(step.mask)
                return writable & self.reserve(step.mask.astype(int), step.tokens, 1)
            case "reserve":
                return self.reserve(step.wanted, step.tokens, MAX_TOKENS)
            case "make_writable":
                return self.make_writable(step.mask)
            case "release":
                self.trim(np.where(step.mask, CAPACITY, 0))
            case "trim":
                self.trim(step.lengths)
            case "fork":
                self.fork(step.source, step.target)
            case "attach":
                self.attach(step.source, step.target, step.lengths)
            case "reorder":
                self.reorder(step.parents)
            case "pin":
                self.pin(step.pages)
            case "unpin":
                self.unpin(step.pages[:1])
        return np.ones(B, bool)


# The same operations on the table, with the pool's contents and the index's pins beside it.


class State(NamedTuple):
    table: PageTable
    contents: jax.Array  # [NUM_SLOTS]
    pins: jax.Array  # [P]


def write(state, table, first, tokens, wanted):
    """Writes as a layer would, refused rows included; also whether a shared page was hit."""
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    slots = table.flat_slots(first[:, None] + offsets)
    slots = jnp.where(offsets < wanted[:, None], slots, NUM_SLOTS)
    pages = jnp.where(slots < NUM_SLOTS, slots // PAGE_SIZE, P)
    shared = table.ref_counts.at[pages].get(mode="fill", fill_value=0) > 1
    contents = state.contents.at[slots].set(tokens, mode="drop")
    return state._replace(contents=contents), jnp.any(shared)


def make_writable(state, step):
    table, plan, ok = state.table.make_writable(step.mask)
    moved = state.contents.at[plan.source_slots].get(mode="fill", fill_value=-1)
    contents = state.contents.at[plan.target_slots].set(moved, mode="drop")
    return State(table, contents, state.pins), ok, jnp.zeros((), bool)


def reserve(state, step, limit=MAX_TOKENS):
    table, ok = state.table.reserve(step.wanted, limit)
    state, shared = write(state, table, state.table.lengths, step.tokens, step.wanted)
    return state._replace(table=table), ok, shared


def decode(state, step):
    state, writable, _ = make_writable(state, step)
    step = step._replace(wanted=step.mask.astype(jnp.int32))
    state, ok, shared = reserve(state, step, limit=1)
    return state, ok & writable, shared


def mapping(change):
    """An operation that stores no token and refuses nothing."""

    @functools.wraps(change)
    def run(state, step):
        return change(state, step), jnp.ones(B, bool), jnp.zeros((), bool)

    return run


@mapping
def release(state, step):
    return state._replace(table=state.table.release(~step.mask))


@mapping
def trim(state, step):
    return state._replace(table=state.table.trim(step.lengths))


@mapping
def fork(state, step):
    return state._replace(table=state.table.fork(step.source, step.target))


@mapping
def attach(state, step):
    """The first tokens of another row, or more than it holds: a page is then none in use."""
    table, source, wanted = state.table, step.source, step.lengths[:2]
    pages = table.page_indices.at[source].get(mode="fill", fill_value=P)
    held = table.lengths.at[source].get(mode="fill", fill_value=0)
    target = jnp.where(source < B, step.target, B)
    wanted = jnp.where(wanted <= held, wanted, CAPACITY)
    return state._replace(table=table.attach(target, pages, wanted))


@mapping
def reorder(state, step):
    return state._replace(table=state.table.reorder(step.parents))


@mapping
def pin(state, step):
    held = state.table.ref_counts.at[step.pages].get(mode="fill", fill_value=0) > 0
    pins = state.pins.at[jnp.where(held, step.pages, P)].add(1, mode="drop")
    return State(state.table.pin(step.pages), state.contents, pins)


@mapping
def unpin(state, step):
    page = step.pages[:1]
    page = jnp.where(state.pins.at[page].get(mode="fill", fill_value=0) > 0, page, P)
    pins = state.pins.at[page].add(-1, mode="drop")
    return State(state.table.unpin(page), state.contents, pins)


OPERATIONS = (
    decode,
    reserve,
    fork,
    attach,
    make_writable,
    release,
    reorder,
    trim,
    pin,
    unpin,
)


@jax.jit
def run_program(program):
    """Tables, ok, "a shared page was written" and the text of every row after each step."""
    every = jnp.broadcast_to(jnp.arange(CAPACITY, dtype=jnp.int32)[None], (B, CAPACITY))

    def run_step(state, step):
        state, ok, shared = jax.lax.switch(step.operation, OPERATIONS, state, step)
        slots = state.table.flat_slots(every)
        return state, (
            state.table,
            ok,
            shared,
            state.contents.at[slots].get(mode="fill", fill_value=0),
        )

    table = PageTable.init(B, P, PAGE_SIZE, PAGES_PER_SEQUENCE)
    state = State(table, jnp.full(NUM_SLOTS, -1, jnp.int32), jnp.zeros(P, jnp.int32))
    return jax.lax.scan(run_step, state, program)[1]


def padded(values, width, fill):
    return [*values, *[fill] * (width - len(values))]


@hypothesis.settings(max_examples=2000, deadline=None, derandomize=True)
@hypothesis.given(st.binary(min_size=STEPS * WIDTH, max_size=STEPS * WIDTH))
def test_every_program_agrees_with_the_model(encoded):
    program = decode_program(encoded)
    tables, oks, shared, texts = jax.tree.map(np.asarray, run_program(program))
    model, expected = Model(), []
    for step in zip(*program, strict=True):
        ok = model.run(Instruction(*step))
        references = model.all_references()
        counts = [references.count(page) for page in range(P)]
        assert sorted(model.free) == [page for page in range(P) if counts[page] == 0]
        expected.append(
            [
                ok,
                [padded(row, PAGES_PER_SEQUENCE, P) for row in model.pages],
                [len(text) for text in model.texts],
                counts,
                padded(model.free, P, -1),
                [padded(text, CAPACITY, 0) for text in model.texts],
            ]
        )
    stacks = np.where(np.arange(P) < tables.num_free[:, None], tables.free_pages, -1)
    actual = (oks, tables.page_indices, tables.lengths, tables.ref_counts, stacks, texts)
    names = ("ok", "page_indices", "lengths", "ref_counts", "the free stack", "the texts")
    assert not shared.any()
    for name, found, wanted in zip(names, actual, zip(*expected, strict=True), strict=True):
        different = np.argwhere(found != np.array(wanted))
        assert different.size == 0, f"{name} differ at [step, ...] = {different[0]}"
