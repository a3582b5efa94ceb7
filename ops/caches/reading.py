"""What caches whose slots are in text order share: which slot a token takes, how blocks are read.

Axes as in `kvlab.ops.caches.protocol`; s keys a read block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvlab.ops import attention
from kvlab.ops.attention import AttentionOptions
from kvlab.ops.caches.protocol import Step, Table


def written_indices(step: Step, table: Table) -> jax.Array:
    """Index within its sequence of each token that the step writes.

    The table's lengths already count the step's tokens; they are the last ones.

    Returns:
      i32[B, T]; meaningless where `step.write` is False.
    """
    order = step.write.astype(jnp.int32)
    if order.shape[1] > 1:  # a sum over one token is a kernel in every layer all the same
        order = jnp.cumsum(order, axis=1)
    return table.lengths[:, None] - order[:, -1:] + order - 1


def attend_in_order(
    query: jax.Array,
    step: Step,
    table: Table,
    num_kv_heads: int,
    options: AttentionOptions,
    block: int,
    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    gather: Callable[[], tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """Attention over a cache whose slot i of a sequence holds its token at position i.

    Args:
      query: [B, T, N, H] float.
      step: the tokens' places.
      table: the step's rows of the layer's table.
      num_kv_heads: K.
      options: scale, window, soft cap and implementation.
      block: keys a block.
      read: keys [B, K, H, s] and values [B, K, s, H] of block i32[], in their stored dtype.
      gather: keys and values [B, S, K, H] whole, for the reference implementation.

    Returns:
      [B, T, N, H] in the query's dtype.
    """
    if attention.resolve_implementation(options.implementation) == "reference":
        keys, values = gather()
        slots = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        stored = slots < table.lengths[:, None]
        slots = jnp.broadcast_to(slots, stored.shape)
        mask = attention.attention_mask(step.positions, slots, stored, options.window)
        values = jnp.where(stored[:, :, None, None], values, jnp.zeros((), values.dtype))
        return attention.reference_attention(
            query, keys, values, mask & step.valid[:, :, None], options
        )

    def read_block(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        keys, values = read(index)
        slots = index * block + jnp.arange(block, dtype=jnp.int32)[None]
        stored = slots < table.lengths[:, None]
        return keys, values, jnp.broadcast_to(slots, stored.shape), stored

    first, end = attention.block_range(step.positions, step.valid, options.window, block)
    return attention.attend_blocks(
        query, step.positions, step.valid, num_kv_heads, read_block, first, end, options
    )
