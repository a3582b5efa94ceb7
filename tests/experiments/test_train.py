"""`kvlab train`: to its end, killed and resumed in equal bits, on several devices, bad input."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from kvlab.experiments import train
from kvlab.models.load import load_model
from kvlab.research.results import read_rows
from kvlab.research.training import Trainer
from kvlab.research.training_config import TrainingConfig

TINY = (
    *("--vocab_size=300", "--num_layers=1", "--embed_dim=12", "--hidden_dim=7", "--num_heads=2"),
    *("--num_kv_heads=1", "--length=16", "--batch=4", "--warmup_steps=2"),
)
LONG = (*TINY, "--steps=40", "--log_every=2", "--eval_every=8", "--checkpoint_every=4")
SHORT = (*TINY, "--steps=6", "--log_every=2", "--eval_every=4", "--checkpoint_every=2")
WORDS = ("prefill", "reads", "a", "whole", "prompt", "and", "decode", "the", "model", "at", "once")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Optax promotes dtypes; the peak by small products: nothing here is about speed."""
    monkeypatch.setattr("kvlab.research.machine._READ_BYTES", 2**20)
    monkeypatch.setattr("kvlab.research.machine._LEAST_CALL_S", 0.0)
    monkeypatch.setattr("kvlab.research.machine._SAMPLE_S", 0.0)
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("texts") / "story.txt"
    random = np.random.default_rng(0)
    path.write_text("".join(" ".join(random.choice(WORDS, 7)) + "\n" for _ in range(150)))
    return path


@pytest.fixture(scope="module")
def process(story, tmp_path_factory):
    """Starts `kvlab train` in a process of its own."""
    cache = tmp_path_factory.mktemp("programs")

    def start(folder, *arguments, devices=1, limit=None):
        code = "import resource, signal, sys\nfrom kvlab.research import machine\n"
        code += "machine._LEAST_CALL_S = machine._SAMPLE_S = 0.0\n"
        code += "from kvlab.experiments import main, train\n"
        if limit is not None:
            code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        code += "sys.exit(main.execute(train, sys.argv[1:]))"
        flags = f"--xla_force_host_platform_device_count={devices}"
        programs = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        environment = os.environ | {"XLA_FLAGS": flags} | programs
        command = [sys.executable, "-c", code, f"--data={story}", f"--out={folder}", *arguments]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


def of_kind(folder, kind):
    return [row for row in read_rows(folder) if row["config"]["kind"] == kind]


def curve(folder):
    """Every loss by its step, training and held out."""
    points = [tuple(point) for row in of_kind(folder, "steps") for point in row["series"]["loss"]]
    judged = [
        (row["config"]["step"], row["metrics"]["held_out_loss"])
        for row in of_kind(folder, "held_out")
    ]
    return sorted(points), sorted(judged)


def test_a_run_to_its_end(kvlab, story, tmp_path):
    folder = tmp_path / "run"
    shown = kvlab("train", *SHORT, f"--data={story}", f"--out={folder}", "--remat")
    assert shown.status == 0, shown.err
    assert f"model: {folder}/model" in shown.out
    assert "held-out loss" in shown.out
    losses, judged = curve(folder)
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert losses[0][1] == pytest.approx(np.log(300), abs=0.2)
    assert losses[-1][1] < losses[0][1] - 0.01
    assert [step for step, _ in judged] == [4, 6]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step_00000004",
        "step_00000006",
    ]
    for row in of_kind(folder, "steps"):
        assert row["metrics"]["perplexity"] == pytest.approx(np.exp(row["metrics"]["loss"]))
        assert 0 < row["metrics"]["mfu"] < 1
        assert row["metrics"]["train_tokens_per_s"] > 0
    (model,) = of_kind(folder, "model")
    assert model["metrics"]["tokens_read"] == 6 * 4 * 16
    assert (folder / "loss.png").stat().st_size > 10_000
    assert (folder / "speed.png").stat().st_size > 10_000
    assert "loss 5." in shown.err
    assert "tokens/s, MFU" in shown.err

    for name in ("model", "checkpoints/step_00000006"):
        loaded = load_model(str(folder / name))
        assert loaded.tokenizer.decode(loaded.tokenizer.encode("decode reads")) == "decode reads"
    told = kvlab(
        "generate", f"--model={folder}/model", "--prompt=decode", "--max_tokens=3", "--json"
    )
    assert len(json.loads(told.out)["tokens"]) == 3

    again = kvlab("train", *SHORT, f"--data={story}", f"--out={folder}", "--remat")
    assert again.status == 0
    assert curve(folder) == (losses, judged)

    other = kvlab("train", *SHORT, f"--data={story}", f"--out={folder}", "--learning_rate=0.1")
    assert other.status == 1
    assert "learning_rate is 0.003 there and 0.1 here" in other.error
    assert "name another folder, or give the same settings" in other.error


@pytest.fixture(scope="module")
def whole(process, tmp_path_factory) -> pathlib.Path:
    """A run of LONG in one go, on one device."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    _, told = process(folder, *LONG).communicate(timeout=600)
    assert told.count("step 40: held-out loss") == 1
    return folder


def test_a_killed_run_goes_on_in_equal_bits(process, whole, tmp_path):
    folder = tmp_path / "killed"
    for wanted in (5, 13):  # rows of steps, in the middle of the run
        running = process(folder, *LONG)
        results = folder / "results.jsonl"
        while not results.exists() or results.read_bytes().count(b'"kind": "steps"') < wanted:
            assert running.poll() is None, running.communicate()
            time.sleep(0.005)
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        running.communicate()
    # The newest checkpoint is cut short: the one before it is taken.
    newest = max((folder / "checkpoints").glob("step_*"))
    file = max((newest / "params").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    os.truncate(file, file.stat().st_size // 2)
    last = process(folder, *LONG)
    _, told = last.communicate(timeout=600)
    assert last.returncode == 0, told
    assert f"skipped the checkpoint of step {int(newest.name[5:])}: {newest} is not compl" in told
    assert f"training goes on after step {int(newest.name[5:]) - 4}" in told
    assert curve(folder) == curve(whole)
    one, two = (load_model(str(run / "model")) for run in (whole, folder))
    for left, right in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True):
        assert np.array_equal(left, right)


def test_four_devices_have_the_losses_of_one(process, whole, tmp_path):
    running = process(tmp_path, *LONG, devices=4)
    _, told = running.communicate(timeout=600)
    assert running.returncode == 0, told
    for left, right in zip(curve(whole), curve(tmp_path), strict=True):
        np.testing.assert_allclose(np.array(right), np.array(left), rtol=1e-5)


def test_a_write_that_the_system_refuses(process, tmp_path):
    """Files may be no larger than the manifest, so the first checkpoint fails for real."""
    folder = tmp_path / "run"
    running = process(folder, *SHORT, "--embed_dim=64", limit=40_000)
    _, told = running.communicate(timeout=600)
    assert running.returncode == 1
    # Not alone: threads of tensorstore may tell of their loop, which Orbax closed.
    place = folder / "checkpoints" / "step_00000002"
    assert (
        f"kvlab train: the checkpoint of step 2 could not be written (cannot write {place}: File "
        "too large); none is kept: make room, and run the same command again"
    ) in told
    assert list((folder / "checkpoints").iterdir()) == []
    again = process(folder, *SHORT, "--embed_dim=64")
    assert again.communicate(timeout=600)[1].count("step 6: held-out loss") == 1


def test_a_loss_that_is_none_stops_the_run(kvlab, story, tmp_path, monkeypatch):
    step, seen = Trainer.step, []

    def spoilt(self, state, rows):
        seen.append(int(state.step))
        if seen[-1] == 4:
            state.params["embed"]["weight"] = state.params["embed"]["weight"] * np.float32("nan")
        return step(self, state, rows)

    monkeypatch.setattr(Trainer, "step", spoilt)
    folder = tmp_path / "run"
    shown = kvlab("train", *SHORT, f"--data={story}", f"--out={folder}")
    assert shown.status == 1
    line = shown.err.splitlines()[-1]
    assert "the loss is nan at step 5, so training stops; the checkpoint of step 4 is kept" in line
    assert "give a lower learning_rate than 0.003" in line
    assert sorted(path.name for path in (folder / "checkpoints").iterdir())[-1] == "step_00000004"
    stopped = of_kind(folder, "steps")[-1]
    assert (stopped["config"]["step"], stopped["status"]) == (6, "failed")
    assert kvlab("report", folder).status == 0

    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    shown = kvlab("train", *SHORT, f"--data={story}", f"--out={folder}")
    assert shown.status == 0
    assert "training goes on after step 4" in shown.err
    assert "on 4 devices; it began on 2 devices, so later losses may differ in" in shown.err


def test_a_held_out_loss_that_is_none_stops_the_run(kvlab, story, tmp_path, monkeypatch):
    """Before the checkpoint of that step: it would hold the parameters that gave it."""
    monkeypatch.setattr(Trainer, "score", lambda *_: (float("inf"), 1))
    shown = kvlab("train", *SHORT, f"--data={story}", f"--out={tmp_path}/run")
    assert shown.status == 1
    said = "the held-out loss is inf at step 4, so training stops; the checkpoint of step 2 is kept"
    assert said in shown.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data=absent.txt"], "absent.txt: No such file"),
        ([], "--data is missing: texts to train on"),
        (["--data=STORY", "--length=9000"], "and a sequence has 9000; give more text"),
        (["--data=STORY", "--vocab_size=9000"], "9000 is more than these texts can fill; the larg"),
        (["--data=STORY", "--batch=3"], "batch=3 cannot be split over 2 devices"),
        (["--data=STORY", "--num_kv_heads=3"], "num_kv_heads=3 does not divide num_heads=2"),
        (["--data=STORY", "--num_heads=5"], "--num_heads=5 does not divide --embed_dim=12; give"),
        (["--data=STORY", "--num_heads=99"], "--num_heads=99 does not divide --embed_dim=12; g"),
        (["--data=STORY", "--vocab_size=5000000000"], "more than a model holds, 2147483647"),
        (["--data=STORY", "--separator="], "a text is wanted"),
    ],
)
def test_bad_input_is_one_line_and_no_folder(kvlab, story, tmp_path, arguments, words):
    written = [argument.replace("STORY", str(story)) for argument in arguments]
    shown = kvlab("train", *SHORT, f"--out={tmp_path}/run", *written)
    assert shown.status in {1, 2}
    assert words in shown.error
    assert not (tmp_path / "run").exists()


def test_an_empty_text_is_one_line(kvlab, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    shown = kvlab("train", *SHORT, f"--data={tmp_path}/empty.txt")
    assert "empty.txt is empty; give a file of text to train on" in shown.error


def test_the_defaults_are_those_of_the_library_and_of_what_is_shipped(story):
    for name in train.FLAGS:
        train.FLAGS[name].unparse()
    train.FLAGS(["kvlab train", f"--data={story}", "--num_kv_heads=4"])
    config = train._training_config(None)
    assert config == TrainingConfig(config.decoder)
    assert config.decoder == load_model("shakespeare-gqa4", dtype="float32").config


def test_training_further(kvlab, story, tmp_path):
    """A model given fewer KV heads and trained on: its own numbers, tokenizer and shape."""
    pooled, run = tmp_path / "mqa", tmp_path / "run"
    start = tmp_path / "mha"
    shown = kvlab(
        "train", *SHORT, f"--data={story}", f"--out={start}", "--num_kv_heads=2", "--seed=3"
    )
    assert shown.status == 0, shown.err
    assert (
        kvlab("convert", f"--model={start}/model", "--attention=mqa", f"--out={pooled}").status == 0
    )
    further = ("--length=16", "--batch=4", "--steps=3", "--warmup_steps=1", "--log_every=1")
    rates = ("--learning_rate=1e-12", "--eval_every=3", "--checkpoint_every=3")
    arguments = (f"--init={pooled}", f"--data={story}", f"--out={run}", *further, *rates)
    shown = kvlab("train", *arguments)
    assert shown.status == 0, shown.err
    before, after = load_model(str(pooled)), load_model(str(run / "model"))
    assert after.config == before.config
    assert after.config.kv_heads == (1,)
    assert after.tokenizer.encode("decode reads") == before.tokenizer.encode("decode reads")
    for left, right in zip(
        jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True
    ):
        np.testing.assert_allclose(right, left, atol=1e-10)
    losses, _ = curve(run)
    assert losses[0][1] < np.log(300) - 0.02  # it has learned

    refused = kvlab("train", *arguments, "--num_kv_heads=2")
    assert "--num_kv_heads given, and --init has a shape of its own" in refused.error
    other = kvlab("train", f"--init={start}/model", *arguments[1:])
    assert other.status == 1
    assert "init is" in other.error


def test_bytes_are_a_tokenizer_to_train_further_with(kvlab, story, tmp_path):
    further = ("--length=16", "--batch=2", "--steps=2", "--warmup_steps=1", "--log_every=2")
    every = ("--eval_every=2", "--checkpoint_every=2")
    shown = kvlab(
        "train", "--init=random:tiny-gqa", f"--data={story}", f"--out={tmp_path}", *further, *every
    )
    assert shown.status == 0, shown.err
    loaded = load_model(str(tmp_path / "model"))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("reads")) == "reads"
