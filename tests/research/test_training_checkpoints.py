"""Checkpoints of training: whole or not there, the newest good one found, bad ones named."""

import dataclasses
import errno
import os
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from kvlab.models.checkpoints.orbax import save_checkpoint
from kvlab.models.config import DecoderConfig
from kvlab.models.load import load_model
from kvlab.ops.rope import Rope
from kvlab.research.training import initial_state
from kvlab.research.training_checkpoints import Checkpoints
from kvlab.research.training_config import OptimizerConfig, TrainingConfig, TrainingError

DECODER = DecoderConfig(
    family="llama",
    vocab_size=29,
    num_layers=1,
    embed_dim=12,
    hidden_dim=7,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    max_length=13,
    rope=Rope(),
    tie_embeddings=True,
)
CONFIG = TrainingConfig(
    DECODER, length=13, batch=2, steps=9, optimizer=OptimizerConfig(warmup_steps=2)
)


@pytest.fixture
def checkpoints(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    return Checkpoints(tmp_path / "checkpoints", CONFIG, [tmp_path / "tokenizer.model"])


def at(step):
    """A state whose every leaf tells the step."""
    state = initial_state(CONFIG)
    state = jax.tree.map(lambda leaf: (leaf + step).astype(leaf.dtype), state)
    return dataclasses.replace(state, step=np.int32(step))


def same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, two in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == two.dtype
        assert np.array_equal(one, two)


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_a_state_comes_back_in_bits_and_old_ones_go(checkpoints):
    assert checkpoints.newest() == (None, [])
    for step in (1, 2, 3):
        checkpoints.save(at(step))
    assert checkpoints.steps() == [3, 2]
    state, skipped = checkpoints.newest()
    same(state, at(3))
    assert skipped == []


@pytest.mark.parametrize("part", ["params", "training"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "absent"])
def test_a_damaged_one_is_skipped_and_named(checkpoints, part, damage):
    for step in (1, 2):
        checkpoints.save(at(step))
    file = largest_file(checkpoints.path(2) / part)
    content = bytearray(file.read_bytes())
    if damage == "absent":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    state, skipped = checkpoints.newest()
    same(state, at(1))
    (sentence,) = skipped
    assert sentence.startswith("skipped the checkpoint of step 2: ")
    assert file.name in sentence
    assert "\n" not in sentence
    checkpoints.save(at(2))
    same(checkpoints.newest()[0], at(2))


def test_what_a_killed_process_was_writing_goes(checkpoints, tmp_path):
    partial = tmp_path / "checkpoints" / ".step_00000004-x1y2" / "step_00000004"
    partial.mkdir(parents=True)
    assert checkpoints.newest() == (None, [])
    Checkpoints(tmp_path / "checkpoints", CONFIG, [tmp_path / "tokenizer.model"])
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        Exception("RESOURCE_EXHAUSTED: No space left on device\nand more"),
    ],
    ids=["of the system", "of tensorstore"],
)
@pytest.mark.parametrize("part", ["params", "training"])
def test_a_full_disk_leaves_the_one_before(checkpoints, monkeypatch, error, part):
    checkpoints.save(at(1))
    save = ocp.StandardCheckpointer.save

    def fill_up(self, folder, arrays):
        save(self, folder, arrays)
        self.wait_until_finished()
        if folder.name == part:
            raise error

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", fill_up)
    with pytest.raises(TrainingError) as caught:
        checkpoints.save(at(2))
    told = str(caught.value)
    assert told.startswith("the checkpoint of step 2 could not be written (cannot write ")
    assert "No space left on device" in told
    assert f"that of step 1 is kept ({checkpoints.path(1)}): make room, and run" in told
    assert "\n" not in told
    monkeypatch.undo()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_00000001"]
    same(checkpoints.newest()[0], at(1))


def test_room_is_asked_for_before_anything_is_written(checkpoints, monkeypatch):
    checkpoints.save(at(1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1_000))
    with pytest.raises(
        TrainingError, match=r"1\.1 MB are needed, and .* has 0\.0 MB free\); that of"
    ):
        checkpoints.save(at(2))
    same(checkpoints.newest()[0], at(1))


def test_one_of_another_decoder_is_refused(checkpoints, tmp_path):
    checkpoints.save(at(1))
    other = dataclasses.replace(CONFIG, decoder=dataclasses.replace(DECODER, num_kv_heads=2))
    wanted = Checkpoints(tmp_path / "checkpoints", other, [tmp_path / "tokenizer.model"])
    with pytest.raises(
        TrainingError, match=r"num_kv_heads is \(1,\) there and \(2,\) here\); name"
    ):
        wanted.newest()


def test_a_model_without_a_state_is_skipped(checkpoints, tmp_path):
    checkpoints.save(at(1))
    save_checkpoint(checkpoints.path(2), DECODER, at(2).params)
    _, (sentence,) = checkpoints.newest()
    assert "holds parameters alone" in sentence
    assert load_model(str(checkpoints.path(2))).config == DECODER
