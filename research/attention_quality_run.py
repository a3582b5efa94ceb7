"""Judges, converts and uptrains the models of the study of attention and quality.

Axes: N query heads, K KV heads.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvlab.models.convert import convert_attention
from kvlab.models.load import Model
from kvlab.models.presets import parameter_count
from kvlab.research.attention_costs import AttentionCosts, kv_bytes_per_token
from kvlab.research.attention_quality_study import (
    CONTROL,
    TRAINED,
    UPTRAINED,
    AttentionQualityStudy,
    label,
)
from kvlab.research.matched_models import Member, rounded
from kvlab.research.point_run import Measured, run_points
from kvlab.research.results import RunFolder
from kvlab.research.rows import Row
from kvlab.research.training import Trainer, initial_state
from kvlab.research.training_config import OptimizerConfig, TrainingConfig, TrainingError
from kvlab.research.training_data import PackedTexts, ShuffledRows, batches_of
from kvlab.research.training_run import judged


class AttentionQuality:
    """The study at work: models, texts and compiled steps that its points share."""

    def __init__(
        self, study: AttentionQualityStudy, models: Mapping[Member, Model], data: PackedTexts
    ) -> None:
        """Trains and judges nothing yet.

        Args:
          study: what to run.
          models: its members, loaded by `matched_models.load_matched`.
          data: the texts, packed by their tokenizer.

        Raises:
          ValueError: steps, sequences or a batch that cannot be trained with.
        """
        self._study, self._data = study, data
        self._costs = AttentionCosts(study, models)
        self._models = {member.sha256: model for member, model in models.items()}
        self._decoder = next(iter(models.values())).config
        self._held_out = batches_of(data.held_out, study.batch)
        self._trainer = functools.cache(self._new_trainer)
        self._trainer(study.num_heads, study.steps)  # refuses what cannot be trained with

    def run(self, folder: RunFolder) -> list[Row]:
        """Measures what the folder has no finished row of.

        Args:
          folder: open; a point that fails becomes a failed row, and the run goes on.

        Returns:
          The newest row of each point.
        """
        self._costs.run(folder)
        points = list(self._study.quality_points())
        return run_points(folder, points, self._study.seed, self._measure, label)

    def _measure(self, config: Mapping[str, Any], seed: int) -> Measured:
        """Makes the model of a point, and judges it."""
        model = self._models[config["sha256"]]
        decoder, params, series = model.config, model.params, {}
        own = seed + config["repeat"]
        if "pooling" in config:
            decoder, params = convert_attention(
                decoder, params, config["num_kv_heads"], config["pooling"], own
            )
            params = rounded(params)
        if config["kind"] in (UPTRAINED, CONTROL):
            params, series["loss"] = self._trained_on(params, config, own)
        heads = config["num_kv_heads"]
        trainer = self._trainer(heads, self._study.steps)
        metrics = {
            **judged(trainer, params, self._held_out, self._data.held_out_bytes),
            "parameters": parameter_count(decoder),
            "kv_bytes_per_token": kv_bytes_per_token(decoder, self._study.page_size),
        }
        if config["kind"] == TRAINED:
            metrics["text_tokens"] = self._data.tokens
            metrics["held_out_tokens"] = self._data.held_out_tokens
        return metrics, series

    def _trained_on(
        self, params: dict, config: Mapping[str, Any], seed: int
    ) -> tuple[dict, list[tuple[float, float]]]:
        """Trains parameters for the share of a point: those after it, rounded, and the losses."""
        trainer = self._trainer(config["num_kv_heads"], config["steps"])
        state = trainer.place(
            initial_state(self._training(config["num_kv_heads"], config["steps"], seed), params)
        )
        rows = ShuffledRows(self._data.rows, jax.device_get(state.key))
        losses: list[tuple[float, float]] = []
        for after, figures in trainer.steps(state, rows.take, config["steps"]):
            state = after
            losses.append((float(len(losses) + 1), figures.loss))
            if wrong := figures.not_finite():
                raise TrainingError(
                    f"{wrong} at step {len(losses)}; give a lower learning_rate than "
                    f"{config['learning_rate']:g}"
                )
        return rounded(jax.tree.map(jnp.asarray, jax.device_get(state.params))), losses

    def _training(self, heads: int, steps: int, seed: int = 0) -> TrainingConfig:
        study = self._study
        return TrainingConfig(
            dataclasses.replace(self._decoder, num_kv_heads=heads),
            length=study.length,
            batch=study.batch,
            steps=steps,
            optimizer=OptimizerConfig(study.learning_rate, warmup_steps=study.warmup_steps(steps)),
            seed=seed,
        )

    def _new_trainer(self, heads: int, steps: int) -> Trainer:
        return Trainer(self._training(heads, steps))
