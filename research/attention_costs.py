"""What a number of KV heads costs: bytes a token, sequences that fit, seconds of decode.

Axes: K KV heads.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvlab.models.config import DecoderConfig
from kvlab.models.load import Model
from kvlab.models.presets import parameter_count
from kvlab.ops.page_pool import unchecked
from kvlab.ops.page_table import PageTable
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.attention_quality_study import MEMORY, AttentionQualityStudy, label
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.matched_models import Member
from kvlab.research.phase_timing import PhaseTimer, Timed, timed_in_turns
from kvlab.research.point_run import Measured, run_points
from kvlab.research.progress import progress
from kvlab.research.results import RunFolder
from kvlab.research.rows import make_row, timestamp

_PREFILL_CHUNK = 64


class AttentionCosts:
    """Memory and speed of each K, whoever trained it."""

    def __init__(self, study: AttentionQualityStudy, models: Mapping[Member, Model]) -> None:
        """Takes one model of each K.

        Args:
          study: what to run.
          models: its members.
        """
        self._study = study
        self._models = {member.num_kv_heads: model for member, model in models.items()}

    def run(self, folder: RunFolder) -> None:
        """Measures what the folder has no finished row of: memory, then speed by batch."""
        points = list(self._study.cost_points())
        memory = [point for point in points if point["kind"] == MEMORY]
        run_points(folder, memory, self._study.seed, self._memory, label)
        for batch in self._study.batches:
            self._time([one for one in points if one.get("batch") == batch], folder)

    def _memory(self, config: Mapping[str, Any], seed: int) -> Measured:
        """How many sequences of the timed length fit the memory at once."""
        del seed
        decoder = self._models[config["num_kv_heads"]].config
        page_size, tokens = config["page_size"], self._study.sequence_tokens
        per_token = kv_bytes_per_token(decoder, page_size)
        pages = int(config["kv_mib"] * 2**20 / (per_token * page_size))
        each = -(-tokens // page_size)
        metrics = {
            "kv_bytes_per_token": per_token,
            "parameters": parameter_count(decoder),
            "max_concurrent_sequences": 0,
        }
        if pages:
            rows = pages // each + 1
            table = PageTable.init(rows, pages, page_size, each)
            with unchecked():
                _, granted = jax.jit(PageTable.reserve)(table, jnp.full(rows, tokens, jnp.int32))
            metrics["max_concurrent_sequences"] = int(granted.sum())
        return metrics, {}

    def _time(self, points: Sequence[Mapping[str, Any]], folder: RunFolder) -> None:
        """Times decode of every K at one batch, the Ks in turns; a row of each."""
        study = self._study
        left = [one for one in points if folder.finished(one, study.seed) is None]
        if not left:
            return
        started, began = timestamp(), time.perf_counter()
        with progress(len(left), folder.manifest["command"], unit="points") as report:
            makers = {label(one): functools.partial(self._timer, one) for one in left}
            found = timed_in_turns(makers, [study.prompt_tokens], study.repeats)
            for point in left:
                timed = found[label(point)]
                error = None if isinstance(timed, Timed) else f"{type(timed).__name__}: {timed}"
                if error is not None:
                    report.say(f"failed: {label(point)}: {error}")
                samples = timed.step_s[study.prompt_tokens] if isinstance(timed, Timed) else []
                speeds = [point["batch"] / seconds for seconds in samples]
                row = make_row(
                    folder.manifest["command"],
                    point,
                    study.seed,
                    repeats={"tpot_s": samples, "decode_tokens_per_s": speeds},
                    started=started,
                    wall_s=time.perf_counter() - began,
                    error=error,
                )
                folder.append(row)
                report.advance(label(point))

    def _timer(self, config: Mapping[str, Any]) -> PhaseTimer:
        study, model = self._study, self._models[config["num_kv_heads"]]
        shapes = InferenceConfig(
            model.config,
            CacheSpec(Paged(config["page_size"])),
            slots=config["batch"],
            rows=config["batch"],
            max_length=study.sequence_tokens,
            chunk=min(_PREFILL_CHUNK, study.prompt_tokens),
            decode_steps=study.decode_tokens,
        )
        return PhaseTimer(model.params, shapes, study.seed)


def kv_bytes_per_token(decoder: DecoderConfig, page_size: int) -> float:
    """Bytes of the layers' pools over the tokens that they hold, keys and values in float32.

    Args:
      decoder: the model.
      page_size: tokens a page.
    """
    pages = InferenceConfig(
        decoder, CacheSpec(Paged(page_size)), slots=1, max_length=page_size, num_pages=1
    )
    return jax.eval_shape(pages.init_cache).nbytes() / page_size
