"""The axes by their names: attention variants of a loaded model, and points on the cache axes.

Axes: N query heads, K KV heads.
"""

import itertools
from collections.abc import Sequence

from kvlab.models.config import DecoderConfig
from kvlab.models.convert import convert_attention, legal_kv_heads
from kvlab.ops.specs import CacheSpec, Paged, Recompute, parse_placement

ATTENTIONS = "mha, gqa, gqa:K (K KV heads, such as gqa:2), mqa"
"""The legal names, in words for messages and help."""

_DEFAULT_PAGE_SIZES = (Paged().page_size,)


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


def kv_heads(config: DecoderConfig, attention: str) -> tuple[int, ...]:
    """The number of KV heads that each layer of a model has under an attention variant.

    Args:
      config: the model.
      attention: a name that `parse_attention` takes.

    Returns:
      K of each layer: N for `mha`, 1 for `mqa`, the named one for `gqa:K`, and the model's own
      for `gqa`.

    Raises:
      ValueError: an unknown name; `gqa` of a model that is itself mha or mqa and has no K between
        1 and N to offer; a K that the model cannot be converted to. The message names a legal one.
    """
    name, _, number = parse_attention(attention).partition(":")
    if name == "mha":
        return (config.num_heads,) * config.num_layers
    if name == "mqa":
        return (1,) * config.num_layers
    if not number:
        if any(1 < heads < config.num_heads for heads in config.kv_heads):
            return config.kv_heads
        own = "mqa" if config.kv_heads[0] == 1 else "mha"
        raise ValueError(
            f"attention=gqa is the model's own grouping, and this model is {own} "
            f"({_heads(config)}); {_advice(config)}"
        )
    wanted = int(number)
    if wanted not in _legal(config):
        reason = "is not possible"
        if wanted == config.num_heads:
            reason = "is mha"
        raise ValueError(f"attention={attention} {reason} with {_heads(config)}; {_advice(config)}")
    return (wanted,) * config.num_layers


def apply_attention(
    config: DecoderConfig, params: dict, attention: str
) -> tuple[DecoderConfig, dict]:
    """Gives a model another attention variant.

    `mha` repeats KV heads and computes the same function; `mqa`, and `gqa:K` with a smaller K,
    average groups of KV heads, which loses quality until the model is trained further.
    Source: GQA (arXiv 2305.13245), section 2.1.

    Args:
      config: the model.
      params: its parameters.
      attention: a name that `parse_attention` takes.

    Returns:
      The config and the parameters of the variant; those given where nothing changes.

    Raises:
      ValueError: as `kv_heads`.
    """
    wanted = kv_heads(config, attention)
    if wanted == config.kv_heads:
        return config, params
    return convert_attention(config, params, wanted, "mean")


def cache_specs(
    placements: Sequence[str],
    page_sizes: Sequence[int] = _DEFAULT_PAGE_SIZES,
    storages: Sequence[str] = ("float32",),
) -> list[CacheSpec]:
    """The product of the cache axes, in the order given.

    A parameter that a point does not use is no part of it: only `paged` has a page size, and
    `recompute` stores nothing. Equal points come once.

    Args:
      placements: names of placements.
      page_sizes: tokens a page.
      storages: names of dtypes.

    Returns:
      The points.

    Raises:
      ValueError: an unknown name, a page size below 1.
    """
    points = []
    for name, page_size, storage in itertools.product(placements, page_sizes, storages):
        placement = parse_placement(name, page_size)
        stored = "float32" if isinstance(placement, Recompute) else storage
        points.append(CacheSpec(placement, stored))
    return list(dict.fromkeys(points))


def _legal(config: DecoderConfig) -> list[int]:
    """Every K strictly between 1 and N that all layers can be converted to."""
    common = set(range(2, config.num_heads))
    for heads in config.kv_heads:
        common &= set(legal_kv_heads(config.num_heads, heads))
    return sorted(common)


def _advice(config: DecoderConfig) -> str:
    legal = ", ".join(f"gqa:{heads}" for heads in _legal(config))
    return f"use {legal}, mha or mqa" if legal else "use mha or mqa"


def _heads(config: DecoderConfig) -> str:
    counts = ", ".join(str(heads) for heads in sorted(set(config.kv_heads)))
    return f"{config.num_heads} query heads and {counts} KV heads"
