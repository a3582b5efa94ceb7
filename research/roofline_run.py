"""Runs `roofline`: this machine's limits, phases timed against them, predictions beside."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvlab.models.config import DecoderConfig
from kvlab.models.load import Model
from kvlab.models.presets import preset
from kvlab.ops.packed_weight import QUANTISED
from kvlab.research.compilation import make_room_for_programs
from kvlab.research.devices import DEVICES, Device
from kvlab.research.experiment import Variant
from kvlab.research.inference import InferenceConfig
from kvlab.research.linear_times import read_linear_times
from kvlab.research.machine import (
    BANDWIDTH,
    NAME,
    Probe,
    machine,
    measure,
    memory_bytes,
    probes,
)
from kvlab.research.operators import Operator
from kvlab.research.phase_timing import PhaseTimer, Timed, timed_in_turns
from kvlab.research.progress import progress
from kvlab.research.results import RunFolder
from kvlab.research.roofline import CostModel
from kvlab.research.roofline_findings import PEAKS, of_kind, rate_of
from kvlab.research.roofline_predictions import (
    PHASES,
    Measured,
    against_limits,
    device_metrics,
    linear_metrics,
    on_data_sheet,
    operator_metrics,
    phase_operators,
    phase_steps,
    turning_point,
)
from kvlab.research.roofline_study import LinearTimes, RooflineStudy, row_label
from kvlab.research.rows import Row, make_row, timestamp
from kvlab.research.variants import apply_attention, kv_heads

_LIMIT_REPEATS = 9
_NOTHING: Measured = ({}, {}, {})


@dataclasses.dataclass(frozen=True)
class _Group:
    """Rows that are measured together.

    Attributes:
      configs: of the rows.
      measure: from those that are still wanted to metrics, samples and series of each, or to why
        it failed.
    """

    configs: tuple[dict[str, Any], ...]
    measure: Callable[[Sequence[dict[str, Any]]], Iterator[Measured | Exception]]


def run_roofline(study: RooflineStudy, model: Model, folder: RunFolder) -> list[Row]:
    """Measures what the folder has no finished row of.

    Limits are measured before, between and after the phases, since other load comes and goes;
    phases measured before a limit was known at its best get a row anew, with the same times.

    Args:
      study: what to run.
      model: the loaded `study.model`.
      folder: open; rows that fail are failed rows, and the run goes on.

    Returns:
      The newest row of each point.
    """
    groups = _groups(study, model, lambda: machine_of(folder.rows))
    wanted = [config for group in groups for config in group.configs]
    done = sum(folder.finished(config, study.seed) is not None for config in wanted)
    with progress(len(wanted), "roofline", done=done, unit="points") as report:
        for group in groups:
            left = [one for one in group.configs if folder.finished(one, study.seed) is None]
            if not left:
                continue
            started, began = timestamp(), time.perf_counter()
            found: list[Measured | Exception]
            try:
                found = list(group.measure(left))
            except Exception as exception:
                found = [exception for _ in left]
            for config, result in zip(left, found, strict=True):
                error = None
                if isinstance(result, Exception):
                    error = f"{type(result).__name__}: {result}"
                    report.say(f"failed: {row_label(config)}: {error}")
                metrics, samples, series = _NOTHING if isinstance(result, Exception) else result
                row = make_row(
                    "roofline",
                    config,
                    study.seed,
                    metrics=metrics,
                    repeats=samples,
                    started=started,
                    wall_s=time.perf_counter() - began,
                    error=error,
                    series=series,
                )
                folder.append(row)
            report.advance(row_label(left[-1]), len(left))
    for row in _rated_anew(folder.rows, study, model):
        folder.append(row)
    return folder.rows


def _rated_anew(rows: Sequence[Row], study: RooflineStudy, model: Model) -> Iterator[Row]:
    """Rows of phases whose limits have been seen better since, with the same times."""
    for row in of_kind(rows, "phase"):
        if row["status"] != "ok":
            continue
        config, metrics = row["config"], row["metrics"]
        variant = next(v for v in study.variants if v.settings().items() <= config.items())
        attending, here = _with_attention(model, variant), machine_of(rows)
        costs = CostModel(attending, variant.cache, here, weights=study.weights)
        seconds = row["repeats"]["ttft_s" if config["phase"] == "prefill" else "tpot_s"]
        length = config["prompt_tokens"]
        timed = Timed(
            metrics["compile_s"],
            int(metrics["compile_count"]),
            {length: seconds},
            {length: seconds},
        )
        found, samples, _ = _phase_metrics(costs, config, timed)
        if (found["mfu"], found["mbu"]) != (metrics["mfu"], metrics["mbu"]):
            yield make_row(
                "roofline",
                config,
                row["seed"],
                metrics=found,
                repeats=samples,
                started=row["started"],
                wall_s=row["wall_s"],
            )


def study_configs(study: RooflineStudy, model: Model) -> list[dict[str, Any]]:
    """The config of each row that a study will have.

    Args:
      study: what to run.
      model: the loaded `study.model`.

    Raises:
      ValueError: a variant that the model cannot have, lengths that it does not take, or a file of
        measured times that cannot be read.
    """
    for one in study.linear_times:
        read_linear_times(one.path, preset(one.model))
    groups = _groups(study, model, lambda: machine_of(()))  # nothing is measured
    return [config for group in groups for config in group.configs]


def _groups(study: RooflineStudy, model: Model, here: Callable[[], Device]) -> list[_Group]:
    """All rows of a study in the order they are measured; `here` gives the measured machine."""
    turn, groups = 0, _limits(study, 0)
    caches = {
        one.cache: [v for v in study.variants if v.cache == one.cache] for one in study.variants
    }
    for variants in caches.values():
        for batch in study.batches:
            lengths = [study.prompt_tokens]  # one shape serves them all
            if variants[0].recomputes:
                lengths = [(one,) for one in study.prompt_tokens]
            groups += [_phases(study, model, variants, batch, some, here) for some in lengths]
            turn += 1
            groups += _limits(study, turn)
    groups += [_operators(study, model, here), _devices(study, model, here)]
    return [*groups, *_linear_times(study)]


def machine_of(rows: Sequence[Row]) -> Device:
    """The machine that the rows of limits describe.

    Raises:
      ValueError: its bandwidth, or every peak, is missing.
    """
    limits = [row for row in of_kind(rows, "limit") if row["status"] == "ok"]
    memory = max((row["metrics"]["memory_bytes"] for row in limits), default=0.0)
    return machine(((row["config"]["limit"], rate_of(row)) for row in limits), memory)


def _rate(limit: str) -> str:
    """The name of a limit's metric."""
    return "bytes_per_s" if limit == BANDWIDTH else "flops_per_s"


def _limits(study: RooflineStudy, turn: int) -> list[_Group]:
    """One probe each, so that what a backend cannot do fails alone; all probes in turn 0."""

    def group(probe: Probe) -> _Group:
        def measured(wanted: Sequence[dict[str, Any]]) -> Iterator[Measured]:
            memory = memory_bytes()
            for _ in wanted:
                samples, size = measure(probe, memory, max(study.repeats, _LIMIT_REPEATS))
                metrics = {"memory_bytes": memory, "size": float(size)}
                yield metrics, {_rate(probe.limit): samples}, {}

        config = {"kind": "limit", "limit": probe.limit, "by": probe.by, "turn": turn}
        return _Group((config,), measured)

    used = (BANDWIDTH, PEAKS[study.dtype])
    return [group(probe) for probe in probes() if turn == 0 or probe.limit in used]


def _phases(
    study: RooflineStudy,
    model: Model,
    variants: Sequence[Variant],
    batch: int,
    lengths: Sequence[int],
    here: Callable[[], Device],
) -> _Group:
    """Both phases of a cache at one batch, its attentions and prompt lengths in turns."""
    shapes = {}  # before anything is written: what the model does not take is said
    for variant in variants:
        shapes[variant.attention] = _shapes(study, model, variant, batch, max(lengths))
    shared: dict[str, Any] = {"batch_size": batch, **study.weight_settings}
    shared |= {"decode_tokens": study.decode_tokens, "repeats": study.repeats}
    if study.implementation is not None:
        shared["implementation"] = study.implementation
    configs = tuple(
        {"kind": "phase", "model": study.model, "dtype": study.dtype}
        | variant.settings()
        | shared
        | {"chunk": shapes[variant.attention].chunk, "prompt_tokens": length, "phase": phase}
        for variant in variants
        for length in lengths
        for phase in PHASES
    )

    def make(attention: str) -> PhaseTimer:
        config, params = apply_attention(model.config, model.params, attention)
        return PhaseTimer(params, dataclasses.replace(shapes[attention], model=config), study.seed)

    def measured(wanted: Sequence[dict[str, Any]]) -> Iterator[Measured | Exception]:
        make_room_for_programs()
        attentions = dict.fromkeys(one["attention"] for one in wanted)
        makers = {name: functools.partial(make, name) for name in attentions}
        asked = list(dict.fromkeys(one["prompt_tokens"] for one in wanted))
        timed = timed_in_turns(makers, asked, study.repeats)
        for one in wanted:
            found = timed[one["attention"]]
            if isinstance(found, Exception):
                yield found
                continue
            config = shapes[one["attention"]].model
            costs = CostModel(config, variants[0].cache, here(), weights=study.weights)
            yield _phase_metrics(costs, one, found)

    return _Group(configs, measured)


def _shapes(
    study: RooflineStudy, model: Model, variant: Variant, batch: int, longest: int
) -> InferenceConfig:
    """The shapes of a variant's session."""
    capacity = longest + study.decode_tokens
    return InferenceConfig(
        _with_attention(model, variant),
        variant.cache,
        slots=batch,
        max_length=capacity,
        rows=batch,
        chunk=capacity if variant.recomputes else study.chunk,
        decode_steps=study.decode_tokens,
        implementation=study.implementation,
        weights=study.weights,
    )


def _phase_metrics(costs: CostModel, config: Mapping[str, Any], timed: Timed) -> Measured:
    """A row's metrics from what its session took."""
    phase, batch, length = config["phase"], config["batch_size"], config["prompt_tokens"]
    seconds = (timed.prefill_s if phase == "prefill" else timed.step_s)[length]
    steps = phase_steps(costs, config, batch, length)
    metrics, samples = against_limits(steps, phase, batch, length, seconds)
    metrics |= {"compile_s": timed.compile_s, "compile_count": timed.compile_count}
    if phase == "decode":
        metrics |= turning_point(costs, length)
    return metrics, samples, {}


def _operators(study: RooflineStudy, model: Model, here: Callable[[], Device]) -> _Group:
    """Each operator of the first variant at the first batch and the longest prompt."""
    variant, batch, prompt = study.variants[0], study.batches[0], max(study.prompt_tokens)
    config = _with_attention(model, variant)
    shared = {"kind": "operator", "model": study.model, "dtype": study.dtype}
    shared |= variant.settings() | {"batch_size": batch, "prompt_tokens": prompt}
    shared |= study.weight_settings

    def operators(phase: str) -> tuple[Operator, ...]:
        return phase_operators(
            config, variant.cache, phase, batch, prompt, study.chunk, study.weights
        )

    configs = tuple(
        {**shared, "phase": phase, "number": number, "operator": one.name}
        for phase in PHASES
        for number, one in enumerate(operators(phase))
    )

    def measured(wanted: Sequence[dict[str, Any]]) -> Iterator[Measured]:
        for one in wanted:
            found = operators(one["phase"])[one["number"]]
            yield operator_metrics(found, here(), config.dtype), {}, {}

    return _Group(configs, measured)


def _devices(study: RooflineStudy, model: Model, here: Callable[[], Device]) -> _Group:
    """Predictions of every attention at the first cache, by device."""
    variants: dict[str, Variant] = {}
    for one in study.variants:
        variants.setdefault(str(one.attention), one)
    batch, prompt = study.batches[0], max(study.prompt_tokens)
    configs = tuple(
        {
            **{"kind": "device", "device": device, "model": study.model},
            **variant.settings(),
            **{"batch_size": batch, "prompt_tokens": prompt},
            **study.weight_settings,
        }
        for variant in variants.values()
        for device in (NAME, *study.devices)
    )

    def measured(wanted: Sequence[dict[str, Any]]) -> Iterator[Measured]:
        for one in wanted:
            variant = variants[one["attention"]]
            config, cache = _with_attention(model, variant), variant.cache
            device, weights = DEVICES.get(one["device"]), study.weights
            if device is None:
                device = here()
            else:
                config, cache = on_data_sheet(config, cache)
                weights = weights if weights in QUANTISED else None
            costs = CostModel(config, cache, device, weights=weights)
            yield device_metrics(costs, batch, prompt), {}, {}

    return _Group(configs, measured)


def _with_attention(model: Model, variant: Variant) -> DecoderConfig:
    heads = kv_heads(model.config, variant.attention)
    return dataclasses.replace(model.config, num_kv_heads=heads)


def _linear_times(study: RooflineStudy) -> list[_Group]:
    """Predicted against measured linear layers of other machines, all files of one together."""
    files: dict[str, list[LinearTimes]] = {}
    for one in study.linear_times:
        files.setdefault(one.device, []).append(one)

    def group(device: str, some: Sequence[LinearTimes]) -> _Group:
        named = [{"model": one.model, "path": one.path} for one in some]
        config = {"kind": "linear_times", "device": device, "files": named}

        def measured(wanted: Sequence[dict[str, Any]]) -> Iterator[Measured]:
            for _ in wanted:
                yield linear_metrics(device, [(one.path, one.model) for one in some])

        return _Group((config,), measured)

    return [group(device, some) for device, some in files.items()]
