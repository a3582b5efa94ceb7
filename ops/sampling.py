"""Choosing the next token of every row, inside a jitted decode loop.

Axes: B sequences (batch rows), V vocabulary.

The order is that of transformers and vLLM: temperature, top-k, top-p over what top-k left, min-p.
(llama.cpp filters in the same order and applies the temperature last.) A row with temperature 0 is
greedy: its largest logit, the lowest id among equals.

A draw is keyed by (request seed, sample index, position) alone, so a row gets the same token in
any slot, beside any neighbours, and however many steps a call takes.

Filters work on `distance = (largest logit - logit) / temperature`, which is 0 for the best token
and grows from there: no temperature overflows it, and the best token passes every filter.

A NaN (or +inf) logit leaves the choice unspecified, but the token is always in [0, V).
"""

import dataclasses
import numbers
import typing
from collections.abc import Sequence

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

MAX_TEMPERATURE = 1e30  # logits divided by it are still normal float32 numbers
_FLOAT32 = np.finfo(np.float32)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request wants its tokens chosen; the default is greedy.

    Args:
      temperature: divides the logits, at most 1e30; 0 is greedy, and anything below 1.2e-38.
      top_k: keep the k most likely tokens, the lower id among equals; 0 is off.
      top_p: keep the smallest set of most likely tokens that holds this probability; 1 is off.
        Source: "The Curious Case of Neural Text Degeneration" (arXiv 1904.09751), section 3.1.
      min_p: drop tokens less likely than this share of the most likely one; 0 is off.
        Source: "Turning Up the Heat: Min-p Sampling" (arXiv 2407.01082), section 3.
      seed: of the request.
      sample_index: which of a request's parallel samples this row is.

    Raises:
      ValueError: a field outside its range; the message names field, value and range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0

    def __post_init__(self) -> None:
        """Validates every field."""
        legal = f"from 0 (greedy) to {MAX_TEMPERATURE:g}"
        self._require(0 <= self.temperature <= MAX_TEMPERATURE, "temperature", legal)
        self._require_int("top_k", 2**31, "from 0 (off) to 2**31 - 1")
        self._require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)")
        self._require(0 <= self.min_p <= 1, "min_p", "from 0 (off) to 1")
        self._require_int("seed", 2**32, "from 0 to 2**32 - 1")
        self._require_int("sample_index", 2**31, "from 0 to 2**31 - 1")

    def _require_int(self, field: str, end: int, legal: str) -> None:
        value = getattr(self, field)
        is_int = isinstance(value, numbers.Integral)
        self._require(is_int and 0 <= int(value) < end, field, f"a whole number {legal}")

    def _require(self, holds: bool, field: str, legal: str) -> None:
        if not holds:
            raise ValueError(f"{field}={getattr(self, field)!r} given: it must be {legal}")


@typing.no_type_check  # JAX rebuilds pytrees around shapes and sentinels as well as arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The `Sampling` of every batch row, as arrays.

    Attributes:
      temperature: `[B] float32`.
      top_k: `[B] int32`.
      top_p: `[B] float32`.
      min_p: `[B] float32`.
      seed: `[B] uint32`.
      sample_index: `[B] int32`.
    """

    temperature: Float32[Array, "B"]
    top_k: Int32[Array, "B"]
    top_p: Float32[Array, "B"]
    min_p: Float32[Array, "B"]
    seed: UInt32[Array, "B"]
    sample_index: Int32[Array, "B"]

    @classmethod
    def from_requests(cls, requests: Sequence[Sampling]) -> "SamplingParams":
        """Stacks one `Sampling` per batch row; `Sampling()` is fine for an idle row."""

        def column(field: str, dtype: type) -> Array:
            return jnp.asarray(np.array([getattr(one, field) for one in requests], dtype))

        return cls(
            temperature=column("temperature", np.float32),
            top_k=column("top_k", np.int32),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
            seed=column("seed", np.uint32),
            sample_index=column("sample_index", np.int32),
        )

    @property
    def greedy(self) -> Bool[Array, "B"]:
        """`[B] bool`: rows that take their largest logit."""
        # Subnormals count as 0, since backends that flush them would divide by 0.
        return self.temperature < float(_FLOAT32.tiny)


def sample(
    logits: Float[Array, "B V"], params: SamplingParams, positions: Int[Array, "B"]
) -> Int[Array, "B"]:
    """Chooses one token per row.

    A draw is Gumbel-max over the kept tokens. A batch of greedy rows costs an argmax and nothing
    else; which branch runs changes no row's bits.

    Args:
      logits: `[B, V] float`.
      params: per-row settings.
      positions: `[B] int32`, the place in its text that each drawn token takes.

    Returns:
      `[B] int32` token ids in [0, V).
    """
    logits = logits.astype(jnp.float32)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int[Array, "B"]:
        distance = _distance(logits, params)
        score = _gumbel(logits.shape[-1], params, positions) - distance
        score = jnp.where(_kept(distance, params), score, -jnp.inf)
        return jnp.where(params.greedy, best, _first_largest(score))

    return jax.lax.cond(jnp.all(params.greedy), lambda: best, draw)


def filter_logits(logits: Float[Array, "B V"], params: SamplingParams) -> Float[Array, "B V"]:
    """The distribution that `sample` draws from.

    Args:
      logits: `[B, V] float`.
      params: per-row settings; seed and sample index are not read.

    Returns:
      `[B, V] float32` log-probabilities: normalised over the kept tokens, -inf elsewhere. A greedy
      row has 0 at its token.
    """
    logits = logits.astype(jnp.float32)
    distance = _distance(logits, params)
    masked = jnp.where(_kept(distance, params), -distance, -jnp.inf)
    ids = jnp.arange(logits.shape[-1])[None, :]
    is_best = ids == jnp.argmax(logits, axis=-1)[:, None]
    certain = jnp.where(is_best, jnp.float32(0), -jnp.inf)
    return jnp.where(params.greedy[:, None], certain, jax.nn.log_softmax(masked, axis=-1))


def token_log_prob(
    logits: Float[Array, "*batch V"], tokens: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Log-probability that the model gives to tokens, before temperature and filters.

    Args:
      logits: `[..., V] float`.
      tokens: `[...] int32`, ids in [0, V); an id outside gives NaN.

    Returns:
      `[...] float32`, natural logarithm.
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    known = (tokens >= 0) & (tokens < logits.shape[-1])
    return jnp.where(known, chosen, jnp.nan) - jax.nn.logsumexp(logits, axis=-1)


def _distance(logits: Float[Array, "B V"], params: SamplingParams) -> Float[Array, "B V"]:
    """How far each token lies below the best one, in units of the temperature; at least 0."""
    temperature = jnp.where(params.greedy, jnp.float32(1), params.temperature)
    return (jnp.max(logits, axis=-1, keepdims=True) - logits) / temperature[:, None]


def _kept(distance: Float[Array, "B V"], params: SamplingParams) -> Bool[Array, "B V"]:
    """Tokens that pass every filter of their row. Filters that no row uses are not computed."""
    uses_top_k = (params.top_k > 0) & (params.top_k < distance.shape[-1]) & ~params.greedy
    uses_top_p = (params.top_p < 1) & ~params.greedy
    uses = jnp.stack([uses_top_k, uses_top_p])

    def keep_fewer(is_top_p: Array, kept: Bool[Array, "B V"]) -> Bool[Array, "B V"]:
        weight = jnp.where(kept, jnp.where(is_top_p, jnp.exp(-distance), 1), 0)
        share = params.top_p * jnp.sum(weight, axis=-1)
        target = jnp.where(is_top_p, share, params.top_k.astype(jnp.float32))
        return kept & (_most_likely(distance, weight, target) | ~uses[is_top_p][:, None])

    def filtered(index: Array, kept: Bool[Array, "B V"]) -> Bool[Array, "B V"]:
        return jax.lax.cond(jnp.any(uses[index]), keep_fewer, lambda _, kept: kept, index, kept)

    # A loop of two, because they are one computation, and a program compiles it once.
    kept = jax.lax.fori_loop(0, 2, filtered, jnp.ones_like(distance, bool))
    return kept & (distance <= -jnp.log(params.min_p)[:, None])


def _most_likely(
    distance: Float[Array, "B V"], weight: Float[Array, "B V"], target: Float[Array, "B"]
) -> Bool[Array, "B V"]:
    """The smallest set of most likely tokens that holds `target` of the weight.

    With weight 1 each this is top-k, with probabilities it is top-p. The cut is found by halving
    the range of float32 31 times, a sum over the row each: on CPU a sort of 49,152 floats takes
    ten times as long. At the cut the lowest ids are taken, as many as the target still needs.
    """
    target = jnp.maximum(target, float(_FLOAT32.tiny))  # at 0 the empty set would do
    # Floats that are not negative order as their bits do.
    order = jax.lax.bitcast_convert_type(distance, jnp.int32)
    infinity = int(np.array(np.inf, np.float32).view(np.int32))

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # weight up to low < target <= weight up to high
        middle = low + (high - low) // 2
        enough = jnp.sum(jnp.where(order <= middle, weight, 0), axis=-1, keepdims=True)
        enough = enough >= target[:, None]
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    start = jnp.full_like(order, -1, shape=(order.shape[0], 1))
    _, cut = jax.lax.fori_loop(0, 31, halve, (start, jnp.full_like(start, infinity)))
    closer, at_cut = order < cut, order == cut
    missing = target - jnp.sum(jnp.where(closer, weight, 0), axis=-1)
    weight_at_cut = jnp.max(jnp.where(at_cut, weight, 0), axis=-1)
    wanted = jnp.ceil(missing / weight_at_cut)[:, None]
    return closer | (at_cut & _first_of(at_cut, wanted))


def _first_of(among: Bool[Array, "B V"], wanted: Float[Array, "B one"]) -> Bool[Array, "B V"]:
    """The ids up to the `wanted`-th of those in `among`, or all ids where it has no more.

    Found by halving the range of ids, which ends at once where there are no ties to break. (A
    running count of 49,152 ids compiles to 13 kernels on CPU.)
    """
    vocab_size = among.shape[-1]
    ids = jnp.arange(vocab_size, dtype=jnp.int32)[None, :]

    def count(last: Int[Array, "B one"]) -> Int[Array, "B one"]:
        return jnp.sum((among & (ids <= last)).astype(jnp.int32), axis=-1, keepdims=True)

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the count up to low < wanted <= the count up to high
        middle = low + (high - low) // 2
        enough = count(middle).astype(jnp.float32) >= wanted
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    high = jnp.full(wanted.shape, vocab_size - 1, jnp.int32)
    has_more = count(high).astype(jnp.float32) > wanted
    low = jnp.where(has_more, -1, vocab_size - 2)
    _, last = jax.lax.while_loop(
        lambda bounds: jnp.any(bounds[1] - bounds[0] > 1), halve, (low, high)
    )
    return ids <= last


def _gumbel(
    vocab_size: int, params: SamplingParams, positions: Int[Array, "B"]
) -> Float[Array, "B V"]:
    """Gumbel noise, each row from a key of its own."""
    # The request and its sample are the key of the cipher, position and id its counter. A call
    # gives two words: those of an id, and of the id half a vocabulary on.
    half = -(-vocab_size // 2)
    shape = (params.seed.shape[0], half)
    seed, sample_index, position = (
        jnp.broadcast_to(column.astype(jnp.uint32)[:, None], shape)
        for column in (params.seed, params.sample_index, positions)
    )
    ids = jnp.broadcast_to(jnp.arange(half, dtype=jnp.uint32)[None, :], shape)
    words = jax.extend.random.threefry2x32_p.bind(seed, sample_index, position, ids)
    bits = jnp.concatenate(words, axis=1)[:, :vocab_size]
    # Winners have a uniform near 0, where all 32 bits make steps of 2 ** -32. With the usual 23
    # no token below 1e-7 could ever win, and a large vocabulary has thousands of those.
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)  # 1 would make the noise of a kept token -inf
    return -jnp.log(-jnp.log1p(-uniform))


def _first_largest(score: Float[Array, "B V"]) -> Int[Array, "B"]:
    """The lowest id with the largest score, by two plain reductions.

    XLA's CPU backend computes what feeds an argmax one element at a time, noise included, which
    is 4 times slower. A row with a NaN gets its last id.
    """
    vocab_size = score.shape[-1]
    is_largest = score == jnp.max(score, axis=-1, keepdims=True)
    ids = jnp.arange(vocab_size, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(is_largest, ids, vocab_size - 1), axis=-1)
