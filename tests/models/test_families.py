"""Every family agrees with transformers on tiny random models, and every feature counts."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.checkpoints.huggingface import load_huggingface
from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder

TOLERANCE = 2e-4  # max |logit difference|, float32
GOLDENS = np.load(pathlib.Path(__file__).parents[1] / "goldens" / "families.npz")
CASES = sorted(GOLDENS.files)


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    """Loads each case once."""
    cache = {}

    def load(case: str) -> tuple[DecoderConfig, dict]:
        if case not in cache:
            cache[case] = load_huggingface(tiny_folder(case))
        return cache[case]

    return load


def forward(
    config: DecoderConfig, params: dict, tokens: np.ndarray, optimise: bool = True
) -> np.ndarray:
    options = {} if optimise else {"xla_backend_optimization_level": 0}  # compiles twice as fast
    apply = jax.jit(
        lambda p, t: Decoder(config).apply({"params": p}, t, method="forward"),
        compiler_options=options,
    )
    return np.asarray(apply(params, jnp.asarray(tokens)))


def distance(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(left.astype(np.float64) - right.astype(np.float64)).max())


def test_the_golden_file_has_every_case(tiny_families):
    assert sorted(tiny_families.CASES) == CASES


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, loaded, tiny_families):
    golden = GOLDENS[case]
    logits = forward(*loaded(case), tiny_families.tokens(case))
    assert logits.dtype == np.float32
    assert logits.shape == golden.shape
    assert 1 < golden.std() < 10
    assert distance(logits, golden) <= TOLERANCE


def test_cases_with_the_same_weights_differ_by_their_config(tiny_families):
    for case, spec in tiny_families.CASES.items():
        if spec.like is not None:
            assert distance(GOLDENS[case], GOLDENS[spec.like]) > 100 * TOLERANCE, case


# A feature of a case, taken away. If its logits stayed, the case would not test the feature.
WITHOUT = [
    ("qwen2_windows", "windows", 13),
    ("qwen3_layer_types", "windows", None),
    ("gemma2", "windows", None),
    ("gemma2", "windows", (None, 13, None)),
    ("gemma2", "soft_cap", None),
    ("gemma2", "query_scale", None),
    ("gemma2", "activation", "gelu"),
    ("gpt2_variant", "activation", "gelu_tanh"),
    ("gpt2_variant", "query_scale", None),
]


@pytest.mark.parametrize(("case", "field", "value"), WITHOUT)
def test_the_case_depends_on_the_feature(case, field, value, loaded, tiny_families):
    config, params = loaded(case)
    changed = dataclasses.replace(config, **{field: value})
    logits = forward(changed, params, tiny_families.tokens(case), optimise=False)
    assert distance(logits, GOLDENS[case]) > 5 * TOLERANCE


@pytest.mark.peers
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("default")  # of torch and transformers
def test_the_goldens_are_what_transformers_gives_now(
    case, loaded, tiny_families, tiny_folder, golden_script
):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    tokens = tiny_families.tokens(case)
    live = golden_script("make_families").reference_logits(tiny_folder(case), tokens)
    assert distance(live, GOLDENS[case]) <= 1e-5
    assert distance(forward(*loaded(case), tokens), live) <= TOLERANCE
