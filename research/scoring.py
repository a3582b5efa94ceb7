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
    kl_vs_oracle_p99: float  # its 99th percentile over positions, nats
    top1_agreement: float  # share of positions where both rank the same token first
    nll: tuple[float, ...]  # negative log-likelihood of each next token, nats
    kl: tuple[float, ...]  # KL of each position, nats

    @staticmethod
    def of(nll: np.ndarray, kl: np.ndarray, agrees: np.ndarray) -> "Quality":
        """Means over positions, from the values of each.

        Args:
          nll: float32, of every position whose next token is known.
          kl: [T] float32.
          agrees: [T] bool.
        """
        return Quality(
            perplexity=math.exp(float(nll.mean())),
            kl_vs_oracle=float(kl.mean()),
            kl_vs_oracle_p99=float(np.quantile(kl, 0.99)),
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
    targets = np.append(tokens[1:], 0).astype(np.int32)
    nll, kl, agrees = compare_hidden(config, params, oracle_hidden, hidden, targets)
    return Quality.of(nll[:-1], kl, agrees)


def compare_hidden(
    config: DecoderConfig,
    params: Params,
    oracle_hidden: np.ndarray,
    hidden: np.ndarray,
    targets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compares two sides position by position, in pieces.

    Args:
      config: the model; its head serves both sides.
      params: parameters that hold the head.
      oracle_hidden: [T, D].
      hidden: [T, D], the variant's.
      targets: [T] int32, the token that follows each position.

    Returns:
      Of each position, [T]: the variant's negative log-likelihood of the target and the KL from
      the oracle, float32, nats; and whether both rank the same token first, bool.
    """
    length = len(targets)
    width = -(-length // _PIECE) * _PIECE
    padded = np.zeros(width, np.int32)
    padded[:length] = targets
    sides = [np.zeros((width, hidden.shape[1]), hidden.dtype) for _ in range(2)]
    sides[0][:length], sides[1][:length] = oracle_hidden, hidden
    weights = head_params(params)
    pieces = [
        jax.device_get(
            _compare_piece(weights, config, sides[0][part], sides[1][part], padded[part])
        )
        for part in (slice(start, start + _PIECE) for start in range(0, width, _PIECE))
    ]
    nll, kl, agrees = (np.concatenate(column)[:length] for column in zip(*pieces, strict=True))
    return nll, kl, agrees


def head_params(params: Params) -> Params:
    """The part of the parameter tree that the head reads."""
    return {name: params[name] for name in ("embed", "head") if name in params}


@functools.partial(jax.jit, static_argnames=("config",))
def compare_logits(
    params: Params,
    config: DecoderConfig,
    oracle_hidden: jax.Array,
    logits: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `compare_hidden`, of one piece of which the variant's logits [T, V] float32 are known.

    Args:
      params: what `head_params` gives.
      config: the model whose head it is.
      oracle_hidden: [T, D].
      logits: [T, V] float32, the variant's.
      targets: [T] int32.
    """
    oracle = jax.nn.log_softmax(head(params, config, oracle_hidden))
    variant = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(variant, targets[:, None], axis=1)[:, 0]
    kl = jnp.sum(jnp.exp(oracle) * (oracle - variant), axis=1)
    agrees = jnp.argmax(oracle, axis=1) == jnp.argmax(variant, axis=1)
    return nll, jnp.maximum(kl, 0.0), agrees


@functools.partial(jax.jit, static_argnames=("config",))
def _compare_piece(
    params: Params,
    config: DecoderConfig,
    oracle_hidden: jax.Array,
    hidden: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One piece of `compare_hidden`."""
    return compare_logits(params, config, oracle_hidden, head(params, config, hidden), targets)
