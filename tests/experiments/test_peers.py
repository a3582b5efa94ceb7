"""kvlab peers: systems in processes of their own, absent ones said, runs resumed."""

import importlib.util
import io
import json

import numpy as np
import pytest

from kvlab.experiments.peer_systems import worker
from kvlab.experiments.peer_systems.system import log_softmax, two_best
from kvlab.research.results import read_rows

SMALL = ("--batch=2", "--prompt_tokens=24", "--new_tokens=5", "--text_tokens=64", "--repeats=2")


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="a peer is here")
def test_a_peer_that_is_not_installed_is_a_row_that_says_so(kvlab, tmp_path):
    model, folder = tmp_path / "mqa.gguf", tmp_path / "run"
    kvlab("convert", "--model=shakespeare-mqa", "--format=gguf", f"--out={model}")
    arguments = "peers", *SMALL, "--precision=float32", f"--out={folder}"
    outcome = kvlab(*arguments, f"--model={model}", "--peer=kvlab,llama.cpp")
    assert outcome.status == 1
    ours, theirs = read_rows(folder)
    assert ours["status"] == "ok"
    assert ours["metrics"]["greedy_agreement"] == 1.0
    assert len(ours["repeats"]["decode_tokens_per_s"]) == 2
    assert theirs["error"].startswith("llama.cpp is not installed (No module named 'llama_cpp')")
    assert "llama.cpp has no figure: llama.cpp is not installed" in outcome.out


def test_a_model_that_peers_cannot_read_is_one_line(kvlab, tmp_path):
    outcome = kvlab("peers", "--model=random:tiny-gqa", f"--out={tmp_path / 'run'}")
    assert outcome.status == 1
    assert "model=random:tiny-gqa is no GGUF file" in outcome.error
    assert not (tmp_path / "run").exists()


def test_a_worker_answers_errors_and_goes_on():
    lines = [
        {"do": "open", "model": "absent.gguf", "precision": "float32", "batch": 1}
        | {"max_length": 8, "threads": 1},
        {"do": "prefill", "ids": "absent.npy"},
    ]
    answers = io.StringIO()
    worker.serve("kvlab", io.StringIO("\n".join(map(json.dumps, lines))), answers)
    first, second = map(json.loads, answers.getvalue().splitlines())
    assert "absent.gguf" in first["error"]
    assert not first["absent"]
    assert "absent.npy" in second["error"]


def test_margins_and_log_probabilities():
    logits = np.array([[0.0, 3.0, 2.5], [1.0, 1.0, -1.0]], np.float32)
    best, margins = two_best(logits)
    assert best.tolist() == [[1, 2], [0, 1]]
    np.testing.assert_allclose(margins, [0.5, 0.0])
    np.testing.assert_allclose(np.exp(log_softmax(logits)).sum(axis=1), 1.0, rtol=1e-6)
