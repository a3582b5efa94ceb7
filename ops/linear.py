"""The matrix products of a model: projections, embeddings and heads.

Axes: D model width, V vocabulary; leading axes are free.

One dtype rule: a product is computed in the dtype of its input. The weight is cast to that dtype,
sums run in float32, and the result is cast back. For float32 inputs the precision is HIGHEST
unless another is named: the default on GPUs and TPUs would multiply in TF32 or bfloat16.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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


def linear(
    x: Float[Array, "*batch D_in"],
    weight: Float[Array, "D_in D_out"],
    bias: Float[Array, "D_out"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch D_out"]:
    """Multiplies by a weight and adds a bias: `x @ weight + bias`.

    Args:
      x: `[..., D_in] float`; its dtype is the compute dtype.
      weight: `[D_in, D_out] float`.
      bias: `[D_out] float`, added in float32 before the result is rounded.
      precision: of the product; None is HIGHEST for float32 and the backend's default otherwise.

    Returns:
      `[..., D_out]` in x's dtype.
    """
    out = _contract(x, weight, 0, precision)
    if bias is not None:
        out = out + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return out.astype(x.dtype)


def linear_transposed(
    x: Float[Array, "*batch D"],
    weight: Float[Array, "V D"],
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch V"]:
    """Multiplies by a weight stored the other way round: `x @ weight.T`, for tied heads.

    Args:
      x: `[..., D] float`; its dtype is the compute dtype.
      weight: `[V, D] float`.
      precision: see `linear`.

    Returns:
      `[..., V]` in x's dtype.
    """
    return _contract(x, weight, 1, precision).astype(x.dtype)


def embed(tokens: Int[Array, "B T"], weight: Float[Array, "V D"]) -> Float[Array, "B T D"]:
    """Looks up the row of each token.

    Args:
      tokens: `[B, T] int32`, ids in [0, V). An id outside gives a row of NaN: a wrong id shows
        in the output, where a clamped or wrapped one would pass for another token.
      weight: `[V, D] float`.

    Returns:
      `[B, T, D]` in weight's dtype.
    """
    rows = weight.at[tokens]
    return rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
