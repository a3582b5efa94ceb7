"""Does a decode step cost more when the page pool is larger? It must not.

    python benchmarks/pool_size.py [MODEL] [BATCH]

Sessions that differ only in the number of pages (x1, x4, x16) decode in turn, interleaved, on the
same prompts; the table has the median step and its range, and the ratio to x1.
"""

import statistics
import sys
import time

import numpy as np

from kvlab.models.load import load_model
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.inference import InferenceConfig
from kvlab.research.session import Session

FACTORS = (1, 4, 16)
ROUNDS = 7
PROMPT, STEPS, MAX_LENGTH = 128, 16, 1024


def main(name: str, batch: int) -> None:
    """Times the decode steps of the three pools and prints the table."""
    model = load_model(name)
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, PROMPT))
    sessions = {}
    for factor in FACTORS:
        config = InferenceConfig(
            model.config,
            CacheSpec(Paged(16)),
            slots=batch,
            max_length=MAX_LENGTH,
            rows=batch,
            num_pages=factor * batch * MAX_LENGTH // 16,
            decode_steps=STEPS,
        )
        sessions[factor] = Session(model.params, config)
        sessions[factor].prefill(list(prompts))
        sessions[factor].decode(STEPS)  # compiles, and touches every page that decode will use
    samples = {factor: [] for factor in FACTORS}
    for _ in range(ROUNDS):
        for factor, session in sessions.items():
            began = time.perf_counter()
            session.decode(STEPS)
            samples[factor].append((time.perf_counter() - began) / STEPS)
    base = statistics.median(samples[1])
    print(f"{name}, batch {batch}: decode step by pool size")
    for factor, times in samples.items():
        middle = statistics.median(times)
        size = sessions[factor].use().allocated_bytes / 2**20
        print(
            f"x{factor:<3} {size:8.0f} MiB  {1e3 * middle:7.2f} ms "
            f"[{1e3 * min(times):.2f}-{1e3 * max(times):.2f}]  ratio {middle / base:.3f}"
        )


if __name__ == "__main__":
    main(*(sys.argv[1:2] or ["smollm2-135m"]), int((sys.argv[2:3] or ["8"])[0]))
