"""The checkpoints of a training run: written whole or not at all, the newest good one found again.

A checkpoint is a folder of `kvlab.models.checkpoints.orbax`, named for its step, that holds the
whole `TrainState`; it is also a model that `load_model` loads.
"""

import dataclasses
import pathlib
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from kvlab.models.checkpoints.errors import CheckpointError
from kvlab.models.checkpoints.orbax import (
    TokenizerFiles,
    load_checkpoint,
    load_training,
    save_checkpoint,
)
from kvlab.models.config import DecoderConfig
from kvlab.research.training import TrainState, initial_state
from kvlab.research.training_config import TrainingConfig, TrainingError

FOLDER = "checkpoints"
_NAME = re.compile(r"step_(\d+)")


class Checkpoints:
    """The folder of a run's checkpoints, held by this process."""

    def __init__(
        self, folder: pathlib.Path, config: TrainingConfig, tokenizer: TokenizerFiles
    ) -> None:
        """Takes the folder, and clears away what a killed process was writing.

        Args:
          folder: of the checkpoints; it is made when one is written.
          config: of the run.
          tokenizer: what goes with every checkpoint.
        """
        self.folder = folder
        self._config = config
        self._tokenizer = tokenizer
        for partial in folder.glob(".step_*"):
            shutil.rmtree(partial, ignore_errors=True)

    def path(self, step: int) -> pathlib.Path:
        """Where the checkpoint of a step lies, if there is one."""
        return self.folder / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, good or not, the newest first."""
        names = (_NAME.fullmatch(path.name) for path in self.folder.glob("step_*"))
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def save(self, state: TrainState) -> pathlib.Path:
        """Writes a checkpoint, and removes those before the newest that are to be kept.

        Args:
          state: of the run.

        Returns:
          Its folder.

        Raises:
          TrainingError: it cannot be written; those before it are as they were.
        """
        step = int(state.step)
        path = self.path(step)
        host = jax.tree.map(jnp.asarray, jax.device_get(state))  # without the devices' layout
        try:
            if path.exists():
                shutil.rmtree(path)  # it was skipped, or training would have begun after it
            save_checkpoint(path, self._config.decoder, host.params, self._tokenizer, _arrays(host))
        except (CheckpointError, OSError) as error:
            raise TrainingError(self._not_written(step, error)) from error
        for old in [one for one in self.steps() if one <= step][self._config.keep :]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return path

    def newest(self) -> tuple[TrainState | None, list[str]]:
        """The state of the newest checkpoint that is good.

        Returns:
          The state, None where no checkpoint is good; and a sentence about each that was skipped.

        Raises:
          TrainingError: a checkpoint is of another decoder.
        """
        skipped: list[str] = []
        for step in self.steps():
            try:
                return self._load(self.path(step)), skipped
            except CheckpointError as error:
                skipped.append(f"skipped the checkpoint of step {step}: {error}")
        return None, skipped

    def _load(self, path: pathlib.Path) -> TrainState:
        decoder, params = load_checkpoint(path)
        if decoder != self._config.decoder:
            raise TrainingError(
                f"{path} is a checkpoint of another config "
                f"({_differences(decoder, self._config.decoder)}); name another folder, or give "
                "the same settings"
            )
        like = jax.eval_shape(lambda: initial_state(self._config))
        arrays = load_training(path, _arrays(like))
        leaves, structure = jax.tree.flatten(dataclasses.replace(like, params={}))
        names = list(_arrays(like))
        assert len(leaves) == len(names)
        state: TrainState = jax.tree.unflatten(structure, [arrays[name] for name in names])
        return dataclasses.replace(state, params=params)

    def _not_written(self, step: int, error: Exception) -> str:
        kept = [one for one in self.steps() if one < step]
        which = f"that of step {kept[0]} is kept ({self.path(kept[0])})" if kept else "none is kept"
        return (
            f"the checkpoint of step {step} could not be written ({error}); {which}: make room, "
            "and run the same command again to go on"
        )


def _arrays(state: TrainState) -> dict[str, Any]:
    """Every leaf but the parameters by a name of its own, in the order of the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(dataclasses.replace(state, params={}))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _differences(there: DecoderConfig, here: DecoderConfig) -> str:
    changed = []
    for field in dataclasses.fields(DecoderConfig):
        before, after = getattr(there, field.name), getattr(here, field.name)
        if before != after:
            changed.append(f"{field.name} is {before} there and {after} here")
    return "; ".join(changed)
