"""No cache: a layer attends to the keys and values of its own step, and keeps nothing.

Every step's input is the whole text, so what a layer is handed is all that there is. In training a
row holds several texts, told apart by their segments (`kvlab.ops.segments`).
"""

import dataclasses

import jax

from kvlab.ops.attention import AttentionOptions, attention, attention_mask, masked_attention
from kvlab.ops.caches.protocol import Step, Table
from kvlab.ops.segments import segment_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecomputeCache:
    """The absence of a cache, behind the protocol of one.

    With segments attention is its formula (`reference_attention`), which has a derivative: the
    loop of online softmax has bounds that follow the batch, and cannot be differentiated backward.
    """

    __no_type_check__ = True  # as in PageTable

    segments: jax.Array | None = None  # i32[B, T]: the text of each token; None: a row is a text

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        step: Step,
        table: Table,
        options: AttentionOptions,
    ) -> tuple[jax.Array, "RecomputeCache"]:
        """Attends to the step's own keys and values; see `LayerCache.attend`."""
        del table
        if self.segments is not None:
            mask = attention_mask(step.positions, step.positions, step.valid, options.window)
            mask &= segment_mask(self.segments, self.segments) & step.valid[:, :, None]
            return masked_attention(query, key, value, step.valid, mask, None, options), self
        output = attention(
            query, key, value, step.positions, step.positions, step.valid, step.valid, options
        )
        return output, self

    def gather(self, table: Table) -> tuple[jax.Array, jax.Array]:
        """Raises: there are no stored keys to show.

        Raises:
          ValueError: always.
        """
        del table
        raise ValueError("placement=recompute stores no keys or values; use contiguous or paged")

    def fork(self, source: jax.Array, target: jax.Array) -> "RecomputeCache":
        """Nothing is held."""
        del source, target
        return self

    def reorder(self, parents: jax.Array) -> "RecomputeCache":
        """Nothing is held."""
        del parents
        return self

    def copy(self, source: jax.Array, target: jax.Array) -> "RecomputeCache":
        """Nothing is held."""
        del source, target
        return self

    def nbytes(self) -> int:
        """0."""
        return 0
