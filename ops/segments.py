"""Several texts in one row: where each token stands in its own text, and whom it may see.

A row's segments number its texts from 1 on, rising along the row; 0 is padding. Axes: B rows, T
query tokens, S key tokens of a row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

PADDING = 0


def segment_positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The place of each token in its own text, which begins at 0.

    Args:
      segments: [B, T] int32.

    Returns:
      [B, T] int32.
    """
    places = jnp.arange(segments.shape[1], dtype=jnp.int32)
    places = jnp.broadcast_to(places[None], segments.shape)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return places - jax.lax.cummax(jnp.where(begins, places, 0), axis=1)


def segment_mask(
    query_segments: Int[Array, "B T"], key_segments: Int[Array, "B S"]
) -> Bool[Array, "B T S"]:
    """Which keys are of the query's own text; padding sees none and is seen by none.

    Args:
      query_segments: [B, T] int32.
      key_segments: [B, S] int32.
    """
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return same & (key_segments != PADDING)[:, None, :]
