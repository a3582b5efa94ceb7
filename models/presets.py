"""Named configs: the published sizes of every family, and tiny ones for tests and trials.

Sources: the config.json that each model was published with. The number of parameters of each is
tested against the published one.
"""

import difflib
import math
from typing import NamedTuple

import jax

from kvlab.models.config import DecoderConfig, LayerNorm, RMSNorm
from kvlab.models.decoder import param_shapes
from kvlab.models.tokenizers.byte_tokenizer import MIN_VOCAB_SIZE
from kvlab.ops.rope import Llama3Scaling, Rope


class _Sizes(NamedTuple):
    """What most sizes of a family differ in: L, D, MLP width, N and K."""

    num_layers: int
    embed_dim: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int


def _llama(
    sizes: _Sizes,
    vocab_size: int,
    max_length: int,
    rope: Rope,
    *,
    family: str = "llama",
    head_dim: int | None = None,
    epsilon: float = 1e-5,
    tied: bool = False,
    window: int | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderConfig:
    """Llama's shape, which mistral, qwen2 and qwen3 share."""
    return DecoderConfig(
        **sizes._asdict(),
        family=family,
        vocab_size=vocab_size,
        head_dim=head_dim or sizes.embed_dim // sizes.num_heads,
        max_length=max_length,
        norm=RMSNorm(epsilon),
        rope=rope,
        windows=window,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tie_embeddings=tied,
    )


def _tiny(num_kv_heads: int, family: str = "llama", window: int | None = None) -> DecoderConfig:
    """Small enough that a sweep takes seconds; for the byte tokenizer."""
    sizes = _Sizes(2, 96, 256, 6, num_kv_heads)
    return _llama(sizes, MIN_VOCAB_SIZE, 1024, Rope(), family=family, window=window)


def _llama2(sizes: _Sizes) -> DecoderConfig:
    return _llama(sizes, 32_000, 4096, Rope())


def _llama3(sizes: _Sizes, divisor: float | None = None, tied: bool = False) -> DecoderConfig:
    """Llama 3, or with the divisor of its RoPE scaling 3.1 (8) and 3.2 (32)."""
    if divisor is None:
        return _llama(sizes, 128_256, 8192, Rope(500_000.0), tied=tied)
    scaling = Llama3Scaling(divisor, 1.0, 4.0, 8192)
    return _llama(sizes, 128_256, 131_072, Rope(500_000.0, scaling), tied=tied)


def _smollm2(sizes: _Sizes, theta: float) -> DecoderConfig:
    return _llama(sizes, 49_152, 8192, Rope(theta), tied=True)


def _mistral(vocab_size: int, rope: Rope, window: int | None) -> DecoderConfig:
    sizes = _Sizes(32, 4096, 14_336, 32, 8)
    return _llama(sizes, vocab_size, 32_768, rope, family="mistral", window=window)


def _qwen2(
    sizes: _Sizes, max_length: int = 131_072, *, small: bool = False, epsilon: float = 1e-6
) -> DecoderConfig:
    """Qwen2 and 2.5; the sizes up to 3B have a smaller, tied vocabulary."""
    return _llama(
        sizes,
        151_936 if small else 152_064,
        max_length,
        Rope(1_000_000.0),
        family="qwen2",
        epsilon=epsilon,
        tied=small,
        qkv_bias=True,
    )


def _qwen3(sizes: _Sizes, *, tied: bool) -> DecoderConfig:
    return _llama(
        sizes,
        151_936,
        40_960,
        Rope(1_000_000.0),
        family="qwen3",
        head_dim=128,
        epsilon=1e-6,
        tied=tied,
        qk_norm=True,
    )


def _gemma2(sizes: _Sizes, head_dim: int, query_size: int) -> DecoderConfig:
    """Gemma 2: every other layer windowed, beginning with the first."""
    return DecoderConfig(
        **sizes._asdict(),
        family="gemma2",
        vocab_size=256_000,
        head_dim=head_dim,
        max_length=8192,
        norm=RMSNorm(1e-6, scale_offset=1.0),
        activation="gelu_tanh",
        rope=Rope(),
        windows=tuple(None if index % 2 else 4096 for index in range(sizes.num_layers)),
        soft_cap=50.0,
        final_soft_cap=30.0,
        query_scale=query_size**-0.5,
        embed_scale=sizes.embed_dim**0.5,
        post_norms=True,
        tie_embeddings=True,
    )


def _gpt2(num_layers: int, embed_dim: int, num_heads: int) -> DecoderConfig:
    return DecoderConfig(
        family="gpt2",
        vocab_size=50_257,
        num_layers=num_layers,
        embed_dim=embed_dim,
        hidden_dim=4 * embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=embed_dim // num_heads,
        max_length=1024,
        norm=LayerNorm(1e-5),
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
    )


PRESETS: dict[str, DecoderConfig] = {
    "tiny-mha": _tiny(6),
    "tiny-gqa": _tiny(2),
    "tiny-mqa": _tiny(1),
    "tiny-window": _tiny(2, "mistral", window=64),
    "llama-2-7b": _llama2(_Sizes(32, 4096, 11_008, 32, 32)),
    "llama-2-13b": _llama2(_Sizes(40, 5120, 13_824, 40, 40)),
    "llama-2-70b": _llama2(_Sizes(80, 8192, 28_672, 64, 8)),
    "llama-3-8b": _llama3(_Sizes(32, 4096, 14_336, 32, 8)),
    "llama-3-70b": _llama3(_Sizes(80, 8192, 28_672, 64, 8)),
    "llama-3.1-8b": _llama3(_Sizes(32, 4096, 14_336, 32, 8), 8.0),
    "llama-3.1-70b": _llama3(_Sizes(80, 8192, 28_672, 64, 8), 8.0),
    "llama-3.2-1b": _llama3(_Sizes(16, 2048, 8192, 32, 8), 32.0, tied=True),
    "llama-3.2-3b": _llama3(_Sizes(28, 3072, 8192, 24, 8), 32.0, tied=True),
    "smollm2-135m": _smollm2(_Sizes(30, 576, 1536, 9, 3), 100_000.0),
    "smollm2-360m": _smollm2(_Sizes(32, 960, 2560, 15, 5), 100_000.0),
    "smollm2-1.7b": _smollm2(_Sizes(24, 2048, 8192, 32, 32), 130_000.0),
    "mistral-7b-v0.1": _mistral(32_000, Rope(), 4096),
    "mistral-7b-v0.3": _mistral(32_768, Rope(1_000_000.0), None),
    "qwen2-0.5b": _qwen2(_Sizes(24, 896, 4864, 14, 2), small=True),
    "qwen2-1.5b": _qwen2(_Sizes(28, 1536, 8960, 12, 2), small=True),
    "qwen2-7b": _qwen2(_Sizes(28, 3584, 18_944, 28, 4)),
    "qwen2.5-0.5b": _qwen2(_Sizes(24, 896, 4864, 14, 2), 32_768, small=True),
    "qwen2.5-1.5b": _qwen2(_Sizes(28, 1536, 8960, 12, 2), small=True),
    "qwen2.5-3b": _qwen2(_Sizes(36, 2048, 11_008, 16, 2), 32_768, small=True),
    "qwen2.5-7b": _qwen2(_Sizes(28, 3584, 18_944, 28, 4)),
    "qwen2.5-14b": _qwen2(_Sizes(48, 5120, 13_824, 40, 8), epsilon=1e-5),
    "qwen2.5-32b": _qwen2(_Sizes(64, 5120, 27_648, 40, 8), epsilon=1e-5),
    "qwen2.5-72b": _qwen2(_Sizes(80, 8192, 29_568, 64, 8), epsilon=1e-5),
    "qwen3-0.6b": _qwen3(_Sizes(28, 1024, 3072, 16, 8), tied=True),
    "qwen3-1.7b": _qwen3(_Sizes(28, 2048, 6144, 16, 8), tied=True),
    "qwen3-4b": _qwen3(_Sizes(36, 2560, 9728, 32, 8), tied=True),
    "qwen3-8b": _qwen3(_Sizes(36, 4096, 12_288, 32, 8), tied=False),
    "gemma2-2b": _gemma2(_Sizes(26, 2304, 9216, 8, 4), head_dim=256, query_size=256),
    "gemma2-9b": _gemma2(_Sizes(42, 3584, 14_336, 16, 8), head_dim=256, query_size=256),
    "gemma2-27b": _gemma2(_Sizes(46, 4608, 36_864, 32, 16), head_dim=128, query_size=144),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
}
"""Configs by name."""


def preset(name: str) -> DecoderConfig:
    """Looks a config up.

    Args:
      name: a key of `PRESETS`.

    Raises:
      ValueError: an unknown name; the message lists the legal ones, the nearest first.
    """
    if name in PRESETS:
        return PRESETS[name]
    nearest = difflib.get_close_matches(name, PRESETS, n=3)
    others = [known for known in PRESETS if known not in nearest]
    raise ValueError(
        f"preset {name!r} is not known; legal values, nearest first: "
        + ", ".join([*nearest, *others])
    )


def parameter_count(config: DecoderConfig) -> int:
    """Number of parameters of a decoder, from shapes alone; a tied head counts once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(config)))
