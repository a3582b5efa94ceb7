"""Which pages hold the prefixes of earlier prompts: prefix reuse between requests.

Host-side bookkeeping; p is the page size in tokens. A block is a full page of a prompt. Blocks are
found by a hash of their content and of everything before them, so that equal hashes mean equal
prefixes ("Efficient Memory Management for Large Language Model Serving with PagedAttention",
arXiv 2309.06180, section 4.4, shares prefixes; hashing blocks by their chain is what vLLM does).

Only pages that prefill wrote belong in here: decode rounds differently, and a warm prefix would
not give the bits of a cold one. The index holds a pin on each of its pages (`PageTable.pin`).
A block is in use while a request maps it; the others are given up, least recently used first, when
pages run out. Whoever uses a block uses all before it, so those outlive it.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Hashable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class PromptBlocks:
    """A prompt as the index sees it.

    Attributes:
      hashes: one for each full page, of its content and everything before it.
      ids: the token ids, [tokens] int32; None where only hashes are known (a simulated trace).
    """

    hashes: tuple[Hashable, ...]
    ids: np.ndarray | None = None


def hash_blocks(ids: np.ndarray, page_size: int, root: bytes) -> PromptBlocks:
    """Hashes the full pages of a prompt.

    Args:
      ids: [tokens] int32, the prompt.
      page_size: tokens a page.
      root: what wrote the pages: model, specs, configuration. Other roots have other hashes.
    """
    whole = len(ids) // page_size * page_size
    blocks = np.ascontiguousarray(ids[:whole], np.int32).reshape(-1, page_size)
    hashes, parent = [], root
    for block in blocks:
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=16).digest()
        hashes.append(parent)
    return PromptBlocks(tuple(hashes), ids)


@dataclasses.dataclass(frozen=True)
class Hit:
    """What the index holds of a prompt.

    Attributes:
      hashes: of the blocks to use; one more than the prompt has, at its end, where the prompt (or
        what it shares) ends inside a page.
      pages: of those blocks.
      length: tokens of the prompt that they hold.
    """

    hashes: tuple[Hashable, ...]
    pages: tuple[int, ...]
    length: int


@dataclasses.dataclass
class _Block:
    page: int
    parent: Hashable
    ids: np.ndarray | None  # [p] int32
    users: int = 0
    # In the order they came: sets of bytes have another one in every process.
    children: dict[Hashable, None] = dataclasses.field(default_factory=dict)


class PrefixIndex:
    """The prefixes that pages of one pool hold.

    Attributes:
      asked_blocks: pages of the prompts that were started, a partial last one too.
      hit_blocks: those of them that were found whole; over `asked_blocks` it is the hit rate.
      asked_tokens: of those prompts.
      hit_tokens: those of them that were found, parts of a page too.
    """

    def __init__(self, page_size: int) -> None:
        """An empty index.

        Args:
          page_size: tokens a page.
        """
        self.page_size = page_size
        self.hit_blocks = self.asked_blocks = self.hit_tokens = self.asked_tokens = 0
        self._blocks: dict[Hashable, _Block] = {}
        self._roots: dict[Hashable, None] = {}
        self._idle: collections.OrderedDict[Hashable, None] = collections.OrderedDict()

    def __len__(self) -> int:
        """Blocks in the index, each with a page."""
        return len(self._blocks)

    @property
    def num_idle(self) -> int:
        """Blocks that no request uses: as many pages can be had back."""
        return len(self._idle)

    def count_idle(self, hit: Hit) -> int:
        """Blocks of a hit that no request uses yet."""
        return sum(digest in self._idle for digest in hit.hashes)

    def find(self, prompt: PromptBlocks) -> Hit:
        """The longest prefix of a prompt that is known; a miss ends it.

        Args:
          prompt: the prompt.
        """
        hashes: list[Hashable] = []
        for digest in prompt.hashes:
            if digest not in self._blocks:
                break
            hashes.append(digest)
        length = len(hashes) * self.page_size
        partial, shared = self._partial(prompt, hashes[-1] if hashes else None, length)
        if shared:
            hashes.append(partial)
        pages = tuple(self._blocks[digest].page for digest in hashes)
        return Hit(tuple(hashes), pages, length + shared)

    def _partial(self, prompt: PromptBlocks, parent: Hashable, length: int) -> tuple[Hashable, int]:
        """The known block after `length` tokens that shares most of the rest, and how much."""
        if prompt.ids is None:
            return None, 0
        rest = prompt.ids[length : length + self.page_size]
        children = self._roots if parent is None else self._blocks[parent].children
        best, most = None, 0
        for digest in children:
            ids = self._blocks[digest].ids
            if ids is not None and len(rest):
                differs = np.flatnonzero(ids[: len(rest)] != rest)
                shared = int(differs[0]) if differs.size else len(rest)
                if shared > most:
                    best, most = digest, shared
        return best, most

    def use(self, prompt: PromptBlocks, num_tokens: int, hit: Hit) -> None:
        """A request starts with what was found; its blocks stay until `give_back`.

        Args:
          prompt: the prompt.
          num_tokens: tokens of the prompt.
          hit: what `find` gave.
        """
        self.asked_blocks += -(-num_tokens // self.page_size)
        ends = hit.length == num_tokens and hit.length % self.page_size > 0
        self.hit_blocks += hit.length // self.page_size + ends
        self.asked_tokens += num_tokens
        self.hit_tokens += hit.length
        self._add_users(hit.hashes)

    def insert(
        self, prompt: PromptBlocks, pages: Sequence[int], used: Sequence[Hashable]
    ) -> tuple[list[int], list[Hashable]]:
        """Makes the blocks of a prompt known, whose pages prefill has just filled.

        Args:
          prompt: the prompt.
          pages: of its full blocks, in order.
          used: hashes of the blocks that its request uses already.

        Returns:
          The pages to pin, those of new blocks; and the hashes that the request now uses besides
          (its new blocks, and those that another request has made known meanwhile).
        """
        pinned: list[int] = []
        added: list[Hashable] = []
        parent: Hashable = None
        for number, (digest, page) in enumerate(zip(prompt.hashes, pages, strict=True)):
            if digest not in self._blocks:
                ids = None
                if prompt.ids is not None:
                    start = number * self.page_size
                    ids = np.array(prompt.ids[start : start + self.page_size], np.int32)
                self._blocks[digest] = _Block(int(page), parent, ids)
                siblings = self._roots if parent is None else self._blocks[parent].children
                siblings[digest] = None
                self._idle[digest] = None
                pinned.append(int(page))
            if digest not in used:
                added.append(digest)
            parent = digest
        self._add_users(added)
        return pinned, added

    def give_back(self, hashes: Sequence[Hashable]) -> None:
        """A request ends or is preempted.

        Args:
          hashes: of the blocks that it used, in the order of its prompt.
        """
        for digest in reversed(hashes):  # the end of a prefix is given up before its start
            block = self._blocks[digest]
            block.users -= 1
            if block.users == 0:
                self._idle[digest] = None

    def evict(self, count: int) -> list[int]:
        """Gives up blocks that nobody uses, least recently used first.

        Args:
          count: pages wanted.

        Returns:
          Pages to unpin, at most `count`.
        """
        pages: list[int] = []
        while self._idle and len(pages) < count:
            digest, _ = self._idle.popitem(last=False)
            block = self._blocks.pop(digest)
            siblings = self._roots if block.parent is None else self._blocks[block.parent].children
            del siblings[digest]
            pages.append(block.page)
        return pages

    def _add_users(self, hashes: Sequence[Hashable]) -> None:
        for digest in hashes:
            self._blocks[digest].users += 1
            self._idle.pop(digest, None)
