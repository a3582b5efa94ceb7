"""How an engine reuses prefixes: requests start on pages that hold their first tokens already."""

import collections
from collections.abc import Hashable

import numpy as np

from kvlab.research.executor import Executor
from kvlab.research.live_requests import LiveRequest
from kvlab.research.prefix_index import PrefixIndex, PromptBlocks, hash_blocks
from kvlab.research.requests import Request


class PrefixReuse:
    """Between the requests of an engine, its executor and the index of known prefixes.

    Attributes:
      index: what is known; None where nothing is reused, and every method then does nothing.
    """

    def __init__(self, executor: Executor, enabled: bool) -> None:
        """Nothing is known.

        Args:
          executor: the engine's.
          enabled: whether prefixes are to be reused.

        Raises:
          ValueError: they are to be, and the executor's cache cannot share them.
        """
        if enabled and executor.prefix_root is None:
            raise ValueError(
                f"reuse_prefixes=True given: {executor.prefix_obstacle}, or reuse_prefixes=False"
            )
        self.index = PrefixIndex(executor.page_size) if enabled else None
        self._executor = executor
        self._being_written: collections.Counter[Hashable] = collections.Counter()

    def blocks_of(self, request: Request) -> PromptBlocks | None:
        """The blocks of a request's prompt."""
        if self.index is None:
            return None
        page_size, root = self.index.page_size, self._executor.prefix_root
        if request.prompt_hashes is not None:
            return PromptBlocks(request.prompt_hashes[: len(request.prompt) // page_size])
        if not self._executor.vocab_size:  # a simulated prompt without content is like no other
            return PromptBlocks(())
        assert root is not None
        return hash_blocks(np.asarray(request.prompt, np.int32), page_size, root)

    def pages_for(self, live: LiveRequest) -> tuple[int, int]:
        """Pages that a waiting request would not need to take, and that could be given up for it.

        Both of the first pool.
        """
        if self.index is None:
            return 0, 0
        assert live.blocks is not None
        hit = self.index.find(live.blocks)
        given_up = self.index.num_idle - self.index.count_idle(hit)
        return hit.length // self.index.page_size, given_up

    def start(self, live: LiveRequest) -> bool:
        """Puts a request on the pages that hold its first tokens.

        Returns:
          False where another request is just writing the next of them: they are worth waiting for.
        """
        if self.index is not None:
            assert live.blocks is not None
            hit = self.index.find(live.blocks)
            full = hit.length // self.index.page_size
            missing = live.blocks.hashes[full:]
            if missing and missing[0] in self._being_written:
                return False
            slot, tokens, done = live.slots[0], live.prompt_tokens, hit.length
            self.index.use(live.blocks, tokens, hit)
            self.make_room(1)
            if done and not self._executor.attach(slot, hit.pages, done, tokens):
                done = full * self.index.page_size  # no page for a copy of the partial one
                if done:
                    self._executor.attach(slot, hit.pages[:full], done, tokens)
            self.index.give_back(hit.hashes[full:])  # a partial page has been copied
            live.hashes = list(hit.hashes[:full])
            live.done, live.writing = done, missing
            self._being_written.update(missing)
        live.started = True
        return True

    def publish(self, live: LiveRequest) -> None:
        """Lets others use the prompt of a request, now that prefill has written all of it."""
        if self.index is None:
            return
        assert live.blocks is not None
        pages = self._executor.mapped_pages(live.slots[0], len(live.blocks.hashes))
        pinned, added = self.index.insert(live.blocks, pages.tolist(), live.hashes)
        if pinned:
            self._executor.repin(pinned, ())
        live.hashes += added
        self._written(live)

    def leave(self, live: LiveRequest) -> None:
        """A request gives up its pages."""
        if self.index is not None:
            self.index.give_back(live.hashes)
            self._written(live)

    def make_room(self, pages: int) -> None:
        """Gives up known prefixes, where that helps, until so many pages are free."""
        if self.index is not None and self.index.num_idle:
            missing = pages - int(self._executor.free_pages()[0])
            if missing > 0:
                self._executor.repin((), self.index.evict(missing))

    def _written(self, live: LiveRequest) -> None:
        for digest in live.writing:
            self._being_written[digest] -= 1
            if not self._being_written[digest]:
                del self._being_written[digest]
        live.writing = ()
