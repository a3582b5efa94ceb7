"""Seconds of prefill and decode of sessions that take turns, with prompts of several lengths.

Axes: B sequences (slots).
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from kvlab.ops.sampling import Sampling, SamplingParams
from kvlab.research.calls import Calls
from kvlab.research.inference import InferenceConfig, Params


@dataclasses.dataclass
class Timed:
    """What one session took.

    Attributes:
      compile_s: seconds that its programs took to compile.
      compile_count: how many there are.
      prefill_s: seconds of each prefill of all prompts, by their length.
      step_s: seconds of a decode step, in each decode call after it.
    """

    compile_s: float
    compile_count: int
    prefill_s: dict[int, list[float]]
    step_s: dict[int, list[float]]


class PhaseTimer:
    """A session of B sequences, all of them alike, whose phases are timed.

    Attributes:
      compile_s: seconds that its programs took to compile.
      compile_count: how many there are.
    """

    def __init__(self, params: Params, config: InferenceConfig, seed: int) -> None:
        """Compiles, and draws the prompts.

        Args:
          params: the decoder's parameters.
          config: the shapes; its rows are its slots, and a call decodes `decode_steps` tokens.
          seed: of the prompts.
        """
        self._calls = Calls(params, config)
        self._calls.warm_up()
        self.compile_s, self.compile_count = self._calls.compile_s, self._calls.compile_count
        shape = (config.slots, config.max_length)
        random = np.random.default_rng(seed)
        self._ids = random.integers(0, config.model.vocab_size, shape).astype(np.int32)

    def once(self, length: int) -> tuple[float, float]:
        """Runs both phases on prompts of a length.

        Returns:
          Seconds of the prefill, and of one of the decode steps that follow.

        Raises:
          RuntimeError: the sequences found no room.
        """
        calls, slots = self._calls, self._calls.config.slots
        calls.release()
        began = time.perf_counter()
        granted = self._prefill(length)
        prefilled = time.perf_counter()
        steps = calls.config.decode_steps
        decoded = calls.decode_call(
            SamplingParams.from_requests([Sampling()] * slots),
            np.full(slots, steps, np.int32),
            [()] * slots,
            np.zeros((slots, steps), np.int32),
            np.zeros(slots, np.int32),
        )
        ended = time.perf_counter()
        if not (np.asarray(granted).all() and (decoded.num_tokens == steps).all()):
            raise RuntimeError(f"no room for {slots} sequences of {length} + {steps} tokens")
        return prefilled - began, (ended - prefilled) / steps

    def _prefill(self, length: int) -> list[jax.Array]:
        """Prefills all prompts; only the logits are waited for, nothing is fetched."""
        calls, config = self._calls, self._calls.config
        slots = np.arange(config.slots, dtype=np.int32)
        total = np.full(config.slots, length, np.int32)
        stored = np.zeros(config.slots, bool)
        granted = []
        for start in range(0, length, config.chunk):
            count = min(config.chunk, length - start)
            tokens = np.zeros((config.slots, config.chunk), np.int32)
            tokens[:, :count] = self._ids[:, start : start + count]
            counts = np.full(config.slots, count, np.int32)
            granted.append(calls.prefill_rows(tokens, counts, slots, total, stored)[0])
        if config.evicts:
            calls.evict(slots.tolist())
        jax.block_until_ready((calls.cache, calls.logits))
        return granted


def timed_in_turns(
    makers: Mapping[str, Callable[[], PhaseTimer]], lengths: Sequence[int], repeats: int
) -> dict[str, Timed | Exception]:
    """Times sessions side by side.

    Each repeat goes through all lengths and sessions, so that what else the machine does meets them
    alike; all their caches are in memory together.

    Args:
      makers: make each session.
      lengths: tokens of the prompts.
      repeats: after a warm-up.

    Returns:
      Of each session what it took, or why it failed, which stops none of the others.
    """
    timers: dict[str, PhaseTimer] = {}
    results: dict[str, Timed | Exception] = {}
    for name, make in makers.items():
        try:
            timers[name] = make()
            timers[name].once(min(lengths))
            samples: list[dict[int, list[float]]] = [{one: [] for one in lengths} for _ in range(2)]
            compiled = timers[name].compile_s, timers[name].compile_count
            results[name] = Timed(*compiled, *samples)
        except Exception as error:
            results[name] = error
    for length in [length for _ in range(repeats) for length in lengths]:
        for name, timer in timers.items():
            result = results[name]
            if isinstance(result, Exception):
                continue
            try:
                prefill_s, step_s = timer.once(length)
            except Exception as error:
                results[name] = error
                continue
            result.prefill_s[length].append(prefill_s)
            result.step_s[length].append(step_s)
    return results
