"""Parameters packed for their products, once, after loading; what is saved is never packed.

Formats (`--weights`): None, as loaded, which changes layout alone: float32, or bfloat16 where that
is the dtype of the parameters or of the computation; or `float32`, `bfloat16`, `int8`, `int4` by
name. Quantised are the projections and the head, and with it a tied embedding; biases, norms and
embeddings that are only looked up stay as they are.
"""

import math
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import param_shapes
from kvlab.ops.packed_weight import (
    FORMATS,
    PackedWeight,
    best_implementation,
    pack,
    packed_bytes,
)

# By the id of an array that lives: sessions over one model share what is packed.
_PACKED: dict[tuple[int, bool, str, str], tuple[weakref.ref[jax.Array], PackedWeight]] = {}


def check_format(weights: str | None) -> None:
    """Refuses what is no format of weights.

    Raises:
      ValueError: an unknown name; the message lists the legal ones.
    """
    if weights is not None and weights not in FORMATS:
        raise ValueError(f"weights={weights!r} is not known; legal values: {', '.join(FORMATS)}")


def pack_params(
    params: Any, config: DecoderConfig, weights: str | None = None, kernel: bool = True
) -> Any:
    """Packs the weights of a decoder's products.

    Args:
      params: the tree of `kvlab.models.decoder`. Weights that are packed already stay.
      config: the decoder.
      weights: the format; see the top of this file.
      kernel: whether kvlab's own kernel may serve; without it, or where it cannot, products run
        through XLA, and nothing is packed for layout alone.

    Returns:
      The tree with `PackedWeight`s for arrays; `params` itself is unchanged.

    Raises:
      ValueError: an unknown format, or weights that are packed in another one.
    """
    check_format(weights)
    implementation = best_implementation() if kernel else "xla"
    wanted = weights or _format_as_loaded(config)
    if wanted is None or (implementation == "xla" and weights in (None, "float32")):
        return params
    flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
    for name, leaf in flat.items():
        if not _is_product(name, config):
            continue
        if not isinstance(leaf, PackedWeight):
            flat[name] = _packed(leaf, _is_embedding(name), wanted, implementation)
        elif weights not in (None, leaf.format):
            raise ValueError(f"{name} is packed as {leaf.format}, and weights={weights} are wanted")
    return traverse_util.unflatten_dict(flat, sep="/")


def param_bytes(config: DecoderConfig, weights: str | None = None) -> int:
    """Bytes of a decoder's parameters, from shapes alone.

    Args:
      config: the decoder.
      weights: the format of what is packed; None is `param_dtype` for all.

    Raises:
      ValueError: an unknown format.
    """
    check_format(weights)
    size, total = jnp.dtype(config.param_dtype).itemsize, 0
    shapes: dict[str, Any] = traverse_util.flatten_dict(param_shapes(config), sep="/")
    for name, leaf in shapes.items():
        if weights is None or not _is_product(name, config):
            total += size * math.prod(leaf.shape)
        else:
            shape = leaf.shape[::-1] if _is_embedding(name) else leaf.shape
            total += packed_bytes(shape, weights)
    return total


def _is_embedding(name: str) -> bool:
    """Whether a weight is stored for look-ups, [V, D]."""
    return "embed" in name.split("/")[-2]


def _is_product(name: str, config: DecoderConfig) -> bool:
    """Whether a parameter is the weight of a product, which is what is packed."""
    *_, module, kind = name.split("/")
    tied_head = module == "embed" and config.tie_embeddings
    return kind == "weight" and (tied_head or not _is_embedding(name))


def _format_as_loaded(config: DecoderConfig) -> str | None:
    """The format that changes no number; None where there is none."""
    dtypes = {config.param_dtype, config.dtype}
    if "float16" in dtypes:
        return None
    return "bfloat16" if "bfloat16" in dtypes else "float32"


def _packed(leaf: jax.Array, transposed: bool, wanted: str, implementation: str) -> PackedWeight:
    key = id(leaf), transposed, wanted, implementation
    known = _PACKED.get(key)
    if known is not None and known[0]() is leaf:
        return known[1]
    array = np.asarray(leaf)
    packed = pack(array.T if transposed else array, wanted, implementation)
    reference = weakref.ref(leaf, lambda _: _PACKED.pop(key, None))
    _PACKED[key] = reference, packed
    return packed
