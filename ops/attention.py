"""Scaled dot-product attention over grouped KV heads: the contract, a reference, online softmax.

Axes: B sequences, T query positions, S key positions, N query heads, K KV heads, G = N/K query
heads per KV head, H head size, s keys a block.

`attend_blocks` is the one online-softmax loop. Dense attention feeds it slices of an array, caches
feed it their stored blocks, so all of them share its bits: keys arrive in blocks of one size,
whatever lies underneath, and a wholly masked block leaves the state exactly as it was. On CPU a
kernel in C++ does the same straight from where keys and values are stored
(`kvlab.ops.cpu_kernels`): bits differ from those of XLA, and agree among themselves as these do.
On TPUs and GPUs kernels that JAX ships serve one phase each (`kvlab.ops.jax_kernels`).

Over 400 lines, half of them docstrings, because the formula and the loop that must equal it are
read side by side.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvlab.ops import jax_kernels
from kvlab.ops.cpu_kernels import attention as cpu_kernel
from kvlab.ops.implementations import Pool, check_implementation, jax_kernel, kernel_pool

READ_BLOCK = 64  # keys a block
QUERY_BLOCK = 256  # queries a block in dense attention: bounds the live scores, skips the future

# Finite, so that no difference of two is NaN. A running maximum starts so far above the score of a
# masked key that the key's weight is exactly 0 even where nothing else has been seen.
_MASKED = -1e30
_LEAST = -1e25


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks of attention, static under jit.

    Args:
      scale: factor on the scores, usually head_dim ** -0.5.
      window: a query sees the last `window` positions, its own included; None is all of them.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2); None is off.
      implementation: None takes the best for the backend; a name takes that one or raises.

    Raises:
      ValueError: a window below 1, a soft cap of 0 or below, or an unknown implementation.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        """Validates the options."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} given: a window holds at least 1 position")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap={self.soft_cap} given: it must be above 0, or None for off")
        check_implementation(self.implementation)

    @property
    def by_xla(self) -> "AttentionOptions":
        """The same where a kernel of JAX that is named leaves a step to XLA."""
        if self.implementation not in jax_kernels.BACKENDS:
            return self
        return dataclasses.replace(self, implementation="chunked")


def attention_mask(
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    key_valid: Bool[Array, "B S"],
    window: int | None,
) -> Bool[Array, "B T S"]:
    """Which keys a query may see: valid ones, not after it, and inside its window.

    Args:
      query_positions: [B, T] int32, places in the text.
      key_positions: [B, S] int32.
      key_valid: [B, S] bool, False for padding.
      window: see `AttentionOptions`.
    """
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    mask = (distance >= 0) & key_valid[:, None, :]
    if window is not None:
        mask &= distance < window
    return mask


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    query_valid: Bool[Array, "B T"],
    key_valid: Bool[Array, "B S"],
    options: AttentionOptions,
) -> Float[Array, "B T N H"]:
    """Causal attention of dense arrays; any number of KV heads K that divides N.

    Args:
      query: [B, T, N, H] float.
      key: [B, S, K, H] float.
      value: [B, S, K, H] float.
      query_positions: [B, T] int32; a query sees keys at its position and before.
      key_positions: [B, S] int32, in ascending order along S where valid.
      query_valid: [B, T] bool; the output is 0 where False.
      key_valid: [B, S] bool; False keys are never seen.
      options: scale, window, soft cap and implementation. `reference` builds all scores, `cudnn`
        a mask [B, T, S]; `chunked` and `cpu` have memory linear in S.

    Returns:
      [B, T, N, H] in the query's dtype.

    Raises:
      ValueError: K does not divide N, or the named implementation cannot serve.
      UnavailableError: `cpu` is named, and there is no compiler.
    """
    check_heads(query.shape[2], key.shape[2])
    layer = (options.implementation, options.window, options.soft_cap)
    kernel = jax_kernel(*layer, query, None)
    if kernel is not None or options.implementation == "reference":
        mask = attention_mask(query_positions, key_positions, key_valid, options.window)
        mask &= query_valid[:, :, None]
        return masked_attention(query, key, value, key_valid, mask, kernel, options)
    options = options.by_xla
    dense = _dense_pool(key, value, key_positions, key_valid)
    pool = kernel_pool(options.implementation, [dense], query.dtype)
    if pool is not None:
        fields = (options.scale, options.window, options.soft_cap)
        return cpu_kernel.attend(query, query_positions, query_valid, pool, *fields)[0]
    return _chunked_attention(
        query, key, value, query_positions, key_positions, query_valid, key_valid, options
    )


def masked_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    key_valid: Bool[Array, "B S"],
    mask: Bool[Array, "B T S"],
    kernel: str | None,
    options: AttentionOptions,
) -> Float[Array, "B T N H"]:
    """Attention of dense arrays under a mask that is built: by cuDNN, or the formula.

    Args:
      query: [B, T, N, H] float.
      key: [B, S, K, H] float.
      value: [B, S, K, H] float.
      key_valid: [B, S] bool.
      mask: [B, T, S] bool, what a query may see, the window included.
      kernel: what `jax_kernel` chose; None is the formula.
      options: scale and soft cap.
    """
    # Padding can hold anything, NaN included: 0 x NaN must not reach the sum.
    key, value = (
        jnp.where(key_valid[:, :, None, None], array, jnp.zeros((), array.dtype))
        for array in (key, value)
    )
    if kernel is None:
        return reference_attention(query, key, value, mask, options)
    return jax_kernels.prefill(query, key, value, mask, options.scale)


def _dense_pool(
    key: jax.Array, value: jax.Array, key_positions: jax.Array, key_valid: jax.Array
) -> cpu_kernel.Pool:
    """Dense arrays as a pool whose units are the sequences."""
    batch = key.shape[0]
    keys = _padded(key, READ_BLOCK).transpose(0, 2, 3, 1)  # [B, K, H, S]
    values = _padded(value, READ_BLOCK).transpose(0, 2, 1, 3)  # [B, K, S, H]
    units = jnp.arange(batch, dtype=jnp.int32)[:, None]
    lengths = jnp.full(batch, key.shape[1], jnp.int32)
    positions = _padded(jnp.where(key_valid, key_positions, cpu_kernel.NOWHERE), READ_BLOCK)
    return cpu_kernel.Pool(
        {"codes": keys}, {"codes": values}, key.dtype.name, units, lengths, positions
    )


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError unless the KV heads divide the query heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        divisors = [k for k in range(1, num_heads + 1) if num_heads % k == 0]
        raise ValueError(
            f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}; "
            f"legal values: {', '.join(map(str, divisors))}"
        )


def reference_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
    options: AttentionOptions,
) -> Float[Array, "B T N H"]:
    """Attention written as its formula, in float32: all scores, one softmax.

    Source: Attention Is All You Need (arXiv 1706.03762), section 3.2.1, with KV heads shared by
    G query heads as in GQA (arXiv 2305.13245), section 2.2.

    Args:
      query: [B, T, N, H] float.
      key: [B, S, K, H] float.
      value: [B, S, K, H] float.
      mask: [B, T, S] bool; a query with no key gives 0.
      options: scale and soft cap are used, the mask already holds the window.
    """
    groups = query.shape[2] // key.shape[2]
    keys = jnp.repeat(key.astype(jnp.float32), groups, axis=2)
    values = jnp.repeat(value.astype(jnp.float32), groups, axis=2)
    scores = jnp.einsum(
        "BTNH,BSNH->BNTS", query.astype(jnp.float32), keys, precision=jax.lax.Precision.HIGHEST
    )
    scores = soft_capped(scores * options.scale, options.soft_cap)
    allowed = mask[:, None, :, :]
    weights = jax.nn.softmax(jnp.where(allowed, scores, _MASKED), axis=-1)
    weights = jnp.where(allowed, weights, 0.0)
    output = jnp.einsum("BNTS,BSNH->BTNH", weights, values, precision=jax.lax.Precision.HIGHEST)
    return output.astype(query.dtype)


def soft_capped(scores: Float[Array, "..."], soft_cap: float | None) -> Float[Array, "..."]:
    """`soft_cap * tanh(scores / soft_cap)`, or the scores where it is None."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Stored keys and values in blocks of one size.

    Attributes:
      read: gives the block of an index i32[]: keys [B, K, H, s], values [B, K, s, H], their
        positions [B, s] int32 and validity [B, s] bool. Called once, under a loop.
      first: i32[], first block that a query may see.
      end: i32[], one past the last such block.
      count: blocks that there are at most.
      pool: the same for kernels that read it where it lies; None where keys are not used as they
        are stored.
    """

    read: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array, jax.Array]]
    first: jax.Array
    end: jax.Array
    count: int
    pool: Pool | None = None


def attend_blocks(
    query: Float[Array, "B T N H"],
    query_positions: Int[Array, "B T"],
    query_valid: Bool[Array, "B T"],
    num_kv_heads: int,
    sources: Sequence[Blocks],
    options: AttentionOptions,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K G T"]]:
    """Online softmax over blocks of keys: running maximum, normaliser and weighted sum.

    Source: FlashAttention (arXiv 2205.14135), section 3.1.

    Args:
      query: [B, T, N, H] float.
      query_positions: [B, T] int32.
      query_valid: [B, T] bool; the output is 0 where False.
      num_kv_heads: K.
      sources: where keys and values lie, read one after the other.
      options: scale, window and soft cap.

    Returns:
      The output [B, T, N, H] in the query's dtype; and the logarithm of each query's normaliser
      [B, K, G, T] float32, a very low number for a query without keys.
    """
    batch, length, num_heads, head_dim = query.shape
    groups = num_heads // num_kv_heads
    grouped = _grouped(query, num_kv_heads)
    merged = (batch, num_kv_heads, groups * length)
    shape = (batch, num_kv_heads, groups, length)

    def body(source: Blocks, index: jax.Array, state: tuple[jax.Array, ...]) -> Any:
        maximum, normaliser, total = state
        keys, values, key_positions, key_valid = source.read(index)
        scores = _masked_scores(
            grouped, keys, shape, query_positions, query_valid, key_positions, key_valid, options
        )
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
        # A masked key weighs exactly 0 and an unchanged maximum rescales by exactly 1.
        weights = jnp.exp(scores - new_maximum[..., None])
        rescale = jnp.exp(maximum - new_maximum)
        # A slot nobody may see can hold anything, NaN included: 0 x NaN must not reach the sum.
        values = jnp.where(key_valid[:, None, :, None], values, jnp.zeros((), values.dtype))
        read = _dot("BKRS,BKSH->BKRH", weights.reshape(*merged, -1), values, query.dtype)
        total = total * rescale[..., None] + read.reshape(*shape, head_dim)
        return new_maximum, normaliser * rescale + weights.sum(axis=-1), total

    state = (
        jnp.full(shape, _LEAST, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    for source in sources:
        loop = functools.partial(body, source)
        state = jax.lax.fori_loop(source.first, source.end, loop, state)
    maximum, normaliser, total = state
    normaliser = jnp.where(normaliser == 0.0, 1.0, normaliser)
    output = total / normaliser[..., None]
    output = output.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)
    return output, maximum + jnp.log(normaliser)


def received_attention(
    query: Float[Array, "B T N H"],
    query_positions: Int[Array, "B T"],
    query_valid: Bool[Array, "B T"],
    num_kv_heads: int,
    log_normaliser: Float[Array, "B K G T"],
    block: tuple[jax.Array, ...],
    options: AttentionOptions,
) -> Float[Array, "B K s"]:
    """How much attention each key of a block gets: summed over queries, a mean over G heads.

    Args:
      query: [B, T, N, H] float.
      query_positions: [B, T] int32.
      query_valid: [B, T] bool; the others give nothing.
      num_kv_heads: K.
      log_normaliser: [B, K, G, T] float32, as `attend_blocks` gave it for these queries.
      block: what `Blocks.read` gave.
      options: those of `attend_blocks`.
    """
    batch, length, num_heads, _ = query.shape
    shape = (batch, num_kv_heads, num_heads // num_kv_heads, length)
    keys, _, key_positions, key_valid = block
    scores = _masked_scores(
        _grouped(query, num_kv_heads),
        keys,
        shape,
        query_positions,
        query_valid,
        key_positions,
        key_valid,
        options,
    )
    weights = jnp.where(scores == _MASKED, 0.0, jnp.exp(scores - log_normaliser[..., None]))
    return weights.sum(axis=3).mean(axis=2)


def _grouped(query: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] to [B, K, G * T, H]: the G query heads of a KV head read its keys together."""
    batch, length, num_heads, head_dim = query.shape
    groups = num_heads // num_kv_heads
    grouped = query.reshape(batch, length, num_kv_heads, groups, head_dim)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, groups * length, head_dim)


def _masked_scores(
    grouped: jax.Array,
    keys: jax.Array,
    shape: tuple[int, ...],
    query_positions: jax.Array,
    query_valid: jax.Array,
    key_positions: jax.Array,
    key_valid: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """Scores [B, K, G, T, s] of a block in float32, `_MASKED` where a query may not see a key."""
    mask = attention_mask(query_positions, key_positions, key_valid, options.window)
    mask = (mask & query_valid[:, :, None])[:, None, None]  # one for all heads: [B, 1, 1, T, s]
    scores = options.scale * _dot("BKRH,BKHS->BKRS", grouped, keys).reshape(*shape, -1)
    return jnp.where(mask, soft_capped(scores, options.soft_cap), _MASKED)


def _dot(
    equation: str, left: jax.Array, right: jax.Array, dtype: jnp.dtype | None = None
) -> jax.Array:
    """A product in the compute dtype (the left one's unless given), summed in float32."""
    dtype = left.dtype if dtype is None else dtype
    return jnp.einsum(
        equation,
        left.astype(dtype),
        right.astype(dtype),
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def block_range(
    query_positions: Int[Array, "B T"],
    query_valid: Bool[Array, "B T"],
    window: int | None,
    block: int,
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The blocks that any valid query may see, where key slot and position are the same.

    The range follows the batch, but not the bits: a block that is wholly masked for a row changes
    nothing in that row.

    Returns:
      First block and one past the last, i32[] each.
    """
    newest = jnp.max(jnp.where(query_valid, query_positions, -1))
    end = (newest + block) // block
    if window is None:
        return jnp.zeros_like(end), end
    never = jnp.iinfo(jnp.int32).max
    oldest = jnp.min(jnp.where(query_valid, query_positions, never))
    first = jnp.clip(oldest - (window - 1), 0, None) // block
    return jnp.minimum(first, end), end


def _chunked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    query_valid: jax.Array,
    key_valid: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """Online softmax over blocks of queries and keys of dense arrays."""
    batch, length, num_heads, head_dim = query.shape
    keys = _padded(key, READ_BLOCK).transpose(0, 2, 3, 1)  # [B, K, H, S]
    values = _padded(value, READ_BLOCK).transpose(0, 2, 1, 3)  # [B, K, S, H]
    positions, valid = _padded(key_positions, READ_BLOCK), _padded(key_valid, READ_BLOCK)
    num_blocks = positions.shape[1] // READ_BLOCK

    def read_block(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        def piece(array: jax.Array, axis: int) -> jax.Array:
            start = index * READ_BLOCK
            return jax.lax.dynamic_slice_in_dim(array, start, READ_BLOCK, axis)

        return piece(keys, 3), piece(values, 2), piece(positions, 1), piece(valid, 1)

    def attend(piece: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        part, part_positions, part_valid = piece
        mask_positions = jnp.where(part_valid, part_positions, -1)
        seen = valid & (positions <= jnp.max(mask_positions))
        if options.window is not None:
            oldest = jnp.min(jnp.where(part_valid, part_positions, jnp.iinfo(jnp.int32).max))
            seen &= positions > oldest - options.window
        blocks = seen.reshape(batch, num_blocks, READ_BLOCK).any(axis=(0, 2))
        first, end = jnp.argmax(blocks), num_blocks - jnp.argmax(blocks[::-1])
        source = Blocks(
            read_block,
            first.astype(jnp.int32),
            jnp.where(blocks.any(), end, first).astype(jnp.int32),
            num_blocks,
        )
        return attend_blocks(part, part_positions, part_valid, key.shape[2], [source], options)[0]

    if length <= QUERY_BLOCK:
        return attend((query, query_positions, query_valid))
    pieces = jax.tree.map(_query_pieces, (query, query_positions, query_valid))
    output = jax.lax.map(attend, pieces)  # [pieces, B, QUERY_BLOCK, N, H]
    return output.transpose(1, 0, 2, 3, 4).reshape(batch, -1, num_heads, head_dim)[:, :length]


def _query_pieces(array: jax.Array) -> jax.Array:
    """[B, T, ...] cut into [T / QUERY_BLOCK, B, QUERY_BLOCK, ...], padded with zeros."""
    padded = _padded(array, QUERY_BLOCK)
    cut = padded.reshape(padded.shape[0], -1, QUERY_BLOCK, *padded.shape[2:])
    return jnp.moveaxis(cut, 1, 0)


def _padded(array: jax.Array, multiple: int) -> jax.Array:
    """Zeros (or False) appended along axis 1 up to a multiple."""
    missing = -array.shape[1] % multiple
    return jnp.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2))
