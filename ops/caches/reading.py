"""What caches share: which slot a token takes, how stored blocks are attended to and gathered.

Axes as in `kvlab.ops.caches.protocol`; s keys a read block.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvlab.ops import attention, jax_kernels
from kvlab.ops.attention import AttentionOptions, Blocks
from kvlab.ops.caches.protocol import Step, Table
from kvlab.ops.cpu_kernels import attention as cpu_kernel
from kvlab.ops.implementations import jax_kernel, kernel_pool


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


def read_stored(
    query: jax.Array,
    step: Step,
    num_kv_heads: int,
    options: AttentionOptions,
    sources: Sequence[Blocks],
) -> jax.Array:
    """The output of `attend_stored`, without normalisers: kernels that JAX ships serve too.

    Raises:
      ValueError: the named implementation cannot serve.
      UnavailableError: `cpu` is named, and there is no compiler.
    """
    pool = sources[0].pool if len(sources) == 1 else None
    layer = (options.implementation, options.window, options.soft_cap)
    kernel = jax_kernel(*layer, query, pool)
    if kernel is None:
        return attend_stored(query, step, num_kv_heads, options.by_xla, sources)[0]
    if kernel not in jax_kernels.PAGED:
        return _attend_gathered(query, step, kernel, options, sources)
    assert isinstance(pool, jax_kernels.Pages)
    fields = (options.scale, options.soft_cap)
    return jax_kernels.decode(kernel, query, step.positions, step.valid, pool, *fields)


def _attend_gathered(
    query: jax.Array,
    step: Step,
    kernel: str | None,
    options: AttentionOptions,
    sources: Sequence[Blocks],
) -> jax.Array:
    """Attention over a copy of the rows' keys and values; see `attention.masked_attention`."""
    keys, values, positions, stored = gather_blocks(sources)
    mask = attention.attention_mask(step.positions, positions, stored, options.window)
    mask &= step.valid[:, :, None]
    return attention.masked_attention(query, keys, values, stored, mask, kernel, options)


def attend_stored(
    query: jax.Array,
    step: Step,
    num_kv_heads: int,
    options: AttentionOptions,
    sources: Sequence[Blocks],
) -> tuple[jax.Array, jax.Array]:
    """Attention over what a cache has stored.

    Args:
      query: [B, T, N, H] float.
      step: the tokens' places.
      num_kv_heads: K.
      options: scale, window, soft cap and implementation.
      sources: the step's rows of the cache.

    Returns:
      The output [B, T, N, H] in the query's dtype, and each query's logarithm of the normaliser
      [B, K, G, T] float32.

    Raises:
      ValueError: the named implementation cannot serve.
      UnavailableError: `cpu` is named, and there is no compiler.
    """
    if options.implementation in jax_kernels.BACKENDS:
        raise ValueError(
            f"implementation={options.implementation!r} cannot serve: it does not give the "
            "normalisers that retention asks for; use 'chunked'"
        )
    pools = [source.pool for source in sources]
    pool = kernel_pool(options.implementation, pools, query.dtype)
    if pool is not None:
        fields = (options.scale, options.window, options.soft_cap)
        return cpu_kernel.attend(query, step.positions, step.valid, pool, *fields)
    output, log_normaliser = attention.attend_blocks(
        query, step.positions, step.valid, num_kv_heads, sources, options
    )
    if options.implementation == "reference":
        output = _attend_gathered(query, step, None, options, sources)
    return output, log_normaliser


def gather_blocks(
    sources: Sequence[Blocks],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """All blocks side by side.

    Returns:
      Keys and values [B, S, K, H], their positions [B, S] int32 and whether each slot holds a
      token that may be seen [B, S] bool.
    """
    parts = []
    for source in sources:
        index = jnp.arange(source.count, dtype=jnp.int32)
        keys, values, positions, stored = jax.vmap(source.read)(index)
        parts.append(
            (
                keys.transpose(1, 0, 4, 2, 3),  # [n, B, K, H, s]
                values.transpose(1, 0, 3, 2, 4),  # [n, B, K, s, H]
                positions.swapaxes(0, 1),
                stored.swapaxes(0, 1),
            )
        )
    joined = [
        jnp.concatenate([a.reshape(a.shape[0], -1, *a.shape[3:]) for a in column], axis=1)
        for column in zip(*parts, strict=True)
    ]
    keys, values, positions, stored = joined
    return keys, values, positions, stored
