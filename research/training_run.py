"""A training run in its folder: steps, rows, held-out losses, checkpoints and the finished model.

The rows of steps are written before the checkpoint that follows them. So a run that was killed goes
on from its newest good checkpoint and writes any later rows once more, the same in every bit.
"""

import math
import pathlib
import shutil
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.orbax import TokenizerFiles, load_checkpoint, save_checkpoint
from kvlab.models.load import Model, tokenizer_of
from kvlab.models.presets import parameter_count
from kvlab.research.machine import measure, memory_bytes, probes
from kvlab.research.operators import LayerWork, step_operators, total
from kvlab.research.progress import Progress, progress
from kvlab.research.results import RunFolder, write_atomically
from kvlab.research.roofline_findings import PEAKS
from kvlab.research.rows import Row, make_row, timestamp
from kvlab.research.training import (
    Compiled,
    Packed,
    StepFigures,
    Trainer,
    TrainState,
    initial_state,
)
from kvlab.research.training_checkpoints import FOLDER, Checkpoints
from kvlab.research.training_config import TrainingConfig, TrainingError
from kvlab.research.training_data import PackedTexts, ShuffledRows, TrainingData, batches_of

MODEL_FOLDER = "model"
TOKENIZER_FILE = "tokenizer.model"

_PEAK_REPEATS = 3
_LARGEST_LOG = 700.0  # a float64 holds no larger power
_BACKWARD = 2  # a backward pass multiplies twice what a forward one does


def run_training(
    config: TrainingConfig, data: PackedTexts, folder: RunFolder, start: Model | None = None
) -> list[Row]:
    """Trains, or goes on where an earlier run of the folder was stopped.

    Args:
      config: the run.
      data: its texts, packed with its length; `TrainingData`, unless there is a `start`.
      folder: open; `model` in it is the trained model when this returns.
      start: what is trained further, in float32, with its tokenizer; a new model if not given.

    Returns:
      The newest row of each point.

    Raises:
      TrainingError: a loss or gradient that is not finite, or a checkpoint that cannot be written.
    """
    trainer = Trainer(config)  # before anything is written
    if isinstance(data, TrainingData):
        tokenizer: TokenizerFiles = [
            _keep_tokenizer(folder.path / TOKENIZER_FILE, data.tokenizer_model)
        ]
    else:
        assert start is not None
        tokenizer = tokenizer_of(start)
    checkpoints = Checkpoints(folder.path / FOLDER, config, tokenizer)
    found, skipped = checkpoints.newest()
    if found is None:
        found = initial_state(config, None if start is None else start.params)
    state = trainer.place(found)
    done = int(state.step)
    with progress(config.steps, "train", done=done, unit="steps") as report:
        for sentence in skipped:
            report.say(sentence)
        if skipped or done:
            report.say(f"training goes on after step {done}")
        run = _Run(config, data, folder, trainer, checkpoints, report)
        run.finish(run.train(state), tokenizer)
    return folder.rows


class _Run:
    """What the steps of a run share."""

    def __init__(
        self,
        config: TrainingConfig,
        data: PackedTexts,
        folder: RunFolder,
        trainer: Trainer,
        checkpoints: Checkpoints,
        report: Progress,
    ) -> None:
        self.config, self.data, self.folder = config, data, folder
        self.trainer, self.checkpoints, self.report = trainer, checkpoints, report
        self.held_out = batches_of(data.held_out, config.batch)
        decoder = config.decoder
        heads = decoder.kv_heads[0] if len(set(decoder.kv_heads)) == 1 else decoder.kv_heads
        self.shared = {"num_heads": decoder.num_heads, "num_kv_heads": heads}
        self.compiled: Compiled | None = None

    def train(self, state: TrainState) -> TrainState:
        """Takes the steps that are left."""
        config, step = self.config, int(state.step)
        if step == config.steps:
            return state
        rows = ShuffledRows(self.data.rows, np.asarray(state.key))
        first = rows.take(0, config.accumulate, config.batch)
        self.compiled = self.trainer.compile(state, first, self.held_out[0])
        peak = self._peak()
        while step < config.steps:
            last = min(step + config.log_every, config.steps)
            state = self._block(state, rows, step, last, peak)
            step = last
            if step % config.eval_every == 0 or step == config.steps:
                self._judge(state, step)
            if step % config.checkpoint_every == 0 or step == config.steps:
                self.checkpoints.save(state)
        return state

    def _block(
        self, state: TrainState, rows: ShuffledRows, step: int, last: int, peak: float
    ) -> TrainState:
        """The steps of one row of results."""
        config = self.config
        started, began = timestamp(), time.perf_counter()
        losses, figures = [], StepFigures(0.0, 0.0, 0.0, 0.0, 0.0)
        predicted = 0.0
        taken = self.trainer.steps(state, rows.take, last)
        for number, (after, figures) in enumerate(taken, step + 1):
            state = after
            if wrong := figures.not_finite():
                self._stop(number, wrong, "steps", last, started, began)
            losses.append((number, figures.loss))
            predicted += figures.predicted
            if number < last:
                self.report.advance()
        seconds = time.perf_counter() - began
        loss = sum(value for _, value in losses) / len(losses)
        metrics = {
            "loss": loss,
            "perplexity": _perplexity(loss),
            "gradient_norm": figures.gradient_norm,
            "learning_rate": figures.learning_rate,
            "train_tokens_per_s": predicted / seconds,
            "mfu": (last - step) * step_flops(config) / seconds / peak,
        }
        curve = [[at, value] for at, value in losses]
        self._append("steps", last, metrics, started, began, series={"loss": curve})
        self.report.advance(
            f"loss {loss:.3f}, perplexity {metrics['perplexity']:.1f}, "
            f"{metrics['train_tokens_per_s']:,.0f} tokens/s, MFU {100 * metrics['mfu']:.0f} %"
        )
        return state

    def _stop(
        self, step: int, wrong: str, kind: str, last: int, started: str, began: float
    ) -> NoReturn:
        """Ends the run after a figure that is none; the row that would have held it says so."""
        kept = [one for one in self.checkpoints.steps() if one < step]
        where = "no checkpoint was written yet"
        if kept:
            where = f"the checkpoint of step {kept[0]} is kept ({self.checkpoints.path(kept[0])})"
        said = (
            f"{wrong} at step {step}, so training stops; {where}: give a lower learning_rate "
            f"than {self.config.optimizer.learning_rate:g} or a longer warm-up, in another folder"
        )
        self._append(kind, last, {}, started, began, error=said)
        raise TrainingError(said)

    def _judge(self, state: TrainState, step: int) -> None:
        """The held-out loss after a step."""
        started, began = timestamp(), time.perf_counter()
        metrics = judged(self.trainer, state.params, self.held_out, self.data.held_out_bytes)
        loss = metrics["held_out_loss"]
        if not math.isfinite(loss):
            self._stop(step, f"the held-out loss is {loss}", "held_out", step, started, began)
        self._append("held_out", step, metrics, started, began)
        self.report.say(f"step {step}: held-out loss {loss:.4f}")

    def _peak(self) -> float:
        """Operations a second that products reach on these devices, measured once a run."""
        devices = jax.local_device_count()
        known = self.folder.finished(self._point("limit", 0, devices=devices), self.config.seed)
        if known is not None:
            return known["metrics"]["peak_flops_per_s"]
        configs = [row["config"] for row in self.folder.rows]
        began_on = next((one["devices"] for one in configs if "devices" in one), devices)
        if began_on != devices:
            self.report.say(
                f"on {_counted(devices)}; it began on {_counted(began_on)}, so later losses "
                "may differ in their last bits from those of a run in one go"
            )
        started, began = timestamp(), time.perf_counter()
        wanted = [one for one in probes() if one.limit == PEAKS[self.config.decoder.dtype]]
        samples = [max(measure(one, memory_bytes(), _PEAK_REPEATS)[0]) for one in wanted]
        # The devices of a CPU are the same cores.
        peak = (1 if jax.default_backend() == "cpu" else devices) * max(samples)
        self._append("limit", 0, {"peak_flops_per_s": peak}, started, began, devices=devices)
        return peak

    def finish(self, state: TrainState, tokenizer: TokenizerFiles) -> None:
        """Writes the trained model, and the row that describes it."""
        path = self.folder.path / MODEL_FOLDER
        for partial in self.folder.path.glob(f".{MODEL_FOLDER}-*"):
            shutil.rmtree(partial, ignore_errors=True)  # a killed process was writing it
        if not _is_good(path):
            shutil.rmtree(path, ignore_errors=True)
            params = jax.tree.map(jnp.asarray, jax.device_get(state.params))
            save_checkpoint(path, self.config.decoder, params, tokenizer)
        step = self.config.steps
        if self.folder.finished(self._point("model", step), self.config.seed) is not None:
            return
        started, began = timestamp(), time.perf_counter()
        samples: dict[str, list[float]] = {"train_tokens_per_s": [], "mfu": []}
        newest: dict[str, float] = {}
        for row in self.folder.rows:
            if row["config"]["kind"] == "steps":
                for name, values in samples.items():
                    values.append(row["metrics"][name])
            elif row["config"]["kind"] == "held_out":
                newest = row["metrics"]  # the last counts
        program: dict[str, float] = {}
        if self.compiled is not None:
            program["compile_s"] = self.compiled.seconds
            if self.compiled.working_bytes is not None:
                program["step_working_bytes"] = self.compiled.working_bytes
        metrics = {
            "parameters": parameter_count(self.config.decoder),
            "tokens_read": step * self.config.rows_per_step * self.config.length,
            "text_tokens": self.data.tokens,
            "held_out_tokens": self.data.held_out_tokens,
            "row_filled": self.data.filled,
            "model_bytes": sum(one.stat().st_size for one in path.rglob("*") if one.is_file()),
            **program,
            **newest,
        }
        self._append("model", step, metrics, started, began, repeats=samples)

    def _point(self, kind: str, step: int, **more: Any) -> dict[str, Any]:
        """The config of a row."""
        return {"kind": kind, **self.shared, "step": step, **more}

    def _append(
        self,
        kind: str,
        step: int,
        metrics: dict[str, float],
        started: str,
        began: float,
        *,
        devices: int | None = None,
        **more: Any,
    ) -> None:
        wall_s = time.perf_counter() - began
        common: dict[str, Any] = {"metrics": metrics, "started": started, "wall_s": wall_s}
        where = {} if devices is None else {"devices": devices}
        point, seed = self._point(kind, step, **where), self.config.seed
        self.folder.append(make_row("train", point, seed, **common, **more))


def judged(
    trainer: Trainer, params: dict, batches: Sequence[Packed], num_bytes: int
) -> dict[str, float]:
    """What held-out text says of parameters.

    Args:
      trainer: of their decoder.
      params: placed, or on one device.
      batches: the rows, [B, T + 1] each.
      num_bytes: of the text.

    Returns:
      `held_out_loss` in nats a token, its `held_out_perplexity`, and `held_out_bits_per_byte`.
    """
    loss, predicted = trainer.score(params, batches)
    return {
        "held_out_loss": loss,
        "held_out_perplexity": _perplexity(loss),
        "held_out_bits_per_byte": loss * predicted / math.log(2) / num_bytes,
    }


def step_flops(config: TrainingConfig) -> float:
    """Operations of one step: of the forward pass, and twice as many of the backward one.

    Every causal pair of a row counts, also of two texts; what `remat` computes again does not.
    Source: PaLM (arXiv 2204.02311), appendix B, with each operator counted for itself.
    """
    tokens = config.rows_per_step * config.length

    def pairs(window: int | None) -> int:
        seen = min(window or config.length, config.length)
        return seen * (seen + 1) // 2 + (config.length - seen) * seen

    decoder = config.decoder
    layers = [
        LayerWork(heads, tokens, config.rows_per_step * pairs(window))
        for heads, window in zip(decoder.kv_heads, decoder.layer_windows, strict=True)
    ]
    return (1 + _BACKWARD) * total(step_operators(decoder, layers, tokens)).flops


def _counted(devices: int) -> str:
    return f"{devices} device{'s' * (devices != 1)}"


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, _LARGEST_LOG))


def _keep_tokenizer(path: pathlib.Path, model: bytes) -> pathlib.Path:
    """Writes the tokenizer into the run folder, or checks that it is the one that is there."""
    if not path.exists():
        write_atomically(path, model)
    elif path.read_bytes() != model:
        raise TrainingError(
            f"{path} is not the tokenizer that these texts give here (another version of "
            "sentencepiece?); name another folder"
        )
    return path


def _is_good(path: pathlib.Path) -> bool:
    try:
        load_checkpoint(path)
    except CheckpointError:
        return False
    return True
