"""Page table of a paged KV cache, as arrays: which page holds which tokens, which are free.

Axis letters: B sequences, R rows of a prefill, T query positions, P pages, p page size (tokens).

A token slot of the pool has the flat number `page * page_size + offset`. Two sentinels stand for
"nowhere", both just out of range so that scatters drop them and gathers can fill: page
`num_pages` and slot `num_pages * page_size`. Never -1, which JAX wraps to the last element even
under `mode="drop"`.

Every operation is a pure method: table in, table out. Free pages lie on a stack, so a step costs
O(B) whatever the size of the pool. Misuse (bad page ids, overflow, double release) leaves a
table whose counts and stack still agree; under `jax.experimental.checkify` it raises, with
sequence and page named.

Over 400 lines, most of them docstrings, because the operations are one contract, read as a whole.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from kvlab.ops.page_pool import (
    count_references,
    drop_references,
    forbid,
    rank_among_equals,
    take_pages,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CopyPlan:
    """Tokens that every layer's cache has to move, before anything else writes to its pool.

    Attributes:
      source_slots: `[n] int32`, flat slots to read; `num_slots` where unused.
      target_slots: `[n] int32`, flat slots to write; `num_slots` where unused. Real targets are
        distinct, lie in pages that are mapped once, and are never a source.
    """

    __no_type_check__ = True  # as in PageTable

    source_slots: Int32[Array, "n"]
    target_slots: Int32[Array, "n"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTable:
    """Who maps which page of one pool; a plain pytree that a donated loop can carry.

    Paging with reference counts follows "Efficient Memory Management for Large Language Model
    Serving with PagedAttention" (Kwon et al., 2023), section 4.

    Between operations, always: `ref_counts` = rows that map the page + pins; the free stack is
    exactly the pages of ref_count 0; row b maps its first `ceil(lengths[b] / page_size)` columns
    and no other.

    Attributes:
      page_indices: `[B, pages_per_sequence] int32`, page of each `page_size` tokens of a
        sequence; `num_pages` where unmapped.
      lengths: `[B] int32`, tokens stored.
      ref_counts: `[P] int32`.
      free_pages: `[P] int32`, the stack; what lies at and above `num_free` means nothing.
      num_free: `[] int32`, height of the stack.
      page_size: tokens in a page (static).
      heads: rows that belong to one sequence (static): messages name the sequence.
    """

    # JAX rebuilds pytrees with other leaves (stacked by scan, abstract, NumPy), and jaxtyping would
    # refuse them; methods are checked all the same.
    __no_type_check__ = True

    page_indices: Int32[Array, "B pages_per_sequence"]
    lengths: Int32[Array, "B"]
    ref_counts: Int32[Array, "P"]
    free_pages: Int32[Array, "P"]
    num_free: Int32[Array, ""]
    page_size: int = dataclasses.field(metadata={"static": True})
    heads: int = dataclasses.field(default=1, metadata={"static": True})

    @classmethod
    def init(
        cls, num_sequences: int, num_pages: int, page_size: int, pages_per_sequence: int
    ) -> "PageTable":
        """Builds a table of empty sequences over a pool that is wholly free.

        Args:
          num_sequences: rows of the table (B).
          num_pages: pages in the pool (P).
          page_size: tokens in a page.
          pages_per_sequence: pages that one sequence can map at most.

        Returns:
          The table. Pages are first handed out in the order 0, 1, 2, ...

        Raises:
          ValueError: a size is below 1, or the pool has more slots than int32 can number.
        """
        sizes = {
            "num_sequences": num_sequences,
            "num_pages": num_pages,
            "page_size": page_size,
            "pages_per_sequence": pages_per_sequence,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size}: a page table needs {name} of at least 1")
        largest = max(num_pages, pages_per_sequence) * page_size
        if largest > jnp.iinfo(jnp.int32).max:
            raise ValueError(
                f"num_pages={num_pages}, pages_per_sequence={pages_per_sequence} and "
                f"page_size={page_size} give {largest} token slots, more than int32 can number; "
                "use fewer pages: fewer slots, or shorter sequences"
            )
        return cls(
            page_indices=jnp.full((num_sequences, pages_per_sequence), num_pages, jnp.int32),
            lengths=jnp.zeros(num_sequences, jnp.int32),
            ref_counts=jnp.zeros(num_pages, jnp.int32),
            free_pages=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
            num_free=jnp.asarray(num_pages, jnp.int32),
            page_size=page_size,
        )

    @property
    def num_sequences(self) -> int:
        """Rows of the table (B); as a row number, the padding sentinel."""
        return self.page_indices.shape[0]

    @property
    def pages_per_sequence(self) -> int:
        """Pages that one sequence can map at most."""
        return self.page_indices.shape[1]

    @property
    def num_pages(self) -> int:
        """Pages in the pool (P); as a page, the unmapped sentinel."""
        (num_pages,) = self.ref_counts.shape
        return num_pages

    @property
    def num_slots(self) -> int:
        """Token slots in the pool; as a slot, the sentinel for nowhere."""
        return self.num_pages * self.page_size

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can store at most."""
        return self.pages_per_sequence * self.page_size

    @property
    def pages_in_use(self) -> Int32[Array, ""]:
        """Pages that a row maps or a pin holds, `[] int32`."""
        return self.num_pages - self.num_free

    def flat_slots(self, indices: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
        """Finds where tokens of each sequence lie in the pool.

        Args:
          indices: `[B, T] int32`, token numbers within each sequence.

        Returns:
          `[B, T] int32` flat slots; `num_slots` for a token that is not stored, that is one
          outside `[0, lengths[b])`. So a row whose `reserve` was refused writes nowhere.
        """
        self._require_rows("indices", indices)
        stored = (indices >= 0) & (indices < self.lengths[:, None])
        columns = jnp.where(stored, indices // self.page_size, self.pages_per_sequence)
        pages = self.page_indices.at[self._row_numbers[:, None], columns].get(
            mode="fill", fill_value=self.num_pages
        )
        known = (pages >= 0) & (pages < self.num_pages)
        forbid(
            stored & ~known,
            f"sequence {{sequence}} maps page {{page}}, want a page in [0, {self.num_pages})",
            sequence=self._sequences[:, None],
            page=pages,
        )
        slots = pages * self.page_size + indices % self.page_size
        return jnp.where(stored & known, slots, self.num_slots)

    def reserve(
        self, wanted: Int32[Array, "B"], max_tokens: int | None = None
    ) -> tuple["PageTable", Bool[Array, "B"]]:
        """Lengthens sequences and maps the pages that their new tokens need.

        Pages are granted in slot order and nobody overtakes: from the first row on that finds
        too few free pages, every row that needs a page is refused, so that a long prompt is not
        starved by shorter ones behind it. Rows that need no new page are not affected. (Where no
        row needs more than one page, as in decode, this is plain first come, first served.)
        A row is refused, too, if it would pass `capacity`, or if its next token falls in a
        partial page that others hold as well: it needs `make_writable` first.

        Args:
          wanted: `[B] int32`, tokens to add; a row that wants 0 is always ok.
          max_tokens: static bound on `wanted` (1 for decode, the chunk for prefill), which bounds
            the work; rows that want more are refused. None means `capacity`.

        Returns:
          The table, and ok `[B] bool`. A row that is not ok is unchanged.

        Raises:
          ValueError: `max_tokens` is below 1, or `wanted` is not one number per row.
        """
        self._require_rows("wanted", wanted)
        limit = self.capacity if max_tokens is None else max_tokens
        if limit < 1:
            raise ValueError(f"max_tokens={max_tokens}: want at least 1, the most a row may add")
        room = self.capacity - self.lengths
        held = self._num_pages_for(self.lengths)
        self._forbid_bad_pages(held)
        forbid(
            (wanted < 0) | (wanted > limit) | (wanted > room),
            f"sequence {{sequence}} maps {{held}} of at most {self.pages_per_sequence} pages (from "
            f"page {{page}} on) and wants {{wanted}} more tokens: want 0 to {limit} a call, and "
            "{room} fit",
            sequence=self._sequences,
            held=held,
            page=self.page_indices[:, 0],
            wanted=wanted,
            room=room,
        )
        _, shared = self._write_page()
        fits = (wanted >= 0) & (wanted <= limit) & (wanted <= room) & ~shared
        demand = jnp.where(fits, self._num_pages_for(self.lengths + wanted) - held, 0)
        max_pages = min(-(-limit // self.page_size), self.pages_per_sequence)
        ref_counts, num_free, pages, granted = take_pages(
            self.ref_counts, self.free_pages, self.num_free, demand, max_pages
        )
        ok = (wanted == 0) | (fits & granted)
        columns = held[:, None] + jnp.arange(max_pages, dtype=jnp.int32)[None, :]
        # Where nothing is granted this writes the sentinel over the sentinel.
        page_indices = self.page_indices.at[self._row_numbers[:, None], columns].set(
            pages, mode="drop"
        )
        table = dataclasses.replace(
            self,
            page_indices=page_indices,
            lengths=self.lengths + jnp.where(ok, wanted, 0),
            ref_counts=ref_counts,
            num_free=num_free,
        )
        return table, ok

    def make_writable(
        self, mask: Bool[Array, "B"]
    ) -> tuple["PageTable", CopyPlan, Bool[Array, "B"]]:
        """Gives rows a last page of their own where their next token would fall in a shared one.

        Rows are served in slot order; the last one left on a page keeps it and copies nothing.

        Args:
          mask: `[B] bool`, rows that are about to store a token.

        Returns:
          The table; the `CopyPlan` (`[B * page_size]` slots) that every layer applies before it
          writes; and ok `[B] bool`. A row that is not ok found no free page and is unchanged; a
          row that is ok, if in the mask, may now reserve and write.
        """
        self._require_rows("mask", mask)
        pages, shared = self._write_page()
        shared = shared & mask
        remaining = count_references(self.ref_counts, pages) - rank_among_equals(
            jnp.where(shared, pages, self.num_pages)
        )
        leaves = shared & (remaining > 1)
        ref_counts, num_free, taken, granted = take_pages(
            self.ref_counts, self.free_pages, self.num_free, leaves.astype(jnp.int32), 1
        )
        fresh = taken[:, 0]
        moved = leaves & granted
        columns = jnp.where(moved, self.lengths // self.page_size, self.pages_per_sequence)
        left = jnp.where(moved, pages, self.num_pages)
        table = dataclasses.replace(
            self,
            page_indices=self.page_indices.at[self._row_numbers, columns].set(fresh, mode="drop"),
            ref_counts=ref_counts.at[left].add(-1, mode="drop"),
            num_free=num_free,
        )
        offsets = jnp.arange(self.page_size, dtype=jnp.int32)[None, :]
        used = moved[:, None] & (offsets < (self.lengths % self.page_size)[:, None])
        source, target = (
            jnp.where(used, page[:, None] * self.page_size + offsets, self.num_slots).reshape(-1)
            for page in (pages, fresh)
        )
        alone = count_references(table.ref_counts, pages) == 1
        return table, CopyPlan(source, target), ~shared | moved | alone

    def release(self, mask: Bool[Array, "B"]) -> "PageTable":
        """Empties rows; pages that nobody else holds return to the stack.

        Args:
          mask: `[B] bool`, rows to empty. Under checkify, a row that is empty already raises.

        Returns:
          The table.
        """
        self._require_rows("mask", mask)
        forbid(
            mask & (self.lengths == 0),
            "sequence {sequence} is released twice: it maps no page (its first entry is page "
            f"{{page}}, and {self.num_pages} is unmapped); release rows that hold tokens",
            sequence=self._sequences,
            page=self.page_indices[:, 0],
        )
        return self._shorten(jnp.where(mask, 0, self.lengths))

    def trim(self, lengths: Int32[Array, "B"]) -> "PageTable":
        """Shortens rows from their end; pages no longer needed are given back.

        Args:
          lengths: `[B] int32`, tokens to keep. A row that holds no more than that is unchanged
            (under checkify, one that holds less raises).

        Returns:
          The table.
        """
        self._require_rows("lengths", lengths)
        forbid(
            (lengths < 0) | (lengths > self.lengths),
            "sequence {sequence} (from page {page} on) holds {held} tokens and cannot be trimmed "
            "to {wanted}",
            sequence=self._sequences,
            page=self.page_indices[:, 0],
            held=self.lengths,
            wanted=lengths,
        )
        return self._shorten(jnp.clip(lengths, 0, self.lengths))

    def fork(self, source: Int32[Array, "n"], target: Int32[Array, "n"]) -> "PageTable":
        """Lets empty rows map what other rows map; a later write needs `make_writable`.

        Args:
          source: `[n] int32`, rows to fork; `num_sequences` for an unused pair.
          target: `[n] int32`, distinct empty rows; `num_sequences` for an unused pair. A pair
            whose rows are out of range, or whose target is not empty, is left undone (under
            checkify it raises).

        Returns:
          The table.
        """
        wrong = (source < 0) | (source > self.num_sequences)
        pages, lengths = self._gather_rows(jnp.where(wrong, self.num_sequences, source))
        unused = wrong | (source == self.num_sequences)
        return self._map_onto(
            target,
            pages,
            lengths,
            unused,
            wrong,
            "sequence {source} cannot be forked",
            source=source // self.heads,
        )

    def attach(
        self, target: Int32[Array, "n"], pages: Int32[Array, "n m"], lengths: Int32[Array, "n"]
    ) -> "PageTable":
        """Lets empty rows map pages in use, which hold the first tokens of their texts.

        Prefix reuse between requests: the index of known prefixes pins their pages and attaches
        them to new requests. Full pages are never written again; to add tokens behind a partial
        last page, `make_writable` gives the row its own copy first.

        Args:
          target: `[n] int32`, distinct empty rows; `num_sequences` for an unused entry.
          pages: `[n, m] int32`, m at most `pages_per_sequence`: the pages of each row in the order
            of its text. Only the first `ceil(lengths[i] / page_size)` are looked at.
          lengths: `[n] int32`, tokens that the row takes over, at most `m * page_size`. An entry
            with another length, a page that is free or out of range, or a target that is not
            empty, is left undone (under checkify it raises).

        Returns:
          The table.

        Raises:
          ValueError: `pages` has more columns than a sequence can map.
        """
        columns = pages.shape[1]
        if columns > self.pages_per_sequence:
            raise ValueError(
                f"pages has {columns} columns, and a sequence maps at most "
                f"{self.pages_per_sequence} pages: attach fewer"
            )
        bad_length = (lengths < 0) | (lengths > columns * self.page_size)
        numbers = jnp.arange(self.pages_per_sequence, dtype=jnp.int32)[None, :]
        needed = numbers < self._num_pages_for(jnp.where(bad_length, 0, lengths))[:, None]
        padding = ((0, 0), (0, self.pages_per_sequence - columns))
        given = jnp.pad(pages, padding, constant_values=self.num_pages)
        free = needed & (count_references(self.ref_counts, given) == 0)
        unused = target == self.num_sequences
        first_free = jnp.take_along_axis(given, jnp.argmax(free, axis=1)[:, None], axis=1)[:, 0]
        forbid(
            ~unused & jnp.any(free, axis=1),
            "page {bad} cannot be attached to sequence {target}: it is free, or not in "
            f"[0, {self.num_pages})",
            bad=first_free,
            target=target // self.heads,
        )
        wrong = bad_length | jnp.any(free, axis=1)
        return self._map_onto(
            target,
            jnp.where(needed, given, self.num_pages),
            lengths,
            unused | wrong,
            ~unused & bad_length,
            f"{{wanted}} tokens of {columns} pages cannot be attached",
            wanted=lengths,
        )

    def reorder(self, parents: Int32[Array, "B"]) -> "PageTable":
        """Gives each row the mapping of its parent (beam search), duplicates included.

        Args:
          parents: `[B] int32`, row whose mapping each row takes; `num_sequences` empties it (so
            does a row out of range, which raises under checkify).

        Returns:
          The table; pages that no row maps any more are free.
        """
        self._require_rows("parents", parents)
        wrong = (parents < 0) | (parents > self.num_sequences)
        forbid(
            wrong,
            "sequence {sequence} (from page {page} on) has parent {parent}: want a row in "
            f"[0, {self.num_sequences}]",
            sequence=self._sequences,
            page=self.page_indices[:, 0],
            parent=parents // self.heads,
        )
        pages, lengths = self._gather_rows(jnp.where(wrong, self.num_sequences, parents))
        # New references first: a page that only changes hands must not pass through the stack.
        table = dataclasses.replace(self, ref_counts=self.ref_counts.at[pages].add(1, mode="drop"))
        table = table._drop(self.page_indices)
        return dataclasses.replace(table, page_indices=pages, lengths=lengths)

    def pin(self, pages: Int32[Array, "n"]) -> "PageTable":
        """Adds a reference to pages in use, so that they outlive the rows that map them.

        Args:
          pages: `[n] int32`; `num_pages` for an unused entry. A page that is free or out of
            range is left alone (under checkify it raises).

        Returns:
          The table.
        """
        counts = count_references(self.ref_counts, pages)
        forbid(
            (pages != self.num_pages) & (counts == 0),
            "entry {entry} pins page {page}, which no sequence maps: want a page in use, in "
            f"[0, {self.num_pages}), or {self.num_pages} for no page",
            entry=jnp.arange(pages.shape[0], dtype=jnp.int32),
            page=pages,
        )
        pages = jnp.where(counts > 0, pages, self.num_pages)
        return dataclasses.replace(self, ref_counts=self.ref_counts.at[pages].add(1, mode="drop"))

    def unpin(self, pages: Int32[Array, "n"]) -> "PageTable":
        """Takes back references that `pin` added; pages that nobody holds any more are free.

        Args:
          pages: `[n] int32`; `num_pages` for an unused entry. A page that is free or out of
            range is left alone (under checkify it raises).

        Returns:
          The table.
        """
        return self._drop(pages[:, None])

    def rows(self, slots: Int32[Array, "R"], later: Int32[Array, "R"]) -> "PageTable":
        """Views sequences as the rows of a step, for reading: where their tokens lie.

        Args:
          slots: `[R] int32`, sequences, repeated or not; `num_sequences` for an empty padding row.
          later: `[R] int32`, tokens at the end of the sequence that the row does not hold: those
            of rows after it. They count as not stored.

        Returns:
          A table of R rows, no operation of which may change the pool.
        """
        pages, lengths = self._gather_rows(slots)
        return dataclasses.replace(self, page_indices=pages, lengths=lengths - later)

    def _forbid_bad_pages(self, held: Int32[Array, "B"]) -> None:
        """Under checkify, raises about a page that a row maps and that is none in use."""
        columns = jnp.arange(self.pages_per_sequence, dtype=jnp.int32)[None, :]
        free = count_references(self.ref_counts, self.page_indices) == 0
        forbid(
            (columns < held[:, None]) & free,
            "sequence {sequence} maps page {page}, which is free, or not in "
            f"[0, {self.num_pages}): what lies there is not its own",
            sequence=self._sequences[:, None],
            page=self.page_indices,
        )

    @property
    def _sequences(self) -> Int32[Array, "B"]:
        """The sequence of each row."""
        return self._row_numbers // self.heads

    @property
    def _row_numbers(self) -> Int32[Array, "B"]:
        return jnp.arange(self.num_sequences, dtype=jnp.int32)

    def _require_rows(self, name: str, array: Array) -> None:
        if array.shape[0] != self.num_sequences:
            raise ValueError(
                f"{name} has shape {array.shape}, and the table {self.num_sequences} sequences: "
                f"want {name} of {self.num_sequences} rows"
            )

    def _num_pages_for(self, tokens: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        return (tokens + (self.page_size - 1)) // self.page_size

    def _gather_rows(
        self, slots: Int32[Array, "R"]
    ) -> tuple[Int32[Array, "R pages_per_sequence"], Int32[Array, "R"]]:
        pages = self.page_indices.at[slots].get(mode="fill", fill_value=self.num_pages)
        return pages, self.lengths.at[slots].get(mode="fill", fill_value=0)

    def _map_onto(
        self,
        target: Int32[Array, "n"],
        pages: Int32[Array, "n pages_per_sequence"],
        lengths: Int32[Array, "n"],
        unused: Bool[Array, "n"],
        wrong: Bool[Array, "n"],
        what: str,
        **values: Array,
    ) -> "PageTable":
        """Lets empty rows map pages with one reference more; `wrong` is named as `what`."""
        known = (target >= 0) & (target <= self.num_sequences)
        target_row = jnp.where(known & ~unused, target, self.num_sequences)
        old_pages, held = self._gather_rows(target_row)
        occurrences = jnp.zeros_like(self.lengths).at[target_row].add(1, mode="drop")
        repeated = occurrences.at[target_row].get(mode="fill", fill_value=0) > 1
        forbid(
            wrong | ~known | repeated | (held > 0),
            what + " to sequence {target}, which holds {held} tokens from page {page} on: want "
            f"distinct empty rows in [0, {self.num_sequences}]",
            target=target // self.heads,
            held=held,
            page=old_pages[:, 0],
            **values,
        )
        target_row = jnp.where((held > 0) | repeated, self.num_sequences, target_row)
        done = (target_row < self.num_sequences)[:, None]
        return dataclasses.replace(
            self,
            page_indices=self.page_indices.at[target_row].set(pages, mode="drop"),
            lengths=self.lengths.at[target_row].set(lengths, mode="drop"),
            ref_counts=self.ref_counts.at[jnp.where(done, pages, self.num_pages)].add(
                1, mode="drop"
            ),
        )

    def _write_page(self) -> tuple[Int32[Array, "B"], Bool[Array, "B"]]:
        """The partial last page of each row (`num_pages`: none), and whether others hold it."""
        partial = self.lengths % self.page_size > 0
        columns = jnp.where(partial, self.lengths // self.page_size, self.pages_per_sequence)
        pages = self.page_indices.at[self._row_numbers, columns].get(
            mode="fill", fill_value=self.num_pages
        )
        return pages, count_references(self.ref_counts, pages) > 1

    def _shorten(self, lengths: Int32[Array, "B"]) -> "PageTable":
        """Cuts rows to lengths that are no longer than theirs."""
        columns = jnp.arange(self.pages_per_sequence, dtype=jnp.int32)[None, :]
        kept = columns < self._num_pages_for(lengths)[:, None]
        table = self._drop(jnp.where(kept, self.num_pages, self.page_indices))
        page_indices = jnp.where(kept, self.page_indices, self.num_pages)
        return dataclasses.replace(table, page_indices=page_indices, lengths=lengths)

    def _drop(self, pages: Int32[Array, "n m"]) -> "PageTable":
        ref_counts, free_pages, num_free = drop_references(
            self.ref_counts, self.free_pages, self.num_free, pages
        )
        return dataclasses.replace(
            self, ref_counts=ref_counts, free_pages=free_pages, num_free=num_free
        )
