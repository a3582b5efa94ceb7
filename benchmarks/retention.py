"""What does eviction gain in decode? Time per token and bytes, against the full cache, in one run.

    python benchmarks/retention.py [MODEL] [PROMPT_TOKENS] [BATCH]

Sessions with the same prompts and a budget of 256 tokens decode in turn, interleaved; the table has
the median step and its range, the ratio to the full cache, and the bytes in use after the prompt.
"""

import statistics
import sys
import time

import numpy as np

from kvlab.models.load import load_model
from kvlab.ops.retention import H2O, Random, Sinks, SnapKV, Window
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.inference import InferenceConfig
from kvlab.research.session import Session

BUDGET, STEPS, ROUNDS, CHUNK, ROWS = 256, 16, 5, 128, 4
POLICIES = (
    None,
    Window(BUDGET),
    Sinks(BUDGET),
    H2O(BUDGET),
    SnapKV(BUDGET),
    SnapKV(BUDGET, allocation="per_head"),
    Random(BUDGET),
)


def main(name: str, prompt_tokens: int, batch: int) -> None:
    """Times decode with every policy and prints the table."""
    model = load_model(name)
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, prompt_tokens))
    sessions, bytes_used = {}, {}
    for policy in POLICIES:
        config = InferenceConfig(
            model.config,
            CacheSpec(Paged(16), retention=policy),
            slots=batch,
            max_length=prompt_tokens + STEPS * (ROUNDS + 1),
            rows=ROWS,
            chunk=CHUNK,
            decode_steps=STEPS,
        )
        label = "all" if policy is None else ":".join(map(str, policy.settings().values()))
        session = Session(model.params, config)
        session.warm_up()
        began = time.perf_counter()
        session.prefill(list(prompts))
        print(f"{label}: prefill {time.perf_counter() - began:.1f} s", flush=True)
        session.decode(STEPS)  # touches what decode will use
        sessions[label], bytes_used[label] = session, session.use().used_bytes
    samples = {label: [] for label in sessions}
    for _ in range(ROUNDS):
        for label, session in sessions.items():
            began = time.perf_counter()
            session.decode(STEPS)
            samples[label].append((time.perf_counter() - began) / STEPS)
    base, base_bytes = statistics.median(samples["all"]), bytes_used["all"]
    print(f"{name}, {prompt_tokens} tokens, batch {batch}: decode step by policy")
    for label, times in samples.items():
        middle, used = statistics.median(times), bytes_used[label]
        print(
            f"{label:40} {1e3 * middle:7.2f} ms [{1e3 * min(times):.2f}-{1e3 * max(times):.2f}]  "
            f"x{middle / base:.3f}  {used / 2**20:7.2f} MiB used  x{used / base_bytes:.3f}"
        )


if __name__ == "__main__":
    given = sys.argv[1:] + ["smollm2-135m", "4096", "1"][len(sys.argv) - 1 :]
    main(given[0], int(given[1]), int(given[2]))
