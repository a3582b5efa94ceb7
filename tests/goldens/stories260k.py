"""stories260K, a trained Llama-2-type model, from llama2.c's version-0 file to kvlab's tree.

The file is seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len) and
then float32 tensors, layers stacked, each weight [out, in]. Its RoPE turns neighbouring pairs
(2i, 2i + 1) where kvlab turns (i, i + H/2), so the rows of queries and keys are reordered.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.models.checkpoints.tree import nest
from kvlab.models.config import DecoderConfig, RMSNorm
from kvlab.ops.rope import Rope

FIRST_IDS = (1, 403, 407, 261, 378, 432, 383, 286)  # greedy, from BOS
FIRST_TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)


def load_stories260k(path: pathlib.Path) -> tuple[DecoderConfig, dict]:
    """Reads stories260K.bin into a config and parameters, float32."""
    content = path.read_bytes()
    header = np.frombuffer(content, "<i4", 7)
    width, hidden, layers, heads, kv_heads, vocab_size, length = (int(n) for n in header)
    head_dim = width // heads
    config = DecoderConfig(
        family="llama",
        vocab_size=vocab_size,
        num_layers=layers,
        embed_dim=width,
        hidden_dim=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=length,
        norm=RMSNorm(1e-5),
        rope=Rope(10_000.0),
        tie_embeddings=True,
    )
    stacked = {
        "embed/weight": (vocab_size, width),
        "attention_norm/scale": (layers, width),
        "attention/query/weight": (layers, heads * head_dim, width),
        "attention/key/weight": (layers, kv_heads * head_dim, width),
        "attention/value/weight": (layers, kv_heads * head_dim, width),
        "attention/output/weight": (layers, width, heads * head_dim),
        "mlp_norm/scale": (layers, width),
        "mlp/gate/weight": (layers, hidden, width),
        "mlp/down/weight": (layers, width, hidden),
        "mlp/up/weight": (layers, hidden, width),
        "final_norm/scale": (width,),
    }
    values = np.frombuffer(content, "<f4", offset=header.nbytes)
    flat: dict[str, jax.Array] = {}
    for name, shape in stacked.items():
        size = int(np.prod(shape))
        array, values = values[:size].reshape(shape), values[size:]
        if name in ("embed/weight", "final_norm/scale"):
            flat[name] = jnp.asarray(array)
            continue
        if name in ("attention/query/weight", "attention/key/weight"):
            array = _half_split_rows(array, head_dim)
        for layer in range(layers):
            flat[f"layers_{layer}/{name}"] = jnp.asarray(array[layer].T)
    assert values.size == length * head_dim  # the cos and sin of RoPE end the file
    return config, nest(flat, config)


def _half_split_rows(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from (0, 1, 2, 3, ...) pairs to (0, 2, ..., 1, 3, ...) halves."""
    layers, _, width = array.shape
    paired = array.reshape(layers, -1, head_dim // 2, 2, width)
    return paired.swapaxes(2, 3).reshape(array.shape)


def load_pieces(path: pathlib.Path) -> list[bytes]:
    """Reads tok512.bin: the longest size, then per piece a score, its size and its bytes."""
    content, offset = path.read_bytes(), 4
    pieces = []
    while offset < len(content):
        size = int.from_bytes(content[offset + 4 : offset + 8], "little")
        pieces.append(content[offset + 8 : offset + 8 + size])
        offset += 8 + size
    return pieces


def decode(pieces: list[bytes], ids: list[int]) -> str:
    """Text of ids after BOS; the space before the first word is the tokenizer's own."""
    return b"".join(pieces[token] for token in ids).decode().removeprefix(" ")
