"""SmolLM2-135M-Instruct, dequantised from its GGUF, predicts what transformers predicts."""

import pathlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.checkpoints.gguf import load_gguf
from kvlab.models.decoder import Decoder
from kvlab.models.tokenizers import load_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
TEXT = ROOT / "research" / "texts" / "english.txt"
GOLDEN = ROOT / "tests" / "goldens" / "smollm2_english.npz"
PIECE = 256  # positions that are compared at once; the same as in make_smollm2.py
MIN_AGREEMENT = 0.995
MAX_KL = 1e-5  # nats, mean over positions

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def pieces(golden, smollm2_path) -> Callable[[], Iterator[np.ndarray]]:
    """Iterates over the text's float32 logits [at most PIECE, V] in order."""
    config, params = load_gguf(smollm2_path)
    forward = jax.jit(lambda p, t: Decoder(config).apply({"params": p}, t, method="forward"))
    logits = forward(params, jnp.asarray(golden["ids"])[None])[0]

    def iterate() -> Iterator[np.ndarray]:
        for begin in range(0, len(logits), PIECE):
            yield np.asarray(logits[begin : begin + PIECE])

    return iterate


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) over the last axis, in nats; 0 log 0 is 0."""
    return np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(q)), 0.0).sum(-1)


def lumped(largest: np.ndarray) -> np.ndarray:
    """Probabilities [T, 32] with what is left of 1 as one more event: [T, 33]."""
    rest = np.maximum(1 - largest.sum(-1, keepdims=True), 1e-12)
    return np.concatenate([largest, rest], axis=-1)


def test_the_golden_is_of_the_text_as_it_is_now(golden, smollm2_path):
    ids = load_tokenizer(smollm2_path).encode(TEXT.read_text(encoding="utf-8"))
    assert ids == golden["ids"].tolist(), "run tests/goldens/make_smollm2.py again"
    assert golden["top_ids"].shape == golden["top_logits"].shape == (len(ids), 32)


def test_predictions_are_those_of_transformers(golden, pieces):
    """Top-1 and KL against the golden.

    The golden has the 32 largest logits of a position; all other tokens are one event here, which
    makes this KL a lower bound of the full one. The full one is compared live, under `peers`.
    """
    expected = lumped(
        np.exp(golden["top_logits"].astype(np.float64) - golden["logsumexp"][:, None])
    )
    at, agreed, distances = 0, 0, []
    for logits in pieces():
        positions = slice(at, at := at + len(logits))
        agreed += int((logits.argmax(-1) == golden["argmax"][positions]).sum())
        log_probability = log_softmax(logits)
        ours = np.take_along_axis(log_probability, golden["top_ids"][positions], -1)
        distances.append(kl(expected[positions], lumped(np.exp(ours))))
    assert at == len(golden["ids"])
    assert agreed >= MIN_AGREEMENT * at
    mean = float(np.concatenate(distances).mean())
    print(f"top-1 equal at {agreed} of {at} positions, mean KL {mean:.2e} nats")
    assert mean <= MAX_KL


def test_the_measure_sees_another_model(golden, pieces):
    """Predictions of the position before fail both bounds by far."""
    logits = next(pieces())[:-1]
    shifted = slice(1, PIECE)
    expected = np.exp(
        golden["top_logits"][shifted].astype(np.float64) - golden["logsumexp"][shifted, None]
    )
    ours = np.take_along_axis(log_softmax(logits), golden["top_ids"][shifted], -1)
    assert (logits.argmax(-1) == golden["argmax"][shifted]).mean() < 0.5
    assert kl(lumped(expected), lumped(np.exp(ours))).mean() > 0.1


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # of torch, transformers and llama.cpp
def test_the_golden_and_the_full_distance_live(golden, pieces, smollm2_path, golden_script):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("llama_cpp")
    script = golden_script("make_smollm2")
    ids = script.llama_cpp_ids(smollm2_path, TEXT.read_text(encoding="utf-8"))
    assert np.array_equal(ids, golden["ids"])
    reference = script.reference_logits(script.load_into_transformers(smollm2_path), ids)
    at, agreed, distances = 0, 0, []
    for theirs, ours in zip(reference, pieces(), strict=True):
        positions = slice(at, at := at + len(theirs))
        now = script.summary(theirs)
        assert (now["argmax"] == golden["argmax"][positions]).mean() >= MIN_AGREEMENT
        assert np.abs(now["logsumexp"] - golden["logsumexp"][positions]).max() <= 1e-3
        assert np.abs(now["top_logits"] - golden["top_logits"][positions]).max() <= 1e-3
        agreed += int((ours.argmax(-1) == now["argmax"]).sum())
        distances.append(kl(np.exp(log_softmax(theirs)), np.exp(log_softmax(ours))))
    assert agreed >= MIN_AGREEMENT * at
    mean = float(np.concatenate(distances).mean())
    print(f"top-1 equal at {agreed} of {at} positions, mean KL {mean:.2e} nats")
    assert mean <= MAX_KL
