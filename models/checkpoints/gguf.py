"""GGUF checkpoints: llama (Mistral too), qwen2, qwen3, gemma2 and gpt2, of any quantisation.

The `gguf` package dequantises; `kvlab.models.checkpoints.gguf_file` reads the file around it.

Axes: D model width, N query heads, K KV heads, H head size, V vocabulary.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.gguf_config import read_config
from kvlab.models.checkpoints.gguf_file import GgufFile, open_gguf
from kvlab.models.checkpoints.tree import flat_shapes, named
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
_READ_BY_CONFIG = frozenset({"rope_freqs.weight"})


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where a parameter comes from.

    Attributes:
      tensor: name in the file.
      rows: first and last row (exclusive) of a fused projection, or None for all.
      paired: rows of a head lie as llama.cpp rotates them, neighbours together.
    """

    tensor: str
    rows: tuple[int, int] | None = None
    paired: bool = False


def load_gguf(
    path: str | os.PathLike[str], param_dtype: str = "float32"
) -> tuple[DecoderConfig, dict]:
    """Reads a model out of a GGUF file.

    Args:
      path: the file.
      param_dtype: dtype of the parameters; values are dequantised in float32 and rounded once.

    Returns:
      The config, and parameters in the tree of `kvlab.models.decoder`.

    Raises:
      CheckpointError: not GGUF, truncated, an unknown architecture, a key or a quantisation that
        is not supported, a tensor that is missing, unknown or of another shape than the metadata
        says.
    """
    file = open_gguf(path)
    config = read_config(file, param_dtype)
    shapes = flat_shapes(config)
    sources = {name: _source(name, file, config) for name in shapes}
    _check_tensors(file, sources, shapes)
    flat = {
        name: jnp.asarray(_read(file, name, source, config)) for name, source in sources.items()
    }
    return config, traverse_util.unflatten_dict(flat, sep="/")


def _source(name: str, file: GgufFile, config: DecoderConfig) -> _Source:
    """Finds a parameter, given by its flat name, in the file."""
    if name in _TOP:
        return _Source(_TOP[name])
    layer, _, rest = name.partition("/")
    module, _, kind = rest.rpartition("/")
    prefix = f"blk.{layer.removeprefix('layers_')}"
    part = "weight" if kind == "scale" else kind
    if module in _FUSED and f"{prefix}.attn_qkv.weight" in file.tensors:
        num_kv_heads = config.kv_heads[int(layer.removeprefix("layers_"))]
        ends = np.cumsum([0, config.num_heads, num_kv_heads, num_kv_heads]) * config.head_dim
        at = _FUSED.index(module)
        return _Source(f"{prefix}.attn_qkv.{part}", (int(ends[at]), int(ends[at + 1])))
    paired = config.family == "llama" and module in ("attention/query", "attention/key")
    return _Source(f"{prefix}.{_IN_LAYER[module]}.{part}", paired=paired)


def _check_tensors(
    file: GgufFile, sources: dict[str, _Source], shapes: dict[str, jax.ShapeDtypeStruct]
) -> None:
    """Compares the file's list of tensors with what the config asks for."""
    used = {source.tensor for source in sources.values()}
    if missing := sorted(used - set(file.tensors)):
        raise CheckpointError(f"{file.path} lacks the tensors {named(missing)}")
    if extra := sorted(set(file.tensors) - used - _READ_BY_CONFIG):
        raise CheckpointError(
            f"{file.path} has tensors that no {file.metadata['general.architecture']} decoder "
            f"uses: {named(extra)}"
        )
    wanted: dict[str, tuple[int, ...]] = {}
    for name, source in sources.items():
        shape = shapes[name].shape if _is_table(name) else shapes[name].shape[::-1]
        rows = wanted.get(source.tensor, (0,))[0]
        wanted[source.tensor] = (rows + shape[0], *shape[1:])
    for tensor, shape in wanted.items():
        if file.tensors[tensor].shape != shape:
            raise CheckpointError(
                f"{file.path}: tensor {tensor} has shape {file.tensors[tensor].shape}; the "
                f"metadata asks for {shape}"
            )


def _is_table(name: str) -> bool:
    """Whether a parameter is looked up by row, and so lies as it does in the file."""
    return name in ("embed/weight", "position_embed/weight")


def _read(file: GgufFile, name: str, source: _Source, config: DecoderConfig) -> np.ndarray:
    """Reads one parameter; projections are [out, in] in the file and [in, out] here."""
    values = file.dequantized(source.tensor)
    if source.rows is not None:
        values = values[slice(*source.rows)]
    if source.paired:
        values = _unpaired(values, config.head_dim)
    if not _is_table(name):
        values = values.T
    return np.ascontiguousarray(values, dtype=jnp.dtype(config.param_dtype))


def _unpaired(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes the order that llama files give the rows of queries and keys, [heads * H, ...].

    llama.cpp rotates neighbours, so the converter moved row i of a head's first half to 2 i and
    row i of its second half to 2 i + 1; `kvlab.ops.rope` turns dimension i with i + H/2.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
