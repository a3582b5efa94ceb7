"""What a decoder is: one frozen, hashable config for every family.

A family is a choice of these fields, made where checkpoints are read
(`kvlab.models.checkpoints`) or where presets are listed (`kvlab.models.presets`).
"""

import dataclasses

import jax.numpy as jnp

from kvlab.ops.attention import AttentionOptions, check_heads
from kvlab.ops.rope import Rope

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class RMSNorm:
    """Root-mean-square norm; Gemma stores its scale as the distance from 1 (`scale_offset`)."""

    epsilon: float = 1e-6
    scale_offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """Mean and variance norm with scale and bias."""

    epsilon: float = 1e-5


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer.

    Args:
      family: llama, mistral, qwen2, qwen3, gemma2 or gpt2; names the checkpoint format.
      vocab_size: V.
      num_layers: L.
      embed_dim: D.
      hidden_dim: width of the MLP.
      num_heads: N.
      num_kv_heads: K of each layer; one number stands for all of them.
      head_dim: H.
      max_length: longest text in tokens (the context).
      norm: RMSNorm or LayerNorm, for every norm but those on queries and keys.
      activation: one of `ACTIVATIONS`.
      gated_mlp: down(act(gate(x)) * up(x)) instead of down(act(up(x))).
      rope: rotary positions; None means learned positions (GPT-2).
      windows: sliding window of each layer in tokens; None is full attention, and one value stands
        for all layers.
      soft_cap: soft cap on attention scores; None is off.
      final_soft_cap: soft cap on logits; None is off.
      query_scale: factor on attention scores; None is head_dim ** -0.5.
      embed_scale: factor on token embeddings; None is off.
      qkv_bias, output_bias, mlp_bias: which projections have a bias.
      qk_norm: RMS norm over head_dim on queries and keys before RoPE.
      post_norms: a second norm on the output of attention and MLP (Gemma 2).
      tie_embeddings: the head is the embedding.
      param_dtype: dtype of the parameters.
      dtype: dtype of the computation. float32 runs its products at `Precision.HIGHEST`.

    Raises:
      ValueError: heads that do not divide, per-layer tuples of another length than num_layers,
        sizes below 1, an odd head_dim with RoPE, an unknown activation or dtype.
    """

    family: str
    vocab_size: int
    num_layers: int
    embed_dim: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int | tuple[int, ...]
    head_dim: int
    max_length: int
    norm: RMSNorm | LayerNorm = dataclasses.field(default_factory=RMSNorm)
    activation: str = "silu"
    gated_mlp: bool = True
    rope: Rope | None = None
    windows: int | tuple[int | None, ...] | None = None
    soft_cap: float | None = None
    final_soft_cap: float | None = None
    query_scale: float | None = None
    embed_scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    tie_embeddings: bool = False
    param_dtype: str = "float32"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Validates, and spells per-layer fields out."""
        for field in ("vocab_size", "num_layers", "embed_dim", "hidden_dim", "num_heads"):
            self._check_positive(field)
        for field in ("head_dim", "max_length"):
            self._check_positive(field)
        for field in ("num_kv_heads", "windows"):
            value = getattr(self, field)
            layers = value if isinstance(value, tuple) else (value,) * self.num_layers
            if len(layers) != self.num_layers:
                raise ValueError(
                    f"{field} has {len(layers)} entries for num_layers={self.num_layers}; "
                    "give one value, or one per layer"
                )
            object.__setattr__(self, field, layers)
        for num_kv_heads in self.kv_heads:
            check_heads(self.num_heads, num_kv_heads)
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs")
        if self.activation not in ACTIVATIONS:
            legal = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation={self.activation!r} is not known; legal values: {legal}")
        for field in ("param_dtype", "dtype"):
            if getattr(self, field) not in DTYPES:
                legal = ", ".join(DTYPES)
                raise ValueError(
                    f"{field}={getattr(self, field)!r} is not known; legal values: {legal}"
                )

    def _check_positive(self, field: str) -> None:
        if getattr(self, field) < 1:
            raise ValueError(f"{field}={getattr(self, field)} given; it must be 1 or more")

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """K of each layer."""
        assert isinstance(self.num_kv_heads, tuple)
        return self.num_kv_heads

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens, None for full attention."""
        assert isinstance(self.windows, tuple)
        return self.windows

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The computation's dtype."""
        return jnp.dtype(self.dtype)

    def attention_options(self, window: int | None, implementation: str | None) -> AttentionOptions:
        """What a layer with this window asks of attention."""
        return AttentionOptions(self.attention_scale, window, self.soft_cap, implementation)
