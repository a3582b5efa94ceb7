"""Retention policies in plain NumPy, as their papers say: which tokens of a layer stay.

What kvlab's policies, and kvpress's goldens, are held against. Axes: T queries, S stored keys in
the order of the text, N query heads, K KV heads, G = N/K, H head size; query head n reads KV head
n // G. Queries and keys are rotated. Positions ascend; keys may have gaps, where earlier evictions
were. Sums are float64. A score of infinity protects a token; of equal scores the older stays.
"""

import numpy as np

POOLING = 5  # tokens a pooled SnapKV score averages


def window_kept(length: int, budget: int) -> np.ndarray:
    """The newest `budget` of `length` tokens, [S] bool."""
    return np.arange(length) >= length - budget


def sinks_kept(length: int, budget: int, num_sinks: int) -> np.ndarray:
    """The first `num_sinks` tokens and the newest, `budget` in all, [S] bool.

    Source: StreamingLLM (arXiv 2309.17453), section 3.2.
    """
    return (np.arange(length) < num_sinks) | window_kept(length, budget - num_sinks)


def attention_weights(
    query: np.ndarray,
    key: np.ndarray,
    query_positions: np.ndarray,
    key_positions: np.ndarray,
    scale: float | None = None,
) -> np.ndarray:
    """Softmax over the keys that are no later than the query.

    Args:
      query: [T, N, H] float.
      key: [S, K, H] float.
      query_positions: [T] int.
      key_positions: [S] int; each query sees at least one key.
      scale: of the logits; 1 / sqrt(H) if None.

    Returns:
      [N, T, S] float64.
    """
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    scale = head_dim**-0.5 if scale is None else scale
    weights = np.zeros((num_heads, num_queries, num_keys))
    for n in range(num_heads):
        for t in range(num_queries):
            seen = key_positions <= query_positions[t]
            logits = key[seen, n // (num_heads // num_kv_heads)] @ query[t, n] * scale
            exponentials = np.exp(logits - logits.max())
            weights[n, t, seen] = exponentials / exponentials.sum()
    return weights


def mean_over_groups(per_query_head: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """The mean of the G query heads that share a KV head: [N, S] to [K, S]."""
    num_heads, num_keys = per_query_head.shape
    grouped = per_query_head.reshape(num_kv_heads, num_heads // num_kv_heads, num_keys)
    return grouped.mean(1)


def average_pool(values: np.ndarray, kernel: int) -> np.ndarray:
    """The mean of the `kernel` (odd) values around each of [..., S]; outside are zeros."""
    reach = kernel // 2
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(reach, reach)])
    return sum(padded[..., i : i + values.shape[-1]] for i in range(kernel)) / kernel


def protect_newest(scores: np.ndarray, count: int) -> np.ndarray:
    """Scores [K, S] with infinity for the newest `count` tokens."""
    return np.where(window_kept(scores.shape[1], count), np.inf, scores)


def snapkv_scores(
    query: np.ndarray,
    key: np.ndarray,
    query_positions: np.ndarray,
    key_positions: np.ndarray,
    observation: int,
) -> np.ndarray:
    """Attention that the last `observation` queries pay to each earlier token, smoothed.

    The newest `observation` tokens are those queries' own: they take their share of the softmax,
    are left out before the pooling, and always stay. The paper sums over queries where this takes
    the mean, which keeps the same tokens; for groups of query heads it says nothing.

    Source: SnapKV (arXiv 2404.14469), section 4.

    Args:
      query: [T, N, H] float, the last queries, at least `observation` of them.
      key: [S, K, H] float, among them those of the last `observation` queries.
      query_positions: [T] int.
      key_positions: [S] int.
      observation: queries, and tokens that always stay.

    Returns:
      [K, S] float64.
    """
    num_keys, num_kv_heads, _ = key.shape
    first = len(query) - observation
    weights = attention_weights(query[first:], key, query_positions[first:], key_positions)
    earlier = weights[:, :, : num_keys - observation].mean(1)
    pooled = mean_over_groups(average_pool(earlier, POOLING), num_kv_heads)
    return protect_newest(np.pad(pooled, [(0, 0), (0, observation)]), observation)


def h2o_scores(
    query: np.ndarray, key: np.ndarray, query_positions: np.ndarray, key_positions: np.ndarray
) -> np.ndarray:
    """Attention mass that each key gathered from these queries, [K, S] float64.

    It is a sum, so the mass of a later query, taken over the keys that are left then, adds to it.
    Arguments as in `attention_weights`. The paper scores per head; here the mean of a group.

    Source: H2O (arXiv 2306.14048), section 4.
    """
    weights = attention_weights(query, key, query_positions, key_positions)
    return mean_over_groups(weights.sum(1), key.shape[1])


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """The `count` largest of [S] scores, older first among equals, as [S] bool."""
    kept = np.zeros(len(scores), bool)
    kept[np.argsort(-scores, kind="stable")[:count]] = True
    return kept


def uniform_kept(scores: np.ndarray, budget: int) -> np.ndarray:
    """Every head's `budget` best: scores [K, S] to [K, S] bool."""
    return np.stack([best(head, budget) for head in scores])


def per_head_kept(scores: np.ndarray, budget: int, safeguard: float) -> np.ndarray:
    """The `K * budget` best of all heads of a layer, after each head's own share.

    The share is int(budget * safeguard) of the head's best tokens, protected ones among them, and
    at least 1 unless `safeguard` is 0. Of equal scores the older token stays, then the lower head.
    The paper's safeguard is another (it mixes the heads' numbers of tokens with even ones); this is
    that of kvpress 0.5.5.

    Source: Ada-KV (arXiv 2407.11550), algorithm 1.

    Args:
      scores: [K, S] float.
      budget: tokens a head, on average.
      safeguard: 0 to 1, the share of the budget that every head is sure of.

    Returns:
      [K, S] bool.
    """
    share = max(1, int(budget * safeguard)) if safeguard > 0 else 0
    safe = uniform_kept(scores, share)
    by_age = np.where(safe, np.inf, scores).T  # [S, K]: ravelled, older tokens come first
    return best(by_age.ravel(), budget * len(scores)).reshape(by_age.shape).T


def snapkv_kept(
    query: np.ndarray,
    key: np.ndarray,
    query_positions: np.ndarray,
    key_positions: np.ndarray,
    budget: int,
    observation: int,
) -> np.ndarray:
    """Every head's `budget` best by `snapkv_scores`, [K, S] bool."""
    scores = snapkv_scores(query, key, query_positions, key_positions, observation)
    return uniform_kept(scores, budget)


def h2o_kept(
    query: np.ndarray,
    key: np.ndarray,
    query_positions: np.ndarray,
    key_positions: np.ndarray,
    budget: int,
    recent: int,
) -> np.ndarray:
    """Every head's newest `recent` tokens, and the best by `h2o_scores`, [K, S] bool."""
    scores = h2o_scores(query, key, query_positions, key_positions)
    return uniform_kept(protect_newest(scores, recent), budget)
