"""A cache in use, and one method for each program that runs over it.

Axes: B sequences (slots), R rows of a prefill call, n tokens of a decode call, D model width,
V vocabulary.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from kvlab.ops.page_pool import unchecked
from kvlab.ops.page_table import PageTable
from kvlab.ops.sampling import SamplingParams
from kvlab.research import inference, sequences
from kvlab.research.cache import Cache, CacheUse, cache_use
from kvlab.research.compilation import count_compilations
from kvlab.research.inference import InferenceConfig, Params
from kvlab.research.programs import compile_programs, stop_array


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a prompt: what one row of a prefill call takes.

    Attributes:
      slot: the sequence.
      ids: [tokens] int32, at most a chunk.
      prompt_tokens: of the whole prompt.
      stored: the sequence holds these tokens at its end already, and is only asked what follows.
    """

    slot: int
    ids: np.ndarray
    prompt_tokens: int
    stored: bool = False


class Calls:
    """Holds what prefill and decode hand back; arguments are not checked. Not thread-safe.

    Its programs are traced without checks for checkify; `inference` and `sequences` have them.

    Attributes:
      params: the decoder's parameters, packed where that is faster or wanted.
      config: the shapes.
      cache: the current cache.
      logits: [B, V] float32, what the model predicts next for each sequence.
      compile_count: programs compiled by this object's calls.
      compile_s: seconds that took.
    """

    def __init__(self, params: Params, config: InferenceConfig) -> None:
        """Builds an empty cache.

        Args:
          params: the decoder's parameters.
          config: the shapes; sessions of equal config share their compiled programs.
        """
        self.params = config.pack(params)
        self.config = config
        self.cache: Cache = config.init_cache()
        self.logits: jax.Array = config.init_logits()
        self.compile_count = 0
        self.compile_s = 0.0

    def warm_up(self) -> None:
        """Compiles prefill and decode without running them; see `compile_programs`."""
        compiled = compile_programs(self.params, self.config)
        self.compile_count += compiled.count
        self.compile_s += compiled.seconds

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of text that each sequence holds, [B] int32."""
        return np.asarray(self.cache.positions)

    def prefill_call(self, pieces: Sequence[Piece]) -> tuple[np.ndarray, jax.Array]:
        """One call of `inference.prefill`, unchecked: what `prefill` and engines are made of.

        Args:
          pieces: at most `config.rows`; those of one sequence in the order of its text, at most
            `config.rows_per_sequence`.

        Returns:
          Whether there was room, [len(pieces)] bool (a sequence without it is unchanged), and the
          hidden states [rows, chunk, D], left on the device.
        """
        config = self.config
        slots = np.full(config.rows, config.slots, np.int32)
        total, counts = np.zeros(config.rows, np.int32), np.zeros(config.rows, np.int32)
        tokens = np.zeros((config.rows, config.chunk), np.int32)
        stored = np.zeros(config.rows, bool)
        for row, piece in enumerate(pieces):
            count = len(piece.ids)
            slots[row], total[row], counts[row] = piece.slot, piece.prompt_tokens, count
            tokens[row, :count], stored[row] = piece.ids, piece.stored
        ok, states = self.prefill_rows(tokens, counts, slots, total, stored)
        return np.asarray(ok)[: len(pieces)], states

    def prefill_rows(self, *rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """One call of `inference.prefill`, whose results are not waited for.

        Args:
          *rows: its arguments from `tokens` on.

        Returns:
          ok [R] bool and the hidden states [R, chunk, D].
        """
        state = self.params, self.config, self.cache, self.logits
        with self._running():
            self.cache, self.logits, ok, states = inference.prefill(*state, *rows)
        return ok, states

    def evict(self, slots: Sequence[int]) -> None:
        """Applies retention to sequences whose prompts are complete; `prefill` does it itself."""
        if slots:
            mask = np.zeros(self.config.slots, bool)
            mask[list(slots)] = True
            with self._running():
                self.cache = sequences.evict(self.config, self.cache, mask)

    def decode_call(
        self,
        sampling: SamplingParams,
        limits: np.ndarray,
        stop_ids: Sequence[Sequence[int]],
        forced: np.ndarray,
        num_forced: np.ndarray,
    ) -> inference.Decoded:
        """One call of `inference.decode`, unchecked: what `decode` and engines are made of.

        Args:
          sampling: arrays of [B].
          limits: [B] int32, most tokens; 0 leaves a sequence alone.
          stop_ids: of each sequence, at most `MAX_STOP_IDS`.
          forced: [B, decode_steps] int32, fed before any is sampled.
          num_forced: [B] int32, how many of those are real.

        Returns:
          What was decoded, as NumPy arrays.
        """
        state = self.params, self.config, self.cache, self.logits
        stops = stop_array(stop_ids)
        with self._running():
            self.cache, self.logits, decoded = inference.decode(
                *state, sampling, limits, stops, forced, num_forced
            )
        return jax.device_get(decoded)

    def fork_call(self, source: int, targets: Sequence[int]) -> bool:
        """One call of `sequences.fork`: copies a sequence into empty slots.

        Returns:
          False where no page was free for the copy of a partial page; nothing has changed then.
        """
        padded = np.full(self.config.slots, self.config.slots, np.int32)
        padded[: len(targets)] = targets
        sources = np.where(padded < self.config.slots, source, self.config.slots).astype(np.int32)
        with self._running():
            self.cache, self.logits, ok = sequences.fork(
                self.config, self.cache, self.logits, sources, padded
            )
        return bool(ok)

    def reorder_call(self, parents: Sequence[int]) -> bool:
        """One call of `sequences.reorder`; returns as `fork_call`."""
        with self._running():
            self.cache, self.logits, ok = sequences.reorder(
                self.config, self.cache, self.logits, np.asarray(parents, np.int32)
            )
        return bool(ok)

    def attach(self, slot: int, pages: Sequence[int], length: int, prompt_tokens: int) -> bool:
        """Starts a sequence on pages that hold the first tokens of its prompt (prefix reuse).

        Args:
          slot: an empty slot.
          pages: pages in use, in the order of the text.
          length: tokens that they hold; a partial last page is copied.
          prompt_tokens: of the whole prompt.

        Returns:
          False where no page was free for the copy; nothing has changed then.
        """
        (table,) = self.cache.tables
        assert isinstance(table, PageTable)
        padded = np.full(table.pages_per_sequence, table.num_pages, np.int32)
        padded[: len(pages)] = pages
        arguments = np.int32(slot), padded, np.int32(length), np.int32(prompt_tokens)
        with self._running():
            self.cache, ok = sequences.attach(self.config, self.cache, *arguments)
        return bool(ok)

    def repin(self, pinned: Sequence[int], unpinned: Sequence[int]) -> None:
        """Adds pins to pages in use, and takes others away; see `PageTable.pin`."""
        (table,) = self.cache.tables
        assert isinstance(table, PageTable)
        width = table.pages_per_sequence
        for start in range(0, max(len(pinned), len(unpinned)), width):
            both = np.full((2, width), table.num_pages, np.int32)
            for row, pages in zip(both, (pinned, unpinned), strict=True):
                part = pages[start : start + width]
                row[: len(part)] = part
            with self._running():
                self.cache = sequences.repin(self.cache, *both)

    def release(self, slots: Sequence[int] | None = None) -> None:
        """Empties sequences (all of them by default); their pages are free at once."""
        held = np.flatnonzero(self.lengths)
        chosen = held if slots is None else [slot for slot in slots if slot in held]
        mask = np.zeros(self.config.slots, bool)
        mask[chosen] = True
        with unchecked():
            self.cache = sequences.release(self.cache, mask)

    def use(self) -> CacheUse | None:
        """The cache's bytes, measured from its arrays; None where nothing is stored."""
        return cache_use(self.cache, self.config.layer_specs)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Programs of the block have no checks, and what it compiles adds to the counts."""
        with count_compilations() as compilations, unchecked():
            yield
        self.compile_count += compilations.count
        self.compile_s += compilations.seconds
