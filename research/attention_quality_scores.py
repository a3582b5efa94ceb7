"""The rows of `attention_quality` as losses of variants, model by model, and what lies between.

Axes: N query heads, K KV heads. Differences are taken between what was made of the same MHA model,
so that what models differ in by their seed cancels.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvlab.models.convert import METHODS
from kvlab.research.attention_quality_study import CONTROL, CONVERTED, QUALITY, TRAINED, UPTRAINED
from kvlab.research.intervals import Estimate, estimate
from kvlab.research.rows import Row

PAPER_SHARE = 0.05
"""Of pre-training, that the paper uptrains for: GQA (arXiv 2305.13245), abstract."""


class Variant(NamedTuple):
    """What a row is of, whichever model it was made from."""

    kind: str
    num_kv_heads: int
    pooling: str | None = None
    share: float | None = None


class Scores:
    """Held-out losses in nats a token.

    Attributes:
      num_heads: N, 0 where there is no row.
      rows: the finished rows on quality, by variant and source.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        """Sorts rows; the last of a variant and source counts.

        Args:
          rows: of one or more runs; failed ones, and those on memory and speed, are left out.
        """
        self.rows: dict[Variant, dict[str, Row]] = collections.defaultdict(dict)
        self.num_heads = 0
        for row in rows:
            config = row["config"]
            if row["status"] == "ok" and config["kind"] in QUALITY:
                variant = Variant(
                    config["kind"],
                    config["num_kv_heads"],
                    config.get("pooling"),
                    config.get("share"),
                )
                self.rows[variant][config["sha256"]] = row
                self.num_heads = config["num_heads"]

    @property
    def variants(self) -> list[Variant]:
        """Every variant, in the order of the kinds, the largest K first."""
        return sorted(
            self.rows,
            key=lambda one: (
                QUALITY.index(one.kind),
                METHODS.index(one.pooling) if one.pooling else 0,
                one.share or 0.0,
                -one.num_kv_heads,
            ),
        )

    @property
    def fewer(self) -> list[int]:
        """Every K below N, descending."""
        known = {one.num_kv_heads for one in self.rows}
        return sorted((heads for heads in known if heads < self.num_heads), reverse=True)

    @property
    def poolings(self) -> list[str]:
        """Ways that heads were pooled, the one with most shares first, then as in the paper."""
        known = {one.pooling for one in self.rows}
        found = [one for one in METHODS if one in known]
        return sorted(found, key=lambda way: -len(self.shares(way)))

    def shares(self, pooling: str) -> list[float]:
        """Shares of uptraining that a way was given, ascending."""
        known = {one.share for one in self.rows if (one.kind, one.pooling) == (UPTRAINED, pooling)}
        return sorted(share for share in known if share is not None)

    @property
    def common_share(self) -> float | None:
        """The share that every way was given, the one nearest to the paper's; None without one."""
        given = [set(self.shares(way)) for way in self.poolings]
        common = set.intersection(*given) if given else set()
        return min(common, key=lambda share: abs(share - PAPER_SHARE), default=None)

    def losses(self, variant: Variant) -> Mapping[str, float]:
        """Of a variant, by the source that it was made from."""
        some = self.rows.get(variant, {})
        return {source: row["metrics"]["held_out_loss"] for source, row in some.items()}

    def mean(self, variant: Variant) -> Estimate | None:
        """Over sources; None where there is none."""
        values = self.losses(variant).values()
        return estimate(values) if values else None

    def difference(self, variant: Variant, other: Variant) -> Estimate | None:
        """How much more a variant loses than another from the same source."""
        here, there = self.losses(variant), self.losses(other)
        both = [here[source] - there[source] for source in here if source in there]
        return estimate(both) if both else None

    def opened(self, heads: int, pooling: str) -> Estimate | None:
        """The gap that pooling opens: what the conversion loses more than its source."""
        return self.difference(Variant(CONVERTED, heads, pooling), self.mha)

    def left(self, heads: int, pooling: str, share: float) -> Estimate | None:
        """The gap that uptraining leaves, to the source trained on for as long."""
        control = Variant(CONTROL, self.num_heads, None, share)
        return self.difference(Variant(UPTRAINED, heads, pooling, share), control)

    def over_scratch(self, heads: int, pooling: str, share: float) -> float | None:
        """What the uptrained conversion loses more than models of its K, trained from scratch."""
        uptrained = self.mean(Variant(UPTRAINED, heads, pooling, share))
        scratch = self.mean(Variant(TRAINED, heads))
        return uptrained.mean - scratch.mean if uptrained and scratch else None

    def recovered(
        self, heads: int, pooling: str, share: float, *, controlled: bool = True
    ) -> Estimate | None:
        """The share of the gap that uptraining closes; None where pooling opened none.

        Args:
          heads: K.
          pooling: how heads became one.
          share: of uptraining.
          controlled: what is left is counted to the source trained on for as long, not as it was.
        """
        mha = self.losses(self.mha)
        converted = self.losses(Variant(CONVERTED, heads, pooling))
        uptrained = self.losses(Variant(UPTRAINED, heads, pooling, share))
        aim = self.losses(Variant(CONTROL, self.num_heads, None, share)) if controlled else mha
        shares = [
            1.0 - (uptrained[one] - aim[one]) / (converted[one] - mha[one])
            for one in uptrained
            if one in aim and one in mha and converted.get(one, mha[one]) > mha[one]
        ]
        return estimate(shares) if shares else None

    @property
    def mha(self) -> Variant:
        """The models that conversions are made from."""
        return Variant(TRAINED, self.num_heads)

    def spread(self) -> float | None:
        """How far models of one K trained alike lie apart at most; None of single models."""
        groups = [
            self.losses(one).values()
            for one in self.rows
            if one.kind == TRAINED and len(self.rows[one]) > 1
        ]
        return max((max(group) - min(group) for group in groups), default=None)
