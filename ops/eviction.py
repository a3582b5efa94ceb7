"""The choice that a policy's scores lead to: which tokens stay, and which goes next.

Axes: rows of the table (a sequence, or one KV head of a sequence), S slots of a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvlab.ops.retention import Evidence, Retention, share_of_tokens


class ScoreError(ValueError):
    """A policy's `score` failed, or gave what is no score for each token."""


def judged(policy: Retention, evidence: Evidence) -> Float[Array, "rows S"]:
    """A policy's scores, as choices are made by them.

    Whole numbers and booleans count as numbers. A NaN is the lowest score, as -inf is: the token
    goes first, and still before no token at all.

    Args:
      policy: of the user's, perhaps.
      evidence: what it judges.

    Returns:
      [rows, S] float32, above -inf.

    Raises:
      ScoreError: `score` raised, or gave another shape or complex numbers.
    """
    shape = evidence.positions.shape
    try:
        given: Any = policy.score(evidence)
    except Exception as error:
        raise ScoreError(
            f"retention={policy.name}: score() raised {type(error).__name__}: {error}"
        ) from error
    got = f"{getattr(given, 'dtype', type(given).__name__)}{list(getattr(given, 'shape', ()))}"
    if getattr(given, "shape", None) != shape or jnp.iscomplexobj(given):
        raise ScoreError(
            f"retention={policy.name}: score() gave {got}; want a number for each slot of the "
            f"evidence, float32{list(shape)} here"
        )
    scores = jnp.asarray(given).astype(jnp.float32)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    return jnp.maximum(scores, jnp.finfo(jnp.float32).min)


def kept_tokens(
    scores: Float[Array, "rows S"],
    positions: Int[Array, "rows S"],
    stored: Bool[Array, "rows S"],
    limits: Int[Array, "rows"],
    heads: int = 1,
    safeguard: float | None = None,
) -> Bool[Array, "rows S"]:
    """Chooses the best tokens of each row, the older one of equals.

    Args:
      scores: [rows, S] float32.
      positions: [rows, S] int32.
      stored: [rows, S] bool.
      limits: [rows] int32, tokens to keep of each row.
      heads: rows of a sequence (K), which follow each other.
      safeguard: None keeps `limits` in each row. A share lets the rows of a sequence keep the sum
        of their limits together: each its best `safeguard * limit` first, then the best of all
        (AdaKV, arXiv 2407.11550, algorithm 1).

    Returns:
      [rows, S] bool.
    """
    scores = jnp.where(stored, scores, -jnp.inf)
    if safeguard is None:
        return stored & (_ranks(scores, positions) < limits[:, None])
    most = share_of_tokens(safeguard, limits)
    most = jnp.maximum(most, 1) if safeguard > 0 else most
    safe = _ranks(scores, positions) < most[:, None]
    scores = jnp.where(safe & stored, jnp.inf, scores)

    def of_sequence(array: Array) -> Array:
        return array.reshape(array.shape[0] // heads, -1)

    ranks = _ranks(of_sequence(scores), of_sequence(positions))
    total = jnp.sum(limits.reshape(-1, heads), axis=1)
    return stored & (ranks < total[:, None]).reshape(stored.shape)


def _ranks(scores: Float[Array, "rows S"], positions: Int[Array, "rows S"]) -> Int[Array, "rows S"]:
    """Place of each entry among its row's, 0 for the highest score; of equals the older first."""
    places = jnp.broadcast_to(jnp.arange(scores.shape[1], dtype=jnp.int32), scores.shape)
    _, _, order = jax.lax.sort((-scores, positions, places), num_keys=2)
    rows = jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros_like(places).at[rows, order].set(places)


def victims(
    scores: Float[Array, "rows S"],
    positions: Int[Array, "rows S"],
    stored: Bool[Array, "rows S"],
) -> Int[Array, "rows"]:
    """The slot of each row whose token goes next: the lowest score, the younger one of equals.

    Args:
      scores: [rows, S] float32.
      positions: [rows, S] int32.
      stored: [rows, S] bool; a row without a token gives slot 0.
    """
    lowest = jnp.min(scores, axis=1, where=stored, initial=jnp.inf)
    youngest = jnp.where(stored & (scores <= lowest[:, None]), positions, -1)
    return jnp.argmax(youngest, axis=1).astype(jnp.int32)
