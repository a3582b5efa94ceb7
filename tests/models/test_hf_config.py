"""config.json to DecoderConfig: published files, both RoPE spellings, and what must be refused."""

import pytest

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.hf_config import config_from_huggingface
from kvlab.models.config import LayerNorm, RMSNorm
from kvlab.ops.rope import DynamicNTK, LinearScaling, Llama3Scaling, Rope, YarnScaling

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 84,
    "intermediate_size": 71,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 67,
    "rms_norm_eps": 1e-5,
}
MISTRAL = LLAMA | {"model_type": "mistral", "head_dim": 14, "sliding_window": 13}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_hidden_layers": 3}
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 14}
GEMMA2 = {name: value for name, value in LLAMA.items() if name != "hidden_act"} | {
    "model_type": "gemma2",
    "num_hidden_layers": 3,
    "head_dim": 14,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 13,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_embd": 55,
    "n_layer": 2,
    "n_head": 5,
    "n_positions": 67,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
FAMILIES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gpt2": GPT2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def refused(mapping: dict, *words: str) -> None:
    """Asserts a one-line CheckpointError that names every word."""
    with pytest.raises(CheckpointError) as caught:
        config_from_huggingface(mapping)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_llama_of_smollm2():
    config = config_from_huggingface(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pad_token_id": 2,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "transformers_version": "4.42.3",
            "use_cache": True,
            "vocab_size": 49152,
        }
    )
    assert (config.num_layers, config.embed_dim, config.hidden_dim) == (30, 576, 1536)
    assert (config.num_heads, config.kv_heads, config.head_dim) == (9, (3,) * 30, 64)
    assert (config.vocab_size, config.max_length) == (49152, 8192)
    assert config.norm == RMSNorm(1e-5)
    assert config.rope == Rope(100_000)
    assert config.tie_embeddings
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)


def test_defaults_that_files_rely_on():
    mapping = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    config = config_from_huggingface(mapping)
    assert config.kv_heads == (6, 6)
    assert config.head_dim == 14
    assert config.rope == Rope(10_000.0)
    assert not config.tie_embeddings
    assert config_from_huggingface(LLAMA | {"num_key_value_heads": None}).kv_heads == (6, 6)
    assert config_from_huggingface(GEMMA2).tie_embeddings
    assert config_from_huggingface(GPT2).tie_embeddings
    assert not config_from_huggingface(QWEN2).tie_embeddings


def test_biases_of_each_family():
    def biases(mapping: dict) -> tuple[bool, bool, bool]:
        config = config_from_huggingface(mapping)
        return config.qkv_bias, config.output_bias, config.mlp_bias

    assert biases(LLAMA | {"attention_bias": True}) == (True, True, False)
    assert biases(LLAMA | {"mlp_bias": True}) == (False, False, True)
    assert biases(MISTRAL) == (False, False, False)
    assert biases(QWEN2) == (True, False, False)
    assert biases(QWEN3) == (False, False, False)
    assert biases(QWEN3 | {"attention_bias": True}) == (True, True, False)
    assert biases(GEMMA2 | {"attention_bias": True}) == (True, True, False)
    assert biases(GPT2) == (True, True, True)


def test_windows_of_each_family():
    def windows(mapping: dict) -> tuple[int | None, ...]:
        return config_from_huggingface(mapping).layer_windows

    assert windows(LLAMA) == (None, None)
    assert windows(MISTRAL) == (13, 13)
    assert windows(MISTRAL | {"sliding_window": None}) == (None, None)
    qwen = {"sliding_window": 13, "max_window_layers": 2}
    assert windows(QWEN2 | qwen) == (None, None, None)
    assert windows(QWEN2 | qwen | {"use_sliding_window": True}) == (None, None, 13)
    types = ["sliding_attention", "full_attention", "full_attention"]
    used = {"use_sliding_window": True, "layer_types": types}
    assert windows(QWEN3 | qwen | used) == (13, None, None)
    assert windows(GEMMA2) == (13, None, 13)
    assert windows(GEMMA2 | {"layer_types": types}) == (13, None, None)


def test_gemma2_scales_and_caps():
    config = config_from_huggingface(GEMMA2)
    assert config.attention_scale == 0.25
    assert config.embed_scale == 84**0.5
    assert (config.soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert config.norm == RMSNorm(1e-5, scale_offset=1.0)
    assert config.activation == "gelu_tanh"
    assert config.post_norms
    uncapped = config_from_huggingface(GEMMA2 | {"attn_logit_softcapping": None})
    assert (uncapped.soft_cap, uncapped.final_soft_cap) == (None, 30.0)


def test_gpt2_shapes_and_scales():
    config = config_from_huggingface(GPT2 | {"n_ctx": 67, "n_inner": None})
    assert (config.head_dim, config.kv_heads, config.hidden_dim) == (11, (5, 5), 220)
    assert config.rope is None
    assert config.norm == LayerNorm(1e-5)
    assert not config.gated_mlp
    assert config.attention_scale == 11**-0.5
    assert config_from_huggingface(GPT2 | {"n_inner": 83}).hidden_dim == 83
    assert config_from_huggingface(GPT2 | {"scale_attn_weights": False}).attention_scale == 1.0


SCALINGS = [
    ({}, None, 67),
    ({"rope_type": "default"}, None, 67),
    ({"rope_type": "linear", "factor": 2.5}, LinearScaling(2.5), 167),
    ({"rope_type": "dynamic", "factor": 2.0}, DynamicNTK(2.0, 67), 134),
    (
        {"rope_type": "llama3", "original_max_position_embeddings": 31, **LLAMA3},
        Llama3Scaling(8.0, 1.0, 4.0, 31),
        67,
    ),
    ({"rope_type": "llama3", **LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 67), 67),
    ({"rope_type": "yarn", "factor": 4.0}, YarnScaling(4.0, 67), 268),
    (
        {
            "rope_type": "yarn",
            "factor": 3.0,
            "original_max_position_embeddings": 17,
            "beta_fast": 5.0,
            "beta_slow": None,
            "attention_factor": 1.5,
            "mscale": 2.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
        YarnScaling(3.0, 17, 5.0, 1.0, 1.5, 2.0, 0.5, truncate=False),
        67,
    ),
]


@pytest.mark.parametrize(("settings", "scaling", "max_length"), SCALINGS)
def test_every_spelling_of_every_rope_scaling(settings, scaling, max_length):
    older = {("type" if name == "rope_type" else name): settings[name] for name in settings}
    inner = settings | {"rope_theta": 500.0}
    for fields in (
        {"rope_theta": 500.0, "rope_scaling": settings},
        {"rope_theta": 500.0, "rope_scaling": older},
        {"rope_parameters": inner},
        {"rope_theta": 500.0, "rope_parameters": inner, "rope_scaling": settings},
        {"rope_parameters": {"full_attention": inner, "sliding_attention": inner}},
    ):
        config = config_from_huggingface(LLAMA | fields)
        assert config.rope == Rope(500.0, scaling)
        assert config.max_length == max_length


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", "proportional"])
def test_a_rope_type_that_is_not_supported_is_named_with_those_that_are(kind):
    supported = ("default", "linear", "dynamic", "llama3", "yarn")
    refused(LLAMA | {"rope_scaling": {"type": kind, "factor": 2.0}}, kind, *supported)
    refused(LLAMA | {"rope_parameters": {"rope_type": kind}}, kind, *supported)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["rope_scaling.factor", "'2'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling.factor"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1.0}}, ["alpha"]),
        ({"rope_scaling": {"type": "default", "temperature": 1.0}}, ["rope_scaling.temperature"]),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, ["rope_type"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"rope_theta": 3.0, "rope_parameters": {"rope_theta": 5.0}}, ["rope_theta", "3.0", "5.0"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 3.0}},
            ["rope_parameters.factor"],
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 3.0},
                    "sliding_attention": {"rope_theta": 5.0},
                }
            },
            ["rope_parameters.full_attention", "rope_parameters.sliding_attention", "differ"],
        ),
        (
            {
                "rope_scaling": {
                    "type": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 31,
                }
            },
            ["original_max_position_embeddings=31", "max_position_embeddings=67"],
        ),
    ],
)
def test_rope_settings_that_contradict_or_lack_something(fields, words):
    refused(LLAMA | fields, *words)


REQUIRED = [
    (family, name)
    for family, mapping in FAMILIES.items()
    for name in mapping
    if name != "model_type" and (family, name) not in {("llama", "num_key_value_heads"),
                                                       ("mistral", "head_dim")}
]  # fmt: skip


@pytest.mark.parametrize(("family", "name"), REQUIRED)
def test_a_missing_field_is_named(family, name):
    mapping = {key: value for key, value in FAMILIES[family].items() if key != name}
    refused(mapping, name, "missing")


UNSUPPORTED = [
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "pretraining_tp", 2),
    ("llama", "quantization_config", {"quant_method": "gptq"}),
    ("llama", "auto_map", {"AutoModelForCausalLM": "modeling.Model"}),
    ("llama", "pruned_heads", {"0": [1]}),
    ("llama", "rope_interleaved", True),
    ("llama", "num_local_experts", 8),
    ("llama", "sliding_window", 13),
    ("llama", "attn_logit_softcapping", 50.0),
    ("mistral", "attention_bias", True),
    ("mistral", "layer_types", ["full_attention", "sliding_attention"]),
    ("qwen2", "mlp_bias", True),
    ("qwen2", "use_mrope", True),
    ("gemma2", "use_bidirectional_attention", True),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "reorder_and_upcast_attn", True),
    ("gpt2", "add_cross_attention", True),
    ("gpt2", "num_key_value_heads", 1),
    ("llama", "a_field_of_tomorrow", 1),
    ("llama", "a_field_of_tomorrow", None),
]


@pytest.mark.parametrize(("family", "name", "value"), UNSUPPORTED)
def test_a_field_that_would_change_logits_is_named(family, name, value):
    refused(FAMILIES[family] | {name: value}, name, repr(value))


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("llama", {"model_type": "mixtral"}, ["mixtral", *FAMILIES]),
        ("llama", {"model_type": None}, ["model_type=None"]),
        ("llama", {"model_type": ["llama"]}, ["model_type=['llama']", "string"]),
        ("llama", {"hidden_act": "relu2"}, ["hidden_act", "relu2", "silu"]),
        ("llama", {"num_key_value_heads": 4}, ["num_key_value_heads=4", "num_attention_heads=6"]),
        ("llama", {"num_key_value_heads": 0}, ["num_key_value_heads=0"]),
        ("llama", {"num_attention_heads": 5}, ["num_attention_heads=5", "hidden_size=84"]),
        ("llama", {"head_dim": 7}, ["head_dim=7"]),
        ("llama", {"vocab_size": 0}, ["vocab_size=0"]),
        ("llama", {"vocab_size": "97"}, ["vocab_size='97'", "whole number"]),
        ("llama", {"vocab_size": True}, ["vocab_size=True", "whole number"]),
        ("llama", {"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan", "finite"]),
        ("llama", {"tie_word_embeddings": None}, ["tie_word_embeddings=None", "true or false"]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 13}, ["max_window_layers"]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, ["sliding_window"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ["layer_types[0]", "sliding_window"]),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, ["layer_types[0]", "full_attention"]),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, ["2 entries", "num_layers=3"]),
        ("gemma2", {"hidden_act": "silu"}, ["hidden_act", "hidden_activation"]),
        ("gemma2", {"sliding_window_size": 11}, ["sliding_window_size"]),
        ("gpt2", {"n_ctx": 31}, ["n_ctx=31", "n_positions=67"]),
        ("gpt2", {"n_head": 3}, ["n_head=3", "n_embd=55"]),
    ],
)
def test_values_that_cannot_be(family, fields, words):
    refused(FAMILIES[family] | fields, *words)


def test_fields_that_change_nothing_are_accepted():
    harmless = {
        "temperature": 0.7,
        "_name_or_path": "somewhere",
        "torch_dtype": "float16",
        "quantization_config": None,
        "partial_rotary_factor": 1.0,
    }
    assert config_from_huggingface(LLAMA | harmless) == config_from_huggingface(LLAMA)
