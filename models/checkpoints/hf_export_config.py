"""From a `DecoderConfig` to a Hugging Face config.json; `hf_config` reads what is written here."""

from typing import Any

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.expressible import refuse_lost
from kvlab.models.checkpoints.hf_config import ACTIVATIONS, config_from_huggingface
from kvlab.models.checkpoints.hf_rope import LAYER_TYPES
from kvlab.models.config import DecoderConfig, RMSNorm
from kvlab.ops.rope import DynamicNTK, LinearScaling, Llama3Scaling, Rope, YarnScaling

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_FORM = "a Hugging Face folder"


def config_to_huggingface(config: DecoderConfig) -> dict[str, Any]:
    """Writes a config as the content of a config.json.

    Args:
      config: the decoder; Gemma's with its norms around 1 (`with_scale_offset`).

    Returns:
      A JSON object. RoPE is spelled as transformers 4 does, which 5 reads too.

    Raises:
      CheckpointError: a family or a field that a config.json of the family cannot say.
    """
    if config.family not in _CLASSES:
        raise CheckpointError(
            f"{_FORM} has no counterpart for family={config.family!r}; it has for "
            + ", ".join(_CLASSES)
        )
    mapping = {
        "architectures": [_CLASSES[config.family]],
        "model_type": config.family,
        "torch_dtype": config.param_dtype,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
        **(_gpt2(config) if config.family == "gpt2" else _rotary(config)),
    }
    refuse_lost(config, config_from_huggingface(mapping), _FORM)
    return mapping


def _gpt2(config: DecoderConfig) -> dict[str, Any]:
    return {
        "n_embd": config.embed_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.hidden_dim,
        "n_positions": config.max_length,
        "n_ctx": config.max_length,
        "activation_function": _activation(config),
        "layer_norm_epsilon": config.norm.epsilon,
        "scale_attn_weights": config.query_scale != 1.0,
    }


def _rotary(config: DecoderConfig) -> dict[str, Any]:
    """The families with RoPE; a field that a family lacks is left to the comparison."""
    if not isinstance(config.norm, RMSNorm) or config.rope is None:
        raise CheckpointError(f"{_FORM} has {config.family} with RMS norms and RoPE alone")
    mapping = {
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads[0],
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm.epsilon,
        "hidden_act": _activation(config),
        "attention_dropout": 0.0,
        **_rope(config.rope, config.max_length),
        **_windows(config),
    }
    if config.family in ("llama", "qwen3", "gemma2"):
        mapping["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        mapping["mlp_bias"] = config.mlp_bias
    if config.family == "gemma2":
        mapping |= {
            "hidden_activation": mapping["hidden_act"],
            "query_pre_attn_scalar": _inverse_square(config.attention_scale),
            "attn_logit_softcapping": config.soft_cap,
            "final_logit_softcapping": config.final_soft_cap,
        }
    return mapping


def _activation(config: DecoderConfig) -> str:
    return {ours: theirs for theirs, ours in ACTIVATIONS.items()}[config.activation]


def _inverse_square(scale: float) -> float | int:
    """The number of which `scale` is the inverse root; a whole one where it fits, as in files."""
    exact = scale**-2
    return round(exact) if round(exact) ** -0.5 == scale else exact


def _windows(config: DecoderConfig) -> dict[str, Any]:
    """Sliding windows; that layers have different ones no family can say."""
    window = next(filter(None, config.layer_windows), None)
    if config.family == "llama":
        return {}
    if config.family == "mistral":
        return {"sliding_window": window}
    kinds = [LAYER_TYPES[int(own is not None)] for own in config.layer_windows]
    if config.family == "gemma2":  # whose field may not be null
        return {"sliding_window": window or config.max_length, "layer_types": kinds}
    used = {} if window is None else {"layer_types": kinds}
    return {"use_sliding_window": window is not None, "sliding_window": window, **used}


def _rope(rope: Rope, max_length: int) -> dict[str, Any]:
    positions = max_length
    scaling: dict[str, Any] | None = None
    match rope.scaling:
        case LinearScaling(factor=factor):
            scaling = {"rope_type": "linear", "factor": factor}
            positions = -int(-max_length // factor)  # the least that reaches as far
        case DynamicNTK(factor=factor, original_max_length=positions):
            scaling = {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling() as llama3:
            scaling = {
                "rope_type": "llama3",
                "factor": llama3.factor,
                "low_freq_factor": llama3.low_freq_factor,
                "high_freq_factor": llama3.high_freq_factor,
                "original_max_position_embeddings": llama3.original_max_length,
            }
        case YarnScaling() as yarn:
            scaling = {
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_max_length,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
            }
            for name in ("attention_factor", "mscale", "mscale_all_dim"):
                if getattr(yarn, name) is not None:
                    scaling[name] = getattr(yarn, name)
    return {
        "max_position_embeddings": positions,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
    }
