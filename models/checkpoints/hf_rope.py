"""RoPE settings of a config.json, in both spellings.

Older files have `rope_theta` and `rope_scaling` (with "type" or "rope_type"); transformers 5 writes
`rope_parameters`, which may hold one object per layer type.
"""

import math

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.hf_fields import Fields
from kvlab.ops.rope import DynamicNTK, LinearScaling, Llama3Scaling, Rope, Scaling, YarnScaling

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")

# Every supported family's meaning of an absent rope_theta; Llama 2's first files rely on it.
_DEFAULT_THETA = 10_000.0


def read_rope(fields: Fields, max_positions: int) -> tuple[Rope, int]:
    """Reads the RoPE settings and the longest text they reach.

    Under `linear`, `dynamic` and `yarn` files keep `max_position_embeddings` at the length the
    model was pretrained on, and texts may be `factor` times as long.

    Args:
      fields: the top level of config.json.
      max_positions: `max_position_embeddings` in tokens; the original length of `dynamic`, and of
        `llama3` and `yarn` where they do not name one.

    Returns:
      The RoPE of every layer, and the longest text in tokens.

    Raises:
      CheckpointError: a type that is not supported, a field that is missing or not known, or two
        settings that differ (spellings, or layer types).
    """
    theta = fields.optional_number("rope_theta")
    spelled: dict[str, dict] = {}
    for name in ("rope_scaling", "rope_parameters"):
        spelled |= _by_layer_type(name, fields.optional_object(name))
    if not spelled:
        return Rope(_DEFAULT_THETA if theta is None else theta), max_positions
    ropes = {
        place: _read_one(Fields(mapping, f"{place}.", harmless=()), theta, max_positions)
        for place, mapping in spelled.items()
    }
    (first, rope), *others = ropes.items()
    for other, different in others:
        if different != rope:
            raise CheckpointError(
                f"{first}={spelled[first]} and {other}={spelled[other]} differ; one RoPE for all "
                "layers is supported"
            )
    return rope, _longest_text(rope.scaling, max_positions)


def _by_layer_type(name: str, mapping: dict | None) -> dict[str, dict]:
    """The RoPE objects in a field, by the place to name in errors."""
    if not mapping:
        return {}
    if not any(key in LAYER_TYPES for key in mapping):
        return {name: mapping}
    nested = Fields(mapping, f"{name}.", harmless=())
    objects = {f"{name}.{key}": nested.optional_object(key) for key in LAYER_TYPES}
    nested.finish()
    return {place: value for place, value in objects.items() if value is not None}


def _read_one(fields: Fields, outer_theta: float | None, max_positions: int) -> Rope:
    theta = fields.optional_number("rope_theta")
    if theta is not None and outer_theta is not None and theta != outer_theta:
        raise CheckpointError(f"rope_theta={outer_theta} and an inner rope_theta={theta} differ")
    if theta is None:
        theta = _DEFAULT_THETA if outer_theta is None else outer_theta
    kind, older = fields.optional_text("rope_type"), fields.optional_text("type")
    if kind is not None and older is not None and kind != older:
        raise CheckpointError(f"rope_type={kind!r} and type={older!r} differ")
    scaling = _read_scaling(fields, kind or older or "default", max_positions)
    fields.finish()
    return Rope(theta, scaling)


def _read_scaling(fields: Fields, kind: str, max_positions: int) -> Scaling | None:
    def original_length() -> int:
        length = fields.optional_integer("original_max_position_embeddings")
        return max_positions if length is None else length

    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(fields.number("factor"))
        case "dynamic":
            if original_length() != max_positions:
                raise CheckpointError(
                    f"original_max_position_embeddings={original_length()} of a dynamic RoPE is "
                    f"not max_position_embeddings={max_positions}, from which its base grows"
                )
            return DynamicNTK(fields.number("factor"), max_positions)
        case "llama3":
            return Llama3Scaling(
                factor=fields.number("factor"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_max_length=original_length(),
            )
        case "yarn":
            return YarnScaling(
                factor=fields.number("factor"),
                original_max_length=original_length(),
                beta_fast=fields.optional_number("beta_fast") or 32.0,
                beta_slow=fields.optional_number("beta_slow") or 1.0,
                attention_factor=fields.optional_number("attention_factor"),
                mscale=fields.optional_number("mscale"),
                mscale_all_dim=fields.optional_number("mscale_all_dim"),
                truncate=fields.flag("truncate", absent=True),
            )
    raise CheckpointError(
        f"RoPE scaling type {kind!r} is not supported; supported types: {', '.join(ROPE_TYPES)}"
    )


def _longest_text(scaling: Scaling | None, max_positions: int) -> int:
    match scaling:
        case LinearScaling(factor=factor):
            return math.floor(max_positions * factor)
        case DynamicNTK(factor=factor, original_max_length=original):
            return math.floor(original * factor)
        case YarnScaling(factor=factor, original_max_length=original):
            return max(max_positions, math.floor(original * factor))
    return max_positions
