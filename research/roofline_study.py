"""What `roofline` runs: models, variants and sizes; and what its rows are called.

Every row's config has a `kind`: `limit` (what the machine can do), `phase` (prefill or decode of an
attention and cache at a batch and prompt length), `operator` and `device` (predictions), and
`linear_times` (predictions against measured times of other machines).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvlab.models.presets import preset
from kvlab.research.devices import DEVICES
from kvlab.research.experiment import Variant
from kvlab.research.machine import LIMITS


@dataclasses.dataclass(frozen=True)
class LinearTimes:
    """A file of measured times of linear layers (`kvlab.research.linear_times`).

    Attributes:
      device: that was measured, of `DEVICES`.
      model: that was measured, a preset.
      path: the file.
    """

    device: str
    model: str
    path: str

    def __post_init__(self) -> None:
        """Validates the names."""
        if self.device not in DEVICES:
            raise ValueError(f"device {self.device!r} is not known; known: {', '.join(DEVICES)}")
        preset(self.model)


@dataclasses.dataclass(frozen=True)
class RooflineStudy:
    """What is run.

    Args:
      model: any form that `kvlab.models.load.load_model` takes.
      dtype: of parameters and computation.
      variants: attention and cache.
      batches: sequences side by side.
      prompt_tokens: lengths of the prompts.
      decode_tokens: decoded after each.
      repeats: timed, after a warm-up.
      chunk: tokens of a prompt that one prefill call takes.
      devices: data sheets to predict for, of `DEVICES`.
      linear_times: files to compare predictions with.
      implementation: of attention; None is the best available.
      weights: format of the products' weights; None is as loaded.
      seed: of the prompts.
    """

    model: str
    dtype: str
    variants: tuple[Variant, ...]
    batches: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    decode_tokens: int
    repeats: int
    chunk: int
    devices: tuple[str, ...]
    linear_times: tuple[LinearTimes, ...]
    implementation: str | None
    weights: str | None
    seed: int

    @property
    def weight_settings(self) -> dict[str, str]:
        """What a row's config says of the weights: nothing where they are as loaded."""
        return {} if self.weights is None else {"weights": self.weights}

    def to_json(self) -> dict[str, Any]:
        """The study as a manifest stores it."""
        values = dataclasses.asdict(self)
        return values | {"variants": [variant.settings() for variant in self.variants]}


def row_label(config: Mapping[str, Any]) -> str:
    """A row's config in a few words."""
    match config["kind"]:
        case "limit":
            return f"{LIMITS[config['limit']]} by {config['by']}, turn {config['turn']}"
        case "phase":
            run = f"{config['run']}: " if "run" in config else ""
            return (
                f"{run}{config['attention']} {config['placement']} {config['phase']}, batch "
                f"{config['batch_size']}, prompt {config['prompt_tokens']}"
            )
        case "operator":
            return f"{config['operator']} of {config['phase']}"
        case "device":
            return f"{config['attention']} on {config['device']}"
    return f"linear layers of {config['device']}"
