"""Makes rope.npz: RoPE frequencies, attention factors and rotated heads of transformers.

Run with the `peers` extra installed (transformers 5.24 made the committed file):

    python tests/goldens/make_rope.py

The file holds `cases`, one JSON text a case, and per case i: `frequencies_i [H/2]`,
`attention_factors[i]`, and `rotated_i [1, T, N, H]` of `x_i` at `positions_i [1, T]`.
"""

import json
import pathlib

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

TARGET = pathlib.Path(__file__).with_name("rope.npz")
POSITIONS = (0, 1, 6, 1021, 131_071)
NUM_HEADS = 1

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}
DEEPSEEK = {
    **YARN,
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}

# head_dim, rope_parameters, and for dynamic scaling the model's and the prompt's length in tokens
CASES = (
    (26, {"rope_type": "default", "rope_theta": 10_000.0}, 2048, None),
    (64, {"rope_type": "default", "rope_theta": 100_000.0}, 2048, None),
    (128, {"rope_type": "default", "rope_theta": 500_000.0}, 2048, None),
    (26, {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}, 2048, None),
    (80, {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0}, 2048, None),
    (26, DYNAMIC, 2048, 17),
    (26, DYNAMIC, 2048, 2048),
    (26, DYNAMIC, 2048, 2049),
    (64, DYNAMIC, 2048, 5003),
    (128, {**DYNAMIC, "rope_theta": 500_000.0, "factor": 5.5}, 4096, 131_072),
    (26, LLAMA3, 131_072, None),
    (64, {**LLAMA3, "factor": 32.0}, 131_072, None),
    (128, {**LLAMA3, "low_freq_factor": 1.5, "high_freq_factor": 3.7}, 131_072, None),
    (26, {**YARN, "original_max_position_embeddings": 13}, 52, None),
    (26, YARN, 131_072, None),
    (128, YARN, 131_072, None),
    (64, {**YARN, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.5}, 131_072, None),
    (64, {**YARN, "attention_factor": 0.83}, 131_072, None),
    (64, {**DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.707}, 163_840, None),
    (64, {**DEEPSEEK, "mscale": 1.3, "mscale_all_dim": 0.707}, 163_840, None),
    (64, {**DEEPSEEK, "mscale": 1.3}, 163_840, None),
)


def rotary_of(head_dim: int, parameters: dict, max_length: int) -> LlamaRotaryEmbedding:
    config = transformers.LlamaConfig(
        hidden_size=NUM_HEADS * head_dim,
        num_attention_heads=NUM_HEADS,
        head_dim=head_dim,
        max_position_embeddings=max_length,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(config)


def build() -> dict[str, np.ndarray]:
    """Every array of the golden file, from the transformers that is installed."""
    generator = np.random.default_rng(20240229)
    arrays, texts, factors = {}, [], []
    for index, (head_dim, parameters, max_length, prompt_length) in enumerate(CASES):
        rotary = rotary_of(head_dim, parameters, max_length)
        positions = POSITIONS
        if prompt_length is not None:
            # Dynamic scaling looks at the last position it is given.
            positions = (0, 1, 6, prompt_length - 1)
        positions = np.array([positions], np.int32)
        shape = (1, positions.size, NUM_HEADS, head_dim)
        x = generator.standard_normal(shape).astype(np.float32)
        heads_first = torch.from_numpy(x).transpose(1, 2)
        cos, sin = rotary(heads_first, torch.from_numpy(positions).long())
        rotated, _ = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
        arrays[f"frequencies_{index}"] = rotary.inv_freq.numpy()
        arrays[f"x_{index}"] = x
        arrays[f"positions_{index}"] = positions
        arrays[f"rotated_{index}"] = rotated.transpose(1, 2).contiguous().numpy()
        factors.append(rotary.attention_scaling)
        case = {"head_dim": head_dim, "rope_parameters": parameters}
        case |= {"max_length": max_length, "prompt_length": prompt_length}
        texts.append(json.dumps(case))
    return arrays | {"cases": np.array(texts), "attention_factors": np.array(factors, np.float64)}


if __name__ == "__main__":
    np.savez_compressed(TARGET, **build())
    print(f"{TARGET.name}: {len(CASES)} cases, transformers {transformers.__version__}")
