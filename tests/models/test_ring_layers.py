"""Rings on windowed layers, beside paged or contiguous ones, agree with transformers' windows.

Prompts are longer than the windows, and one chunk is longer than a window; part of each text goes
through decode.
"""

import pathlib

import numpy as np
import pytest

from kvlab.models.checkpoints.huggingface import load_huggingface
from kvlab.ops.attention import READ_BLOCK
from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Ring
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.positions import position_logits
from kvlab.research.session import Session

TOLERANCE = 2e-4  # max |logit difference|, float32
GOLDENS = np.load(pathlib.Path(__file__).parents[1] / "goldens" / "families.npz")
WINDOWED = {"mistral_window": 5, "gemma2": 31, "qwen2_windows": 31, "qwen3_layer_types": 5}
OTHER_CHUNK = {5: 31, 31: 5}
LATER = [
    pytest.param(case, OTHER_CHUNK[chunk], marks=pytest.mark.long)
    for case, chunk in WINDOWED.items()
]


@pytest.mark.parametrize(("case", "chunk"), [*WINDOWED.items(), *LATER])
def test_logits_are_those_of_transformers(case, chunk, tiny_folder, tiny_families):
    config, params = load_huggingface(tiny_folder(case))
    others = Paged(8) if chunk == 5 else Contiguous()
    specs = tuple(
        CacheSpec(others) if window is None else CacheSpec(Ring(window))
        for window in config.layer_windows
    )
    windows = [window for window in config.layer_windows if window is not None]
    tokens, golden = tiny_families.tokens(case), GOLDENS[case]
    length = tokens.shape[1]
    assert windows
    assert max(windows) < length - 1
    session = Session(
        params,
        InferenceConfig(config, specs, slots=len(tokens), max_length=length, chunk=chunk),
    )
    logits = np.stack(list(position_logits(session, tokens.tolist(), decode_from=length - 7)))
    assert np.abs(logits - golden).max() <= TOLERANCE
    for layer, spec in zip(session.cache.layers, specs, strict=True):
        if isinstance(spec.placement, Ring):
            needed = min(spec.placement.window + chunk - 1, length)
            assert layer.capacity == -(-needed // READ_BLOCK) * READ_BLOCK
