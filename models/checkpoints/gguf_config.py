"""From the metadata of a GGUF file to a decoder's config.

Every key of the architecture (`llama.*`, ...) must be understood, or the file is refused: a key
that is not read is a number that would be wrong. Source of the keys: ggml's docs/gguf.md; of what
they mean, llama.cpp.
"""

from typing import Any

import numpy as np

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.gguf_file import GgufFile
from kvlab.models.checkpoints.gguf_keys import GgufKeys
from kvlab.models.checkpoints.gguf_rope import read_positions
from kvlab.models.config import DecoderConfig, LayerNorm, RMSNorm

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gpt2")
_GEMMA2_27B_LAYERS = 46


def read_config(file: GgufFile, param_dtype: str) -> DecoderConfig:
    """Works out the config of the model in a file.

    GGUF leaves two things to the reader's knowledge of the family: that Gemma 2 scales queries by
    (embed_dim / num_heads) ** -0.5 in its 27B size alone, and which of its layers are windowed.
    A window that the converter dropped (Mistral 7B v0.1) cannot be known; one that a llama file
    has counts here, as in the model it is from, where llama.cpp passes over it.

    Args:
      file: the open file.
      param_dtype: the config's `param_dtype`.

    Raises:
      CheckpointError: an unknown architecture, a key that is missing or not supported.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} holds the architecture {architecture!r}; supported: "
            + ", ".join(ARCHITECTURES)
        )
    keys = GgufKeys(file, architecture)
    num_layers = keys.require("block_count")
    embed_dim = keys.require("embedding_length")
    num_heads = keys.one("attention.head_count")
    head_dim = _head_dim(keys, embed_dim, num_heads)
    _refuse_experts(keys)
    try:
        rope, max_length = read_positions(keys, file, head_dim)
        config = DecoderConfig(
            family=architecture,
            vocab_size=_vocab_size(file),
            num_layers=num_layers,
            embed_dim=embed_dim,
            hidden_dim=keys.one("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=_kv_heads(keys, num_heads),
            head_dim=head_dim,
            max_length=max_length,
            norm=_norm(keys),
            rope=rope,
            windows=_windows(keys, num_layers),
            qkv_bias="blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_up.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            tie_embeddings="output.weight" not in file.tensors,
            param_dtype=param_dtype,
            **_family_fields(keys, embed_dim, num_layers, num_heads),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise keys.error(f"contradicts itself: {error}") from error
    keys.refuse_unread()
    return config


def _family_fields(
    keys: GgufKeys, embed_dim: int, num_layers: int, num_heads: int
) -> dict[str, Any]:
    """What a family does that its files do not say."""
    if keys.architecture == "gpt2":
        return {"activation": "gelu_tanh", "gated_mlp": False}
    if keys.architecture != "gemma2":
        return {}
    large = num_layers == _GEMMA2_27B_LAYERS
    return {
        "activation": "gelu_tanh",
        "soft_cap": keys.require("attn_logit_softcapping"),
        "final_soft_cap": keys.require("final_logit_softcapping"),
        "query_scale": (embed_dim / num_heads) ** -0.5 if large else None,
        "embed_scale": embed_dim**0.5,
        "post_norms": True,
    }


def _norm(keys: GgufKeys) -> RMSNorm | LayerNorm:
    """The family's norm. Gemma's scales lie in GGUF with their 1 already added."""
    if keys.architecture == "gpt2":
        return LayerNorm(keys.require("attention.layer_norm_epsilon"))
    return RMSNorm(keys.require("attention.layer_norm_rms_epsilon"))


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} lacks the tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _head_dim(keys: GgufKeys, embed_dim: int, num_heads: int) -> int:
    head_dim = keys.get("attention.key_length", embed_dim // max(num_heads, 1))
    value_dim = keys.get("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise keys.error(f"has keys of size {head_dim} and values of size {value_dim}")
    return head_dim


def _kv_heads(keys: GgufKeys, num_heads: int) -> int | tuple[int, ...]:
    kv_heads = keys.get("attention.head_count_kv", num_heads)
    return tuple(kv_heads.tolist()) if np.ndim(kv_heads) else kv_heads


def _refuse_experts(keys: GgufKeys) -> None:
    for name in ("expert_count", "expert_used_count"):
        if keys.get(name, 0):
            raise keys.error("is a mixture of experts, which is not supported")


def _windows(keys: GgufKeys, num_layers: int) -> int | tuple[int | None, ...] | None:
    """Windows per layer; a pattern of n leaves every n-th layer with full attention."""
    gemma2 = keys.architecture == "gemma2"
    window = (
        keys.require("attention.sliding_window") if gemma2 else keys.get("attention.sliding_window")
    )
    pattern = keys.get("attention.sliding_window_pattern", 2 if gemma2 else 0)
    if not window:
        return None
    if np.ndim(pattern):
        return tuple(window if windowed else None for windowed in pattern)
    if not pattern:
        return window
    return tuple(window if (index + 1) % pattern else None for index in range(num_layers))
