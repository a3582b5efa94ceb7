"""No cache: a layer attends to the keys and values of its own step, and keeps nothing.

Every step's input is the whole text, so what a layer is handed is all that there is.
"""

import dataclasses

import jax

from kvlab.ops.attention import AttentionOptions, attention
from kvlab.ops.caches.protocol import Step, Table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecomputeCache:
    """The absence of a cache, behind the protocol of one."""

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
