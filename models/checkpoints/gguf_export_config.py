"""From a `DecoderConfig` to the metadata of a GGUF file; `gguf_config` reads what is written here.

Source of the keys: ggml's docs/gguf.md; of what llama.cpp makes of them, its `src/llama-model.cpp`.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.config import DecoderConfig, LayerNorm
from kvlab.ops.rope import DynamicNTK, LinearScaling, Llama3Scaling, Rope, YarnScaling

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gpt2": "gpt2",
}


def gguf_config(config: DecoderConfig) -> DecoderConfig:
    """The config under the name that GGUF has for its family.

    Args:
      config: the decoder.

    Raises:
      CheckpointError: llama.cpp has no such family, or would compute it otherwise: it passes over
        windows of any family but Gemma 2, reads one number of KV heads, and wants the heads of
        Qwen 2 to fill the width.
    """
    if config.family not in _ARCHITECTURES:
        raise CheckpointError(
            f"GGUF has no counterpart for family={config.family!r}; it has for "
            + ", ".join(_ARCHITECTURES)
        )
    window = next(filter(None, config.layer_windows), None)
    if window is not None and config.family != "gemma2":
        raise CheckpointError(
            f"GGUF cannot hold a {config.family} with a sliding window of {window} tokens: "
            "llama.cpp would pass over it"
        )
    if len(set(config.kv_heads)) > 1:
        raise CheckpointError(
            f"GGUF cannot hold layers with different KV heads {config.kv_heads}: llama.cpp reads "
            "one number for all"
        )
    width = config.num_heads * config.head_dim
    if config.family == "qwen2" and width != config.embed_dim:
        raise CheckpointError(
            f"GGUF cannot hold a qwen2 whose heads are {width} wide and embed_dim="
            f"{config.embed_dim}: llama.cpp wants them equal"
        )
    return dataclasses.replace(config, family=_ARCHITECTURES[config.family])


def config_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    """Writes a config as the keys of its architecture.

    Args:
      config: as `gguf_config` gives it.

    Returns:
      Values by key, without the architecture in front.

    Raises:
      CheckpointError: a RoPE scaling that GGUF has no key for.
    """
    norm = "layer_norm_epsilon" if isinstance(config.norm, LayerNorm) else "layer_norm_rms_epsilon"
    keys = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_layers,
        "context_length": config.max_length,
        "embedding_length": config.embed_dim,
        "feed_forward_length": config.hidden_dim,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.kv_heads[0],
        f"attention.{norm}": float(config.norm.epsilon),
    }
    if config.family == "gpt2":
        return keys
    keys |= {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        **_rope(config.rope or Rope(), config.max_length),
    }
    if config.family == "gemma2":
        window = next(filter(None, config.layer_windows), config.max_length)
        keys |= {
            "attention.sliding_window": window,
            "attn_logit_softcapping": float(config.soft_cap or 0.0),
            "final_logit_softcapping": float(config.final_soft_cap or 0.0),
        }
    return keys


def _rope(rope: Rope, max_length: int) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope.freq_base": float(rope.theta)}
    match rope.scaling:
        case LinearScaling(factor=factor):
            keys["rope.scaling.type"] = "linear"
            keys["rope.scaling.factor"] = float(factor)
            keys["rope.scaling.original_context_length"] = math.floor(max_length / factor)
        case YarnScaling() as yarn:
            keys["rope.scaling.type"] = "yarn"
            keys["rope.scaling.factor"] = float(yarn.factor)
            keys["rope.scaling.original_context_length"] = yarn.original_max_length
            keys["rope.scaling.yarn_beta_fast"] = float(yarn.beta_fast)
            keys["rope.scaling.yarn_beta_slow"] = float(yarn.beta_slow)
        case DynamicNTK():
            raise CheckpointError("GGUF has no counterpart for dynamic NTK scaling of RoPE")
    return keys


def rope_divisors(rope: Rope | None, head_dim: int) -> np.ndarray | None:
    """What llama.cpp divides the frequencies of Llama 3 by.

    Source: "The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.4.2.

    Args:
      rope: of the decoder.
      head_dim: H.

    Returns:
      [H/2] float32, or None where RoPE is not scaled so.
    """
    if rope is None or not isinstance(rope.scaling, Llama3Scaling):
        return None
    scaling = rope.scaling
    waves = 2 * math.pi * float(rope.theta) ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((scaling.original_max_length / waves - low) / (high - low), 0, 1)
    divisors = 1 / ((1 - kept) / scaling.factor + kept)
    # The ends are exact: from them the scaling is recognised.
    divisors = np.where(kept == 0, scaling.factor, np.where(kept == 1, 1.0, divisors))
    return divisors.astype(np.float32)
