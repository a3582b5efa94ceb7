"""What each operation of the page table promises, and what XLA makes of it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from kvlab.ops.page_table import PageTable

B, P, PAGE_SIZE, PAGES_PER_SEQUENCE = 5, 13, 3, 7
CAPACITY, NUM_SLOTS = PAGES_PER_SEQUENCE * PAGE_SIZE, P * PAGE_SIZE
MAX_TOKENS, CHUNK = 8, 4


def i32(*values):
    return jnp.asarray(values, jnp.int32)


def only(*rows):
    """Mask `[B]` of these rows."""
    return jnp.asarray([row in rows for row in range(B)])


ONES = jnp.ones(B, jnp.int32)


def compiled(name, *static):
    return staticmethod(jax.jit(getattr(PageTable, name), static_argnums=static))


class on:
    """The operations, each compiled once for all tests."""

    reserve = compiled("reserve", 2)
    make_writable, release, trim = map(compiled, ("make_writable", "release", "trim"))
    fork, reorder, pin, unpin = map(compiled, ("fork", "reorder", "pin", "unpin"))
    attach = compiled("attach")
    flat_slots, rows = map(compiled, ("flat_slots", "rows"))


def small_table():
    return PageTable.init(B, P, PAGE_SIZE, PAGES_PER_SEQUENCE)


def filled_table(*lengths):
    table, ok = on.reserve(small_table(), i32(*lengths))
    assert np.all(ok)
    return table


def test_init_is_empty_and_hands_out_pages_in_order():
    table = small_table()
    assert (table.num_sequences, table.num_pages, table.page_size) == (B, P, PAGE_SIZE)
    assert (table.pages_per_sequence, table.capacity) == (PAGES_PER_SEQUENCE, CAPACITY)
    assert table.num_slots == NUM_SLOTS
    assert table.pages_in_use == 0
    assert np.all(table.page_indices == P)
    table = filled_table(4, 0, 3, 1, 0)
    assert table.pages_in_use == 4
    assert table.page_indices[:, :2].tolist() == [[0, 1], [P, P], [2, P], [3, P], [P, P]]


@pytest.mark.parametrize("field", ["num_sequences", "num_pages", "page_size", "pages_per_sequence"])
@pytest.mark.parametrize("size", [0, -1])
def test_init_names_the_size_that_is_wrong(field, size):
    sizes = {"num_sequences": 2, "num_pages": 3, "page_size": 5, "pages_per_sequence": 7}
    with pytest.raises(ValueError, match=f"{field}={size}: .* at least 1"):
        PageTable.init(**sizes | {field: size})


@pytest.mark.parametrize("sizes", [(2, 2**27, 16, 1), (2, 1, 16, 2**27)])
def test_init_refuses_more_slots_than_int32_can_number(sizes):
    with pytest.raises(ValueError, match="2147483648 token slots, more than int32 can number"):
        PageTable.init(*sizes)


def test_arguments_must_have_one_entry_per_sequence():
    with pytest.raises(ValueError, match=r"wanted has shape \(1,\), .* 5 sequences"):
        small_table().reserve(i32(1))
    with pytest.raises(ValueError, match="max_tokens=0: want at least 1"):
        small_table().reserve(jnp.ones(B, jnp.int32), 0)


def test_reserve_grants_in_slot_order_without_overtaking():
    table = filled_table(2, 18, 0, 0, 12)  # 11 pages; 2 are free
    table, ok = on.reserve(table, i32(1, 1, 7, 3, 2))
    # Row 0 has room in its page, row 1 takes a page, row 2 wants 3 of 1, and those behind wait.
    assert ok.tolist() == [True, True, False, False, False]
    assert table.lengths.tolist() == [3, 19, 0, 0, 12]
    assert table.pages_in_use == 12
    table, ok = on.reserve(table, i32(0, 2, 0, 3, 0))
    assert np.all(ok)
    assert table.pages_in_use == P


def test_reserve_refuses_what_is_out_of_bounds_without_harm_to_others():
    table = filled_table(CAPACITY, 1, 0, 0, 0)
    new, ok = on.reserve(table, i32(1, -1, 9, 2**31 - 1, 8), MAX_TOKENS)
    assert ok.tolist() == [False, False, False, False, True]
    assert np.array_equal(new.page_indices[:4], table.page_indices[:4])
    assert new.lengths.tolist() == [CAPACITY, 1, 0, 0, 8]
    assert new.pages_in_use == table.pages_in_use + 3


def test_reserve_refuses_to_lengthen_a_row_into_a_shared_page():
    table = on.fork(filled_table(4, 3, 0, 0, 0), i32(0, 1), i32(2, 3))
    # Rows 0 and 2 share a partial page; rows 1 and 3 a full one, which nobody writes again.
    table, ok = on.reserve(table, ONES, 1)
    assert ok.tolist() == [False, True, False, True, True]
    table, plan, ok = on.make_writable(table, only(2))
    assert np.all(ok)
    assert plan.source_slots.tolist().count(NUM_SLOTS) == B * PAGE_SIZE - 1
    assert np.all(on.reserve(table, ONES, 1)[1])


def test_the_last_row_on_a_page_keeps_it():
    table = on.fork(filled_table(2, 0, 0, 0, 0), i32(0, 0, 0), i32(1, 3, 4))
    table, plan, ok = on.make_writable(table, ONES > 0)
    assert np.all(ok)
    assert table.pages_in_use == 4
    assert table.page_indices[:, 0].tolist() == [1, 2, P, 3, 0]
    none = NUM_SLOTS
    sources, unused = [0, 1, none], [none, none, none]
    assert plan.source_slots.tolist() == sources + sources + unused + sources + unused
    assert plan.target_slots.tolist() == [3, 4, none, 6, 7, none, *unused, 9, 10, none, *unused]


def test_make_writable_refuses_when_no_page_is_free_and_leaves_the_row():
    table = on.fork(filled_table(20, 18, 0, 0, 0), i32(0), i32(2))
    assert table.pages_in_use == P
    new, plan, ok = on.make_writable(table, only(2))
    assert ok.tolist() == [True, True, False, True, True]
    assert np.all(plan.target_slots == NUM_SLOTS)
    assert jax.tree.all(jax.tree.map(np.array_equal, new, table))


def test_a_pinned_prefix_is_attached_to_later_requests_and_copied_before_it_grows():
    """Prefix reuse: the pages outlive their writer, two rows take them, one of them in part."""
    table = on.pin(filled_table(7, 0, 0, 0, 0), i32(0, 1, 2))
    table = on.release(table, only(0))
    pages = jnp.asarray([[0, 1, 2], [0, 1, P]], jnp.int32)
    table = on.attach(table, i32(1, 2), pages, i32(7, 6))
    assert table.lengths.tolist() == [0, 7, 6, 0, 0]
    assert table.ref_counts[:4].tolist() == [3, 3, 2, 0]
    assert table.pages_in_use == 3
    # Row 2 ends with a full page and grows into a new one; row 1 ends in a page that the pin holds.
    grown, ok = on.reserve(table, ONES, 1)
    assert ok.tolist() == [True, False, True, True, True]
    assert grown.ref_counts[2] == 2
    table, plan, ok = on.make_writable(table, only(1))
    assert np.all(ok)
    assert plan.source_slots[PAGE_SIZE : PAGE_SIZE + 2].tolist() == [6, NUM_SLOTS]
    table, ok = on.reserve(table, ONES, 1)
    assert np.all(ok)
    table = on.release(table, only(1, 2))
    assert table.ref_counts[:3].tolist() == [1, 1, 1]  # the pins


def test_attach_takes_no_more_pages_than_a_sequence_maps():
    pages = jnp.zeros((1, PAGES_PER_SEQUENCE + 1), jnp.int32)
    with pytest.raises(ValueError, match=r"pages has 8 columns, .* at most 7"):
        small_table().attach(i32(0), pages, i32(1))


def test_a_pinned_partial_page_is_copied_and_outlives_its_row():
    table = on.pin(filled_table(2, 0, 0, 0, 0), i32(0, P))
    table, plan, ok = on.make_writable(table, ONES > 0)
    assert np.all(ok)
    assert plan.source_slots[:2].tolist() == [0, 1]
    table = on.release(table, only(0))
    assert table.pages_in_use == 1
    assert on.unpin(table, i32(P, 0)).pages_in_use == 0


def test_release_and_unpin_return_everything():
    table = on.fork(filled_table(5, 7, 0, 0, 3), i32(0, 1), i32(2, 3))
    table = on.pin(on.pin(table, i32(0, 0)), i32(4, P))
    table = on.trim(on.reorder(table, i32(1, 1, 0, 2, 4)), i32(7, 4, 0, 5, 3))
    table = on.release(table, table.lengths > 0)
    assert table.pages_in_use == 2
    table = on.unpin(on.unpin(table, i32(0, 4)), i32(0, P))
    assert table.pages_in_use == 0
    assert sorted(table.free_pages.tolist()) == list(range(P))


def test_flat_slots_gives_the_sentinel_for_what_is_not_stored():
    table = filled_table(4, 2, 0, 0, 0)
    indices = i32(-1, 0, 3, 4, 5, CAPACITY, 2**31 - 1)
    slots = on.flat_slots(table, jnp.broadcast_to(indices[None], (B, indices.size)))
    assert slots[0].tolist() == [NUM_SLOTS, 0, 3, *[NUM_SLOTS] * 4]
    assert slots[1].tolist() == [NUM_SLOTS, 6, *[NUM_SLOTS] * 5]
    assert np.all(slots[2:] == NUM_SLOTS)


def test_rows_are_views_that_repeat_and_end_early():
    table = filled_table(4, 2, 0, 0, 0)
    rows = on.rows(table, i32(0, 0, B), i32(3, 0, 0))
    assert rows.lengths.tolist() == [1, 4, 0]
    assert rows.page_indices[2].tolist() == [P] * PAGES_PER_SEQUENCE  # padding is empty
    indices = jnp.broadcast_to(i32(0, 1, 3)[None], (3, 3))
    first, last, padding = on.flat_slots(rows, indices).tolist()
    assert first == [0, NUM_SLOTS, NUM_SLOTS]
    assert last == [0, 1, 3]
    assert padding == [NUM_SLOTS] * 3


# Misuse is named under checkify, and leaves the pool whole (checkify returns the table as well).

# Page -11 would wrap to page 2, which is in use.
MISUSE = [
    (("reserve", i32(CAPACITY, 0, 0, 0, 0)), r"sequence 0 .*from page 0 on.*wants 21"),
    (("reserve", i32(0, 0, -1, 0, 0)), r"sequence 2 .*page 13 .*wants -1"),
    (("release", only(0, 3)), r"sequence 3 is released twice.*page 13"),
    (("trim", i32(4, 3, 0, 0, 0)), r"sequence 1 .*page 2 on.* holds 2 .*to 3"),
    (("fork", i32(3, 0), i32(4, 1)), r"sequence 0 .*to sequence 1, which holds 2 .*page 2 on"),
    (("fork", i32(0, 1), i32(2, 2)), r"sequence 0 .*to sequence 2.*distinct"),
    (("fork", i32(6, 0), i32(2, 3)), r"sequence 6 cannot be forked to sequence 2"),
    (("fork", i32(0, 1), i32(-1, 3)), r"sequence 0 cannot be forked to sequence -1"),
    (("attach", i32(3), i32(7)[None], i32(2)), r"page 7 cannot be attached to sequence 3"),
    (("attach", i32(3), i32(-11)[None], i32(2)), r"page -11 cannot be attached to sequence 3"),
    (("attach", i32(3), i32(0)[None], i32(4)), r"4 tokens of 1 pages .* to sequence 3"),
    (("attach", i32(3), i32(0)[None], i32(-1)), r"-1 tokens of 1 pages .* to sequence 3"),
    (("attach", i32(1), i32(0)[None], i32(3)), r"3 tokens .* sequence 1, which holds 2 .*page 2"),
    (("attach", i32(3, 3), i32(0, 1)[:, None], i32(3, 1)), r"to sequence 3.*distinct"),
    (("attach", i32(6), i32(0)[None], i32(3)), r"cannot be attached to sequence 6"),
    (("reorder", i32(0, -1, 2, 3, 4)), r"sequence 1 .*page 2 on.*parent -1"),
    (("pin", i32(P, 7)), r"entry 1 pins page 7"),
    (("pin", i32(-11, P)), r"entry 0 pins page -11"),
    (("unpin", i32(P, 7)), r"\(or entry\) 1 gives back page 7.*double release"),
    (("unpin", i32(99, P)), r"0 gives back page 99.*bad page"),
    (("unpin", i32(-11, P)), r"0 gives back page -11.*bad page"),
]


@functools.cache
def checked(name):
    return jax.jit(checkify.checkify(getattr(PageTable, name)))


@pytest.mark.parametrize(("misuse", "message"), MISUSE)
def test_misuse_is_named_under_checkify_and_leaves_the_pool_whole(misuse, message):
    name, *arguments = misuse
    error, table = checked(name)(filled_table(4, 2, 0, 0, 0), *arguments)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()
    table = table[0] if isinstance(table, tuple) else table
    mapped = np.asarray(table.page_indices)
    references = np.bincount(mapped[mapped < P], minlength=P)
    assert np.array_equal(table.ref_counts, references)
    stack = sorted(table.free_pages[: table.num_free].tolist())
    assert stack == np.flatnonzero(references == 0).tolist()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (("flat_slots", jnp.zeros((B, 1), jnp.int32)), r"sequence 1 maps page -1"),
        (("release", only(1)), r"1 gives back page -1"),
        (("reserve", i32(0, 0, 0, 0, 3)), r"page 0, of ref_count 1, to sequence 4"),
    ],
)
def test_corrupt_tables_are_named_under_checkify(use, message):
    name, argument = use
    table = filled_table(4, 2, 0, 0, 0)
    if name == "reserve":
        table = dataclasses.replace(table, free_pages=jnp.zeros_like(table.free_pages))
    else:
        table = dataclasses.replace(table, page_indices=table.page_indices.at[1, 0].set(-1))
    error, result = checked(name)(table, argument)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()
    if name == "flat_slots":
        assert result[1, 0] == NUM_SLOTS


def test_correct_use_passes_checkify():
    table = filled_table(4, 2, 0, 0, 0)
    program = [
        ("fork", i32(0, B), i32(2, B)),
        ("pin", i32(2, P)),
        ("attach", i32(B, 3), jnp.asarray([[7, 7], [0, 1]], jnp.int32), i32(99, 4)),
        ("make_writable", ONES > 0),
        ("reserve", ONES),
        ("reorder", i32(0, 0, 2, B, 1)),
        ("trim", i32(1, 5, 0, 0, 2)),
        ("unpin", i32(2, P)),
        ("release", only(0, 1, 4)),
    ]
    for name, *arguments in program:
        error, table = checked(name)(table, *arguments)
        error.throw()
        table = table[0] if isinstance(table, tuple) else table
    assert table.pages_in_use == 0


# What XLA sees: a step's cost does not depend on the pool.

LARGE_POOL = 10007


def every_equation(jaxpr):
    for equation in jaxpr.eqns:
        inner = [
            getattr(value, "jaxpr", value)
            for value in jax.tree.leaves(
                equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
            )
            if hasattr(value, "eqns") or hasattr(value, "jaxpr")
        ]
        if inner and not equation.primitive.name.startswith("scatter"):
            for sub in inner:
                yield from every_equation(sub)
        else:
            yield equation


def decode_step(table):
    wanted = jnp.ones(B, jnp.int32)
    table, _, _ = table.make_writable(wanted > 0)
    return table.reserve(wanted, 1)[0]


@pytest.mark.parametrize("max_tokens", [1, CHUNK, None])
def test_reserve_has_no_loop_and_touches_the_pool_only_by_scatter_and_gather(max_tokens):
    table = PageTable.init(B, LARGE_POOL, PAGE_SIZE, PAGES_PER_SEQUENCE)
    jaxpr = jax.make_jaxpr(lambda t, wanted: t.reserve(wanted, max_tokens))(
        table, jnp.ones(B, jnp.int32)
    )
    names, on_pool = set(), set()
    for equation in every_equation(jaxpr.jaxpr):
        names.add(equation.primitive.name)
        shapes = [v.aval.shape for v in (*equation.invars, *equation.outvars)]
        if any(LARGE_POOL in shape for shape in shapes):
            on_pool.add(equation.primitive.name)
    assert not names & {"while", "scan", "cond", "fori_loop"}
    assert on_pool == {"gather", "scatter"}


def beam_step(table):
    """Every operation that a decode loop may call."""
    table = decode_step(table.reorder(i32(0, 0, 2, 3, 4)))
    table = table.trim(table.lengths - (table.lengths % 5 == 0).astype(jnp.int32))
    return table.pin(table.page_indices[:, 0]).unpin(table.page_indices[:, 0])


@pytest.mark.parametrize("step", [decode_step, beam_step])
def test_a_donated_loop_updates_the_pool_in_place(step):
    table = PageTable.init(B, LARGE_POOL, PAGE_SIZE, PAGES_PER_SEQUENCE)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(table):
        return jax.lax.fori_loop(0, CAPACITY, lambda _, t: step(t), table)

    compiled = loop.lower(table).compile()
    assert re.findall(rf"s32\[{LARGE_POOL}\]\S* copy\(.*", compiled.as_text()) == []
    before = table.ref_counts
    assert loop(table).lengths.max() > 0
    assert before.is_deleted()
