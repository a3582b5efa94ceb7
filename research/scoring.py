"""Quality of a variant against an oracle, side by side in pieces.

Axes: T positions, D model width, V vocabulary. Both sides are given as hidden states [T, D], which
are small; logits exist for one piece at a time and are never kept whole.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.models.config import DecoderConfig
from kvlab.research.inference import Params, head

_PIECE = 128  # positions: two float32 pieces of a 50,000-token vocabulary are 50 MB


@dataclasses.dataclass(frozen=True)
class Quality:
    """How well a variant predicts a text, and how far it is from the oracle."""

    perplexity: float  # exp of the mean negative log-likelihood of the next token
    kl_vs_oracle: float  # mean KL(oracle || variant) over positions, nats
    top1_agreement: float  # share of positions where both rank the same token first
    nll: tuple[float, ...]  # negative log-likelihood of each next token, nats
    kl: tuple[float, ...]  # KL of each position, nats

    @staticmethod
    def of(nll: np.ndarray, kl: np.ndarray, agrees: np.ndarray) -> "Quality":
        """Means over positions, from the values of each.

        Args:
          nll: [T - 1] float32.
          kl: [T] float32.
          agrees: [T] bool.
        """
        return Quality(
            perplexity=math.exp(float(nll.mean())),
            kl_vs_oracle=float(kl.mean()),
            top1_agreement=float(agrees.mean()),
            nll=tuple(nll.tolist()),
            kl=tuple(kl.tolist()),
        )


def compare(
    config: DecoderConfig,
    params: Params,
    oracle_hidden: np.ndarray,
    hidden: np.ndarray,
    tokens: np.ndarray,
) -> Quality:
    """Scores a variant of a model on a text.

    Args:
      config: the model; its head serves both sides, since attention variants leave it alone.
      params: parameters that hold the head.
      oracle_hidden: [T, D], the oracle's hidden states after the final norm.
      hidden: [T, D], the variant's, of the same tokens.
      tokens: [T] int32, T of 2 or more.

    Raises:
      ValueError: fewer than 2 tokens.
    """
    length = len(tokens)
    if length < 2:
        raise ValueError(f"quality needs a text of 2 tokens or more; this one has {length}")
    width = -(-length // _PIECE) * _PIECE
    targets = np.zeros(width, np.int32)
    targets[: length - 1] = tokens[1:]
    sides = [np.zeros((width, hidden.shape[1]), hidden.dtype) for _ in range(2)]
    sides[0][:length], sides[1][:length] = oracle_hidden, hidden
    weights = _head_params(params)
    pieces = [
        jax.device_get(
            _compare_piece(weights, config, sides[0][part], sides[1][part], targets[part])
        )
        for part in (slice(start, start + _PIECE) for start in range(0, width, _PIECE))
    ]
    nll, kl, agrees = (np.concatenate(column)[:length] for column in zip(*pieces, strict=True))
    return Quality.of(nll[:-1], kl, agrees)


def _head_params(params: Params) -> Params:
    """The part of the parameter tree that the head reads."""
    return {name: params[name] for name in ("embed", "head") if name in params}


@functools.partial(jax.jit, static_argnames=("config",))
def _compare_piece(
    params: Params,
    config: DecoderConfig,
    oracle_hidden: jax.Array,
    hidden: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per position: negative log-likelihood, KL from the oracle, and the same best token."""
    oracle = jax.nn.log_softmax(head(params, config, oracle_hidden))
    variant = jax.nn.log_softmax(head(params, config, hidden))
    nll = -jnp.take_along_axis(variant, targets[:, None], axis=1)[:, 0]
    kl = jnp.sum(jnp.exp(oracle) * (oracle - variant), axis=1)
    agrees = jnp.argmax(oracle, axis=1) == jnp.argmax(variant, axis=1)
    return nll, jnp.maximum(kl, 0.0), agrees
