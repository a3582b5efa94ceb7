"""Rotary position embedding (RoPE) and the ways published models stretch it.

Axes: B sequences, T query positions, N heads (query or KV), H head size.

Pairing is half-split: dimension i turns with dimension i + H/2, as in Hugging Face checkpoints.
Frequencies are worked out in float32, one rounding a step, because checkpoints were trained that
way: at position 131,071 one last bit of a frequency turns a pair by 0.008 rad.
"""

import dataclasses
import math
from typing import assert_never

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Number = float | int  # config files write 4 as readily as 4.0


def _require(legal: bool, owner: object, field: str, wanted: str) -> None:
    """Raises a ValueError that names the field of `owner`, its value and its legal range."""
    if not legal:
        value = getattr(owner, field)
        raise ValueError(f"{type(owner).__name__}.{field}={value!r} given: it must be {wanted}")


def _require_factor(owner: "LinearScaling | DynamicNTK | Llama3Scaling | YarnScaling") -> None:
    legal = 1 <= owner.factor < math.inf
    _require(legal, owner, "factor", "a finite number of at least 1 (1 leaves RoPE as it is)")


def _require_original_length(owner: "DynamicNTK | Llama3Scaling | YarnScaling") -> None:
    legal = owner.original_max_length >= 1
    _require(legal, owner, "original_max_length", "at least 1 token: the length pretrained on")


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor`.

    Source: "Extending Context Window of Large Language Models via Positional Interpolation"
    (arXiv 2306.15595), section 2.3.

    Args:
      factor: longest text wanted over longest text trained on, at least 1.

    Raises:
      ValueError: a factor below 1.
    """

    factor: Number

    def __post_init__(self) -> None:
        """Validates the factor."""
        _require_factor(self)


@dataclasses.dataclass(frozen=True)
class DynamicNTK:
    """NTK-aware scaling whose base grows with the length of the prompt.

    The length is the prompt's own, fixed when the sequence is admitted: keys already cached are
    never turned again. transformers takes the longest row of the batch so far instead, and so
    changes the base while it generates; the two agree on a prompt run alone.

    Source: YaRN (arXiv 2309.00071), section 3.3 "dynamic scaling" and appendix A.1 for the base.

    Args:
      factor: how fast the base grows, at least 1.
      original_max_length: tokens; prompts up to this length are not scaled.

    Raises:
      ValueError: a factor or a length below 1.
    """

    factor: Number
    original_max_length: int

    def __post_init__(self) -> None:
        """Validates both fields."""
        _require_factor(self)
        _require_original_length(self)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Long waves divided by `factor`, short ones kept, and a linear blend between.

    Source: "The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.4.2, and the Llama 3.1
    reference code.

    Args:
      factor: divisor of the low frequencies, at least 1.
      low_freq_factor: waves longer than `original_max_length / low_freq_factor` are divided.
      high_freq_factor: waves shorter than `original_max_length / high_freq_factor` are kept.
      original_max_length: tokens pretrained on.

    Raises:
      ValueError: a factor or length below 1, or frequency factors that are not 0 < low < high.
    """

    factor: Number
    low_freq_factor: Number
    high_freq_factor: Number
    original_max_length: int

    def __post_init__(self) -> None:
        """Validates every field."""
        _require_factor(self)
        _require_original_length(self)
        _require(self.low_freq_factor > 0, self, "low_freq_factor", "above 0")
        legal = self.low_freq_factor < self.high_freq_factor < math.inf
        _require(legal, self, "high_freq_factor", f"above low_freq_factor={self.low_freq_factor}")


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """NTK-by-parts interpolation, with cos and sin multiplied by an attention factor.

    Source: YaRN (arXiv 2309.00071), sections 3.2 and 3.4.

    Args:
      factor: longest text wanted over longest text trained on, at least 1.
      original_max_length: tokens pretrained on.
      beta_fast: pairs that turn more often than this over the original length are kept.
      beta_slow: pairs that turn less often than this are divided by `factor`.
      attention_factor: multiplies cos and sin; None infers it from `factor`.
      mscale: with `mscale_all_dim`, the inferred factor is the ratio of the two (DeepSeek-V2).
        As in transformers they count only together, and None and 0 are both "absent".
      mscale_all_dim: see `mscale`.
      truncate: round the blend's ends to whole dimensions.

    Raises:
      ValueError: a factor or length below 1, betas that are not 0 < slow < fast, an attention
        factor or an mscale that is out of range.
    """

    factor: Number
    original_max_length: int
    beta_fast: Number = 32.0
    beta_slow: Number = 1.0
    attention_factor: Number | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Validates every field."""
        _require_factor(self)
        _require_original_length(self)
        _require(self.beta_slow > 0, self, "beta_slow", "above 0")
        legal = self.beta_slow < self.beta_fast < math.inf
        _require(legal, self, "beta_fast", f"above beta_slow={self.beta_slow}")
        legal = self.attention_factor is None or 0 < self.attention_factor < math.inf
        _require(legal, self, "attention_factor", "above 0, or None to infer it from factor")
        for field, value in (("mscale", self.mscale), ("mscale_all_dim", self.mscale_all_dim)):
            _require(value is None or 0 <= value < math.inf, self, field, "at least 0, or None")


Scaling = LinearScaling | DynamicNTK | Llama3Scaling | YarnScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding over the whole head; static under jit.

    Source: RoFormer (arXiv 2104.09864), section 3.2.

    Args:
      theta: base of the wavelengths, above 1 (10,000 in the paper, 500,000 in Llama 3).
      scaling: how texts longer than those trained on are reached; None is plain RoPE.

    Raises:
      ValueError: theta is not a finite number above 1.
    """

    theta: Number = 10_000.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        """Validates the base."""
        _require(1 < self.theta < math.inf, self, "theta", "a finite number above 1")


def attention_factor(rope: Rope) -> float:
    """What multiplies cos and sin, and so scores by its square: 1 for everything but YaRN."""
    yarn = rope.scaling
    if not isinstance(yarn, YarnScaling):
        return 1.0
    if yarn.attention_factor is not None:
        return float(yarn.attention_factor)
    log_factor = math.log(yarn.factor)
    if yarn.mscale and yarn.mscale_all_dim:
        return (0.1 * yarn.mscale * log_factor + 1) / (0.1 * yarn.mscale_all_dim * log_factor + 1)
    return 0.1 * log_factor + 1


def inverse_frequencies(
    rope: Rope, head_dim: int, prompt_lengths: Int[Array, "B"] | None = None
) -> Float[Array, "*rows half"]:
    """Radians that each pair of dimensions turns per token.

    Args:
      rope: base and scaling.
      head_dim: H, even.
      prompt_lengths: `[B] int32`, tokens of each sequence's prompt; read by `DynamicNTK` alone.

    Returns:
      `[H/2] float32`, or `[B, H/2] float32` under `DynamicNTK`.

    Raises:
      ValueError: an odd head size, one of 2 under `DynamicNTK` (its exponent divides by H - 2),
        or `DynamicNTK` without prompt lengths.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} given: RoPE turns pairs of dimensions, so it must be even"
        )
    # The power is taken in float64 and rounded: float32 powers differ between machines.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = np.float64(np.float32(rope.theta))
    periods = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / periods
    match rope.scaling:
        case None:
            return jnp.asarray(plain)
        case LinearScaling(factor=factor):
            return jnp.asarray(plain / np.float32(factor))
        case DynamicNTK() as dynamic:
            return _dynamic_frequencies(plain, dynamic, prompt_lengths)
        case Llama3Scaling() as llama3:
            return jnp.asarray(_llama3_frequencies(plain, llama3))
        case YarnScaling() as yarn:
            return jnp.asarray(_yarn_frequencies(periods, yarn, rope.theta))
        case unreachable:
            assert_never(unreachable)


def _dynamic_frequencies(
    plain: np.ndarray, scaling: DynamicNTK, prompt_lengths: Int[Array, "B"] | None
) -> Float[Array, "B half"]:
    """Frequencies of base theta * growth ** (H / (H - 2)), as a factor on the plain ones."""
    head_dim = 2 * plain.size
    if prompt_lengths is None:
        raise ValueError(
            "Rope.scaling=DynamicNTK takes its base from each prompt's length, and no "
            "prompt_lengths came: pass the lengths known at admission, [B] int32"
        )
    if head_dim == 2:
        raise ValueError("head_dim=2 given: DynamicNTK divides by head_dim - 2; use 4 or more")
    # Written on the excess, a prompt inside the original length grows by exactly 1 and keeps
    # the bits of the plain frequencies (1 ** y is exact).
    excess = jnp.maximum(prompt_lengths - scaling.original_max_length, 0).astype(jnp.float32)
    growth = 1 + excess * (scaling.factor / scaling.original_max_length)
    powers = -np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim - 2)
    return jnp.asarray(plain)[None, :] * jnp.power(growth[:, None], powers[None, :])


def _llama3_frequencies(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Divides long waves, keeps short ones, blends those between."""
    # Reciprocal, then product: torch divides a number by a tensor so, and where the blend starts
    # the subtraction below makes 5 last bits out of one.
    waves = np.float32(2 * math.pi) * (1 / plain)  # tokens a turn
    turns = np.float32(scaling.original_max_length) * (1 / waves)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = (turns - np.float32(low)) / np.float32(high - low)
    divided = plain / np.float32(scaling.factor)
    blended = (1 - kept_share) * plain / np.float32(scaling.factor) + kept_share * plain
    too_long = waves > np.float32(scaling.original_max_length / low)
    short = waves < np.float32(scaling.original_max_length / high)
    return np.where(too_long, divided, np.where(short, plain, blended))


def _yarn_frequencies(periods: np.ndarray, scaling: YarnScaling, theta: Number) -> np.ndarray:
    """Divided frequencies where a pair turns rarely, plain ones where often, a ramp between."""
    head_dim = 2 * periods.size

    def dimension_of(turns: Number) -> float:
        """The pair, as a real number, that makes this many turns over the original length."""
        wave = scaling.original_max_length / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(theta))

    first, last = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound is H - 1, not H/2 - 1, in the reference code and so in every checkpoint.
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    pairs = np.arange(periods.size, dtype=np.float32)
    divided_share = np.clip((pairs - np.float32(first)) / np.float32(width), 0, 1)
    kept_share = 1 - divided_share
    kept = np.float32(1) / periods
    divided = np.float32(1) / (np.float32(scaling.factor) * periods)
    return divided * (1 - kept_share) + kept * kept_share


def rotation(
    positions: Int[Array, "B T"],
    rope: Rope,
    head_dim: int,
    prompt_lengths: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """The cos and sin that `rotate` takes, so that a model works them out once for all layers.

    Args:
      positions: `[B, T] int32`, places in the text, below 2 ** 24 (exact in float32).
      rope: base and scaling.
      head_dim: H, even.
      prompt_lengths: `[B] int32` tokens; needed by `DynamicNTK` alone.

    Returns:
      cos and sin, each `[B, T, H/2] float32`, with YaRN's attention factor in them.

    Raises:
      ValueError: see `inverse_frequencies`.
    """
    frequencies = inverse_frequencies(rope, head_dim, prompt_lengths)
    # [H/2] is the same for every sequence, [B, H/2] is not: both become [B or 1, 1, H/2].
    frequencies = frequencies.reshape(-1, 1, head_dim // 2)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies
    factor = attention_factor(rope)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T N H"]:
    """Turns every head by the angles of its position.

    Args:
      x: `[B, T, N, H] float`, queries or keys.
      cos: `[B, T, H/2] float32`, from `rotation`.
      sin: `[B, T, H/2] float32`, from `rotation`.

    Returns:
      `[B, T, N, H]` in x's dtype; the arithmetic is float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def apply_rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    rope: Rope,
    prompt_lengths: Int[Array, "B"] | None = None,
) -> Float[Array, "B T N H"]:
    """Rotates queries or keys by their positions; see `rotation` and `rotate`.

    Args:
      x: `[B, T, N, H] float`, H even.
      positions: `[B, T] int32`, places in the text.
      rope: base and scaling.
      prompt_lengths: `[B] int32` tokens; needed by `DynamicNTK` alone.

    Returns:
      `[B, T, N, H]` in x's dtype.

    Raises:
      ValueError: see `inverse_frequencies`.
    """
    *_, head_dim = x.shape
    return rotate(x, *rotation(positions, rope, head_dim, prompt_lengths))
