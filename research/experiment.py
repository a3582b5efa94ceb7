"""Experiments as data: a sweep is one frozen value that a file, a flag or a manifest can give."""

import dataclasses
import importlib.util
import itertools
import pathlib
from collections.abc import Mapping
from typing import Any

from kvlab.models.config_json import decoded, encoded
from kvlab.ops.retention import Retention
from kvlab.ops.specs import CacheSpec, Paged, Recompute
from kvlab.research.cache_axes import classes_named
from kvlab.research.evaluation_texts import TextFile


@dataclasses.dataclass(frozen=True)
class Variant:
    """One point of attention x cache.

    Args:
      attention: `mha`, `gqa`, `gqa:K` or `mqa`, or one per layer.
      cache: the cache of all layers, or one per layer.
    """

    attention: str | tuple[str, ...] = "gqa"
    cache: CacheSpec | tuple[CacheSpec, ...] = dataclasses.field(default_factory=CacheSpec)

    @property
    def recomputes(self) -> bool:
        """Whether the variant has no cache."""
        return self._specs[0].placement == Recompute()

    @property
    def evicts(self) -> bool:
        """Whether a layer has a policy of retention."""
        return bool(self.policies)

    @property
    def policies(self) -> tuple[Retention, ...]:
        """The layers' policies of retention, each once."""
        found = (spec.retention for spec in self._specs if spec.retention is not None)
        return tuple(dict.fromkeys(found))

    @property
    def _specs(self) -> tuple[CacheSpec, ...]:
        return (self.cache,) if isinstance(self.cache, CacheSpec) else self.cache

    def settings(self) -> dict[str, Any]:
        """The variant as a row's config names it; per-layer values are joined, runs counted."""
        settings: dict[str, Any] = {"attention": _runs(self.attention)}
        if len(set(self._specs)) > 1:
            settings["placement"] = _runs(tuple(str(spec.placement) for spec in self._specs))
            settings["storage"] = _runs(tuple(str(spec.storage) for spec in self._specs))
            settings["retention"] = _runs(tuple(str(s.retention or "all") for s in self._specs))
            return settings
        spec = self._specs[0]
        if isinstance(spec.placement, Paged):
            settings |= {"placement": "paged", "page_size": spec.placement.page_size}
        else:
            settings["placement"] = str(spec.placement)
        settings |= {"storage": str(spec.storage), "retention": "all"}
        return settings if spec.retention is None else settings | spec.retention.settings()


def _runs(values: str | tuple[str, ...]) -> str:
    """One value as it is; one per layer as `10*gqa+20*mqa`."""
    if isinstance(values, str):
        return values
    groups = [(value, len(list(group))) for value, group in itertools.groupby(values)]
    if len(groups) == 1:
        return groups[0][0]
    return "+".join(f"{count}*{value}" for value, count in groups)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """An ablation: every variant at every batch size, with speed, bytes and quality.

    Quality is that of one prefill of each evaluation text. Where any variant evicts, that would see
    no eviction, so then all variants are scored on windows of the texts: the first part of a window
    goes through prefill, the rest is forced through decode, and only that counts.

    Args:
      name: of the experiment; rows carry it.
      question: what it asks, for the report.
      model: any form that `kvlab.models.load.load_model` takes.
      variants: the points of attention x cache.
      batch_sizes: sequences decoded together. Quality is scored at the largest.
      prompt_tokens: tokens of each timed prompt.
      decode_tokens: tokens decoded after it.
      recompute_decode_tokens: as many where every step computes the whole text.
      repeats: timed repetitions after the warm-up.
      quality_tokens: tokens of each evaluation text that are scored; None is all, 0 is none.
      window_tokens: of a window, where windows are scored. Budgets below window_tokens -
        forced_tokens evict at the end of the prompt already.
      forced_tokens: of a window, forced through decode.
      passkey_tokens: lengths of the texts that passkey retrieval is asked in; none by default.
      texts: files to score instead of the project's English and Turkish texts.
      max_length: slots that a sequence may grow to; contiguous placement reserves them all.
      chunk: tokens of a row of one prefill call.
      seed: picks the timed prompts.
      implementation: of attention; None is the best available.

    Raises:
      ValueError: no variant, or a size out of range.
    """

    name: str
    question: str
    model: str
    variants: tuple[Variant, ...]
    batch_sizes: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 32
    decode_tokens: int = 8
    recompute_decode_tokens: int = 1
    repeats: int = 3
    quality_tokens: int | None = 1024
    window_tokens: int = 640
    forced_tokens: int = 128
    passkey_tokens: tuple[int, ...] = ()
    texts: tuple[TextFile, ...] = ()
    max_length: int = 1024
    chunk: int = 32
    seed: int = 0
    implementation: str | None = None

    def __post_init__(self) -> None:
        """Validates."""
        if not self.variants or not self.batch_sizes:
            raise ValueError("a sweep needs at least one variant and one batch size")
        sizes = ("prompt_tokens", "decode_tokens", "recompute_decode_tokens", "repeats", "chunk")
        for name in (*sizes, "forced_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} given; it must be 1 or more")
        if min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes={self.batch_sizes} given; each must be 1 or more")
        if self.quality_tokens is not None and (
            self.quality_tokens < 0 or self.quality_tokens == 1
        ):
            raise ValueError(
                f"quality_tokens={self.quality_tokens} given; use 0 for no quality, or 2 or more: "
                "the first token of a text has nothing to be predicted from"
            )
        if self.prompt_tokens + self.decode_tokens > self.max_length:
            raise ValueError(
                f"prompt_tokens={self.prompt_tokens} and decode_tokens={self.decode_tokens} do not "
                f"fit max_length={self.max_length}; raise max_length or lower them"
            )
        self._check_forced()

    def _check_forced(self) -> None:
        """Validates the sizes of texts that go through decode."""
        if self.forced_tokens >= self.window_tokens:
            raise ValueError(
                f"forced_tokens={self.forced_tokens} leaves no prompt in window_tokens="
                f"{self.window_tokens}; lower it or raise window_tokens"
            )
        lengths = {"passkey_tokens": max(self.passkey_tokens, default=0)}
        if self.scores_windows:
            lengths["window_tokens"] = self.window_tokens
        for name, length in lengths.items():
            if length > self.max_length:
                raise ValueError(
                    f"{name}={length} does not fit max_length={self.max_length}; raise max_length "
                    f"or lower {name}"
                )

    @property
    def scores_windows(self) -> bool:
        """Whether quality is scored on windows, by forced decode."""
        return self.quality_tokens != 0 and any(variant.evicts for variant in self.variants)

    def to_json(self) -> dict[str, Any]:
        """The experiment as a manifest stores it."""
        return encoded(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Sweep":
        """Reads what `to_json` gave.

        Raises:
          ValueError: not a sweep, or one of another version of kvlab.
        """
        try:
            own = {"Sweep": Sweep, "Variant": Variant, "TextFile": TextFile}
            classes = own | classes_named(value)
            sweep = decoded(dict(value), classes)
        except TypeError as error:
            raise ValueError(f"the manifest's config is not a sweep: {error}") from error
        if not isinstance(sweep, Sweep):
            raise ValueError("the manifest's config is not a sweep")
        return sweep


def cross(attentions: tuple[str, ...], caches: tuple[CacheSpec, ...]) -> tuple[Variant, ...]:
    """Every attention with every cache; equal points once."""
    points = [Variant(attention, cache) for attention in attentions for cache in caches]
    return tuple(dict.fromkeys(points))


def load_experiment(name: str) -> Sweep:
    """Reads an experiment file.

    Args:
      name: a module of `kvlab.experiments.configs`, or the path of a `.py` file.

    Returns:
      The `Sweep` that the file calls `CONFIG`.

    Raises:
      ValueError: no such experiment, a file that does not run, or one without a `CONFIG`.
    """
    shipped = importlib.util.find_spec("kvlab.experiments.configs")
    assert shipped is not None
    folders = [pathlib.Path(p) for p in shipped.submodule_search_locations or ()]
    known = sorted(path.stem for folder in folders for path in folder.glob("[a-z]*.py"))
    path = pathlib.Path(name)
    if path.suffix != ".py":
        if name not in known:
            raise ValueError(
                f"config={name!r} is not known; give the path of a .py file, or one of: "
                f"{', '.join(known)}"
            )
        path = next(f / f"{name}.py" for f in folders if (f / f"{name}.py").exists())
    if not path.is_file():
        raise ValueError(f"config file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"kvlab_experiment_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a file that exits would end the command with it
        raise ValueError(f"config file {path} does not run: {error!r}") from error
    config = getattr(module, "CONFIG", None)
    if not isinstance(config, Sweep):
        raise ValueError(
            f"config file {path} must define CONFIG, a kvlab.research.experiment.Sweep; it has "
            f"{type(config).__name__}"
        )
    return config
