"""The contiguous table: counts, and nothing else."""

import dataclasses

import jax.numpy as jnp

from kvlab.ops.row_table import RowTable


def i32(*values):
    return jnp.asarray(values, jnp.int32)


def filled_table():
    """Rows of 11 slots that hold 10, 5 and 11 tokens."""
    return dataclasses.replace(RowTable.init(3, 11), lengths=i32(10, 5, 11))


def test_a_new_table_is_empty():
    assert RowTable.init(3, 11).lengths.tolist() == [0, 0, 0]


def test_a_row_that_would_overflow_is_refused_and_unchanged():
    table, ok = filled_table().reserve(i32(2, 6, 0))
    assert ok.tolist() == [False, True, True]
    assert table.lengths.tolist() == [10, 11, 11]


def test_trim_and_release():
    table = filled_table()
    assert table.trim(i32(3, 9, 0)).lengths.tolist() == [3, 5, 0]
    assert table.release(jnp.array([False, True, True])).lengths.tolist() == [10, 0, 0]


def test_fork_and_reorder_move_counts():
    table = filled_table().release(jnp.array([False, True, False]))
    assert table.fork(i32(2, 3), i32(1, 3)).lengths.tolist() == [10, 11, 11]  # 3 is no row
    assert table.reorder(i32(2, 3, 0)).lengths.tolist() == [11, 0, 10]


def test_rows_are_views_that_repeat_and_end_early():
    rows = filled_table().rows(i32(0, 0, 3), i32(4, 0, 0))
    assert rows.lengths.tolist() == [6, 10, 0]  # 3 is no row: empty
