"""What another format can say of a decoder: a config is written, read back and compared.

So nothing is exported that would be computed otherwise, whichever of two formats grows a field.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.config import DecoderConfig, RMSNorm
from kvlab.ops.rope import YarnScaling, attention_factor

_HOW_IT_RUNS = ("family", "param_dtype", "dtype")


def refuse_lost(wanted: DecoderConfig, came: DecoderConfig, form: str) -> None:
    """Compares a config with what a file in another format says of it.

    Args:
      wanted: the decoder that is exported.
      came: the config as the file gives it back.
      form: the format, for the error.

    Raises:
      CheckpointError: they compute different functions; it names the fields.
    """
    left, right = _resolved(wanted), _resolved(came)
    lost = [
        f"{field.name}={_shown(getattr(wanted, field.name))} would be read as "
        f"{_shown(getattr(came, field.name))}"
        for field in dataclasses.fields(DecoderConfig)
        if field.name not in _HOW_IT_RUNS
        and getattr(left, field.name) != getattr(right, field.name)
    ]
    if lost:
        raise CheckpointError(
            f"{form} has no counterpart for this {wanted.family} decoder: {'; '.join(lost)}"
        )


def with_scale_offset(
    config: DecoderConfig, flat: Mapping[str, jax.Array], offset: float
) -> tuple[DecoderConfig, dict[str, jax.Array]]:
    """Stores the scales of RMS norms around another number; what they multiply by stays.

    Args:
      config: the decoder; one with LayerNorm is left as it is.
      flat: its parameters by flat name.
      offset: the `scale_offset` wanted: 1 for Gemma in a Hugging Face folder, 0 in GGUF.

    Returns:
      The config and the parameters; changed scales are float32, whatever `param_dtype` says.

    Raises:
      CheckpointError: a scale whose distance from `offset` float32 does not hold.
    """
    if not isinstance(config.norm, RMSNorm) or config.norm.scale_offset == offset:
        return config, dict(flat)
    old, new = np.float32(config.norm.scale_offset), np.float32(offset)
    moved = dict(flat)
    for name in [name for name in flat if name.endswith("/scale")]:
        factors = np.asarray(flat[name], np.float32) + old
        scales = factors - new
        if not np.array_equal(scales + new, factors):
            raise CheckpointError(f"{name} cannot be stored around {offset:g}: float32 rounds it")
        moved[name] = jax.numpy.asarray(scales)
    norm = dataclasses.replace(config.norm, scale_offset=offset)
    return dataclasses.replace(config, norm=norm), moved


def _resolved(config: DecoderConfig) -> DecoderConfig:
    """The config with what it infers spelled out."""
    rope = config.rope
    if rope is not None and isinstance(rope.scaling, YarnScaling):
        scaling = dataclasses.replace(
            rope.scaling, attention_factor=attention_factor(rope), mscale=None, mscale_all_dim=None
        )
        rope = dataclasses.replace(rope, scaling=scaling)
    return dataclasses.replace(config, query_scale=config.attention_scale, rope=rope)


def _shown(value: object) -> str:
    """A field's value, once where it is the same for every layer."""
    if isinstance(value, tuple) and len(set(value)) == 1:
        value = value[0]
    return f"{value}"
