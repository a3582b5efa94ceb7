"""The shapes of a session for given sequences, where the user names none."""

from kvlab.models.config import DecoderConfig
from kvlab.ops.specs import CacheSpec, Recompute
from kvlab.research.inference import InferenceConfig

_MAX_SLOTS = 8
_CHUNK = 128
_SMALLEST = 64  # tokens
_LARGE = 1024  # tokens: up to here lengths double, beyond they grow by as much
_RECOMPUTE_STEP = 16  # tokens: where every step computes max_length tokens, rounding costs time


def fitting_config(
    model: DecoderConfig,
    spec: CacheSpec,
    *,
    sequences: int,
    needed: int,
    group: int = 1,
    slots: int | None = None,
    max_length: int | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
    weights: str | None = None,
) -> InferenceConfig:
    """A configuration that holds some sequences, as many side by side as is sensible.

    Lengths are rounded up, so that inputs of similar length share compiled programs.

    Args:
      model: the decoder.
      spec: the cache of all layers.
      sequences: how many there are.
      needed: tokens of the longest; what is past the model's context is left out.
      group: sequences that run together or not at all, as the beams of a prompt.
      slots: sequences side by side; None is all of them up to 8, in whole groups, at least one.
      max_length: most tokens of a sequence; None is `needed`, rounded up.
      chunk: most tokens of a row of one prefill call; None is 128. Less where texts are shorter.
      implementation: of attention; None is the best available.
      weights: format of the weights; None is as loaded.

    Raises:
      ValueError: an impossible combination, as `InferenceConfig`.
    """
    recomputes = isinstance(spec.placement, Recompute)
    if max_length is None:
        max_length = min(_rounded(needed, recomputes), model.max_length)
    if chunk is None:
        chunk = max_length if recomputes else _CHUNK
    return InferenceConfig(
        model,
        spec,
        slots=slots or group * max(min(sequences, _MAX_SLOTS) // group, 1),
        max_length=max_length,
        chunk=chunk if recomputes else min(chunk, max_length),
        implementation=implementation,
        weights=weights,
    )


def _rounded(needed: int, recomputes: bool) -> int:
    if recomputes:
        return -(-needed // _RECOMPUTE_STEP) * _RECOMPUTE_STEP
    if needed > _LARGE:
        return -(-needed // _LARGE) * _LARGE
    return max(1 << (needed - 1).bit_length(), _SMALLEST)
