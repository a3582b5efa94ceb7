"""What a training run is: the decoder, the data's shape, the optimizer and what is recorded."""

import dataclasses
from typing import Any

from kvlab.models.config import DecoderConfig
from kvlab.models.config_json import encoded
from kvlab.ops.rope import DynamicNTK


class TrainingError(ValueError):
    """Training cannot begin or go on; the message is one line and says how to mend it."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine decay, gradients clipped by their global norm.

    Sources: Decoupled Weight Decay Regularization (arXiv 1711.05101), Algorithm 2; SGDR (arXiv
    1608.03983), equation 5, without restarts; On the difficulty of training RNNs (arXiv 1211.5063),
    Algorithm 1.

    Args:
      learning_rate: the highest, reached at the end of the warm-up.
      final_share: the last learning rate, as a share of the highest.
      warmup_steps: steps until the highest learning rate.
      weight_decay: of matrices; scales and biases do not decay.
      beta1, beta2: of the moments.
      clip_norm: gradients whose global norm is larger are scaled to it.

    Raises:
      ValueError: a value outside its range.
    """

    learning_rate: float = 3e-3
    final_share: float = 0.1
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        """Validates every field."""
        _require(self, "learning_rate", self.learning_rate > 0, "above 0")
        _require(self, "final_share", 0 <= self.final_share <= 1, "from 0 to 1")
        _require(self, "warmup_steps", self.warmup_steps >= 0, "0 or more")
        _require(self, "weight_decay", self.weight_decay >= 0, "0 or more")
        _require(self, "beta1", 0 <= self.beta1 < 1, "0 or more and below 1")
        _require(self, "beta2", 0 <= self.beta2 < 1, "0 or more and below 1")
        _require(self, "clip_norm", self.clip_norm > 0, "above 0")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """A training run, but for its texts.

    Args:
      decoder: what is trained; its `param_dtype` is float32, its `dtype` that of the computation.
      length: tokens that a row predicts; a row holds one more.
      batch: rows of one forward and backward pass, over all devices.
      accumulate: passes whose gradients make one step.
      steps: of the optimizer.
      optimizer: its settings.
      remat: compute the layers' activations again in the backward pass instead of keeping them.
      seed: of the first parameters and of the order of rows.
      log_every: steps of one row of results.
      eval_every: steps from one held-out loss to the next, a multiple of `log_every`.
      checkpoint_every: steps from one checkpoint to the next, a multiple of `log_every`.
      keep: newest checkpoints that are kept.

    Raises:
      ValueError: a size below 1, rows longer than the decoder's texts, a warm-up as long as the
        run, steps that are no multiple, parameters that are not float32, or dynamic NTK.
    """

    decoder: DecoderConfig
    length: int = 256
    batch: int = 8
    accumulate: int = 1
    steps: int = 1200
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    remat: bool = False
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        """Validates every field."""
        for name in ("length", "batch", "accumulate", "steps", "log_every", "keep"):
            _require(self, name, getattr(self, name) >= 1, "1 or more")
        for name in ("eval_every", "checkpoint_every"):
            value = getattr(self, name)
            near = max(round(value / self.log_every), 1) * self.log_every
            wanted = f"a multiple of log_every={self.log_every}: {near}, for example"
            _require(self, name, value >= 1 and value % self.log_every == 0, wanted)
        longest = self.decoder.max_length
        _require(
            self, "length", self.length <= longest, f"the decoder's max_length={longest} or less"
        )
        warmup = self.optimizer.warmup_steps
        wanted = f"above warmup_steps={warmup}; warm up for less, or train for longer"
        _require(self, "steps", self.steps > warmup, wanted)
        if self.decoder.param_dtype != "float32":
            raise ValueError(
                f"param_dtype={self.decoder.param_dtype} given; training updates float32 "
                "parameters (dtype is that of the computation)"
            )
        if self.decoder.rope is not None and isinstance(self.decoder.rope.scaling, DynamicNTK):
            raise ValueError("DynamicNTK given, whose base is one for a row; use another scaling")

    @property
    def rows_per_step(self) -> int:
        """Rows that one step reads."""
        return self.batch * self.accumulate

    def to_json(self) -> dict[str, Any]:
        """Every field, those of the decoder and the optimizer beside the run's own."""
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("decoder", "optimizer")
        }
        decoder, optimizer = encoded(self.decoder), encoded(self.optimizer)
        del decoder["type"], optimizer["type"]
        return {**decoder, **optimizer, **own}


def _require(owner: object, field: str, legal: bool, wanted: str) -> None:
    """Raises a ValueError that names the field of `owner`, its value and what is wanted."""
    if not legal:
        raise ValueError(f"{field}={getattr(owner, field)} given; it must be {wanted}")
