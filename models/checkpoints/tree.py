"""From flat parameters to the tree of `kvlab.models.decoder`, the last step of every loader.

A flat name is the path in the tree, joined by slashes: `layers_3/attention/query/weight`.
"""

from collections.abc import Mapping

import jax
from flax import traverse_util

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import param_shapes
from kvlab.ops.packed_weight import PackedWeight

_NAMED = 3  # names an error spells out before it only counts


def flat_shapes(config: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter of a config, by flat name; nothing is allocated."""
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(config))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def nest(flat: Mapping[str, jax.Array], config: DecoderConfig) -> dict:
    """Checks flat parameters against a config and nests them.

    Args:
      flat: every parameter of the config by flat name, in `config.param_dtype`.
      config: the decoder they are for.

    Returns:
      The tree that `Decoder(config).apply({"params": tree}, ...)` takes.

    Raises:
      CheckpointError: a parameter is missing, is not one of the config's, is packed, or has another
        shape or dtype than the config gives it.
    """
    wanted = flat_shapes(config)
    missing = [name for name in wanted if name not in flat]
    if missing:
        raise CheckpointError(f"parameters are missing: {named(missing)}")
    extra = [name for name in flat if name not in wanted]
    if extra:
        raise CheckpointError(f"parameters that a {config.family} decoder lacks: {named(extra)}")
    for name, want in wanted.items():
        came = flat[name]
        if isinstance(came, PackedWeight):
            raise CheckpointError(f"parameter {name} is packed for products; give it as loaded")
        if came.shape != want.shape:
            raise CheckpointError(
                f"parameter {name} has shape {came.shape}; the config wants {want.shape}"
            )
        if came.dtype != want.dtype:
            raise CheckpointError(
                f"parameter {name} is {came.dtype}; the config wants param_dtype={want.dtype}"
            )
    return traverse_util.unflatten_dict(dict(flat), sep="/")


def named(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
