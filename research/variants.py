"""Attention variants of a loaded model, by their names.

Axes: N query heads, K KV heads.
"""

import dataclasses

from kvlab.models.config import DecoderConfig
from kvlab.models.convert import convert_attention, legal_kv_heads
from kvlab.models.load import Model

ATTENTIONS = "mha, gqa, gqa:K (K KV heads, such as gqa:2), mqa"
"""The legal names, in words for messages and help."""


def parse_attention(text: str) -> str:
    """Checks the name of an attention variant.

    Args:
      text: `mha`, `gqa`, `gqa:K` or `mqa`.

    Returns:
      The name in its one spelling (`gqa:02` is `gqa:2`).

    Raises:
      ValueError: an unknown name, or `gqa:1`, which is `mqa`.
    """
    name, colon, number = text.partition(":")
    if name not in ("mha", "gqa", "mqa") or (colon and name != "gqa"):
        raise ValueError(f"attention={text!r} is not known; legal values: {ATTENTIONS}")
    if not colon:
        return name
    if not (number.isascii() and number.isdecimal() and int(number) >= 1):
        raise ValueError(f"attention={text!r} names no number of KV heads; write gqa:2, say")
    if int(number) == 1:
        raise ValueError("attention=gqa:1 has one KV head for all queries: that is mqa; use mqa")
    return f"gqa:{int(number)}"


def kv_heads(config: DecoderConfig, attention: str | tuple[str, ...]) -> tuple[int, ...]:
    """The number of KV heads that each layer of a model has under an attention variant.

    Args:
      config: the model.
      attention: a name that `parse_attention` takes, or one per layer.

    Returns:
      K of each layer: N for `mha`, 1 for `mqa`, the named one for `gqa:K`, and the model's own
      for `gqa`.

    Raises:
      ValueError: an unknown name; another number of names than layers; `gqa` of a model that is
        itself mha or mqa; a K that the model cannot be converted to, or that is mha. The message
        names a legal value.
    """
    names = (attention,) * config.num_layers if isinstance(attention, str) else attention
    if len(names) != config.num_layers:
        raise ValueError(
            f"attention has {len(names)} entries for {config.num_layers} layers; give one value, "
            "or one per layer"
        )
    return tuple(_layer_kv_heads(config, layer, name) for layer, name in enumerate(names))


def _layer_kv_heads(config: DecoderConfig, layer: int, attention: str) -> int:
    """K of one layer under an attention variant."""
    name, _, number = parse_attention(attention).partition(":")
    num_heads, own = config.num_heads, config.kv_heads[layer]
    if name in ("mha", "mqa"):
        return num_heads if name == "mha" else 1
    grouped = [k for k in legal_kv_heads(num_heads, own) if 1 < k < num_heads]
    advice = "use " + ", ".join([*(f"gqa:{k}" for k in grouped), "mha or mqa"])
    if not number:
        if any(1 < k < num_heads for k in config.kv_heads):
            return own
        kind = "mqa" if own == 1 else "mha"
        raise ValueError(
            f"attention=gqa means the model's own groups, and this model is {kind} ({num_heads} "
            f"query heads, {own} KV heads); {advice}"
        )
    if int(number) not in grouped:
        fault = "is mha" if int(number) == num_heads else "is not possible"
        raise ValueError(
            f"attention={attention} {fault} with {num_heads} query heads and {own} KV heads; "
            f"{advice}"
        )
    return int(number)


def own_attention(config: DecoderConfig) -> str:
    """The name of the attention that a model was trained with: `mha`, `gqa` or `mqa`.

    A model whose layers differ is `gqa`, or what most of its layers are where none has groups.
    """
    kv_heads = config.kv_heads
    if any(1 < k < config.num_heads for k in kv_heads):
        return "gqa"
    return "mqa" if 2 * kv_heads.count(1) > len(kv_heads) else "mha"


def apply_attention(
    config: DecoderConfig,
    params: dict,
    attention: str | tuple[str, ...],
    pooling: str = "mean",
    seed: int = 0,
) -> tuple[DecoderConfig, dict]:
    """Gives a model another attention variant.

    `mha` repeats KV heads and computes the same function; `mqa`, and `gqa:K` with a smaller K,
    make one KV head of each group, which loses quality until the model is trained further.
    Source: GQA (arXiv 2305.13245), section 2.1 and, for the ways to pool, Fig. 4.

    Args:
      config: the model.
      params: its parameters.
      attention: a name that `parse_attention` takes, or one per layer.
      pooling: how a group becomes one head: `mean`, `first` or `random` (drawn anew).
      seed: of the draws of `random`.

    Returns:
      The config and the parameters of the variant; those given where nothing changes.

    Raises:
      ValueError: as `kv_heads`; or an unknown pooling.
    """
    wanted = kv_heads(config, attention)
    if wanted == config.kv_heads:
        return config, params
    return convert_attention(config, params, wanted, pooling, seed)


def with_attention(
    model: Model, attention: str | None, pooling: str = "mean", seed: int = 0
) -> Model:
    """The model with another attention variant (`apply_attention`); None leaves it as it is."""
    if attention is None:
        return model
    config, params = apply_attention(model.config, model.params, attention, pooling, seed)
    return dataclasses.replace(model, config=config, params=params)
