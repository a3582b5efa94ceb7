"""From a Hugging Face config.json to a `DecoderConfig`.

A field that would change logits and is not supported is an error that names it; so is a field that
nobody here knows (`kvlab.models.checkpoints.hf_fields`). Defaults stand only where the files of a
family rely on them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.hf_fields import Fields
from kvlab.models.checkpoints.hf_rope import LAYER_TYPES, read_rope
from kvlab.models.config import DecoderConfig, LayerNorm, RMSNorm

ACTIVATIONS = {
    "swish": "silu",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Names in config.json to those of `DecoderConfig`; of several, the last is the one to write."""


def config_from_huggingface(mapping: Mapping[str, Any]) -> DecoderConfig:
    """Reads the content of a config.json.

    `max_length` is `max_position_embeddings`, times the factor of a RoPE scaling whose files leave
    that field at the original length (linear, dynamic, yarn).

    Args:
      mapping: the parsed JSON object.

    Returns:
      The decoder in float32; replace `param_dtype` and `dtype` for another.

    Raises:
      CheckpointError: an unknown `model_type`, a missing field, a field that would change logits
        and is not supported, a field that is not known, or values that contradict each other.
    """
    fields = Fields(mapping)
    family = fields.text("model_type")
    if family not in _FAMILIES:
        raise CheckpointError(
            f"model_type={family!r} is not supported; supported: {', '.join(_FAMILIES)}"
        )
    try:
        arguments = _FAMILIES[family](fields)
        fields.finish()
        return DecoderConfig(family=family, **arguments)
    except CheckpointError:
        raise
    except ValueError as error:  # from DecoderConfig or a RoPE scaling, which name their field
        raise CheckpointError(str(error)) from error


def _llama(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", absent=False)
    return {
        **_rotary(fields, tied=False),
        **_kv_heads(fields, required=False),
        "activation": _activation(fields, "hidden_act"),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": fields.flag("mlp_bias", absent=False),
    }


def _mistral(fields: Fields) -> dict[str, Any]:
    fields.value("sliding_window")  # its absence would mean 4,096, its null no window
    return {
        **_rotary(fields, tied=False),
        **_kv_heads(fields, required=True),
        "activation": _activation(fields, "hidden_act"),
        "windows": fields.optional_integer("sliding_window"),
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    return {
        **_rotary(fields, tied=False),
        **_kv_heads(fields, required=True),
        "activation": _activation(fields, "hidden_act"),
        "windows": _qwen_windows(fields),
        "qkv_bias": True,
    }


def _qwen3(fields: Fields) -> dict[str, Any]:
    fields.integer("head_dim")  # its absence would mean 128, not hidden_size / num_attention_heads
    bias = fields.flag("attention_bias", absent=False)
    return {**_qwen2(fields), "qkv_bias": bias, "output_bias": bias, "qk_norm": True}


def _gemma2(fields: Fields) -> dict[str, Any]:
    fields.integer("head_dim")
    arguments = _rotary(fields, tied=True)
    activation = _activation(fields, "hidden_activation")
    if fields.value("hidden_act", None) is not None:
        older = _activation(fields, "hidden_act")
        if older != activation:
            raise CheckpointError("hidden_act and hidden_activation differ; remove one")
    window = fields.integer("sliding_window")
    if fields.value("sliding_window_size", window) != window:
        raise CheckpointError("sliding_window and sliding_window_size differ; remove one")
    num_layers = arguments["num_layers"]
    layer_types = fields.optional_list("layer_types")
    if layer_types is None:
        layer_types = [LAYER_TYPES[1 - layer % 2] for layer in range(num_layers)]
    bias = fields.flag("attention_bias", absent=False)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.value(name)  # null is off, absence would mean 50 and 30
    return {
        **arguments,
        **_kv_heads(fields, required=True),
        "norm": RMSNorm(fields.number("rms_norm_eps"), scale_offset=1.0),
        "activation": activation,
        "windows": _windows(layer_types, window),
        "soft_cap": fields.optional_number("attn_logit_softcapping"),
        "final_soft_cap": fields.optional_number("final_logit_softcapping"),
        "query_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "embed_scale": arguments["embed_dim"] ** 0.5,
        "qkv_bias": bias,
        "output_bias": bias,
        "post_norms": True,
    }


def _gpt2(fields: Fields) -> dict[str, Any]:
    embed_dim, num_heads = fields.integer("n_embd"), fields.integer("n_head")
    max_length = fields.integer("n_positions")
    if fields.value("n_ctx", max_length) != max_length:
        raise CheckpointError(f"n_ctx={fields.value('n_ctx')} and n_positions={max_length} differ")
    inner = fields.optional_integer("n_inner")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "num_layers": fields.integer("n_layer"),
        "embed_dim": embed_dim,
        "hidden_dim": 4 * embed_dim if inner is None else inner,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": _divided("n_embd", embed_dim, "n_head", num_heads),
        "max_length": max_length,
        "norm": LayerNorm(fields.number("layer_norm_epsilon")),
        "activation": _activation(fields, "activation_function"),
        "gated_mlp": False,
        "query_scale": None if fields.flag("scale_attn_weights", absent=True) else 1.0,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tie_embeddings": fields.flag("tie_word_embeddings", absent=True),
    }


_FAMILIES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
}


def _rotary(fields: Fields, tied: bool) -> dict[str, Any]:
    """What the families with RoPE share; `tied` is what an absent tie_word_embeddings means."""
    embed_dim, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        head_dim = _divided("hidden_size", embed_dim, "num_attention_heads", num_heads)
    rope, max_length = read_rope(fields, fields.integer("max_position_embeddings"))
    return {
        "vocab_size": fields.integer("vocab_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "embed_dim": embed_dim,
        "hidden_dim": fields.integer("intermediate_size"),
        "num_heads": num_heads,
        "head_dim": head_dim,
        "max_length": max_length,
        "norm": RMSNorm(fields.number("rms_norm_eps")),
        "rope": rope,
        "tie_embeddings": fields.flag("tie_word_embeddings", absent=tied),
    }


def _kv_heads(fields: Fields, required: bool) -> dict[str, int]:
    """K; where it may be absent (llama), absent means one KV head per query head."""
    num_heads = fields.integer("num_attention_heads")
    if required:
        count = fields.integer("num_key_value_heads")
    else:
        given = fields.optional_integer("num_key_value_heads")
        count = num_heads if given is None else given
    if count < 1 or num_heads % count:
        raise CheckpointError(
            f"num_key_value_heads={count} does not divide num_attention_heads={num_heads}"
        )
    return {"num_kv_heads": count}


def _divided(name: str, size: int, heads_name: str, num_heads: int) -> int:
    if num_heads < 1 or size % num_heads:
        raise CheckpointError(f"{heads_name}={num_heads} does not divide {name}={size}")
    return size // num_heads


def _activation(fields: Fields, name: str) -> str:
    activation = fields.text(name)
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{name}={activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[activation]


def _qwen_windows(fields: Fields) -> tuple[int | None, ...] | None:
    """Layers from max_window_layers on slide, where windows are used at all."""
    num_layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window")
    first = fields.optional_integer("max_window_layers")
    layer_types = fields.optional_list("layer_types")
    if not fields.flag("use_sliding_window", absent=False):
        return _windows(layer_types or [LAYER_TYPES[0]] * num_layers, None)
    if layer_types is None:
        if first is None:
            raise CheckpointError("max_window_layers is missing, and use_sliding_window needs it")
        layer_types = [LAYER_TYPES[int(layer >= first)] for layer in range(num_layers)]
    return _windows(layer_types, window)


def _windows(layer_types: list, window: int | None) -> tuple[int | None, ...]:
    for layer, kind in enumerate(layer_types):
        if kind not in LAYER_TYPES:
            raise CheckpointError(
                f"layer_types[{layer}]={kind!r} is not supported; "
                f"supported: {', '.join(LAYER_TYPES)}"
            )
        if kind == "sliding_attention" and window is None:
            raise CheckpointError(
                f"layer_types[{layer}]={kind!r}, but sliding_window is null or not in use"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
