"""One step of training, as a pure function: a state and rows of packed texts in, both out.

Axes: A passes of a step, B rows of a pass, T tokens that a row predicts (it holds one more), V
vocabulary. Rows are split over the devices of a mesh, the state is on each of them.
"""

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder
from kvlab.models.random_params import random_params
from kvlab.ops.segments import PADDING
from kvlab.research.environment import usable_cores
from kvlab.research.training_config import OptimizerConfig, TrainingConfig

_AXIS = "data"


class Packed(NamedTuple):
    """Rows that hold one text or more; `kvlab.ops.segments` says how texts are numbered."""

    tokens: Any  # i32[..., T + 1]
    segments: Any  # i32[..., T + 1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run needs to go on: what a checkpoint holds."""

    params: dict  # in the tree of `kvlab.models.decoder`
    optimizer: Any  # optax's own state
    step: jax.Array  # i32[]: steps done
    rows_read: jax.Array  # i32[]: rows of data read, over all epochs
    key: jax.Array  # u32[2]: of the order of rows


class StepFigures(NamedTuple):
    """What a step measured, each float32[]."""

    loss: Any  # mean over predicted tokens, nats
    predicted: Any  # tokens that count
    gradient_norm: Any  # global, before clipping
    learning_rate: Any
    update_norm: Any  # global, of what was added to the parameters

    def not_finite(self) -> str | None:
        """What of the loss, the gradient and the update is no finite number, in words, if any."""
        named = {"loss": self.loss, "gradient": self.gradient_norm, "update": self.update_norm}
        for name, value in named.items():
            if not math.isfinite(value):
                return f"the {name} is {value}"
        return None


def optimizer_of(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` steps."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule_of(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


def schedule_of(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """From steps done to the learning rate of the next; the first is above 0, the last is low."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=steps,
        end_value=config.learning_rate * config.final_share,
    )


def initial_state(config: TrainingConfig, params: dict | None = None) -> TrainState:
    """The state before the first step.

    Args:
      config: the run; its seed decides the order of rows.
      params: float32, of a model that is trained further; drawn with the seed if not given.
    """
    params = random_params(config.decoder, config.seed) if params is None else params
    return TrainState(
        params=params,
        optimizer=optimizer_of(config.optimizer, config.steps).init(params),
        step=jnp.zeros((), jnp.int32),
        rows_read=jnp.zeros((), jnp.int32),
        key=jax.random.key_data(jax.random.key(config.seed)),
    )


def summed_loss(
    params: dict, rows: Packed, config: DecoderConfig, remat: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of every next token that is of the same text, summed.

    The first token of a text is predicted from nothing, and so does not count; nor does padding.

    Args:
      params: of the decoder.
      rows: [B, T + 1] each.
      config: the decoder.
      remat: see `TrainingConfig`.

    Returns:
      The sum in nats, and how many tokens were predicted, each float32[].
    """
    tokens, segments = map(jnp.asarray, rows)
    read, own = segments[:, :-1], segments[:, 1:]
    decoder = Decoder(config, remat=remat)
    logits = decoder.apply({"params": params}, tokens[:, :-1], read, method="forward")
    assert isinstance(logits, jax.Array)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    losses = -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    counts = (read == own) & (own != PADDING)
    return jnp.where(counts, losses, 0.0).sum(), counts.sum().astype(jnp.float32)


def train_step(
    state: TrainState, rows: Packed, config: TrainingConfig
) -> tuple[TrainState, StepFigures]:
    """One step of the optimizer on the mean loss over all predicted tokens of all passes.

    Args:
      state: before the step.
      rows: [A, B, T + 1] each.
      config: the run; static.
    """
    gradient_of = jax.value_and_grad(summed_loss, has_aux=True)

    def add(totals: tuple, piece: Packed) -> tuple[tuple, None]:
        (loss, count), gradient = gradient_of(state.params, piece, config.decoder, config.remat)
        return jax.tree.map(jnp.add, totals, (loss, count, gradient)), None

    zero = jnp.zeros((), jnp.float32)
    nothing = (zero, zero, jax.tree.map(jnp.zeros_like, state.params))
    (loss, count, gradient), _ = jax.lax.scan(add, nothing, rows)
    gradient = jax.tree.map(lambda leaf: leaf / count, gradient)
    norm = optax.tree.norm(gradient)
    optimizer = optimizer_of(config.optimizer, config.steps)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    after = TrainState(
        params=params,
        optimizer=optimizer_state,
        step=state.step + 1,
        rows_read=state.rows_read + config.rows_per_step,
        key=state.key,
    )
    rate = jnp.asarray(schedule_of(config.optimizer, config.steps)(state.step), jnp.float32)
    return after, StepFigures(loss / count, count, norm, rate, optax.tree.norm(updates))


class Compiled(NamedTuple):
    """What compiling took and found."""

    seconds: float
    working_bytes: int | None  # that a step holds beside its state and rows, a device


def share_cpu(batch: int, wanted: int | None = None) -> None:
    """Makes a device of every core of a CPU, before JAX begins, so that each works on its own rows.

    XLA splits only some operations over cores (a step took 1.5 times as long on one device as on
    two, 2 cores). Where JAX has begun, or `XLA_FLAGS` names a number of devices, that stays.

    Args:
      batch: rows that the devices share.
      wanted: devices; the largest number up to the cores that splits the batch if not given.

    Raises:
      ValueError: another number of devices than the wanted one is there.
    """
    count = wanted or max(n for n in range(1, usable_cores() + 1) if batch % n == 0)
    if wanted or "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has begun
            jax.config.update("jax_num_cpu_devices", count)
    if wanted and jax.default_backend() == "cpu" and jax.local_device_count() != wanted:
        raise ValueError(
            f"cpu_devices={wanted} given, and JAX has begun with {jax.local_device_count()} here; "
            "leave cpu_devices out, or begin with it"
        )


class Trainer:
    """The compiled step and score of a run, on some devices."""

    def __init__(self, config: TrainingConfig, devices: Sequence[Any] | None = None) -> None:
        """Lays the devices out; `compile` or the first call compiles.

        Args:
          config: the run.
          devices: that share the rows of a pass; all local ones if not given.

        Raises:
          ValueError: the rows of a pass cannot be split evenly over the devices.
        """
        self._config = config
        devices = jax.local_devices() if devices is None else devices
        if config.batch % len(devices):
            fitting = -(-config.batch // len(devices)) * len(devices)
            raise ValueError(
                f"batch={config.batch} cannot be split over {len(devices)} devices; it must be a "
                f"multiple of that: {fitting}, for example"
            )
        mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
        spec = jax.sharding.PartitionSpec
        self._everywhere = jax.sharding.NamedSharding(mesh, spec())
        passes = jax.sharding.NamedSharding(mesh, spec(None, _AXIS))
        rows = jax.sharding.NamedSharding(mesh, spec(_AXIS))
        self._step: Any = jax.jit(
            functools.partial(train_step, config=config),
            in_shardings=(self._everywhere, passes),
            out_shardings=self._everywhere,
            donate_argnums=0,
        )
        self._score: Any = jax.jit(
            functools.partial(summed_loss, config=config.decoder),
            in_shardings=(self._everywhere, rows),
            out_shardings=self._everywhere,
        )

    def place(self, state: TrainState) -> TrainState:
        """Puts a state on every device, in buffers of its own, for `step` takes them over."""
        copied = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
        placed: TrainState = jax.device_put(copied, self._everywhere)
        return placed

    def step(self, state: TrainState, rows: Packed) -> tuple[TrainState, StepFigures]:
        """`train_step`; the state that is given is used up.

        Args:
          state: placed.
          rows: [A, B, T + 1] each.

        Returns:
          The state after it, and what was measured, on the host.
        """
        state, figures = self._step(state, rows)
        return state, StepFigures(*map(float, figures))

    def steps(
        self, state: TrainState, take: Callable[[int, int, int], Packed], last: int
    ) -> Iterator[tuple[TrainState, StepFigures]]:
        """Takes steps until so many are done.

        Args:
          state: placed; it is used up.
          take: gives the rows of a step, as `training_data.ShuffledRows.take` does.
          last: steps done at the end.

        Yields:
          The state after each step, which the next one uses up, and what the step measured.
        """
        config, read = self._config, int(state.rows_read)
        for _ in range(int(state.step), last):
            state, figures = self.step(state, take(read, config.accumulate, config.batch))
            read += config.rows_per_step
            yield state, figures

    def score(self, params: dict, batches: Iterable[Packed]) -> tuple[float, int]:
        """Mean loss of rows, and how many tokens were predicted.

        Args:
          params: placed.
          batches: [B, T + 1] each.
        """
        loss, count = 0.0, 0
        for rows in batches:
            piece, predicted = self._score(params, rows)
            loss, count = loss + float(piece), count + int(predicted)
        return loss / count, count

    def compile(self, state: TrainState, rows: Packed, batch: Packed) -> Compiled:
        """Compiles the step and the score, and runs neither.

        Args:
          state: placed.
          rows: of a step.
          batch: of a score.
        """
        began = time.perf_counter()
        step = self._step.lower(state, rows).compile()
        self._score = self._score.lower(state.params, batch).compile()
        self._step = step
        memory = step.memory_analysis()
        working = None if memory is None else int(memory.temp_size_in_bytes)
        return Compiled(time.perf_counter() - began, working)
