"""Which tensor of a Hugging Face folder holds which parameters, for every family."""

import dataclasses
import re
from collections.abc import Mapping

import jax
import numpy as np

from kvlab.models.checkpoints.tree import flat_shapes
from kvlab.models.config import DecoderConfig

# Parameter, within a layer or at the top, to tensor.
_LLAMA = {
    "embed/weight": "embed_tokens.weight",
    "final_norm/scale": "norm.weight",
    "head/weight": "lm_head.weight",
    "attention_norm/scale": "input_layernorm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.o_proj",
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
_GEMMA2 = _LLAMA | {
    "attention_post_norm/scale": "post_attention_layernorm.weight",
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "mlp_post_norm/scale": "post_feedforward_layernorm.weight",
}
_GPT2 = {
    "embed/weight": "wte.weight",
    "position_embed/weight": "wpe.weight",
    "final_norm/scale": "ln_f.weight",
    "final_norm/bias": "ln_f.bias",
    "head/weight": "lm_head.weight",
    "attention_norm/scale": "ln_1.weight",
    "attention_norm/bias": "ln_1.bias",
    "mlp_norm/scale": "ln_2.weight",
    "mlp_norm/bias": "ln_2.bias",
    # One tensor holds the three, side by side along its last axis, in this order.
    "attention/query": "attn.c_attn",
    "attention/key": "attn.c_attn",
    "attention/value": "attn.c_attn",
    "attention/output": "attn.c_proj",
    "mlp/up": "mlp.c_fc",
    "mlp/down": "mlp.c_proj",
}

# Files of the base model and of the model with its head differ by this prefix.
_PREFIXES = re.compile(r"^(model|transformer)\.")
# Constants that old files saved beside the weights: RoPE frequencies and GPT-2's causal mask.
_BUFFERS = re.compile(
    r"^(layers\.\d+\.self_attn\.rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias)$"
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a folder.

    Args:
      name: its name in the files, without the prefix of the model.
      parameters: flat names of the parameters in it, side by side along the parameters' last axis.
      transposed: the file holds [out, in].
      shape: its shape in the file, as the config has it.
    """

    name: str
    parameters: tuple[str, ...]
    transposed: bool
    shape: tuple[int, ...]

    def split(self, array: np.ndarray, dtype: np.dtype) -> dict[str, jax.Array]:
        """Turns the array in the file into parameters.

        Args:
          array: [*shape] float.
          dtype: of the parameters.

        Returns:
          Each parameter by flat name, [in, out] where it is a weight.
        """
        array = array.T if self.transposed else array
        parts = np.split(array, len(self.parameters), axis=-1)
        return {
            name: jax.numpy.asarray(np.ascontiguousarray(part, dtype))
            for name, part in zip(self.parameters, parts, strict=True)
        }

    def join(self, flat: Mapping[str, jax.Array], dtype: np.dtype) -> np.ndarray:
        """Turns parameters into the array in the file: what `split` undoes.

        Args:
          flat: parameters by flat name.
          dtype: of the file.

        Returns:
          [*shape] in `dtype`.
        """
        parts = [np.asarray(flat[name]).astype(dtype) for name in self.parameters]
        array = np.concatenate(parts, axis=-1)
        return np.ascontiguousarray(array.T if self.transposed else array)


def tensors(config: DecoderConfig) -> list[Tensor]:
    """Every tensor that a folder of this config must hold."""
    shapes = flat_shapes(config)
    places = {name: _place(name, config) for name in shapes}
    groups: dict[str, list[str]] = {}
    for name in sorted(shapes, key=lambda name: places[name][0]):
        groups.setdefault(places[name][1], []).append(name)
    return [_tensor(name, group, shapes, config) for name, group in groups.items()]


def _place(parameter: str, config: DecoderConfig) -> tuple[int, str]:
    """Row of the family's table that a parameter is in, and the name of its tensor."""
    table = {"gpt2": _GPT2, "gemma2": _GEMMA2}.get(config.family, _LLAMA)
    top, _, rest = parameter.partition("/")
    in_layer = top.startswith("layers_")
    within = rest if in_layer else parameter
    module, _, kind = within.rpartition("/")
    row = within if within in table else module
    tensor = table[row] if row == within else f"{table[row]}.{kind}"
    if in_layer:
        layers = "h" if config.family == "gpt2" else "layers"
        tensor = f"{layers}.{top.removeprefix('layers_')}.{tensor}"
    return list(table).index(row), tensor


def _tensor(
    name: str,
    parameters: list[str],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    config: DecoderConfig,
) -> Tensor:
    # torch's Linear keeps [out, in]; GPT-2 keeps [in, out], but for its head.
    first = parameters[0]
    is_linear = first.endswith("/weight") and first not in ("embed/weight", "position_embed/weight")
    transposed = is_linear and (config.family != "gpt2" or first == "head/weight")
    *leading, _ = shapes[first].shape
    shape = (*leading, sum(shapes[parameter].shape[-1] for parameter in parameters))
    return Tensor(name, tuple(parameters), transposed, shape[::-1] if transposed else shape)


def without_prefix(name: str) -> str:
    """A tensor's name as `Tensor.name` has it."""
    return _PREFIXES.sub("", name)


def with_prefix(name: str, config: DecoderConfig) -> str:
    """A tensor's name in the files of the model with its head, given `Tensor.name`."""
    if name == "lm_head.weight":
        return name
    return f"{'transformer' if config.family == 'gpt2' else 'model'}.{name}"


def is_buffer(name: str) -> bool:
    """Whether a tensor, named without its prefix, is a constant that is worked out anew here."""
    return _BUFFERS.match(name) is not None
