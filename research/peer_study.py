"""kvlab beside other systems: the same weights, prompts and threads, interleaved in one run.

Outputs come first. In float32 every system is led along kvlab's greedy tokens and must find each of
them itself, except where the two best logits are a tie. At fewer bits each system's predictions on
one text are compared with kvlab's in float32. Then prefill and decode are timed, one system after
the other, and all of them again.
"""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvlab.models.checkpoints.gguf_types import write_gguf_as
from kvlab.models.fetch import REMOTE_MODELS, fetched_path
from kvlab.models.tokenizers import load_tokenizer
from kvlab.research.evaluation_texts import read_texts
from kvlab.research.progress import progress
from kvlab.research.results import RunFolder
from kvlab.research.rows import Row, make_row, timestamp

SYSTEMS = ("kvlab", "kvlab-f32", "transformers", "llama.cpp", "llama.cpp-noflash")
PRECISIONS = ("float32", "bfloat16", "int8")
# transformers has no products of int8 weights on a CPU; kvlab computes in float32 there anyway.
_PRECISIONS_OF = {"transformers": ("float32", "bfloat16"), "kvlab-f32": ("bfloat16",)}
TIE = 1e-3  # logits closer than this are one
_WORKER = "kvlab.experiments.peer_systems.worker"


@dataclasses.dataclass(frozen=True)
class PeerStudy:
    """What is compared.

    Args:
      model: a GGUF file.
      model_name: as the user called it.
      systems: of `SYSTEMS`.
      precisions: of the weights, of `PRECISIONS`.
      batches: sequences at once.
      prompt_tokens: of each sequence.
      new_tokens: decoded after them.
      repeats: timings of each system.
      threads: of the processor.
      text_tokens: of the text on which predictions at fewer bits are compared.
    """

    model: str
    model_name: str
    systems: tuple[str, ...] = SYSTEMS
    precisions: tuple[str, ...] = PRECISIONS
    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 512
    new_tokens: int = 32
    repeats: int = 5
    threads: int = 2
    text_tokens: int = 512

    def to_json(self) -> dict[str, Any]:
        """The study as a manifest stores it; where the model file lies does not matter."""
        return dataclasses.asdict(dataclasses.replace(self, model=""))

    def points(self) -> Iterator[dict[str, Any]]:
        """The config of each row; rows of one precision and batch are measured together."""
        for precision in self.precisions:
            for batch in self.batches:
                for system in self.systems:
                    if precision not in _PRECISIONS_OF.get(system, PRECISIONS):
                        continue
                    yield {
                        "model": self.model_name,
                        "system": system,
                        "precision": precision,
                        "batch": batch,
                        "prompt_tokens": self.prompt_tokens,
                        "new_tokens": self.new_tokens,
                        "threads": self.threads,
                    }


class PeerError(RuntimeError):
    """A system could not do what was asked; `absent` where it is not installed."""

    def __init__(self, message: str, absent: bool = False) -> None:
        """Says what the system said."""
        super().__init__(message)
        self.absent = absent


class PeerProcess:
    """A system in a process of its own."""

    def __init__(self, system: str, scratch: pathlib.Path, threads: int) -> None:
        """Starts it.

        Args:
          system: of `SYSTEMS`.
          scratch: a folder for the arrays that go to and fro.
          threads: processors that it may use.
        """
        self.system, self._scratch = system, scratch
        self.versions: dict[str, str] = {}  # of what a model was opened with
        self._log = (scratch / f"{system}.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, system, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """One request; arrays in it go as files.

        Raises:
          PeerError: the system failed, or its process ended.
        """
        for name, value in request.items():
            if isinstance(value, np.ndarray):
                path = self._scratch / f"{self.system}-{name}.npy"
                np.save(path, value)
                request[name] = str(path)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps({"do": do, **request}), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            said = self._log.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise PeerError(f"the process of {self.system} ended ({process.wait()}): {said[0]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"], answer["absent"])
        return answer

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()


def peer_model(name: str) -> pathlib.Path:
    """The GGUF file of a model, which all systems can read.

    Args:
      name: a fetched model, or a `.gguf` file.

    Raises:
      FetchError: it can be fetched and has not been.
      ValueError: another kind of model.
    """
    if name in REMOTE_MODELS:
        return fetched_path(name)
    path = pathlib.Path(name)
    if path.suffix != ".gguf" or not path.is_file():
        raise ValueError(
            f"model={name} is no GGUF file, which all the systems could read; use "
            f"{', '.join(REMOTE_MODELS)} or a .gguf file"
        )
    return path


def peer_text(model: pathlib.Path) -> np.ndarray:
    """The project's English text in the model's own tokens, [tokens] int."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ValueError(f"{model} holds no tokenizer, so no text can be given to it")
    return np.array(tokenizer.encode(read_texts(())["en"]))


def run_peers(study: PeerStudy, text: np.ndarray, seed: int, folder: RunFolder) -> list[Row]:
    """Measures what has no finished row yet.

    Args:
      study: what to compare.
      text: token ids [tokens] int; prompts are pieces of it, and predictions are compared on its
        beginning.
      seed: where the prompts begin.
      folder: open; a system that fails, or is not there, has a row that says so.

    Returns:
      The newest row of each point.
    """
    points = list(study.points())
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in points:
        groups.setdefault((point["precision"], point["batch"]), []).append(point)
    # What is compared is measured side by side: a group that lacks a row is measured whole.
    left = {
        key: group
        for key, group in groups.items()
        if any(folder.finished(point, seed) is None for point in group)
    }
    done = len(points) - sum(map(len, left.values()))
    with (
        tempfile.TemporaryDirectory() as scratch,
        progress(len(points), "peers", done=done, unit="rows") as report,
    ):
        prepared = _Prepared(study, text, seed, pathlib.Path(scratch))
        for (precision, batch), group in left.items():
            measured = _Group(prepared, precision, batch)
            for row in measured.rows(group):
                folder.append(row)
                label = f"{row['config']['system']}, {precision}, batch {batch}"
                if "error" in row:
                    report.say(f"{label}: {row['error']}")
                report.advance(label)
    return folder.rows


class _Prepared:
    """What all groups of a run share: model files, prompts, and float32 predictions."""

    def __init__(
        self, study: PeerStudy, text: np.ndarray, seed: int, scratch: pathlib.Path
    ) -> None:
        self.study, self.seed, self.scratch = study, seed, scratch
        self.text = np.resize(text, max(len(text), study.prompt_tokens + max(study.batches)))
        self._exact: np.ndarray | None = None

    def model(self, precision: str) -> pathlib.Path:
        """The model's file in one precision."""
        path = self.scratch / f"{precision}.gguf"
        if not path.exists():
            write_gguf_as(self.study.model, path, precision)
        return path

    def prompts(self, batch: int) -> np.ndarray:
        """[batch, prompt_tokens] int, pieces that begin in different places."""
        tokens = self.study.prompt_tokens
        places = len(self.text) - tokens
        starts = np.random.default_rng(self.seed).choice(places, batch, replace=False)
        return np.stack([self.text[start : start + tokens] for start in starts])

    def process(self, system: str) -> PeerProcess:
        """A system that has nothing loaded yet."""
        return PeerProcess(system, self.scratch, self.study.threads)

    def open(self, process: PeerProcess, precision: str, batch: int) -> None:
        """Has a system load the model."""
        study = self.study
        answer = process.ask(
            "open",
            model=str(self.model("float32" if process.system.startswith("kvlab") else precision)),
            precision=precision,
            batch=batch,
            max_length=max(study.prompt_tokens + study.new_tokens, study.text_tokens),
            threads=study.threads,
        )
        process.versions = answer["versions"]

    def log_probs(self, process: PeerProcess) -> np.ndarray:
        """What a system predicts on the text, [text_tokens, V] float32."""
        out = self.scratch / "log-probs.npy"
        process.ask("log_probs", ids=self.text[: self.study.text_tokens], out=str(out))
        found: np.ndarray = np.load(out)
        return found

    def kl(self, process: PeerProcess) -> float:
        """Mean KL from kvlab's float32 predictions on the text to a system's, nats."""
        if self._exact is None:
            with contextlib.closing(self.process("kvlab")) as other:
                self.open(other, "float32", 1)
                self._exact = self.log_probs(other)
        exact, found = self._exact.astype(np.float64), self.log_probs(process)
        return float(np.mean(np.sum(np.exp(exact) * (exact - found), axis=-1)))


class _Group:
    """One precision and batch: systems side by side."""

    def __init__(self, prepared: _Prepared, precision: str, batch: int) -> None:
        self._prepared, self._precision, self._batch = prepared, precision, batch
        self._study, self._prompts = prepared.study, prepared.prompts(batch)
        self._processes: dict[str, PeerProcess] = {}
        self._errors: dict[str, str] = {}
        self._metrics: dict[str, dict[str, float]] = {}
        self._samples: dict[str, dict[str, list[float]]] = {}

    def rows(self, points: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
        """Measures the points, which differ in their system."""
        started, began = timestamp(), time.perf_counter()
        with contextlib.ExitStack() as stack:
            for point in points:
                name = point["system"]
                process = stack.enter_context(contextlib.closing(self._prepared.process(name)))
                self._processes[name] = process
                self._metrics[name], self._samples[name] = {}, {}
                self._attempt(name, self._prepared.open, process, self._precision, self._batch)
            self._compare()
            for repeat in range(self._study.repeats + 1):  # the first one warms up
                for name in self._running:
                    self._attempt(name, self._time, name, repeat > 0)
        for point in points:
            name = point["system"]
            row = make_row(
                "peers",
                point,
                self._prepared.seed,
                metrics=self._metrics[name],
                repeats=self._samples[name],
                started=started,
                wall_s=time.perf_counter() - began,
                error=self._errors.get(name),
            )
            row["system_versions"] = self._processes[name].versions
            yield row

    @property
    def _running(self) -> list[str]:
        return [name for name in self._processes if name not in self._errors]

    def _attempt(self, name: str, action: Callable[..., None], *arguments: Any) -> None:
        """Does something with a system; where it fails the others go on."""
        try:
            action(*arguments)
        except PeerError as error:
            hint = f"{name} is not installed ({error}); `make peers` has it" if error.absent else ""
            self._errors[name] = hint or str(error)

    def _compare(self) -> None:
        """Outputs, before anything is timed."""
        if self._precision != "float32":
            for name in self._running:
                self._attempt(name, self._measure_kl, name)
            return
        if "kvlab" not in self._running:
            return
        kvlab = self._processes["kvlab"]
        kvlab.ask("prefill", ids=self._prompts)
        tokens = np.array(kvlab.ask("decode", steps=self._study.new_tokens)["tokens"])
        kvlab.ask("prefill", ids=self._prompts)
        found = kvlab.ask("forced", tokens=tokens)
        ties = np.array(found["margins"]) < TIE
        second = np.where(ties, np.array(found["best"])[..., 1], tokens)
        for name in self._running:
            self._attempt(name, self._measure_agreement, name, tokens, second)

    def _measure_kl(self, name: str) -> None:
        self._metrics[name]["kl_vs_float32"] = self._prepared.kl(self._processes[name])

    def _measure_agreement(self, name: str, tokens: np.ndarray, second: np.ndarray) -> None:
        """Led along kvlab's tokens, how many of them a system finds, or of a tie the second."""
        process = self._processes[name]
        process.ask("prefill", ids=self._prompts)
        best = np.array(process.ask("forced", tokens=tokens)["best"])[..., 0]
        metrics = self._metrics[name]
        metrics["greedy_agreement"] = float(np.mean((best == tokens) | (best == second)))
        metrics["greedy_ties"] = int(np.sum(second != tokens))

    def _time(self, name: str, kept: bool) -> None:
        """Prefill and decode once."""
        process, study = self._processes[name], self._study
        prefill_s = process.ask("prefill", ids=self._prompts)["seconds"]
        decode_s = process.ask("decode", steps=study.new_tokens)["seconds"]
        if kept:
            tokens = self._batch * study.prompt_tokens, self._batch * study.new_tokens
            samples = self._samples[name]
            for metric, value in (
                ("prefill_tokens_per_s", tokens[0] / prefill_s),
                ("decode_tokens_per_s", tokens[1] / decode_s),
            ):
                samples.setdefault(metric, []).append(value)
