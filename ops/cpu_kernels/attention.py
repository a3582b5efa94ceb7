"""Attention by the CPU kernel: which stored keys and values it reads, and how it is called.

Axes: B rows of a step, T query positions, N query heads, K KV heads, G = N/K, H head size, n units
(pages, or rows of a contiguous cache), p slots of a unit, U units of a row, S slots of a row. The
kernel, `attention.cc`, reads units where they lie, in blocks of 64 keys whatever p is, in float32.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.ops.cpu_kernels import library
from kvlab.ops.storage import Storage, Stored

NOWHERE = int(jnp.iinfo(jnp.int32).max)
"""The position of a slot that holds no key."""

_QUERIES = ("float32", "bfloat16")
_STORAGES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4")


@dataclasses.dataclass(frozen=True)
class Pool:
    """Where the keys and values of a step's rows lie.

    Attributes:
      key: codes [n, K, H, p] and scale [n, K, 1, p], as `kvlab.ops.storage` keeps them.
      value: codes [n, K, p, H] and scale [n, K, p, 1].
      storage: of both.
      units: [B, U] int32, units of each row in order; one that is out of range holds no key.
      lengths: [B] int32, slots from there on hold no key.
      positions: [B, S] int32, of the slots' keys in the text, or `NOWHERE`; None where slots lie
        in the order of the text.
    """

    key: Stored
    value: Stored
    storage: Storage
    units: jax.Array
    lengths: jax.Array
    positions: jax.Array | None = None


def served_pool(pools: Sequence[Pool | None], dtype: jnp.dtype, must: bool) -> Pool | None:
    """The pool that the kernel can read, of all that a layer attends to, or None.

    Args:
      pools: of each source, None where its keys are not used as they are stored.
      dtype: of the queries.
      must: raise instead of None.

    Raises:
      ValueError: it cannot, and must.
    """
    pool = pools[0] if len(pools) == 1 else None
    if dtype.name not in _QUERIES:
        reason = f"it takes queries of {' or '.join(_QUERIES)}, not {dtype.name}"
    elif pool is None:
        reason = "it reads keys as one pool stores them: not kivi4, nor sinks placed in the cache"
    elif pool.storage not in _STORAGES:
        reason = f"it does not read storage={pool.storage}"
    else:
        return pool
    if must:
        raise ValueError(f"implementation='cpu' cannot serve: {reason}; use 'chunked'")
    return None


def attend(
    query: jax.Array,
    query_positions: jax.Array,
    query_valid: jax.Array,
    pool: Pool,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention over a pool; see `kvlab.ops.attention.attend_blocks`.

    Args:
      query: [B, T, N, H] float32 or bfloat16.
      query_positions: [B, T] int32.
      query_valid: [B, T] bool; the output is 0 where False.
      pool: what is stored.
      scale: factor on the scores.
      window: positions that a query sees, its own included; None is all.
      soft_cap: of the scores; None is off.

    Returns:
      The output [B, T, N, H] in the query's dtype, and the logarithm of each query's normaliser
      [B, K, G, T] float32.

    Raises:
      UnavailableError: there is no compiled kernel.
    """
    library.load()
    batch, length, num_heads, _ = query.shape
    num_kv_heads = pool.key["codes"].shape[1]
    shape = (batch, num_kv_heads, num_heads // num_kv_heads, length)
    nothing = jnp.zeros((0, 0, 0, 0), jnp.float32)
    positions = jnp.zeros((0, 0), jnp.int32) if pool.positions is None else pool.positions
    call = jax.ffi.ffi_call(
        "kvlab_attention",
        (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        vmap_method="sequential",
    )
    output, log_normaliser = call(
        query,
        pool.key["codes"],
        pool.key.get("scale", nothing),
        pool.value["codes"],
        pool.value.get("scale", nothing),
        pool.units,
        pool.lengths,
        positions,
        query_positions,
        query_valid,
        scale=np.float32(scale),
        window=np.int64(0 if window is None else window),
        soft_cap=np.float32(0.0 if soft_cap is None else soft_cap),
    )
    return output, log_normaliser
