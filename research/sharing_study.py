"""How much memory samples and beams of one prompt save by sharing pages, really decoding.

"Efficient Memory Management for Large Language Model Serving with PagedAttention" (arXiv
2309.06180), Fig. 15: the pages saved by sharing, over the pages that there would be without.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvlab.models.load import Model
from kvlab.ops.page_table import PageTable
from kvlab.ops.sampling import Sampling
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.arrivals import Arrival
from kvlab.research.beam import BeamOptions, beam_search
from kvlab.research.engine import Engine, EngineOptions
from kvlab.research.executor import ModelExecutor
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.prompts import Prompt
from kvlab.research.requests import Request
from kvlab.research.serving import serve
from kvlab.research.session import Session
from kvlab.research.workloads import load_workload

METHODS = ("parallel", "beam")


@dataclasses.dataclass(frozen=True)
class SharingStudy:
    """Prompts, and how many samples or beams continue each.

    Args:
      model: any form that `kvlab.models.load.load_model` takes.
      methods: `parallel` sampling, `beam` search.
      counts: samples or beams of a prompt.
      workload: a word that `load_workload` takes, for the lengths of prompts and outputs.
      num_prompts: continued.
      max_length: longest sequence; longer ones are cut.
      page_size: tokens a page.
      seed: of lengths, of the prompts' places and of sampling.
      trace_sha256: what a trace's file holds, as `workloads.trace_sha256` gives it; None pins none.
    """

    model: str
    methods: tuple[str, ...]
    counts: tuple[int, ...]
    workload: str
    num_prompts: int
    max_length: int
    page_size: int
    seed: int
    trace_sha256: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The study as a manifest stores it."""
        values = dataclasses.asdict(self)
        if self.trace_sha256 is None:
            del values["trace_sha256"]
        return values

    def points(self) -> Iterator[dict[str, Any]]:
        """The config of each row."""
        shared = self.to_json()
        for name in ("methods", "counts", "seed"):
            del shared[name]
        for method in self.methods:
            for count in self.counts:
                yield {"method": method, "count": count, **shared}


@dataclasses.dataclass
class Pages:
    """Pages that sequences map, summed over steps."""

    mapped: int = 0  # without sharing each would be a page of its own
    distinct: int = 0

    def add(self, table: PageTable) -> None:
        """Counts what the sequences of a table map now."""
        pages = np.asarray(table.page_indices)
        pages = pages[pages < table.num_pages]
        self.mapped += len(pages)
        self.distinct += len(np.unique(pages))

    @property
    def saved(self) -> float:
        """The share of pages that sharing saves."""
        return 1.0 - self.distinct / self.mapped if self.mapped else 0.0


def read_lengths(config: Mapping[str, Any], seed: int) -> tuple[Arrival, ...]:
    """The lengths of the prompts and continuations of a point.

    Raises:
      ValueError: an unknown workload, or a trace that cannot be read, has changed, is malformed or
        holds too few.
    """
    return load_workload(
        config["workload"],
        num_requests=config["num_prompts"],
        seed=seed,
        max_length=config["max_length"],
        sha256=config.get("trace_sha256"),
    ).arrivals


def measure_sharing(
    model: Model, text: np.ndarray, config: Mapping[str, Any], seed: int
) -> tuple[dict[str, float], dict[str, list[tuple[float, float]]]]:
    """Continues the prompts of one point, one at a time.

    Args:
      model: the loaded model.
      text: [tokens] int32, which prompts are cut from.
      config: from `SharingStudy.points`.
      seed: of lengths, of the prompts' places and of sampling.

    Returns:
      Metrics: `saved`, the share of pages saved, over all steps of all prompts, its range over
      prompts, and mean lengths; and no series.

    Raises:
      ValueError: the text is shorter than a prompt.
    """
    count, max_length = config["count"], config["max_length"]
    lengths = read_lengths(config, seed)
    longest = max(one.prompt_tokens for one in lengths)
    if longest > len(text):
        raise ValueError(
            f"a prompt has {longest} tokens and the text {len(text)}; give a longer text"
        )
    pages_each = -(-max_length // config["page_size"]) + 1
    shapes = InferenceConfig(
        model.config,
        CacheSpec(Paged(config["page_size"])),
        slots=count,
        max_length=max_length,
        chunk=32,
        num_pages=count * pages_each,
        decode_steps=1,
    )
    random = np.random.default_rng(seed)
    prompts = []
    for one in lengths:
        start = int(random.integers(0, len(text) - one.prompt_tokens + 1))
        prompts.append((text[start : start + one.prompt_tokens], one.output_tokens))
    if config["method"] == "parallel":
        each = _sampled(model, shapes, prompts, count, seed)
    else:
        each = _searched(model, shapes, prompts, count)
    total = Pages(sum(p.mapped for p in each), sum(p.distinct for p in each))
    saved = [pages.saved for pages in each]
    metrics = {"saved": total.saved, "saved_least": min(saved), "saved_most": max(saved)}
    metrics["prompt_tokens_mean"] = float(np.mean([len(prompt) for prompt, _ in prompts]))
    metrics["output_tokens_mean"] = float(np.mean([tokens for _, tokens in prompts]))
    return metrics, {}


def _sampled(
    model: Model,
    shapes: InferenceConfig,
    prompts: Sequence[tuple[np.ndarray, int]],
    count: int,
    seed: int,
) -> list[Pages]:
    """Parallel samples of each prompt, by the engine."""
    executor = ModelExecutor(model.params, shapes)
    found = []
    for number, (prompt, tokens) in enumerate(prompts):
        pages = Pages()
        sampling = Sampling(temperature=1.0, seed=seed + number)
        request = Request(str(number), prompt, tokens, sampling, n=count)
        engine = Engine(executor, EngineOptions(reuse_prefixes=False))
        for part in serve(engine, [request]):
            if part.sample == 0 and part.outcome is None:
                (table,) = executor.calls.cache.tables
                assert isinstance(table, PageTable)
                pages.add(table)
        found.append(pages)
    return found


def _searched(
    model: Model,
    shapes: InferenceConfig,
    prompts: Sequence[tuple[np.ndarray, int]],
    count: int,
) -> list[Pages]:
    """Beams of each prompt."""
    session = Session(model.params, shapes)
    found = []
    for prompt, tokens in prompts:
        pages = Pages()

        def watch(searched: Session, pages: Pages = pages) -> None:
            (table,) = searched.cache.tables
            assert isinstance(table, PageTable)
            pages.add(table)

        options = BeamOptions(num_beams=count, max_tokens=tokens)
        for _ in beam_search(session, [Prompt(tuple(prompt.tolist()))], options, watch):
            pass
        found.append(pages)
    return found
