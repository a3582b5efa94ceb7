"""Normalisation of the last axis; float32 inside, whatever comes in.

Axes: D the normalised axis (model width, or head size for QK-norm); leading axes are free.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def _along_last(vector: Float[Array, "D"], ndim: int) -> Float[Array, "*ones D"]:
    """A vector as float32, with the leading axes of 1 that strict rank promotion wants."""
    return jnp.expand_dims(vector.astype(jnp.float32), tuple(range(ndim - 1)))


def rms_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, "D"],
    epsilon: float,
    scale_offset: float = 0.0,
) -> Float[Array, "*batch D"]:
    """Divides by the root mean square and multiplies by a learned scale.

    The scale is applied in float32 and the product rounded once; transformers' Llama rounds to
    the input's dtype before it too. In float32 the two are the same.

    Source: "Root Mean Square Layer Normalization" (arXiv 1910.07467), section 4.

    Args:
      x: `[..., D] float`.
      scale: `[D] float`.
      epsilon: added to the mean square.
      scale_offset: added to the scale; Gemma stores its scales around 0 and has 1 here.

    Returns:
      `[..., D]` in x's dtype.
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + epsilon)
    return (normed * (_along_last(scale, x.ndim) + scale_offset)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, "D"],
    bias: Float[Array, "D"],
    epsilon: float,
) -> Float[Array, "*batch D"]:
    """Subtracts the mean, divides by the standard deviation, then scales and shifts.

    The variance is the mean square of what is left after the mean, not a difference of two
    large sums, which float32 would lose.

    Source: "Layer Normalization" (arXiv 1607.06450), section 3.

    Args:
      x: `[..., D] float`.
      scale: `[D] float`.
      bias: `[D] float`.
      epsilon: added to the variance.

    Returns:
      `[..., D]` in x's dtype.
    """
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + epsilon)
    shifted = normed * _along_last(scale, x.ndim) + _along_last(bias, x.ndim)
    return shifted.astype(x.dtype)
