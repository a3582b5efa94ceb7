"""Writes smollm2_english.npz: what transformers predicts on the project's English text.

Run in an environment with torch, transformers and llama-cpp-python (the `peers` extra):

    python tests/goldens/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

The weights are those of the GGUF file, dequantised by the `gguf` package and put into
LlamaForCausalLM by this script alone: it shares no code with kvlab's loader. Arrays, for every
position of the text: `ids` int32 (llama.cpp's), `argmax` int32, `logsumexp` float32, and the 32
largest logits, `top_ids` int32 and `top_logits` float32.
"""

import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
TEXT = HERE.parents[1] / "research" / "texts" / "english.txt"
GOLDEN = HERE / "smollm2_english.npz"
NUM_LARGEST = 32
PIECE = 256  # positions whose logits are held at once

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_into_transformers(path: pathlib.Path):
    """A llama GGUF file as transformers' LlamaForCausalLM: float32, eager attention."""
    import gguf
    import torch
    import transformers

    reader = gguf.GGUFReader(path)

    def field(name: str) -> float:
        return reader.fields[f"llama.{name}"].contents()

    heads = {
        "attn_q": field("attention.head_count"),
        "attn_k": field("attention.head_count_kv"),
    }
    state = {}
    for tensor in reader.tensors:
        *layer, stem, part = tensor.name.split(".")
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if stem in heads:  # rows of a head: pairs of neighbours back to two halves
            out, width = values.shape
            size = out // heads[stem]
            split = values.reshape(heads[stem], size, width)
            values = np.concatenate([split[:, 0::2], split[:, 1::2]], axis=1).reshape(out, width)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        state[f"{prefix}{_NAMES[stem]}.{part}"] = torch.from_numpy(np.array(values))
    config = transformers.LlamaConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=field("context_length"),
        rms_norm_eps=float(np.float32(field("attention.layer_norm_rms_epsilon"))),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"], missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model


def reference_logits(model, ids: np.ndarray):
    """Yields float32 logits [at most PIECE, V] of a text's positions, in order."""
    import torch

    with torch.no_grad():
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        hidden = model.model(tokens, use_cache=False).last_hidden_state[0]
        for begin in range(0, len(ids), PIECE):
            yield model.lm_head(hidden[begin : begin + PIECE]).numpy()


def llama_cpp_ids(path: pathlib.Path, text: str) -> np.ndarray:
    """llama.cpp's token ids of a text, without a begin-of-text token."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return np.asarray(model.tokenize(text.encode(), add_bos=False, special=False), np.int32)


def summary(logits: np.ndarray) -> dict[str, np.ndarray]:
    """What the golden keeps of logits [T, V]."""
    largest = np.argsort(-logits, axis=-1, kind="stable")[:, :NUM_LARGEST]
    wide = logits.astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    logsumexp = np.log(np.exp(wide - peak).sum(-1)) + peak[:, 0]
    return {
        "argmax": largest[:, 0].astype(np.int32),
        "logsumexp": logsumexp.astype(np.float32),
        "top_ids": largest.astype(np.int32),
        "top_logits": np.take_along_axis(logits, largest, -1).astype(np.float32),
    }


def main() -> None:
    """Writes the file."""
    path = pathlib.Path(sys.argv[1])
    ids = llama_cpp_ids(path, TEXT.read_text(encoding="utf-8"))
    pieces = [summary(piece) for piece in reference_logits(load_into_transformers(path), ids)]
    arrays = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    np.savez_compressed(GOLDEN, ids=ids, **arrays)
    probability = np.exp(arrays["top_logits"].astype(np.float64) - arrays["logsumexp"][:, None])
    print(f"{len(ids)} positions; the {NUM_LARGEST} largest hold {probability.sum(-1).mean():.4f}")
    hits = arrays["argmax"][:-1] == ids[1:]
    print(f"top-1 is the next token at {hits.mean():.3f} of them; {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
