"""Tiny random models of every family as Hugging Face folders, written without torch or JAX.

Weights come from integer draws alone, so every machine writes the same bits. They are scaled so
that logits are of order 1 to 10 and attention is far from uniform. Sizes are distinct primes where
the families let them: head_dim is twice a prime, num_heads is num_kv_heads times a prime.
"""

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LENGTH = 41  # tokens a row, longer than every window and every original length below
VOCAB_SIZE = 97
WINDOW = 13

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 66,
    "intermediate_size": 71,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 14,
    "hidden_act": "silu",
    "max_position_embeddings": 67,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
    "use_cache": True,
}
_MHA = {"hidden_size": 65, "num_attention_heads": 5, "num_key_value_heads": 5}
_MQA = {"num_key_value_heads": 1}
_TIED = {"tie_word_embeddings": True}
_NO_BIAS_FIELDS = {"attention_bias", "mlp_bias"}
_MISTRAL = {k: v for k, v in _LLAMA.items() if k not in _NO_BIAS_FIELDS} | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": WINDOW,
}
_QWEN2 = {k: v for k, v in _LLAMA.items() if k not in _NO_BIAS_FIELDS} | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 3,
    "use_sliding_window": False,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_QWEN3 = _QWEN2 | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_GEMMA2 = {k: v for k, v in _LLAMA.items() if k not in {"mlp_bias", "tie_word_embeddings"}} | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 19,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": 2.5,
    "final_logit_softcapping": 7.0,
    "cache_implementation": "hybrid",
}
_GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": VOCAB_SIZE,
    "n_embd": 55,
    "n_layer": 2,
    "n_head": 5,
    "n_positions": 67,
    "n_ctx": 67,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One tiny model: its config.json, its shards, and how its tensors are named.

    `like` is the case whose weights and texts it shares, so that its logits differ by the config.
    `query_gains`, one per query head, scale its query projection: sharp heads beside flat ones.
    """

    config: dict[str, Any]
    like: str | None = None
    shards: int = 1
    prefix: bool = True
    buffers: bool = False
    rows: int = 1
    query_gains: tuple[float, ...] = ()


def _scaled(**scaling: Any) -> Case:
    return Case(_LLAMA | {"rope_scaling": scaling}, like="llama_sharded")


def _respelled(config: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """The config with RoPE settings as transformers 5 writes them."""
    kept = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    return kept | {"rope_parameters": parameters}


_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 17}

CASES: dict[str, Case] = {
    "llama_mha": Case(_LLAMA | _MHA, rows=2),
    "llama_gqa": Case(_respelled(_LLAMA, {"rope_type": "default", "rope_theta": 500.0}), rows=2),
    "llama_mqa": Case(_LLAMA | _MHA | _MQA, rows=2),
    "llama_tied": Case(_LLAMA | _TIED),
    "llama_biases": Case(_LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama_sharded": Case(_LLAMA, shards=3, buffers=True),
    "llama_linear": _scaled(type="linear", factor=2.5),
    "llama_dynamic": Case(
        _LLAMA
        | {"max_position_embeddings": 23, "rope_scaling": {"type": "dynamic", "factor": 3.0}},
        like="llama_sharded",
    ),
    "llama_llama3": _scaled(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=31,
    ),
    "llama_yarn": Case(
        _LLAMA | {"max_position_embeddings": 68, "rope_scaling": _YARN}, like="llama_sharded"
    ),
    "llama_yarn_mscale": Case(
        _respelled(
            _LLAMA | {"max_position_embeddings": 68},
            {
                "rope_type": "yarn",
                "rope_theta": 700.0,
                "factor": 4.0,
                "original_max_position_embeddings": 17,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "mscale": 3.0,
                "mscale_all_dim": 0.7,
                "truncate": False,
            },
        ),
        like="llama_sharded",
    ),
    "mistral_window": Case(_MISTRAL, like="llama_sharded"),
    "mistral_mha_tied": Case(_MISTRAL | _MHA | _TIED, shards=2),
    "mistral_mqa": Case(_MISTRAL | _MHA | _MQA),
    "qwen2": Case(_QWEN2),
    "qwen2_mha_sharded": Case(_QWEN2 | _MHA, shards=2),
    "qwen2_mqa_untied": Case(_QWEN2 | _MHA | _MQA | {"tie_word_embeddings": False}),
    "qwen2_windows": Case(_QWEN2 | {"use_sliding_window": True}, like="qwen2"),
    "qwen3": Case(_QWEN3),
    "qwen3_mha_tied": Case(_QWEN3 | _MHA | _TIED, shards=2),
    "qwen3_mqa": Case(_QWEN3 | _MHA | _MQA),
    "qwen3_layer_types": Case(
        _respelled(_QWEN3, {"rope_type": "default", "rope_theta": 1000000.0})
        | {
            "attention_bias": True,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
    ),
    "gemma2": Case(_GEMMA2),
    "gemma2_mha_sharded": Case(_GEMMA2 | _MHA, shards=2),
    "gemma2_mqa": Case(_GEMMA2 | _MHA | _MQA),
    "gpt2": Case(_GPT2, buffers=True),
    "gpt2_sharded": Case(_GPT2, shards=2),
    "gpt2_variant": Case(
        _GPT2
        | {
            "n_inner": 83,
            "activation_function": "gelu",
            "scale_attn_weights": False,
            "tie_word_embeddings": False,
        },
        prefix=False,
    ),
}

_LONG = {"max_position_embeddings": 151}

# For goldens of retention policies, whose texts are longer and whose heads should differ.
RETENTION_CASES: dict[str, Case] = {
    "retention_gqa": Case(_LLAMA | _LONG, query_gains=(0.3, 0.5, 1.0, 1.4, 1.5, 1.9)),
    "retention_mha": Case(_LLAMA | _MHA | _LONG, query_gains=(0.2, 1.7, 0.6, 1.1, 1.4)),
    "retention_qk_norm": Case(_QWEN3 | _LONG),
}


def tokens(case: str) -> np.ndarray:
    """The case's texts, [rows, LENGTH] int32."""
    draw = np.random.RandomState(zlib.crc32(f"{CASES[case].like or case}/tokens".encode()))
    return draw.randint(0, VOCAB_SIZE, (CASES[case].rows, LENGTH)).astype(np.int32)


def write_tiny_folder(case: str, path: pathlib.Path) -> pathlib.Path:
    """Writes a case's config.json and safetensors into a folder, and returns the folder."""
    spec = _spec(case)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(spec.config, indent=2))
    arrays = tensors(case)
    if spec.shards == 1:
        save_file(arrays, path / "model.safetensors", {"format": "pt"})
        return path
    weight_map = {}
    for shard in range(spec.shards):
        file = f"model-{shard + 1:05d}-of-{spec.shards:05d}.safetensors"
        part = {name: arrays[name] for name in list(arrays)[shard :: spec.shards]}
        save_file(part, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return path


def tensors(case: str) -> dict[str, np.ndarray]:
    """A case's tensors by the name they have in its files, float32."""
    spec = _spec(case)
    shapes = _gpt2_shapes if spec.config["model_type"] == "gpt2" else _llama_shapes
    arrays = {}
    for name, shape in shapes(spec.config):
        stored = name if spec.prefix else name.removeprefix("transformer.").removeprefix("model.")
        array = _draw(f"{spec.like or case}/{name}", name, shape, spec.config["model_type"])
        if spec.query_gains and name.endswith("q_proj.weight"):
            gains = np.array(spec.query_gains, np.float32)
            array *= np.repeat(gains, spec.config["head_dim"])[:, None]
        arrays[stored] = array
    if spec.buffers:
        arrays |= dict(_buffers(spec.config))
    return arrays


def _spec(case: str) -> Case:
    return (CASES | RETENTION_CASES)[case]


def _draw(seed: str, name: str, shape: tuple[int, ...], family: str) -> np.ndarray:
    """Uniform numbers of a variance that suits the tensor."""
    draw = np.random.RandomState(zlib.crc32(seed.encode()))
    unit = (draw.random_sample(shape) - 0.5) * 12**0.5
    if name.endswith(".bias"):
        array = 0.3 * unit
    elif "norm" in name or "ln_" in name:
        array = 0.3 * unit + (0.0 if family == "gemma2" else 1.0)
    elif any(table in name for table in ("embed_tokens", "wte", "wpe")):
        array = unit
    else:
        is_conv1d = family == "gpt2" and name != "lm_head.weight"
        fan_in = shape[0] if is_conv1d else shape[1]
        gain = 3.0 if name == "lm_head.weight" else 1.5
        array = gain * unit / fan_in**0.5
    return array.astype(np.float32)


def _llama_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    family = config["model_type"]
    width, hidden, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query = config["num_attention_heads"] * head
    key = config["num_key_value_heads"] * head
    attention_bias = config.get("attention_bias", False)
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        if family == "gemma2":
            yield f"{layer}.pre_feedforward_layernorm.weight", (width,)
            yield f"{layer}.post_feedforward_layernorm.weight", (width,)
        if family == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (head,)
            yield f"{layer}.self_attn.k_norm.weight", (head,)
        for name, out, into, bias in (
            ("self_attn.q_proj", query, width, attention_bias or family == "qwen2"),
            ("self_attn.k_proj", key, width, attention_bias or family == "qwen2"),
            ("self_attn.v_proj", key, width, attention_bias or family == "qwen2"),
            ("self_attn.o_proj", width, query, attention_bias),
            ("mlp.gate_proj", hidden, width, config.get("mlp_bias", False)),
            ("mlp.up_proj", hidden, width, config.get("mlp_bias", False)),
            ("mlp.down_proj", width, hidden, config.get("mlp_bias", False)),
        ):
            yield f"{layer}.{name}.weight", (out, into)
            if bias:
                yield f"{layer}.{name}.bias", (out,)
    yield "model.norm.weight", (width,)
    if not config.get("tie_word_embeddings", family == "gemma2"):
        yield "lm_head.weight", (config["vocab_size"], width)


def _gpt2_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = config["n_embd"]
    hidden = config.get("n_inner", 4 * width)
    yield "transformer.wte.weight", (config["vocab_size"], width)
    yield "transformer.wpe.weight", (config["n_positions"], width)
    for index in range(config["n_layer"]):
        layer = f"transformer.h.{index}"
        for name, shape in (
            ("ln_1", (width,)),
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("ln_2", (width,)),
            ("mlp.c_fc", (width, hidden)),
            ("mlp.c_proj", (hidden, width)),
        ):
            yield f"{layer}.{name}.weight", shape
            yield f"{layer}.{name}.bias", shape[-1:]
    yield "transformer.ln_f.weight", (width,)
    yield "transformer.ln_f.bias", (width,)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (config["vocab_size"], width)


def _buffers(config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The constants that older files hold beside the weights."""
    if config["model_type"] == "gpt2":
        positions = config["n_positions"]
        mask = np.tril(np.ones((1, 1, positions, positions), np.float32))
        for index in range(config["n_layer"]):
            yield f"transformer.h.{index}.attn.bias", mask
            yield f"transformer.h.{index}.attn.masked_bias", np.array(-1e4, np.float32)
    else:
        half = np.arange(0, config["head_dim"], 2, dtype=np.float32) / config["head_dim"]
        frequencies = (config["rope_theta"] ** -half).astype(np.float32)
        for index in range(config["num_hidden_layers"]):
            yield f"model.layers.{index}.self_attn.rotary_emb.inv_freq", frequencies
