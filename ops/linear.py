"""The matrix products of a model: projections, embeddings and heads.

Axes: D model width, V vocabulary; leading axes are free.

One dtype rule: a product is computed in the dtype of its input. The weight is cast to that dtype,
sums run in float32, and the result is cast back. For float32 inputs the precision is HIGHEST
unless another is named: the default on GPUs and TPUs would multiply in TF32 or bfloat16.

A weight may be packed (`kvlab.ops.packed_weight`). What it holds is then multiplied as it is: the
kernel for CPU does not cast it down, and each row of its result has the same bits whatever the
other rows are and however many.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvlab.ops.cpu_kernels import library
from kvlab.ops.packed_weight import PackedWeight


def _contract(
    x: Float[Array, "*batch D"],
    weight: Float[Array, "rows columns"],
    weight_axis: int,
    precision: jax.lax.PrecisionLike,
) -> Float[Array, "*batch out"]:
    """Contracts x's last axis with one axis of the weight; the float32 sums come back."""
    if precision is None and x.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    axes = (((x.ndim - 1,), (weight_axis,)), ((), ()))
    return jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        axes,
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _packed(
    x: Float[Array, "*batch D_in"], weight: PackedWeight, bias: Float[Array, "D_out"] | None
) -> Float[Array, "*batch D_out"]:
    """As `linear`, by the implementation that the weight was packed for."""
    length, count = weight.shape
    if x.shape[-1] != length:
        raise ValueError(f"x has {x.shape[-1]} values a row, and the packed weight wants {length}")
    if bias is not None and bias.shape != (count,):
        raise ValueError(f"a bias {bias.shape} given, and the packed weight has {count} columns")
    if weight.implementation != "cpu" or x.size == 0:
        panels = weight.unpacked()
        out = _contract(x, panels.reshape(-1, length), 1, None)[..., :count]
        return _with_bias(out, bias).astype(x.dtype)
    library.load()
    served = x if x.dtype in (jnp.float32, jnp.bfloat16) else x.astype(jnp.float32)
    call = jax.ffi.ffi_call(
        "kvlab_linear",
        jax.ShapeDtypeStruct((*x.shape[:-1], count), served.dtype),
        vmap_method="sequential",
    )
    added = jnp.zeros(0, jnp.float32) if bias is None else bias.astype(jnp.float32)
    return call(served, weight.panels, weight.scales, added).astype(x.dtype)


def _with_bias(out: Float[Array, "*batch D"], bias: Float[Array, "D"] | None) -> jax.Array:
    if bias is None:
        return out
    return out + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(out.ndim - 1)))


def linear(
    x: Float[Array, "*batch D_in"],
    weight: Float[Array, "D_in D_out"] | PackedWeight,
    bias: Float[Array, "D_out"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch D_out"]:
    """Multiplies by a weight and adds a bias: `x @ weight + bias`.

    Args:
      x: `[..., D_in] float`; its dtype is the compute dtype.
      weight: `[D_in, D_out] float`, or packed.
      bias: `[D_out] float`, added in float32 before the result is rounded.
      precision: of the product; None is HIGHEST for float32 and the backend's default otherwise.
        A packed weight's sums are float32 always.

    Returns:
      `[..., D_out]` in x's dtype.
    """
    if isinstance(weight, PackedWeight):
        return _packed(x, weight, bias)
    return _with_bias(_contract(x, weight, 0, precision), bias).astype(x.dtype)


def linear_transposed(
    x: Float[Array, "*batch D"],
    weight: Float[Array, "V D"] | PackedWeight,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch V"]:
    """Multiplies by a weight stored the other way round: `x @ weight.T`, for tied heads.

    Args:
      x: `[..., D] float`; its dtype is the compute dtype.
      weight: `[V, D] float`, or `[D, V]` packed.
      precision: see `linear`.

    Returns:
      `[..., V]` in x's dtype.
    """
    if isinstance(weight, PackedWeight):
        return _packed(x, weight, None)
    return _contract(x, weight, 1, precision).astype(x.dtype)


def embed(
    tokens: Int[Array, "B T"], weight: Float[Array, "V D"] | PackedWeight
) -> Float[Array, "B T D"]:
    """Looks up the row of each token.

    Args:
      tokens: `[B, T] int32`, ids in [0, V). An id outside gives a row of NaN: a wrong id shows
        in the output, where a clamped or wrapped one would pass for another token.
      weight: `[V, D] float`, or `[D, V]` packed, so that a tied head is stored once.

    Returns:
      `[B, T, D]` in weight's dtype; float32 where it is packed.
    """
    if isinstance(weight, PackedWeight):
        return weight.columns(tokens)
    rows = weight.at[tokens]
    return rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
