"""What limits allow: phases against the measured ones, operators, other devices, other studies.

Each function gives the metrics of one kind of row (`kvlab.research.roofline_study`).
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.models.config import DecoderConfig
from kvlab.models.presets import preset
from kvlab.ops.specs import CacheSpec, Recompute
from kvlab.research.devices import DEVICES, Device
from kvlab.research.linear_times import linear_time_study
from kvlab.research.operators import Operator, added, total
from kvlab.research.roofline import CostModel, Phase

PHASES = ("prefill", "decode")

Specs = CacheSpec | tuple[CacheSpec, ...]
Metrics = dict[str, float]
Samples = dict[str, list[float]]
Series = dict[str, list[tuple[float, float]]]
Measured = tuple[Metrics, Samples, Series]

_COUNTED_ON = DEVICES["A100-80GB"]  # operations and bytes are the same on every device


def phase_steps(
    costs: CostModel, config: Mapping[str, Any], batch: int, prompt: int
) -> list[Phase]:
    """What is computed: the calls of a prefill, or the steps of a decode call.

    Args:
      costs: of the variant.
      config: of the row: `phase`, and tokens of a prefill call (`chunk`) or of a decode call
        (`decode_tokens`).
      batch: sequences.
      prompt: tokens of each.
    """
    if config["phase"] == "prefill":
        chunk = prompt if costs.recomputes else config["chunk"]
        return [
            costs.prefill(batch, min(chunk, prompt - start), start)
            for start in range(0, prompt, chunk)
        ]
    return [
        costs.decode(batch, prompt + step + 1, prompt) for step in range(config["decode_tokens"])
    ]


def against_limits(
    steps: Sequence[Phase], phase: str, batch: int, prompt: int, seconds: Sequence[float]
) -> tuple[Metrics, Samples]:
    """Puts measured seconds beside what the device's limits allow.

    Args:
      steps: the calls of a prefill, or the steps of a decode call.
      phase: `prefill` or `decode`.
      batch: sequences.
      prompt: tokens of each.
      seconds: measured, of each prefill, or of a step in each decode call.

    Returns:
      Metrics, of the whole prefill or of one decode step: `flops`, `moved_bytes`,
      `arithmetic_intensity`, `mfu` and `mbu` (operations and bytes over what the peak and the
      bandwidth give in the measured time), `limit_share` (the larger of the two: time at the limit
      that binds, over the measured time), `predicted_s` (operators one after the other, each at
      its own limit); and the samples behind times and rates.
    """
    count = 1 if phase == "prefill" else len(steps)
    device, dtype = steps[0].device, steps[0].dtype
    work = total([one.total for one in steps])
    flops, moved = work.flops / count, work.moved_bytes / count
    middle = statistics.median(seconds)
    metrics = {
        "flops": flops,
        "moved_bytes": moved,
        "arithmetic_intensity": work.intensity,
        "ridge": device.ridge(dtype),
        "mfu": flops / device.peak(dtype) / middle,
        "mbu": moved / device.bandwidth / middle,
        "limit_share": device.seconds(flops, moved, dtype) / middle,
        "predicted_s": sum(one.seconds for one in steps) / count,
    }
    if phase == "prefill":
        rates = [batch * prompt / one for one in seconds]
        return metrics, {"ttft_s": list(seconds), "prefill_tokens_per_s": rates}
    return metrics, {
        "tpot_s": list(seconds),
        "decode_tokens_per_s": [batch / one for one in seconds],
    }


def turning_point(costs: CostModel, prompt: int) -> Metrics:
    """The batch at which decode of the next token turns compute-bound; absent if there is none."""
    batch = costs.compute_bound_batch(prompt + 1, prompt)
    return {} if batch is None else {"compute_bound_batch": float(batch)}


def phase_operators(
    config: DecoderConfig,
    specs: Specs,
    phase: str,
    batch: int,
    prompt: int,
    chunk: int,
    weights: str | None = None,
) -> tuple[Operator, ...]:
    """Operators of a prefill, added up over its calls of `chunk` tokens, or of the next step."""
    costs = CostModel(config, specs, _COUNTED_ON, weights=weights)
    steps = phase_steps(costs, {"phase": phase, "chunk": chunk, "decode_tokens": 1}, batch, prompt)
    return tuple(added(same) for same in zip(*(step.operators for step in steps), strict=True))


def operator_metrics(one: Operator, device: Device, dtype: str) -> Metrics:
    """What an operator of one layer computes and moves, and the least time for it on a device."""
    metrics = {
        "layers": float(one.layers),
        "flops": one.flops,
        "moved_bytes": one.moved_bytes,
        "weight_bytes": one.weight_bytes,
        "kv_bytes": one.kv_bytes,
        "predicted_s": device.seconds(one.flops, one.moved_bytes, dtype),
        "ridge": device.ridge(dtype),
    }
    return metrics | ({"arithmetic_intensity": one.intensity} if one.moved_bytes else {})


def on_data_sheet(config: DecoderConfig, specs: Specs) -> tuple[DecoderConfig, Specs]:
    """A model and its caches as data centres run them: in bfloat16 what was in float32.

    Caches stored in fewer bits stay as they are.
    """

    def stored(spec: CacheSpec) -> CacheSpec:
        plain = spec.storage == "float32" and not isinstance(spec.placement, Recompute)
        return dataclasses.replace(spec, storage="bfloat16") if plain else spec

    halved = dataclasses.replace(config, param_dtype="bfloat16", dtype="bfloat16")
    return halved, stored(specs) if isinstance(specs, CacheSpec) else tuple(map(stored, specs))


def device_metrics(costs: CostModel, batch: int, prompt: int) -> Metrics:
    """What a device would do at best.

    Args:
      costs: of the variant on the device.
      batch: sequences.
      prompt: tokens of each, prefilled in one call.

    Returns:
      `predicted_ttft_s`, `predicted_tpot_s`, `ridge`; the batch at which decode turns compute-bound
      and the most sequences of that length that fit, each absent where there is no such number; and
      the longest context of `batch` sequences that fits.
    """
    metrics = {
        "ridge": costs.device.ridge(costs.config.dtype),
        "predicted_ttft_s": costs.ttft_s(prompt, batch),
        "predicted_tpot_s": costs.decode(batch, prompt + 1, prompt).seconds,
        "largest_context": float(costs.largest_context(batch)),
    }
    most = costs.largest_batch(prompt)
    if most is not None:
        metrics["largest_batch"] = float(most)
    return metrics | turning_point(costs, prompt)


def linear_metrics(device: str, files: Sequence[tuple[str, str]]) -> Measured:
    """Errors of predicted times of linear layers (`linear_time_study`).

    Args:
      device: that was measured, of `DEVICES`.
      files: path, and name of the preset that was measured.

    Returns:
      `efficiency` and the errors over all measurements, and, by the first and the last token count
      of each range, series of `last`, `count`, `bias`, `median`, `p90` and `largest`.
    """
    known = [
        (path, dataclasses.replace(preset(model), param_dtype="float16", dtype="float16"))
        for path, model in files
    ]
    efficiency, rows = linear_time_study(DEVICES[device], known)
    *ranges, whole = rows
    names = ("last", "count", "bias", "median", "p90", "largest")
    series = {name: [(float(r.first), float(getattr(r, name))) for r in ranges] for name in names}
    metrics = {"efficiency": efficiency, "measurements": float(whole.count)}
    metrics |= {
        "median_error": whole.median,
        "p90_error": whole.p90,
        "largest_error": whole.largest,
    }
    return metrics, {}, series
