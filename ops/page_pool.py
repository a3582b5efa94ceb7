"""Reference counts and the stack of free pages: what the rows of a page table share.

Axis letters: B sequences, P pages. `num_pages` (P) stands for "no page" in every argument.

Counts and stack are always in step: the free stack, `free_pages[:num_free]`, is exactly the
pages of ref_count 0. Taking costs O(pages taken) and giving back O(entries given back), whatever
the size of the pool. `kvlab.ops.page_table` is the user.
"""

from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Int32

_checks = jax.make_user_context(True)


def unchecked() -> AbstractContextManager[None]:
    """Traces operations without their checks, for programs that are never run under checkify.

    A check is an effect of the program, even where it comes to nothing, and JAX dispatches programs
    with effects from Python: 0.4 ms a call instead of 0.1. It is a constant of the program too,
    which counts the checks that the process has traced so far, so that the persistent compilation
    cache would know the program only from a process that traced the same ones before.

    Around the call of a jitted function, it calls another program than the one with checks.
    """
    return _checks(False)


def forbid(wrong: Bool[Array, "..."], message: str, **values: Array) -> None:
    """Raises about the first wrong entry under checkify; otherwise costs nothing.

    Args:
      wrong: bool, any shape: entries that must not be.
      message: `str.format` text whose fields are the names of `values`.
      **values: arrays that broadcast to the shape of `wrong`; the message shows their element at
        the first wrong entry.
    """
    if not _checks.value:
        return
    first = jnp.argmax(wrong)
    picked = {
        name: jnp.broadcast_to(value, wrong.shape).reshape(-1)[first]
        for name, value in values.items()
    }
    checkify.debug_check(~jnp.any(wrong), message, **picked)


def count_references(
    ref_counts: Int32[Array, "P"], pages: Int32[Array, "*n"]
) -> Int32[Array, "*n"]:
    """Looks up ref_counts.

    Args:
      ref_counts: `[P] int32`.
      pages: int32, any shape.

    Returns:
      References to each page; 0 for a number that is no page of the pool.
    """
    (num_pages,) = ref_counts.shape
    pages = jnp.where(pages < 0, num_pages, pages)  # JAX would wrap it
    return ref_counts.at[pages].get(mode="fill", fill_value=0)


def take_pages(
    ref_counts: Int32[Array, "P"],
    free_pages: Int32[Array, "P"],
    num_free: Int32[Array, ""],
    demand: Int32[Array, "B"],
    max_pages: int,
) -> tuple[Int32[Array, "P"], Int32[Array, ""], Int32[Array, "B {max_pages}"], Bool[Array, "B"]]:
    """Pops pages for each row, in slot order, until a row finds too few.

    Args:
      ref_counts: `[P] int32`.
      free_pages: `[P] int32` stack; popping leaves it as it is.
      num_free: `[] int32`, height of the stack.
      demand: `[B] int32`, pages that each row needs, at most `max_pages`.
      max_pages: static bound on `demand`.

    Returns:
      The new ref_counts, in which a page taken has 1; the new num_free; the pages of each row,
      `[B, max_pages] int32` (`num_pages` where none); and granted `[B] bool`: the row got all it
      needs. Once a row is refused, so is every later one that needs a page.
    """
    (num_pages,) = ref_counts.shape
    end = jnp.cumsum(demand, dtype=jnp.int32)
    granted = (demand == 0) | (end <= num_free)
    nth = (end - demand)[:, None] + jnp.arange(max_pages, dtype=jnp.int32)[None, :]
    wanted = granted[:, None] & (nth < end[:, None])
    pages = free_pages.at[jnp.where(wanted, num_free - 1 - nth, num_pages)].get(
        mode="fill", fill_value=num_pages
    )
    counts = count_references(ref_counts, pages)
    forbid(
        wanted & ((pages < 0) | (pages >= num_pages) | (counts != 0)),
        "the free stack hands page {page}, of ref_count {count}, to sequence {sequence}: the table "
        "was not made by its own operations, or an old copy of its pool was used",
        page=pages,
        count=counts,
        sequence=jnp.arange(demand.shape[0], dtype=jnp.int32)[:, None],
    )
    num_free = num_free - jnp.sum(jnp.where(granted, demand, 0), dtype=jnp.int32)
    return ref_counts.at[pages].set(1, mode="drop"), num_free, pages, granted


def drop_references(
    ref_counts: Int32[Array, "P"],
    free_pages: Int32[Array, "P"],
    num_free: Int32[Array, ""],
    pages: Int32[Array, "n m"],
) -> tuple[Int32[Array, "P"], Int32[Array, "P"], Int32[Array, ""]]:
    """Takes one reference from each page, and pushes those that nobody holds any more.

    Args:
      ref_counts: `[P] int32`.
      free_pages: `[P] int32` stack.
      num_free: `[] int32`, height of the stack.
      pages: `[n, m] int32`, the pages that n owners give back; `num_pages` for none. A page that
        is free already, or out of range, is left alone (under checkify it raises).

    Returns:
      The new ref_counts, free_pages and num_free. A page freed by several entries is pushed once,
      in the place of the last of them.
    """
    (num_pages,) = ref_counts.shape
    owners, _ = pages.shape
    held = count_references(ref_counts, pages) > 0
    forbid(
        (pages != num_pages) & ~held,
        "sequence (or entry) {sequence} gives back page {page}, which is free already or is not "
        f"in [0, {num_pages}): a double release, or a bad page",
        sequence=jnp.arange(owners, dtype=jnp.int32)[:, None],
        page=pages,
    )
    flat = jnp.where(held, pages, num_pages).reshape(-1)
    ref_counts = ref_counts.at[flat].add(-1, mode="drop")
    left = ref_counts.at[flat].get(mode="fill", fill_value=1)
    freed = jnp.where(left <= 0, flat, num_pages)
    # The entries that free one page elect the last of them. Its count, just now 0, serves as the
    # scratch for that: a work array would be as large as the pool.
    ballot = -1 - jnp.arange(flat.size, dtype=jnp.int32)
    ref_counts = ref_counts.at[freed].min(ballot, mode="drop")
    elected = ref_counts.at[freed].get(mode="fill", fill_value=0) == ballot
    freed = jnp.where(elected, flat, num_pages)
    # Only the elected reset it: the write then depends on the read, and XLA needs no copy.
    ref_counts = ref_counts.at[freed].set(0, mode="drop")
    height = num_free + jnp.cumsum(elected, dtype=jnp.int32)
    place = jnp.where(elected, height - 1, num_pages)
    return ref_counts, free_pages.at[place].set(freed, mode="drop"), height[-1]


def rank_among_equals(keys: Int32[Array, "n"]) -> Int32[Array, "n"]:
    """Numbers the entries of each key in their order.

    Args:
      keys: `[n] int32`.

    Returns:
      `[n] int32`: how many earlier entries have the same key.
    """
    order = jnp.argsort(keys, stable=True)
    ordered = keys[order]
    index = jnp.arange(keys.shape[0], dtype=jnp.int32)
    starts = jnp.where(ordered != jnp.roll(ordered, 1), index, 0)
    return jnp.zeros_like(keys).at[order].set(index - jax.lax.cummax(starts))
