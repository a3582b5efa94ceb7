"""Random weights, drawn on the host.

Linen's own initialisation compiles one program a shape, 10 s for a model of two layers; drawing the
same kinds of numbers with NumPy takes a moment.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from kvlab.models.checkpoints.tree import flat_shapes
from kvlab.models.config import DecoderConfig, RMSNorm

_EMBEDDING_DEVIATION = 0.02


def random_params(config: DecoderConfig, seed: int) -> dict:
    """Draws the parameters of a config; a seed always gives the same numbers.

    Weights are normal with deviation 1 / sqrt(inputs), tables with 0.02, norms are neutral, biases
    are 0.

    Args:
      config: the decoder.
      seed: of the draws.

    Returns:
      Parameters in the tree of `kvlab.models.decoder`.
    """
    generator = np.random.default_rng(seed)
    flat: dict[str, jax.Array] = {}
    for name, shape in sorted(flat_shapes(config).items()):
        *_, module, kind = name.split("/")
        if kind == "bias":
            values = np.zeros(shape.shape, np.float32)
        elif kind == "scale":
            values = np.full(shape.shape, _neutral_scale(config), np.float32)
        else:
            deviation = _EMBEDDING_DEVIATION if "embed" in module else shape.shape[0] ** -0.5
            values = generator.standard_normal(shape.shape, np.float32) * np.float32(deviation)
        flat[name] = jnp.asarray(values.astype(shape.dtype))
    return traverse_util.unflatten_dict(flat, sep="/")


def _neutral_scale(config: DecoderConfig) -> float:
    """The scale that leaves a normed vector as it is."""
    return 1.0 - config.norm.scale_offset if isinstance(config.norm, RMSNorm) else 1.0
