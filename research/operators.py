"""Operators of a decoder step with what each computes and moves, counted from the config.

Axes as letters: T new tokens of all sequences, N query heads, K KV heads, H head size, D model
width, F MLP width, V vocabulary. Names are those of the parameters where an operator has some.

What an operator computes and moves follows "LLM Inference Unveiled" (arXiv 2402.16363, section
2.2) and its tool (LLM-Viewer): a multiplication and an addition are two operations, each operator
reads its inputs from memory and writes its output there. An elementwise operator has a fixed number
of operations a value (`_SOFTMAX` and so on), which is a convention; products are exact.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from kvlab.models.config import DecoderConfig, LayerNorm
from kvlab.ops.packed_weight import packed_bytes

# Operations a value. Norm: sum, subtract, square, sum, divide, scale, shift; softmax: maximum,
# subtract, exponentiate, sum, divide (both as LLM-Viewer counts them).
_NORM, _SOFTMAX = 7, 5
_SOFT_CAP = 3  # divide, tanh, multiply
_ROPE = 3  # four products and two sums for a pair
_ACTIVATION = 4  # SiLU: negate, exponentiate, add, divide


@dataclasses.dataclass(frozen=True)
class Operator:
    """What one operator of one layer computes and moves.

    Attributes:
      name: as `query`, `qk_matmul`, `attention_norm`.
      flops: operations.
      weight_bytes: of parameters, read.
      activation_bytes: read and written.
      kv_bytes: of the cache, read and written.
      layers: how many layers have such an operator.
    """

    name: str
    flops: float = 0
    weight_bytes: float = 0
    activation_bytes: float = 0
    kv_bytes: float = 0
    layers: int = 1

    @property
    def moved_bytes(self) -> float:
        """All that goes through memory."""
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in operations a byte; infinite where nothing is moved."""
        return self.flops / self.moved_bytes if self.moved_bytes else float("inf")


def total(operators: Iterable[Operator], name: str = "total") -> Operator:
    """All operators of all their layers as one."""
    flops, weights, activations, kv = 0.0, 0.0, 0.0, 0.0
    for one in operators:
        flops += one.flops * one.layers
        weights += one.weight_bytes * one.layers
        activations += one.activation_bytes * one.layers
        kv += one.kv_bytes * one.layers
    return Operator(name, flops, weights, activations, kv)


def added(operators: Sequence[Operator]) -> Operator:
    """One operator of several calls as that of one; name and layers are theirs."""
    return dataclasses.replace(
        operators[0],
        flops=sum(one.flops for one in operators),
        weight_bytes=sum(one.weight_bytes for one in operators),
        activation_bytes=sum(one.activation_bytes for one in operators),
        kv_bytes=sum(one.kv_bytes for one in operators),
    )


@dataclasses.dataclass(frozen=True)
class Accounting:
    """What counts, where there is a choice.

    Args:
      fused_attention: scores stay on chip, and both products with the softmax between them are one
        operator, `attention` (FlashAttention, arXiv 2205.14135); else `qk_matmul`, `softmax` and
        `sv_matmul` write scores to memory and read them back.
      causal: only pairs that the mask lets through are computed; else every query meets every key
        that its layer reads.
      small_reads: the scales of norms and the second operand of residual additions are read too.
    """

    fused_attention: bool = True
    causal: bool = True
    small_reads: bool = True


EXACT = Accounting()
"""What a good kernel has to do."""
UNVEILED = Accounting(fused_attention=False, causal=False, small_reads=False)
"""As "LLM Inference Unveiled" counts in its Table 1."""


@dataclasses.dataclass(frozen=True)
class LayerWork:
    """What a step asks of one layer, over all sequences.

    Attributes:
      kv_heads: K of the layer.
      tokens: that go through it (T).
      pairs: of a query and a key, each of which every query head computes.
      key_bytes, value_bytes: that attention reads of the cache.
      written_bytes: of keys and values that enter the cache.
      dense_keys: keys that attention reads as activations, where there is no cache.
    """

    kv_heads: int
    tokens: int
    pairs: int
    key_bytes: float = 0
    value_bytes: float = 0
    written_bytes: float = 0
    dense_keys: int = 0


def step_operators(
    config: DecoderConfig,
    layers: Sequence[LayerWork],
    positions: int,
    accounting: Accounting = EXACT,
    weights: str | None = None,
) -> tuple[Operator, ...]:
    """Every operator of one step of a decoder.

    Args:
      config: the decoder; its `param_dtype` and `dtype` give bytes a weight and an activation.
      layers: what is asked of each layer.
      positions: whose logits are computed, over all sequences.
      accounting: what counts.
      weights: the format that weights of products are packed in (`kvlab.ops.packed_weight`), of
        D_out columns that fill whole panels; None is `param_dtype`.

    Returns:
      Operators in the order they run, layers that do the same being one group (`layers`).
    """
    counts = _Counts(config, accounting, weights)
    groups = collections.Counter(layers)  # in the order of their first layers
    operators = [counts.embed(layers[0].tokens)]
    for work, number in groups.items():
        for one in [*counts.attention_block(work), *counts.mlp_block(work.tokens)]:
            operators.append(dataclasses.replace(one, layers=number))
    return (*operators, counts.norm("final_norm", layers[0].tokens), counts.head(positions))


@dataclasses.dataclass(frozen=True)
class _Counts:
    """Counts of single operators."""

    config: DecoderConfig
    accounting: Accounting
    weights: str | None

    @functools.cached_property
    def _weight(self) -> int:
        """Bytes of a parameter that is not packed."""
        return jnp.dtype(self.config.param_dtype).itemsize

    @functools.cached_property
    def _value(self) -> int:
        """Bytes of an activation."""
        return self.config.compute_dtype.itemsize

    def _product(self, width_in: int, width_out: int) -> int:
        """Bytes of the weight of a product."""
        if self.weights is None:
            return width_in * width_out * self._weight
        return packed_bytes((width_in, width_out), self.weights)

    def _linear(
        self, name: str, width_in: int, width_out: int, tokens: int, bias: bool = False
    ) -> Operator:
        return Operator(
            name,
            flops=tokens * width_out * (2 * width_in + bias),
            weight_bytes=self._product(width_in, width_out) + width_out * bias * self._weight,
            activation_bytes=tokens * (width_in + width_out) * self._value,
        )

    def _elementwise(
        self, name: str, flops: int, values_read: int, values_written: int
    ) -> Operator:
        return Operator(name, flops, 0, (values_read + values_written) * self._value)

    def norm(self, name: str, tokens: int, width: int | None = None) -> Operator:
        """A norm over the model's width, or another."""
        width = self.config.embed_dim if width is None else width
        arrays = 2 if isinstance(self.config.norm, LayerNorm) else 1
        one = self._elementwise(name, _NORM * tokens * width, tokens * width, tokens * width)
        scale = arrays * width * self._weight if self.accounting.small_reads else 0
        return dataclasses.replace(one, weight_bytes=scale)

    def _add(self, name: str, tokens: int) -> Operator:
        """A residual addition."""
        values = tokens * self.config.embed_dim
        read = 2 * values if self.accounting.small_reads else values
        return self._elementwise(name, values, read, values)

    def attention_block(self, work: LayerWork) -> list[Operator]:
        """From the residual stream through attention back to it."""
        config, tokens = self.config, work.tokens
        width, kv_width = config.num_heads * config.head_dim, work.kv_heads * config.head_dim
        operators = [
            self.norm("attention_norm", tokens),
            self._linear("query", config.embed_dim, width, tokens, config.qkv_bias),
            self._linear("key", config.embed_dim, kv_width, tokens, config.qkv_bias),
            self._linear("value", config.embed_dim, kv_width, tokens, config.qkv_bias),
        ]
        if config.qk_norm:
            operators.append(self._head_norm("query_norm", tokens, config.num_heads))
            operators.append(self._head_norm("key_norm", tokens, work.kv_heads))
        if config.rope is not None:
            values = tokens * (width + kv_width)
            operators.append(self._elementwise("rope", _ROPE * values, values, values))
        if work.written_bytes:
            read = 2 * tokens * kv_width * self._value
            operators.append(Operator("kv_write", 0, 0, read, work.written_bytes))
        operators += self._attend(work)
        operators.append(
            self._linear("output", width, config.embed_dim, tokens, config.output_bias)
        )
        if config.post_norms:
            operators.append(self.norm("attention_post_norm", tokens))
        return [*operators, self._add("attention_add", tokens)]

    def _head_norm(self, name: str, tokens: int, heads: int) -> Operator:
        """A norm of every head, all with one scale."""
        one = self.norm(name, tokens * heads, self.config.head_dim)
        return dataclasses.replace(one, name=name)

    def _attend(self, work: LayerWork) -> list[Operator]:
        """Products with keys and values, and the softmax between them."""
        config = self.config
        width = config.num_heads * config.head_dim
        vectors = work.tokens * width * self._value  # queries, or outputs
        scores = config.num_heads * work.pairs
        moved = 0 if self.accounting.fused_attention else scores * self._value
        dense = work.dense_keys * work.kv_heads * config.head_dim * self._value
        product = 2 * config.head_dim * scores
        capped = _SOFT_CAP if config.soft_cap is not None else 0
        parts = [
            Operator("qk_matmul", product, 0, vectors + dense + moved, work.key_bytes),
            Operator("softmax", (_SOFTMAX + capped) * scores, 0, 2 * moved),
            Operator("sv_matmul", product, 0, vectors + dense + moved, work.value_bytes),
        ]
        return [total(parts, "attention")] if self.accounting.fused_attention else parts

    def mlp_block(self, tokens: int) -> list[Operator]:
        """From the residual stream through the MLP back to it."""
        config = self.config
        inner, outer, bias = config.hidden_dim, config.embed_dim, config.mlp_bias
        names = ("gate", "up") if config.gated_mlp else ("up",)
        values, gated = tokens * inner, int(config.gated_mlp)
        operators = [self.norm("mlp_norm", tokens)]
        operators += [self._linear(name, outer, inner, tokens, bias) for name in names]
        operators += [
            self._elementwise(
                "activation", (_ACTIVATION + gated) * values, (1 + gated) * values, values
            ),
            self._linear("down", inner, outer, tokens, bias),
        ]
        if config.post_norms:
            operators.append(self.norm("mlp_post_norm", tokens))
        return [*operators, self._add("mlp_add", tokens)]

    def embed(self, tokens: int) -> Operator:
        """Rows of the token embedding, and of the positions' where they are learned."""
        config = self.config
        tables = 1 if config.rope is not None else 2
        values = tokens * config.embed_dim
        row = config.embed_dim * self._weight
        token = self._product(config.embed_dim, 1) if config.tie_embeddings else row
        scaled = int(config.embed_scale is not None)
        return Operator(
            "embed",
            (tables - 1 + scaled) * values,
            tokens * (token + (tables - 1) * row),
            values * self._value,
        )

    def head(self, positions: int) -> Operator:
        """Logits of some positions."""
        config = self.config
        one = self._linear("head", config.embed_dim, config.vocab_size, positions)
        capped = _SOFT_CAP if config.final_soft_cap is not None else 0
        return dataclasses.replace(one, flops=one.flops + capped * positions * config.vocab_size)
