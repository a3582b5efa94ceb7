"""The host's side of prefill and decode: a model's parameters, one cache, plain Python in and out.

Axes: B sequences (slots), D model width.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvlab.ops.page_table import PageTable
from kvlab.ops.sampling import Sampling, SamplingParams
from kvlab.research import inference
from kvlab.research.cache import unwrapped
from kvlab.research.calls import Calls, Piece
from kvlab.research.programs import stop_array

TokenIds = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What decode gave one sequence."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]  # natural, under the model without sampling filters
    stopped: bool  # ended with a stop token, the last of `tokens`
    stalled: bool  # no room for its next token: out of pages, or at max_length


class Session(Calls):
    """A cache in use, with arguments checked and prompts of any length; not thread-safe."""

    def prefill(
        self, prompts: Mapping[int, TokenIds] | Sequence[TokenIds], *, hidden: bool = True
    ) -> dict[int, np.ndarray]:
        """Appends prompts to sequences, in pieces of the one prefill shape.

        Args:
          prompts: token ids by slot, or a list of them for slots 0, 1, ...
          hidden: whether the hidden states are wanted; nothing is kept of them otherwise.

        Returns:
          Hidden states after the final norm of each prompt's tokens, [tokens, D], by slot;
          `inference.head` turns them into logits. Empty where they are not wanted.

        Raises:
          ValueError: a prompt that is empty, too long, or has ids outside the vocabulary; a slot
            that does not exist; too few free pages for all the prompts. Nothing is stored then.
        """
        by_slot = prompts if isinstance(prompts, Mapping) else dict(enumerate(prompts))
        arrays = {slot: self._checked(slot, ids) for slot, ids in by_slot.items()}
        self._check_room({slot: len(ids) for slot, ids in arrays.items()})
        chunk = self.config.chunk
        pieces = [
            (slot, start) for slot, ids in arrays.items() for start in range(0, len(ids), chunk)
        ]
        kept: dict[int, list[np.ndarray]] = {slot: [] for slot in arrays if hidden}
        for call in self._calls(pieces):
            _, given = self.prefill_call(
                [
                    Piece(slot, arrays[slot][start : start + chunk], len(arrays[slot]))
                    for slot, start in call
                ]
            )
            if hidden:
                fetched = np.asarray(given)
                for row, (slot, start) in enumerate(call):
                    kept[slot].append(fetched[row, : len(arrays[slot]) - start])
            if self.config.evicts:
                self.evict([slot for slot, start in call if start + chunk >= len(arrays[slot])])
        return {slot: np.concatenate(states) for slot, states in kept.items()}

    def _calls(self, pieces: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Cuts pieces (slot, start) into prefill calls, the pieces of a slot in their order."""
        rows, of_one = self.config.rows, self.config.rows_per_sequence
        waiting = list(pieces)
        while waiting:
            call: list[tuple[int, int]] = []
            rest: list[tuple[int, int]] = []
            taken: collections.Counter[int] = collections.Counter()
            for slot, start in waiting:
                fits = len(call) < rows and taken[slot] < of_one
                (call if fits else rest).append((slot, start))
                taken[slot] += fits
            yield call
            waiting = rest

    def decode(
        self,
        limits: int | Mapping[int, int],
        *,
        sampling: Sampling | Mapping[int, Sampling] = Sampling(),  # noqa: B008 (frozen)
        stop_ids: Sequence[int] = (),
        forced: Mapping[int, TokenIds] | None = None,
        steps_per_call: int | None = None,
    ) -> dict[int, Continuation]:
        """Continues sequences.

        Args:
          limits: most tokens for every sequence that holds any, or by slot.
          sampling: for every sequence, or by slot (greedy where not named).
          stop_ids: token ids that end a sequence, at most `MAX_STOP_IDS`.
          forced: token ids by slot, fed before any is sampled; they count towards the limit.
          steps_per_call: tokens a device call; None is `config.decode_steps`. 1 is the host loop,
            by the same compiled program.

        Returns:
          What each sequence of `limits` got, by slot.

        Raises:
          ValueError: too many stop ids, an unknown or empty slot, ids outside the vocabulary, or
            `steps_per_call` past `config.decode_steps`.
        """
        config = self.config
        if not isinstance(limits, Mapping):
            limits = {int(slot): limits for slot in np.flatnonzero(self.lengths)}
        lengths = self.lengths
        for slot, limit in limits.items():
            self._check_slot(slot)
            if lengths[slot] == 0:
                raise ValueError(f"slot {slot} is empty; prefill a prompt there first")
            if not isinstance(limit, int | np.integer) or limit < 0:
                raise ValueError(
                    f"limit {limit!r} for slot {slot} is no number of tokens; use 0, 1, 2, ..."
                )
        idle = [slot for slot in forced or {} if slot not in limits]
        if idle:
            raise ValueError(f"forced tokens for slots {idle}, but only {list(limits)} decode")
        steps = config.decode_steps if steps_per_call is None else steps_per_call
        if not 1 <= steps <= config.decode_steps:
            raise ValueError(f"steps_per_call={steps} given; use 1 to {config.decode_steps}")
        stops = [stop_ids] * config.slots
        stop_array(stops)
        fed = {slot: self._checked_ids(slot, ids) for slot, ids in (forced or {}).items()}
        requests = [
            sampling if isinstance(sampling, Sampling) else sampling.get(slot, Sampling())
            for slot in range(config.slots)
        ]
        params = SamplingParams.from_requests(requests)
        results = {slot: Continuation((), (), False, False) for slot in limits}
        while True:
            remaining = np.zeros(config.slots, np.int32)
            feed = np.zeros((config.slots, config.decode_steps), np.int32)
            num_feed = np.zeros(config.slots, np.int32)
            for slot, result in results.items():
                done = len(result.tokens)
                if not (result.stopped or result.stalled):
                    remaining[slot] = min(limits[slot] - done, steps)
                ids = fed.get(slot, feed[0, :0])[done : done + config.decode_steps]
                feed[slot, : len(ids)], num_feed[slot] = ids, len(ids)
            if not remaining.any():
                return results
            decoded = self.decode_call(params, remaining, stops, feed, num_feed)
            results = _extended(results, remaining, decoded)

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Copies a sequence into empty slots; paged tokens are shared, not copied.

        Args:
          source: the slot to copy.
          targets: distinct empty slots.

        Raises:
          ValueError: an unknown slot, a target in use, an empty source, or no free page for a
            partial page's copy; nothing has changed then.
        """
        for slot in (source, *targets):
            self._check_slot(slot)
        if self.lengths[source] == 0:
            raise ValueError(f"slot {source} is empty; there is nothing to fork")
        taken = [slot for slot in targets if self.lengths[slot] or slot == source]
        if taken or len(set(targets)) != len(targets):
            raise ValueError(
                f"fork targets {list(targets)} must be distinct empty slots"
                + (f"; {taken} hold a sequence: release them first" if taken else "")
            )
        if not self.fork_call(source, targets):
            raise ValueError(
                f"no free page to copy the partial page of slot {source} for {len(targets)} forks; "
                "release sequences or give more num_pages"
            )

    def reorder(self, parents: Sequence[int]) -> None:
        """Lets slots take over what others hold, as beams do; paged tokens are shared.

        Args:
          parents: for each slot, the slot that it takes over; `config.slots` empties it.

        Raises:
          ValueError: another number of parents than slots, an unknown or empty parent, or no free
            page for a partial page's copy; nothing has changed then.
        """
        slots, lengths = self.config.slots, self.lengths
        if len(parents) != slots:
            raise ValueError(f"{len(parents)} parents given for {slots} slots; give one for each")
        for slot, parent in enumerate(parents):
            if parent not in (slot, slots):
                self._check_slot(parent)
                if lengths[parent] == 0:
                    raise ValueError(
                        f"slot {slot} cannot take over slot {parent}, which is empty; parent "
                        f"{slots} empties a slot"
                    )
        if not self.reorder_call(parents):
            raise ValueError(
                "no free page to copy a partial page that slots would share; release sequences or "
                "give more num_pages"
            )

    def release(self, slots: Sequence[int] | None = None) -> None:
        """Empties sequences (all of them by default); their pages are free at once.

        Raises:
          ValueError: an unknown slot.
        """
        for slot in slots or ():
            self._check_slot(slot)
        super().release(slots)

    def _check_slot(self, slot: int) -> None:
        whole = isinstance(slot, int | np.integer) and not isinstance(slot, bool)
        if not whole or not 0 <= slot < self.config.slots:
            raise ValueError(
                f"slot {slot!r} does not exist; slots are 0 to {self.config.slots - 1}"
            )

    def _checked(self, slot: int, ids: TokenIds) -> np.ndarray:
        """The ids as int32, or a ValueError that says what is wrong with this prompt."""
        self._check_slot(slot)
        array = self._checked_ids(slot, ids)
        if not array.size:
            raise ValueError(f"the prompt for slot {slot} is empty; give at least one token id")
        held, context = int(self.lengths[slot]), self.config.model.max_length
        if array.size > context:
            raise ValueError(
                f"the prompt for slot {slot} has {array.size} tokens, past the model's context of "
                f"{context}; shorten it, or feed the rest as forced tokens of decode"
            )
        if held + array.size > self.config.max_length:
            raise ValueError(
                f"the prompt for slot {slot} has {array.size} tokens after {held} held, past "
                f"max_length={self.config.max_length}; shorten it or raise max_length (the model "
                f"takes {context})"
            )
        return array

    def _checked_ids(self, slot: int, ids: TokenIds) -> np.ndarray:
        """A list of whole numbers inside the vocabulary, as int32."""
        array = np.asarray(ids)
        if array.ndim != 1 or not (array.size == 0 or array.dtype.kind in "iuO"):
            raise ValueError(
                f"the ids for slot {slot} must be a list of whole numbers; got shape "
                f"{array.shape}, dtype {array.dtype}"
            )
        if array.dtype.kind == "O" and not all(isinstance(one, int | np.integer) for one in array):
            raise ValueError(f"the ids for slot {slot} must all be whole numbers; got {ids!r}")
        vocab_size = self.config.model.vocab_size
        wrong = array[(array < 0) | (array >= vocab_size)]
        if wrong.size:
            raise ValueError(
                f"token id {wrong[0]} for slot {slot} is out of range; ids are 0 to "
                f"{vocab_size - 1}"
            )
        return array.astype(np.int32)

    def _check_room(self, added: Mapping[int, int]) -> None:
        """Raises where the page pools have too few free pages for tokens added by slot."""
        for table, heads in map(unwrapped, self.cache.all_tables()):
            if not isinstance(table, PageTable):
                continue
            held, size = np.asarray(table.lengths), table.page_size
            wanted = sum(
                -(-(held[row] + count) // size) - -(-held[row] // size)
                for slot, count in added.items()
                for row in range(slot * heads, (slot + 1) * heads)
            )
            free = int(table.num_free)
            if wanted > free:
                raise ValueError(
                    f"the prompts need {wanted} more pages of {size} tokens and "
                    f"{free} of {table.num_pages} are free; release sequences, or give "
                    "a larger num_pages"
                )


def _extended(
    results: Mapping[int, Continuation], limits: np.ndarray, decoded: inference.Decoded
) -> dict[int, Continuation]:
    """Continuations with one call's tokens appended."""
    extended = dict(results)
    for slot, result in results.items():
        if limits[slot]:
            count = int(decoded.num_tokens[slot])
            extended[slot] = Continuation(
                result.tokens + tuple(decoded.tokens[slot, :count].tolist()),
                result.log_probs + tuple(decoded.log_probs[slot, :count].tolist()),
                bool(decoded.stopped[slot]),
                bool(decoded.stalled[slot]),
            )
    return extended
