"""A process around one system: does what lines of JSON on its standard input say.

Answers are lines of JSON too, on what was standard output at the start; whatever a library prints
goes to standard error. Arrays come and go as `.npy` files, named by the lines.
"""

import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from kvlab.experiments.peer_systems.system import Setting, System

SYSTEMS = {
    "kvlab": "kvlab_system:KvlabSystem",
    "kvlab-f32": "kvlab_system:KvlabFloat32System",
    "transformers": "transformers_system:TransformersSystem",
    "llama.cpp": "llama_cpp_system:LlamaCppSystem",
    "llama.cpp-noflash": "llama_cpp_system:LlamaCppNoFlashSystem",
}


def load(name: str) -> type[System]:
    """The class of a system.

    Raises:
      ImportError: it is not installed.
    """
    module, _, kind = SYSTEMS[name].partition(":")
    found: type[System] = getattr(importlib.import_module(f"{__package__}.{module}"), kind)
    return found


class Worker:
    """Keeps a system between requests."""

    def __init__(self, name: str) -> None:
        """Nothing is loaded yet."""
        self._name = name
        self._system: System | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what is asked; an error is an answer."""
        try:
            return self._actions[request.pop("do")](self, **request)
        except Exception as error:
            absent = isinstance(error, ImportError)
            said = str(error) if absent else f"{type(error).__name__}: {error}"
            return {"error": said, "absent": absent}

    def _open(self, model: str, **settings: Any) -> dict[str, Any]:
        self._system = load(self._name)(Setting(pathlib.Path(model), **settings))
        return {"versions": self._system.versions}

    def _prefill(self, ids: str) -> dict[str, Any]:
        prompts, system = np.load(ids), self._opened
        began = time.perf_counter()
        system.prefill(prompts)
        return {"seconds": time.perf_counter() - began}

    def _decode(self, steps: int) -> dict[str, Any]:
        system, began = self._opened, time.perf_counter()
        tokens = system.decode(steps)
        return {"seconds": time.perf_counter() - began, "tokens": tokens.tolist()}

    def _forced(self, tokens: str) -> dict[str, Any]:
        best, margins = self._opened.forced(np.load(tokens))
        return {"best": best.tolist(), "margins": margins.tolist()}

    def _log_probs(self, ids: str, out: str) -> dict[str, Any]:
        np.save(out, self._opened.log_probs(np.load(ids)))
        return {}

    @property
    def _opened(self) -> System:
        assert self._system is not None, "open comes first"
        return self._system

    _actions: dict[str, Callable[..., dict[str, Any]]] = {  # noqa: RUF012 (never changed)
        "open": _open,
        "prefill": _prefill,
        "decode": _decode,
        "forced": _forced,
        "log_probs": _log_probs,
    }


def serve(name: str, requests: IO[str], answers: IO[str]) -> None:
    """Answers requests until there are no more."""
    worker = Worker(name)
    for line in requests:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as kept:
        os.dup2(2, 1)  # what libraries print
        name, threads = sys.argv[1:]
        # Every system gets the same processors; XLA takes its threads from them.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
        serve(name, sys.stdin, kept)
