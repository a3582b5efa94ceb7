"""Where the time of prefill and decode goes: this machine's limits, phases measured against them.

Every row's config has a `kind`: `limit` (what the machine can do), `phase` (prefill or decode of an
attention and cache at a batch and prompt length), `operator` and `device` (predictions), and
`linear_times` (predictions against measured times of other machines).
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvlab.models.config import DecoderConfig
from kvlab.models.load import Model
from kvlab.models.presets import preset
from kvlab.ops.specs import CacheSpec
from kvlab.research.compilation import make_room_for_programs
from kvlab.research.devices import DEVICES, Device
from kvlab.research.experiment import Variant
from kvlab.research.inference import InferenceConfig
from kvlab.research.linear_times import read_linear_times
from kvlab.research.machine import (
    BANDWIDTH,
    LIMITS,
    NAME,
    PROBES,
    Probe,
    machine,
    measure,
    memory_bytes,
)
from kvlab.research.phase_timing import PhaseTimer
from kvlab.research.progress import progress
from kvlab.research.results import RunFolder
from kvlab.research.roofline import CostModel
from kvlab.research.roofline_findings import of_kind, rate_of
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
from kvlab.research.rows import Row, make_row, timestamp
from kvlab.research.variants import apply_attention, kv_heads

_LIMIT_REPEATS = 9


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
    seed: int

    def to_json(self) -> dict[str, Any]:
        """The study as a manifest stores it."""
        values = dataclasses.asdict(self)
        return values | {"variants": [variant.settings() for variant in self.variants]}


@dataclasses.dataclass(frozen=True)
class _Group:
    """Rows that are measured together.

    Attributes:
      configs: of the rows.
      measure: from those that are still wanted to metrics, samples and series of each.
    """

    configs: tuple[dict[str, Any], ...]
    measure: Callable[[Sequence[dict[str, Any]]], Iterator[Measured]]


def run_roofline(study: RooflineStudy, model: Model, folder: RunFolder) -> list[Row]:
    """Measures what the folder has no finished row of.

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
            error = None
            found: list[Measured] = [({}, {}, {}) for _ in left]
            try:
                found = list(group.measure(left))
            except Exception as exception:
                error = f"{type(exception).__name__}: {exception}"
                report.say(f"failed: {row_label(left[0])}: {error}")
            for config, (metrics, samples, series) in zip(left, found, strict=True):
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
    return folder.rows


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
    groups = _limits(study)
    for variant in study.variants:
        for batch in study.batches:
            lengths = [study.prompt_tokens]  # one shape serves them all
            if variant.recomputes:
                lengths = [(one,) for one in study.prompt_tokens]
            groups += [_phases(study, model, variant, batch, some, here) for some in lengths]
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


def row_label(config: Mapping[str, Any]) -> str:
    """A row's config in a few words."""
    match config["kind"]:
        case "limit":
            return f"{LIMITS[config['limit']]} by {config['by']}"
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


def _rate(limit: str) -> str:
    """The name of a limit's metric."""
    return "bytes_per_s" if limit == BANDWIDTH else "flops_per_s"


def _limits(study: RooflineStudy) -> list[_Group]:
    """One probe each: what a backend cannot do fails alone."""

    def group(probe: Probe) -> _Group:
        def measured(wanted: Sequence[dict[str, Any]]) -> Iterator[Measured]:
            memory = memory_bytes()
            for _ in wanted:
                samples, size = measure(probe, memory, max(study.repeats, _LIMIT_REPEATS))
                metrics = {"memory_bytes": memory, "size": float(size)}
                yield metrics, {_rate(probe.limit): samples}, {}

        return _Group(({"kind": "limit", "limit": probe.limit, "by": probe.by},), measured)

    return [group(probe) for probe in PROBES]


def _phases(
    study: RooflineStudy,
    model: Model,
    variant: Variant,
    batch: int,
    lengths: Sequence[int],
    here: Callable[[], Device],
) -> _Group:
    """Both phases at one batch: one session, its prompts of all lengths in turns."""
    assert isinstance(variant.cache, CacheSpec)
    capacity = max(lengths) + study.decode_tokens
    shapes = InferenceConfig(  # before anything is written: what the model does not take is said
        _with_attention(model, variant),
        variant.cache,
        slots=batch,
        max_length=capacity,
        rows=batch,
        chunk=capacity if variant.recomputes else study.chunk,
        decode_steps=study.decode_tokens,
        implementation=study.implementation,
    )
    shared = {"kind": "phase", "model": study.model, "dtype": study.dtype} | variant.settings()
    shared |= {"batch_size": batch, "decode_tokens": study.decode_tokens, "chunk": shapes.chunk}
    shared |= {"repeats": study.repeats}
    if study.implementation is not None:
        shared["implementation"] = study.implementation
    configs = tuple(
        {**shared, "prompt_tokens": length, "phase": phase}
        for length in lengths
        for phase in PHASES
    )

    def measured(wanted: Sequence[dict[str, Any]]) -> Iterator[Measured]:
        make_room_for_programs()
        config, params = apply_attention(model.config, model.params, variant.attention)
        timer = PhaseTimer(params, dataclasses.replace(shapes, model=config), study.seed)
        asked = list(dict.fromkeys(one["prompt_tokens"] for one in wanted))
        times = timer.times(asked, study.repeats)
        costs = CostModel(config, variant.cache, here())
        for one in wanted:
            length = one["prompt_tokens"]
            steps = phase_steps(costs, one, batch, length)
            seconds = times[length][PHASES.index(one["phase"])]
            metrics, samples = against_limits(steps, one["phase"], batch, length, seconds)
            metrics |= {"compile_s": timer.compile_s, "compile_count": timer.compile_count}
            if one["phase"] == "decode":
                metrics |= turning_point(costs, length)
            yield metrics, samples, {}

    return _Group(configs, measured)


def _operators(study: RooflineStudy, model: Model, here: Callable[[], Device]) -> _Group:
    """Each operator of the first variant at the first batch and the longest prompt."""
    variant, batch, prompt = study.variants[0], study.batches[0], max(study.prompt_tokens)
    config = _with_attention(model, variant)
    shared = {"kind": "operator", "model": study.model, "dtype": study.dtype}
    shared |= variant.settings() | {"batch_size": batch, "prompt_tokens": prompt}
    configs = tuple(
        {**shared, "phase": phase, "number": number, "operator": one.name}
        for phase in PHASES
        for number, one in enumerate(phase_operators(config, variant.cache, phase, batch, prompt))
    )

    def measured(wanted: Sequence[dict[str, Any]]) -> Iterator[Measured]:
        for one in wanted:
            found = phase_operators(config, variant.cache, one["phase"], batch, prompt)
            yield operator_metrics(found[one["number"]], here(), config.dtype), {}, {}

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
        }
        for variant in variants.values()
        for device in (NAME, *study.devices)
    )

    def measured(wanted: Sequence[dict[str, Any]]) -> Iterator[Measured]:
        for one in wanted:
            variant = variants[one["attention"]]
            config, cache = _with_attention(model, variant), variant.cache
            device = DEVICES.get(one["device"])
            if device is None:
                device = here()
            else:
                config, cache = on_data_sheet(config, cache)
            yield device_metrics(CostModel(config, cache, device), batch, prompt), {}, {}

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
