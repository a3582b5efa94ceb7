"""A set of models that differ in their KV heads alone, some of them perhaps trained several times.

Axes: N query heads, K KV heads.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvlab.models.config import DecoderConfig
from kvlab.models.load import Model, load_model, params_sha256


@dataclasses.dataclass(frozen=True)
class Member:
    """A model of a set, as rows name it.

    Attributes:
      model: any form that `kvlab.models.load.load_model` takes.
      sha256: of its weights in bfloat16, so that rows are known to be of these.
      num_kv_heads: K.
      repeat: how many of the same K stand before it in the set.
    """

    model: str
    sha256: str
    num_kv_heads: int
    repeat: int


def load_matched(names: Sequence[str], sample: str) -> dict[Member, Model]:
    """Loads models and makes sure that they can be compared.

    Args:
      names: any form that `load_model` takes; models of the same K are repeats.
      sample: text that all of their tokenizers must cut alike.

    Returns:
      The models in float32, their weights rounded to bfloat16 as those that are shipped.

    Raises:
      CheckpointError: a model that is not there, or that kvlab does not read.
      ValueError: models that differ in more than KV heads, or are the same; a tokenizer that is
        absent or another; layers that differ in K; no model with K = N, or no other.
    """
    found: dict[Member, Model] = {}
    for name in names:
        model = load_model(name, "float32", "float32")
        model = dataclasses.replace(model, params=rounded(model.params))
        heads = _kv_heads(model)
        member = Member(
            name,
            params_sha256(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)),
            heads,
            sum(heads == other.num_kv_heads for other in found),
        )
        for other in found:
            if other.sha256 == member.sha256:
                raise ValueError(f"{name} and {other.model} are the same model; name it once")
        found[member] = model
    first, *others = found.values()
    ids = _encoded(first, sample)
    for model in others:
        _require_alike(model, first)
        if _encoded(model, sample) != ids:
            raise ValueError(
                f"the tokenizer of {model.name} cuts these texts otherwise than that of "
                f"{first.name}; compare models of one tokenizer"
            )
    _require_both_kinds(found, first.config.num_heads)
    return found


def rounded(params: dict) -> dict:
    """Parameters rounded to bfloat16, in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)


def _kv_heads(model: Model) -> int:
    heads = set(model.config.kv_heads)
    if len(heads) > 1:
        raise ValueError(
            f"{model.name} has num_kv_heads={model.config.kv_heads}, which differ between layers; "
            "give models with one number of KV heads"
        )
    return heads.pop()


def _require_alike(model: Model, first: Model) -> None:
    one, other = (dataclasses.replace(of.config, num_kv_heads=1) for of in (first, model))
    for field in dataclasses.fields(DecoderConfig):
        wanted, given = getattr(one, field.name), getattr(other, field.name)
        if wanted != given:
            raise ValueError(
                f"{model.name} has {field.name}={given} and {first.name} {wanted}; models of a "
                "set differ in num_kv_heads alone"
            )


def _encoded(model: Model, sample: str) -> list[int]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer to cut the texts with")
    return tokenizer.encode(sample)


def _require_both_kinds(found: dict[Member, Model], num_heads: int) -> None:
    heads = sorted({member.num_kv_heads for member in found})
    if num_heads not in heads:
        listed = ", ".join(map(str, heads))
        raise ValueError(
            f"no model of the set has as many KV heads as query heads ({num_heads}; there are "
            f"{listed}); conversions are made from such a model: add one"
        )
    if heads == [num_heads]:
        raise ValueError(
            f"every model of the set has {num_heads} KV heads; add one with fewer to compare with"
        )
