"""Does the memory of prefill grow with the prompt? Peak resident memory, each in its own process.

    python benchmarks/long_prompts.py [MODEL] [TOKENS ...]

A fresh process for each length prefills one prompt of random ids into a paged cache that holds the
longest of them, and tells its peak before and after, and the seconds (compiling apart).
"""

import resource
import subprocess
import sys
import time

import numpy as np

from kvlab.models.load import load_model
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.inference import InferenceConfig
from kvlab.research.session import Session

LENGTHS = (1024, 2048, 4096, 8192)


def main(name: str, lengths: tuple[int, ...]) -> None:
    """Runs a process for each length and prints the table."""
    print("tokens  compiled MiB  prefilled MiB  compile s  prefill s  tokens/s")
    for length in lengths:
        command = [sys.executable, __file__, name, str(length), f"--capacity={max(lengths)}"]
        subprocess.run(command, check=True)


def prefill_one(name: str, length: int, capacity: int) -> None:
    """Prefills one prompt and prints its row of the table."""
    model = load_model(name)
    config = InferenceConfig(model.config, CacheSpec(Paged(16)), slots=1, max_length=capacity)
    session = Session(model.params, config)
    session.warm_up()
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, length)
    before, began = _peak_mib(), time.perf_counter()
    session.prefill([prompt], hidden=False)
    session.logits.block_until_ready()
    seconds = time.perf_counter() - began
    print(
        f"{length:6,}  {before:12,.0f}  {_peak_mib():13,.0f}  {session.compile_s:9.1f}  "
        f"{seconds:9.2f}  {length / seconds:8.0f}",
        flush=True,
    )


def _peak_mib() -> float:
    """The most memory that this process has had resident, as Linux counts it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    *given, last = sys.argv[1:] or ["smollm2-135m"]
    if last.startswith("--capacity="):
        prefill_one(given[0], int(given[1]), int(last.removeprefix("--capacity=")))
    else:
        model_name, *written = [*given, last]
        main(model_name, tuple(map(int, written)) or LENGTHS)
