"""What fewer KV heads cost in quality, and save: models trained so, converted and uptrained.

"GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints" (arXiv
2305.13245): Table 1 and Fig. 4 to 6, in shape.

Axes: N query heads, K KV heads.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.models.convert import METHODS
from kvlab.research.matched_models import Member

TRAINED, CONVERTED, UPTRAINED, CONTROL = "trained", "converted", "uptrained", "control"
MEMORY, SPEED = "memory", "speed"
QUALITY = (TRAINED, CONVERTED, UPTRAINED, CONTROL)
"""Kinds of rows that say how good a model is; `CONTROL` is the MHA model, trained on as long."""

_WARMUP = 10  # one in so many steps warms up


@dataclasses.dataclass(frozen=True)
class AttentionQualityStudy:
    """A matched set of models, what is made of them, and how all of it is judged and timed.

    Args:
      members: of the set; every one with K = N is converted to every other K.
      num_heads: N.
      data: of each text, what `training_data.Text.to_json` says.
      separator: between the documents of a text; None: a text is one.
      held_out: share of each text that judges, from its end.
      length: tokens of a sequence.
      poolings: ways that heads become one, of `kvlab.models.convert.METHODS`.
      shares: of the steps of training that conversions by the first pooling are uptrained for.
      pooling_share: that conversions by every pooling are uptrained for.
      steps: that the models were trained for.
      batch: sequences of such a step, and of one of uptraining.
      learning_rate: the highest of uptraining.
      batches: sequences that decode is timed with.
      prompt_tokens: of each of those.
      decode_tokens: of each of those, after its prompt.
      repeats: of each timing.
      kv_mib: memory for keys and values that sequences are to fit, MiB.
      page_size: tokens a page.
      seed: of random pooling and the order of rows; a model's repeat is added to it.

    Raises:
      ValueError: a share that is not above 0 and at most 1, or is less than a step; an unknown
        pooling; timed sequences past the sequences' length.
    """

    members: tuple[Member, ...]
    num_heads: int
    data: tuple[Mapping[str, Any], ...]
    separator: str | None
    held_out: float
    length: int
    poolings: tuple[str, ...] = METHODS
    shares: tuple[float, ...] = (0.01, 0.05, 0.1)
    pooling_share: float = 0.05
    steps: int = 1200
    batch: int = 8
    learning_rate: float = 3e-3
    batches: tuple[int, ...] = (1, 64)
    prompt_tokens: int = 192
    decode_tokens: int = 32
    repeats: int = 7
    kv_mib: float = 64.0
    page_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Validates what does not depend on the weights."""
        for name in ("shares", "pooling_share"):
            value = getattr(self, name)
            for share in value if isinstance(value, tuple) else (value,):
                if not 0 < share <= 1:
                    raise ValueError(
                        f"{name}={share:g} given; a share of the steps is above 0 and at most 1"
                    )
                if round(share * self.steps) < 1:
                    raise ValueError(
                        f"{name}={share:g} of steps={self.steps} is no step; give a larger share"
                    )
        for pooling in self.poolings:
            if pooling not in METHODS:
                raise ValueError(
                    f"pooling={pooling!r} is not known; legal values: {', '.join(METHODS)}"
                )
        if self.sequence_tokens > self.length:
            raise ValueError(
                f"prompt_tokens={self.prompt_tokens} and decode_tokens={self.decode_tokens} are "
                f"past the models' length={self.length}; time shorter sequences"
            )

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a sequence that is timed, and of one that is to fit the memory."""
        return self.prompt_tokens + self.decode_tokens

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Every K of the set, the largest first."""
        return tuple(sorted({one.num_kv_heads for one in self.members}, reverse=True))

    @property
    def sources(self) -> tuple[Member, ...]:
        """The members with K = N."""
        return tuple(one for one in self.members if one.num_kv_heads == self.num_heads)

    def warmup_steps(self, steps: int) -> int:
        """Steps of uptraining until the highest learning rate."""
        return steps // _WARMUP

    def to_json(self) -> dict[str, Any]:
        """The study as a manifest stores it."""
        return dataclasses.asdict(self)

    def cost_points(self) -> Iterator[dict[str, Any]]:
        """The config of each row on memory and on speed: of a K, whoever trained it."""
        sequence = {"prompt_tokens": self.prompt_tokens, "decode_tokens": self.decode_tokens}
        sequence["page_size"] = self.page_size
        for heads in self.kv_heads:
            yield {**self._shape(MEMORY, heads), **sequence, "kv_mib": self.kv_mib}
        for batch in self.batches:
            for heads in self.kv_heads:
                yield {**self._shape(SPEED, heads), "batch": batch, **sequence}

    def quality_points(self) -> Iterator[dict[str, Any]]:
        """The config of each row on quality, all of one source before those of the next."""
        for member in self.members:
            yield self._point(TRAINED, member, member.num_kv_heads)
        fewer = [heads for heads in self.kv_heads if heads < self.num_heads]
        for source in self.sources:
            for pooling in self.poolings:
                for heads in fewer:
                    yield self._point(CONVERTED, source, heads, pooling=pooling)
            for share in self._shares(self.poolings[0]):
                yield self._point(CONTROL, source, self.num_heads, **self._training(share))
            for pooling in self.poolings:
                for share in self._shares(pooling):
                    for heads in fewer:
                        training = self._training(share)
                        yield self._point(UPTRAINED, source, heads, pooling=pooling, **training)

    def _shares(self, pooling: str) -> list[float]:
        shares = self.shares if pooling == self.poolings[0] else ()
        return sorted({*shares, self.pooling_share})

    def _shape(self, kind: str, heads: int) -> dict[str, Any]:
        return {"kind": kind, "num_heads": self.num_heads, "num_kv_heads": heads}

    def _point(self, kind: str, member: Member, heads: int, **more: Any) -> dict[str, Any]:
        told = {"model": member.model, "sha256": member.sha256, "repeat": member.repeat}
        names = ("data", "separator", "held_out", "length")
        text = {name: getattr(self, name) for name in names}
        return {**self._shape(kind, heads), **told, **more, **text}

    def _training(self, share: float) -> dict[str, Any]:
        steps = round(share * self.steps)
        return {
            "share": share,
            "steps": steps,
            "warmup_steps": self.warmup_steps(steps),
            "batch": self.batch,
            "learning_rate": self.learning_rate,
        }


def label(config: Mapping[str, Any]) -> str:
    """A row's config in a few words."""
    heads = f"{config['num_kv_heads']} KV heads of {config['num_heads']}"
    kind = config["kind"]
    if kind == MEMORY:
        return f"{heads}, memory"
    if kind == SPEED:
        return f"{heads}, speed at batch {config['batch']}"
    return f"{heads}, {kind_name(kind, config.get('pooling'), config.get('share'))}: " + (
        str(config["model"])
    )


def kind_name(kind: str, pooling: str | None, share: float | None) -> str:
    """What a model is, in a few words."""
    trained = "" if share is None else shown(share)
    return {
        TRAINED: "trained from scratch",
        CONVERTED: f"converted ({pooling})",
        UPTRAINED: f"uptrained {trained} ({pooling})",
        CONTROL: f"source trained {trained} more",
    }[kind]


def shown(share: float) -> str:
    """Writes a share of training as a percentage."""
    return f"{100 * share:g} %"
