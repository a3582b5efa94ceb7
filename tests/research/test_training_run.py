"""What a run counts."""

import dataclasses

import pytest

from kvlab.models.config import DecoderConfig
from kvlab.ops.rope import Rope
from kvlab.research.training_config import TrainingConfig
from kvlab.research.training_run import step_flops

DECODER = DecoderConfig(
    family="llama",
    vocab_size=1024,
    num_layers=4,
    embed_dim=128,
    hidden_dim=320,
    num_heads=8,
    num_kv_heads=8,
    head_dim=16,
    max_length=256,
    rope=Rope(),
    tie_embeddings=True,
)
CONFIG = TrainingConfig(DECODER, length=256, batch=3, accumulate=2)


def test_a_step_is_six_operations_a_parameter_and_token():
    matrices = 4 * (4 * 128 * 128 + 3 * 128 * 320) + 1024 * 128
    pairs = 256 * 257 // 2
    rows = 6
    products = 6 * matrices * rows * 256 + 12 * 4 * 128 * pairs * rows
    assert step_flops(CONFIG) == pytest.approx(products, rel=0.05)
    assert step_flops(CONFIG) > products  # norms, softmax, activations


def test_a_window_leaves_pairs_out():
    windowed = dataclasses.replace(CONFIG, decoder=dataclasses.replace(DECODER, windows=16))
    pairs = 16 * 17 // 2 + 240 * 16
    left_out = (256 * 257 // 2 - pairs) * 6 * 4
    saved = step_flops(CONFIG) - step_flops(windowed)
    assert saved == pytest.approx(12 * 128 * left_out + 3 * 8 * 5 * left_out, rel=0.02)
