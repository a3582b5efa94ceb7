"""The RoPE settings of a GGUF file.

Source of the keys: ggml's docs/gguf.md; of what they mean, llama.cpp.
"""

import math

import numpy as np

from kvlab.models.checkpoints.gguf_file import GgufFile
from kvlab.models.checkpoints.gguf_keys import GgufKeys
from kvlab.ops.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling, inverse_frequencies

_DEFAULT_THETA = 10_000.0  # llama.cpp's, for files that do not say
_FREQUENCY_TOLERANCE = 1e-4
_LLAMA3_HIGH = 4.0  # high_freq_factor of every published Llama 3


def read_positions(keys: GgufKeys, file: GgufFile, head_dim: int) -> tuple[Rope | None, int]:
    """Reads what a model knows of positions.

    Args:
      keys: the architecture's keys.
      file: the open file, for the divisors of Llama 3.
      head_dim: H.

    Returns:
      RoPE (None for GPT-2), and the longest text in tokens: under linear and YaRN scaling `factor`
      original lengths.

    Raises:
      CheckpointError: a scaling that is not supported, or RoPE over part of a head.
      ValueError: a number that is out of range.
    """
    context = keys.require("context_length")
    if keys.architecture == "gpt2":
        return None, context
    rotated = keys.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise keys.error(
            f"rotates {rotated} of {head_dim} dimensions a head; RoPE over part of a head is not "
            "supported"
        )
    theta = keys.get("rope.freq_base", _DEFAULT_THETA)
    kind = keys.get("rope.scaling.type")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    original = keys.get("rope.scaling.original_context_length", context)
    if kind is None:
        kind = "none" if factor in (0.0, 1.0) else "linear"
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise keys.error(f"scales RoPE twice: type {kind} and the tensor rope_freqs.weight")
        divisors = file.dequantized("rope_freqs.weight")
        return Rope(theta, _llama3(keys, divisors, Rope(theta), head_dim)), context
    longest = max(context, math.floor(original * factor))
    match kind:
        case "none":
            return Rope(theta), context
        case "linear":
            return Rope(theta, LinearScaling(factor)), longest
        case "yarn":
            return Rope(theta, _yarn(keys, factor, original)), longest
    raise keys.error(f"has RoPE scaling type {kind!r}; supported: none, linear, yarn, llama3")


def _yarn(keys: GgufKeys, factor: float, original: int) -> YarnScaling:
    """YaRN as llama.cpp reads it: its factors multiply the one inferred from `factor`."""
    if keys.get("rope.scaling.yarn_log_multiplier", 0.0):
        raise keys.error("sets rope.scaling.yarn_log_multiplier, which is not supported")
    if keys.get("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise keys.error("sets rope.scaling.yarn_ext_factor to other than 1: not supported")
    multiplier = keys.get("rope.scaling.attn_factor", 1.0)
    multiplier *= keys.get("rope.scaling.yarn_attn_factor", 1.0)
    return YarnScaling(
        factor=factor,
        original_max_length=original,
        beta_fast=keys.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.get("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=multiplier * (0.1 * math.log(factor) + 1.0),
    )


def _llama3(
    keys: GgufKeys, divisors: np.ndarray, plain: Rope, head_dim: int
) -> Llama3Scaling | None:
    """Finds the Llama 3 scaling that gives these divisors of the plain frequencies.

    Between its two ends the scaling multiplies a frequency f by (1 - s) / factor + s, with
    s = (original * f / 2 pi - low) / (high - low). That is a straight line in f, so two blended
    frequencies give original / (high - low) and low / (high - low). All three may be multiplied by
    one number without effect: low = 1 fixes it, as in every published Llama 3. Where only one is
    blended, high = 4 is taken too; what comes out is checked against every divisor.
    """
    factor = float(divisors.max())
    if divisors.shape != (head_dim // 2,) or not np.all((divisors >= 1) & np.isfinite(divisors)):
        raise keys.error("has a tensor rope_freqs.weight that is not Llama 3's")
    if factor == 1.0:
        return None
    turns = np.asarray(inverse_frequencies(plain, head_dim), np.float64) / (2 * math.pi)
    blended = (divisors > 1) & (divisors < factor)
    shares = (1 / divisors[blended] - 1 / factor) / (1 - 1 / factor)
    if blended.sum() > 1:
        slope, intercept = np.polyfit(turns[blended], shares, 1)
    elif blended.sum() == 1:
        intercept = -1 / (_LLAMA3_HIGH - 1)
        slope = (shares[0] - intercept) / turns[blended][0]
    else:
        raise keys.error(
            "has a tensor rope_freqs.weight that blends no frequencies: Llama 3's settings cannot "
            "be recovered from it"
        )
    if not (slope > 0 > intercept):
        raise keys.error("has a tensor rope_freqs.weight that is not Llama 3's")
    scaling = Llama3Scaling(
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=round(float(1 - 1 / intercept), 3),
        original_max_length=round(float(-slope / intercept)),
    )
    scaled = np.asarray(inverse_frequencies(Rope(plain.theta, scaling), head_dim), np.float64)
    wanted = 2 * math.pi * turns / divisors
    if not np.allclose(scaled, wanted, rtol=_FREQUENCY_TOLERANCE, atol=0):
        raise keys.error("has a tensor rope_freqs.weight that no Llama 3 scaling gives")
    return scaling
