"""Which tokens a cache keeps when it may not keep them all: policies and the choice they lead to.

Axes: rows of the table (a sequence, or one KV head of a sequence), S slots of a row, B sequences,
K KV heads. A policy is a frozen dataclass: a budget, when it applies, what it wants to know, and
one pure function that scores tokens, the higher the longer kept. Everything else (choosing by
score, moving survivors, freeing pages) is the same for all, so a new policy is one class:

    @dataclasses.dataclass(frozen=True)
    class Newest(Retention):
        def score(self, evidence):
            return evidence.positions.astype(jnp.float32)
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.extend
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ALWAYS = jnp.inf  # the score of a token that is not up for eviction


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a policy may judge tokens by. Entries of slots that hold no token mean nothing."""

    __no_type_check__ = True  # as in PageTable

    positions: jax.Array  # i32[rows, S]: place in the text of the token in each slot
    stored: jax.Array  # bool[rows, S]: the slot holds a token
    next_position: jax.Array  # i32[rows]: place of the sequence's next token
    mass: jax.Array  # f32[rows, S]: attention received, as `Retention.observes` asks; else 0
    head: jax.Array  # i32[rows]: KV head of the row; 0 where a row is a sequence
    layer: jax.Array  # i32[]: index of the layer


@dataclasses.dataclass(frozen=True)
class Retention:
    """A policy of eviction. Subclasses define `score`; static under jit.

    Args:
      budget: tokens that a row holds at most, the newest included; or a share of the prompt, above
        0 and below 1, rounded down, and at least one token more than `protected_tokens`.
      when: `prefill` shrinks a sequence when its prompt is complete and lets it grow again,
        `decode` keeps the prompt whole and then puts each new token in the place of one evicted,
        `both` does the two.

    Raises:
      ValueError: a budget of 0 or less, a share of 1 or more, another `when`.
    """

    budget: int | float = 256
    when: str = "both"

    by_head: ClassVar[bool] = False
    """Whether each KV head keeps tokens of its own choice."""

    @property
    def observes(self) -> int | None:
        """Whose attention `Evidence.mass` holds, a mean over the query heads of the KV head.

        None: nobody's. 0: the sum over all queries so far. n: the mean over the last n queries
        before the choice, what they give to each other left out.
        """
        return None

    @property
    def protected_tokens(self) -> int:
        """Tokens of a row that the policy keeps whatever they score: first ones, newest ones."""
        return 0

    @property
    def shared_safeguard(self) -> float | None:
        """`ByHead.safeguard` where the heads of a layer share their budgets; else None."""
        return None

    @property
    def placed_sinks(self) -> int | None:
        """First tokens that stay, where keys are turned by their place in the cache; else None.

        Every other token kept must be among the newest.
        """
        return None

    def __post_init__(self) -> None:
        """Validates."""
        share = isinstance(self.budget, float)
        known = isinstance(self.budget, int | float) and not isinstance(self.budget, bool)
        if not known or not self.budget > 0 or (share and self.budget >= 1):
            raise ValueError(
                f"budget={self.budget} given: want a number of tokens, 1 or more, or a share of "
                "the prompt between 0 and 1 (0.5)"
            )
        if self.when not in ("prefill", "decode", "both"):
            raise ValueError(
                f"when={self.when!r} is not known; legal values: prefill, decode, both"
            )

    @property
    def name(self) -> str:
        """As the command line names the policy."""
        cls = type(self)
        for name, policy in POLICIES.items():
            if policy is cls:
                return name
        return f"{cls.__module__}:{cls.__name__}"

    def settings(self) -> dict[str, Any]:
        """The policy and its parameters, as a row's config names them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.shared_safeguard is None:
            fields.pop("safeguard", None)
        return {"retention": self.name} | fields

    def __str__(self) -> str:
        return f"{self.name}:{self.budget}"

    def score(self, evidence: Evidence) -> Float[Array, "rows S"]:
        """How much each token is worth keeping; of equals the older one is."""
        raise NotImplementedError(f"{type(self).__name__} defines no score")

    def limits(self, prompt_lengths: Int[Array, "B"]) -> Int[Array, "B"]:
        """Tokens that a row of each sequence may hold, i32[B]."""
        if isinstance(self.budget, float):
            share = share_of_tokens(self.budget, prompt_lengths)
            return jnp.maximum(share, self.protected_tokens + 1)
        return jnp.full_like(prompt_lengths, self.budget)

    def _require_less(self, name: str, value: int) -> None:
        """Raises ValueError where protected tokens fill the budget."""
        if value < 0 or (isinstance(self.budget, int) and value >= self.budget):
            raise ValueError(
                f"{name}={value} with budget={self.budget}: want 0 or more, and less than the "
                f"budget, so that a choice is left; use budget={max(value, 0) + 1} or more"
            )


@dataclasses.dataclass(frozen=True)
class Window(Retention):
    """The newest tokens of a sequence (`budget` of them)."""

    def score(self, evidence: Evidence) -> Float[Array, "rows S"]:
        """Newer is better."""
        return evidence.positions.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Sinks(Retention):
    """The first tokens and the newest.

    Source: StreamingLLM (arXiv 2309.17453), section 3.2.

    Args:
      num_sinks: first tokens that are always kept.
      positions: `text` turns keys and queries by their place in the text; `cache` by their place
        in the cache, as the paper does, which is needed past the trained context.
    """

    num_sinks: int = 4
    positions: str = "text"

    def __post_init__(self) -> None:
        """Validates."""
        super().__post_init__()
        self._require_less("num_sinks", self.num_sinks)
        if self.positions not in ("text", "cache"):
            raise ValueError(
                f"positions={self.positions!r} is not known; legal values: text, cache"
            )

    @property
    def protected_tokens(self) -> int:
        """The sinks."""
        return self.num_sinks

    @property
    def placed_sinks(self) -> int | None:
        """`num_sinks` where positions are those of the cache."""
        return self.num_sinks if self.positions == "cache" else None

    def score(self, evidence: Evidence) -> Float[Array, "rows S"]:
        """Newer is better; the first tokens stay."""
        first = evidence.positions < self.num_sinks
        return jnp.where(first, ALWAYS, evidence.positions.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class ByHead(Retention):
    """A policy under which each KV head keeps tokens of its own.

    Args:
      allocation: `uniform` gives every head the budget; `per_head` lets the heads of a layer share
        K times the budget by their scores (AdaKV, arXiv 2407.11550, algorithm 1).
      safeguard: with `per_head`, the share of the budget that each head keeps whatever the others
        score (AdaKV, section 3.3).
    """

    allocation: str = "uniform"
    safeguard: float = 0.2

    by_head: ClassVar[bool] = True

    @property
    def shared_safeguard(self) -> float | None:
        """`safeguard` where heads share a budget."""
        return self.safeguard if self.allocation == "per_head" else None

    def __post_init__(self) -> None:
        """Validates."""
        super().__post_init__()
        if self.allocation not in ("uniform", "per_head"):
            raise ValueError(
                f"allocation={self.allocation!r} is not known; legal values: uniform, per_head"
            )
        if not 0 <= self.safeguard <= 1:
            raise ValueError(
                f"safeguard={self.safeguard} given: want a share of the budget, 0 to 1"
            )
        if self.allocation == "uniform":  # which has no safeguard: equal policies are equal values
            object.__setattr__(self, "safeguard", ByHead.safeguard)


@dataclasses.dataclass(frozen=True)
class H2O(ByHead):
    """The tokens that received most attention so far, and the newest.

    Source: H2O (arXiv 2306.14048), section 4.

    Args:
      recent: newest tokens that are always kept.
    """

    recent: int = 32

    def __post_init__(self) -> None:
        """Validates."""
        super().__post_init__()
        self._require_less("recent", self.recent)

    @property
    def protected_tokens(self) -> int:
        """The newest."""
        return self.recent

    @property
    def observes(self) -> int | None:
        """Every query."""
        return 0

    def score(self, evidence: Evidence) -> Float[Array, "rows S"]:
        """Accumulated attention; the newest stay."""
        newest = evidence.positions >= evidence.next_position[:, None] - self.recent
        return jnp.where(newest, ALWAYS, evidence.mass)


@dataclasses.dataclass(frozen=True)
class SnapKV(ByHead):
    """The tokens that the end of the prompt attends to, with their neighbours.

    Source: SnapKV (arXiv 2404.14469), section 4.

    Args:
      observation: last tokens, which are always kept, and whose queries judge the others.
      when: `prefill` unless told otherwise, as in the paper: in decode every step would ask the
        observed queries again.
      kernel: width of the mean over neighbouring slots, an odd number.
    """

    when: str = "prefill"
    observation: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        """Validates."""
        super().__post_init__()
        self._require_less("observation", self.observation)
        if self.observation < 1:
            raise ValueError(f"observation={self.observation} given: want 1 token or more")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel} given: want an odd number of slots")

    @property
    def protected_tokens(self) -> int:
        """Those whose queries judge."""
        return self.observation

    @property
    def observes(self) -> int | None:
        """The last queries."""
        return self.observation

    def score(self, evidence: Evidence) -> Float[Array, "rows S"]:
        """Attention of the last queries, averaged over neighbours; the last tokens stay."""
        last = evidence.positions >= evidence.next_position[:, None] - self.observation
        mass = jnp.where(last | ~evidence.stored, 0.0, evidence.mass)
        reach = self.kernel // 2
        padded = jnp.pad(mass, ((0, 0), (reach, reach)))
        width = mass.shape[1]
        total = sum(padded[:, start : start + width] for start in range(self.kernel))
        return jnp.where(last, ALWAYS, total / self.kernel)


@dataclasses.dataclass(frozen=True)
class Random(ByHead):
    """A control: tokens drawn by lot, other ones for every layer and head.

    Args:
      recent: newest tokens that are always kept.
      seed: of the draw; a token's lot depends on seed, layer, head and position alone.
    """

    recent: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Validates."""
        super().__post_init__()
        self._require_less("recent", self.recent)

    @property
    def protected_tokens(self) -> int:
        """The newest."""
        return self.recent

    def score(self, evidence: Evidence) -> Float[Array, "rows S"]:
        """A uniform number for each token; the newest stay."""
        shape = evidence.positions.shape
        seed, layer, head, position = (
            jnp.broadcast_to(jnp.asarray(word, jnp.uint32), shape)
            for word in (
                self.seed,
                evidence.layer.astype(jnp.uint32),
                evidence.head.astype(jnp.uint32)[:, None],
                evidence.positions.astype(jnp.uint32),
            )
        )
        bits, _ = jax.extend.random.threefry2x32_p.bind(seed, layer, head, position)
        newest = evidence.positions >= evidence.next_position[:, None] - self.recent
        return jnp.where(newest, ALWAYS, (bits >> 8).astype(jnp.float32))


POLICIES: dict[str, type[Retention]] = {
    "window": Window,
    "sinks": Sinks,
    "h2o": H2O,
    "snapkv": SnapKV,
    "random": Random,
}
"""The policies by the names of the command line."""


def share_of_tokens(share: float, counts: Int[Array, "n"]) -> Int[Array, "n"]:
    """A share of counts, rounded down; 0.29 of 100 is 29, whatever its float is."""
    product = counts.astype(jnp.float32) * jnp.float32(share)
    return jnp.floor(product + 1e-4).astype(jnp.int32)
