"""GGUF files mean here what they mean to llama.cpp: names, order of rows, norms, RoPE scalings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.checkpoints.gguf import load_gguf
from kvlab.models.decoder import Decoder

# llama.cpp reads GELU out of a float16 table; the rest is float32.
TOLERANCES = {"gpt2": 2e-2, "gemma2": 5e-3}
CASES = (
    "llama_mha",
    "llama_gqa",
    "llama_mqa",
    "llama_tied",
    "llama_biases",
    "llama_linear",
    "llama_llama3",
    "llama_yarn",
    "qwen2",
    "qwen3",
    "gemma2",
    "gpt2",
)
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [f"t{index}" for index in range(97)],
    "tokenizer.ggml.token_type": [1] * 97,
    "tokenizer.ggml.merges": ["t 1"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_llama_cpp(case, tiny_families, golden_script, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    tiny_gguf = golden_script("tiny_gguf")
    config, arrays = tiny_families.CASES[case].config, tiny_families.tensors(case)
    if case == "qwen2":  # llama.cpp wants heads that fill the width there
        config = config | {"hidden_size": config["num_attention_heads"] * config["head_dim"]}
        arrays = {
            name: tiny_families._draw(f"wide/{name}", name, shape, case)
            for name, shape in tiny_families._llama_shapes(config)
        }
    path = tiny_gguf.write(
        tmp_path / "model.gguf",
        tiny_gguf.architecture(config),
        tiny_gguf.metadata(config),
        tiny_gguf.tensors(config, arrays),
        other_keys=VOCABULARY,
    )
    tokens = tiny_families.tokens(case)[0]
    float32 = 0
    model = llama_cpp.Llama(
        str(path), n_ctx=64, logits_all=True, type_k=float32, type_v=float32, verbose=False
    )
    model.eval(tokens.tolist())
    theirs = np.asarray(model.scores[: len(tokens)])
    model.close()
    config, params = load_gguf(path)
    apply = jax.jit(lambda p, t: Decoder(config).apply({"params": p}, t, method="forward"))
    ours = np.asarray(apply(params, jnp.asarray(tokens)[None])[0])
    assert np.abs(theirs).max() > 3
    assert np.abs(ours - theirs).max() <= TOLERANCES.get(case, 1e-4)
