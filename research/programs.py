"""The programs of a session, compiled side by side before it is needed.

Axes: B sequences (slots), R rows of a prefill call.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from kvlab.ops.page_pool import unchecked
from kvlab.ops.sampling import Sampling, SamplingParams
from kvlab.research import inference, sequences
from kvlab.research.compilation import Compilations, count_compilations
from kvlab.research.inference import MAX_STOP_IDS, InferenceConfig, Params


def compile_programs(params: Params, config: InferenceConfig) -> Compilations:
    """Compiles prefill, decode and, where tokens are evicted, evict of a config, for its sessions.

    Most of a compilation runs on one core, so the two go side by side and take little longer than
    one.

    Args:
      params: the decoder's parameters, as sessions will be given them.
      config: the shapes.

    Returns:
      How many programs were built, and how long it took.
    """
    rows, slots = np.zeros(config.rows, np.int32), np.zeros(config.slots, np.int32)
    tokens = np.zeros((config.rows, config.chunk), np.int32)
    sampling = SamplingParams.from_requests([Sampling()] * config.slots)
    stops = stop_array([()] * config.slots)
    feed = np.zeros((config.slots, config.decode_steps), np.int32)
    params = config.pack(params)
    state = params, config, jax.eval_shape(config.init_cache), jax.eval_shape(config.init_logits)
    # Traced one after the other: JAX names inner functions as it meets them, and the persistent
    # compilation cache would see other names, and so another program, each time.
    with unchecked():
        lowered = [
            inference.prefill.lower(*state, tokens, rows, rows, rows, rows > 0),
            inference.decode.lower(*state, sampling, slots, stops, feed, slots),
        ]
        if config.evicts:
            lowered.append(sequences.evict.lower(*state[1:3], slots > 0))

    def compile_one(program: jax.stages.Lowered) -> int:
        with count_compilations() as compilations:
            program.compile()
        return compilations.count

    began = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        count = sum(threads.map(compile_one, lowered))
    return Compilations(count, time.perf_counter() - began)


def stop_array(stop_ids: Sequence[Sequence[int]]) -> np.ndarray:
    """The stop ids of each sequence as an array, [B, MAX_STOP_IDS] int32, -1 for none."""
    stops = np.full((len(stop_ids), MAX_STOP_IDS), -1, np.int32)
    for row, ids in zip(stops, stop_ids, strict=True):
        if len(ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(ids)} stop ids given; at most {MAX_STOP_IDS} fit")
        row[: len(ids)] = ids
    return stops
