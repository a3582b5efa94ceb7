"""The matrix products of a model: projections, embeddings and heads.

Axes: D model width, V vocabulary; leading axes are free.

One dtype rule: a product is computed in the dtype of its input. The weight is cast to that dtype,
sums run in float32, and the result is cast back. For float32 inputs the precision is HIGHEST
unless another is named: the default on GPUs and TPUs would multiply in TF32 or bfloat16.

A weight may be packed (`kvlab.ops.packed_weight`). What it holds is then multiplied as it is: the
kernel for CPU does not cast it down, and each row of its result has the same bits whatever the
other rows are and however many.
"""

from collections.abc import Sequence

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
    if weight.implementation == "cpu" and x.size > 0:
        return _by_kernel(x, [weight], [bias])[0]
    _check_sizes(x, weight, bias)
    length, count = weight.shape
    out = _contract(x, weight.unpacked().reshape(-1, length), 1, None)[..., :count]
    return _with_bias(out, bias).astype(x.dtype)


def _by_kernel(
    x: Float[Array, "*batch D_in"],
    weights: Sequence[PackedWeight],
    biases: Sequence[Float[Array, "_"] | None],
) -> list[Float[Array, "*batch _"]]:
    """As `linears`, over weights of one format, in one call of the kernel for CPU."""
    library.load()
    served = x if x.dtype in (jnp.float32, jnp.bfloat16) else x.astype(jnp.float32)
    arguments, results = [served], []
    for weight, bias in zip(weights, biases, strict=True):
        _check_sizes(x, weight, bias)
        added = jnp.zeros(0, jnp.float32) if bias is None else bias.astype(jnp.float32)
        arguments += weight.panels, weight.scales, added
        shape = *x.shape[:-1], weight.shape[1]
        results.append(jax.ShapeDtypeStruct(shape, served.dtype))
    call = jax.ffi.ffi_call("kvlab_linear", results, vmap_method="sequential")
    return [y.astype(x.dtype) for y in call(*arguments)]


def _check_sizes(x: jax.Array, weight: PackedWeight, bias: jax.Array | None) -> None:
    length, count = weight.shape
    if x.shape[-1] != length:
        raise ValueError(f"x has {x.shape[-1]} values a row, and the packed weight wants {length}")
    if bias is not None and bias.shape != (count,):
        raise ValueError(f"a bias {bias.shape} given, and the packed weight has {count} columns")


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


def linears(
    x: Float[Array, "*batch D_in"],
    weights: Sequence[Float[Array, "D_in _"] | PackedWeight],
    biases: Sequence[Float[Array, "_"] | None],
) -> list[Float[Array, "*batch _"]]:
    """Multiplies one x by several weights: `linear` of each, in the same bits.

    Weights that are packed in one format for CPU go through one call of the kernel, whose threads
    then meet once: a layer's query, key and value, or gate and up, are too small to wait for each.

    Args:
      x: `[..., D_in] float`; its dtype is the compute dtype.
      weights: `[D_in, D_out] float` or packed, one or more; each has its own D_out.
      biases: `[D_out] float` or None, one for each weight.

    Returns:
      `[..., D_out]` in x's dtype for each weight.

    Raises:
      ValueError: no weight, not as many biases as weights, or sizes that do not go together.
    """
    if not weights or len(weights) != len(biases):
        raise ValueError(f"{len(weights)} weights and {len(biases)} biases given; want 1 bias each")
    packed = [w for w in weights if isinstance(w, PackedWeight) and w.implementation == "cpu"]
    one_format = len({weight.format for weight in packed}) == 1
    if one_format and len(packed) == len(weights) and x.size > 0:
        return _by_kernel(x, packed, biases)
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


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
