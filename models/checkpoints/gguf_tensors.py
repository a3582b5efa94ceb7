"""Which tensor of a GGUF file holds which parameter, and how it lies there; read and written.

Axes: D model width, N query heads, K KV heads, H head size, V vocabulary.
"""

import dataclasses

import numpy as np

from kvlab.models.config import DecoderConfig

_TOP = {
    "embed/weight": "token_embd.weight",
    "position_embed/weight": "position_embd.weight",
    "final_norm/scale": "output_norm.weight",
    "final_norm/bias": "output_norm.bias",
    "head/weight": "output.weight",
}
_IN_LAYER = {
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_post_norm": "post_ffw_norm",
    "attention/query": "attn_q",
    "attention/key": "attn_k",
    "attention/value": "attn_v",
    "attention/output": "attn_output",
    "attention/query_norm": "attn_q_norm",
    "attention/key_norm": "attn_k_norm",
    "mlp/gate": "ffn_gate",
    "mlp/up": "ffn_up",
    "mlp/down": "ffn_down",
}
_FUSED = ("attention/query", "attention/key", "attention/value")
_LOOKED_UP = ("embed/weight", "position_embed/weight")

FUSED = "attn_qkv"
"""Queries, keys and values in one tensor, one above the other."""
ROPE_DIVISORS = "rope_freqs.weight"
"""What Llama 3 divides each frequency by, [H/2]; part of the config here."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter lies.

    Attributes:
      tensor: name in the file.
      rows: first and last row (exclusive) of a fused projection, or None for all.
      paired: H where the rows of a head lie as llama.cpp rotates them, neighbours together.
      turned: the file holds [out, in] for the parameter's [in, out].
    """

    tensor: str
    rows: tuple[int, int] | None = None
    paired: int | None = None
    turned: bool = True

    def parameter(self, values: np.ndarray) -> np.ndarray:
        """Takes the parameter out of its tensor.

        Args:
          values: [rows, ...] float, the whole tensor.

        Returns:
          The parameter, float, perhaps a view.
        """
        if self.rows is not None:
            values = values[slice(*self.rows)]
        if self.paired is not None:
            values = _unpaired(values, self.paired)
        return values.T if self.turned else values

    def values(self, parameter: np.ndarray) -> np.ndarray:
        """The rows of the tensor that hold a parameter: what `parameter` undoes."""
        values = parameter.T if self.turned else parameter
        return values if self.paired is None else _paired(values, self.paired)


def place_of(name: str, config: DecoderConfig, fused: bool) -> Place:
    """Finds a parameter in a file.

    Args:
      name: the parameter's flat name.
      config: the decoder, of a GGUF architecture (Mistral's is llama).
      fused: queries, keys and values share a tensor.
    """
    turned = name not in _LOOKED_UP
    if name in _TOP:
        return Place(_TOP[name], turned=turned)
    layer, _, rest = name.partition("/")
    module, _, kind = rest.rpartition("/")
    index = int(layer.removeprefix("layers_"))
    prefix, part = f"blk.{index}", "weight" if kind == "scale" else kind
    if module in _FUSED and fused:
        num_kv_heads = config.kv_heads[index]
        ends = np.cumsum([0, config.num_heads, num_kv_heads, num_kv_heads]) * config.head_dim
        at = _FUSED.index(module)
        return Place(f"{prefix}.{FUSED}.{part}", (int(ends[at]), int(ends[at + 1])))
    paired = config.family == "llama" and module in ("attention/query", "attention/key")
    tensor = f"{prefix}.{_IN_LAYER[module]}.{part}"
    return Place(tensor, paired=config.head_dim if paired else None)


def _unpaired(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes the order that llama files give the rows of queries and keys, [heads * H, ...].

    llama.cpp rotates neighbours, so the converter moved row i of a head's first half to 2 i and
    row i of its second half to 2 i + 1; `kvlab.ops.rope` turns dimension i with i + H/2.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _paired(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Gives rows the order that `_unpaired` undoes."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
