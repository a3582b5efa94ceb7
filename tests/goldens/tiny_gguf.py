"""Tiny GGUF files, written from the tiny Hugging Face models of tiny_families.py.

What a converter does, written anew and apart from kvlab's loader: names, the order of query and key
rows of llama files, Gemma's norms with their 1 added, GPT-2's weights the other way round.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

F32 = gguf.GGMLQuantizationType.F32

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_NORMS_AFTER_ATTENTION = {"post_attention_layernorm": "ffn_norm"}
_NORMS_GEMMA2 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


def architecture(config: Mapping[str, Any]) -> str:
    """The name that GGUF has for a family: Mistral's models are llama's."""
    return "llama" if config["model_type"] == "mistral" else config["model_type"]


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture's keys for a Hugging Face config, without their prefix."""
    if config["model_type"] == "gpt2":
        return {
            "context_length": config["n_positions"],
            "embedding_length": config["n_embd"],
            "feed_forward_length": 4 * config["n_embd"],
            "block_count": config["n_layer"],
            "attention.head_count": config["n_head"],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        }
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    rope = config.get("rope_parameters") or config
    keys["rope.freq_base"] = rope["rope_theta"]
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if config["model_type"] == "mistral":
        keys["attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "gemma2":
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        keys["final_logit_softcapping"] = config["final_logit_softcapping"]
    return keys


def tensors(config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A model's tensors as a GGUF file has them, float32."""
    converted = {}
    for name, array in arrays.items():
        target = _name(name, config["model_type"])
        if target is not None:
            converted[target] = np.ascontiguousarray(_values(name, target, array, config))
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        converted["rope_freqs.weight"] = llama3_divisors(
            config["rope_theta"], config["head_dim"], scaling
        )
    return converted


def _values(name: str, target: str, array: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    if target.endswith(("attn_q.weight", "attn_q.bias")):
        return _paired(array, config["num_attention_heads"], config)
    if target.endswith(("attn_k.weight", "attn_k.bias")):
        return _paired(array, config["num_key_value_heads"], config)
    if config["model_type"] == "gemma2" and "norm" in target:
        return array + np.float32(1)
    return array.T if name.startswith("transformer.h.") and array.ndim == 2 else array


def llama3_divisors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> np.ndarray:
    """What llama.cpp divides each frequency by, [H/2] float32."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for exponent in np.arange(0, head_dim, 2) / head_dim:
        wave = 2 * np.pi * theta**exponent
        if wave < original / high:
            divisors.append(1.0)
        elif wave > original / low:
            divisors.append(scaling["factor"])
        else:
            smooth = (original / wave - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.asarray(divisors, np.float32)


def write(
    path: pathlib.Path,
    arch: str,
    keys: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    other_keys: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Writes a GGUF file.

    Tensors named in `kinds` are given as stored bytes, `[rows, bytes a row] uint8`, of that
    quantisation; the others as they are.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        _add(writer, f"{arch}.{key}", value)
    for key, value in (other_keys or {}).items():
        _add(writer, key, value)
    for name, array in arrays.items():
        writer.add_tensor(name, array, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny(
    path: pathlib.Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> pathlib.Path:
    """Writes a tiny Hugging Face model as float32 GGUF."""
    return write(path, architecture(config), metadata(config), tensors(config, arrays))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _name(name: str, family: str) -> str | None:
    """The GGUF name of a tensor; None for buffers, which it does not hold."""
    stem, _, part = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{part}"
    match = re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", stem)
    norms = _NORMS_GEMMA2 if family == "gemma2" else _NORMS_AFTER_ATTENTION
    if match is None or match[2] not in _LAYER_NAMES | norms:
        return None
    return f"blk.{match[1]}.{(_LAYER_NAMES | norms)[match[2]]}.{part}"


def _paired(rows: np.ndarray, heads: int, config: Mapping[str, Any]) -> np.ndarray:
    """Rows of queries or keys in the order of llama files, where neighbours turn together."""
    if architecture(config) != "llama":
        return rows
    head_dim = config["head_dim"]
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]
