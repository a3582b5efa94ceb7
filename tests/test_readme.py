"""The code in README runs as it is printed there."""

import importlib
import pathlib
import re
import shlex

import jax
import pytest

from kvlab.experiments import main
from kvlab.research.experiment import load_experiment
from kvlab.research.results import read_rows

REPOSITORY = pathlib.Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_library_example_runs(capsys):
    (example,) = [block for block in BLOCKS if "session.use" in block]
    exec(compile(example, "README.md", "exec"), {})
    assert "CacheUse(" in capsys.readouterr().out
    assert len([line for line in example.splitlines() if line.strip()]) <= 14


def test_the_engine_example_runs(capsys):
    (example,) = [block for block in BLOCKS if "Engine" in block]
    exec(compile(example, "README.md", "exec"), {})
    endings = [line for line in capsys.readouterr().out.splitlines() if line.endswith("length")]
    assert len(endings) == 6


def test_the_ablation_script_runs_from_any_folder(tmp_path, monkeypatch, capsys):
    (script,) = [block for block in BLOCKS if "CONFIG" in block]
    command = re.search(r"Run: kvlab (.*?)\"\"\"", script)
    assert command
    (tmp_path / "my_ablation.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    assert main.run(shlex.split(command[1])) == 0
    rows = read_rows("runs/page_size")
    assert len(rows) == len(load_experiment("my_ablation.py").variants) == 6
    assert pathlib.Path("runs/page_size/report.html").exists()
    assert "report: runs/page_size/report.html" in capsys.readouterr().out


def test_the_policy_runs_from_any_folder(tmp_path, monkeypatch):
    (policy,) = [block for block in BLOCKS if "class EveryOther" in block]
    assert len(policy.splitlines()) < 60
    command = re.search(r"`kvlab (sweep [^`]*my_policy:EveryOther[^`]*)`", README)
    assert command
    (tmp_path / "my_policy.py").write_text(policy)
    monkeypatch.chdir(tmp_path)
    small = ["--model=random:tiny-gqa", "--batch_sizes=2", "--prompt_tokens=90", "--out=run"]
    small += ["--max_length=128", "--quality_tokens=0", "--repeats=1"]
    assert main.run(shlex.split(command[1].replace("all,window,", "all,")) + small) == 0
    full, own = (row["metrics"]["kv_bytes_used"] for row in read_rows("run"))
    assert own < 0.7 * full


def test_the_training_commands_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvlab.research.machine._LEAST_CALL_S", 0.0)
    monkeypatch.setattr("kvlab.research.machine._SAMPLE_S", 0.0)
    section = README.split("## Training")[1].split("##")[0]
    train, generate = re.findall(r"^kvlab (.*)$", section, re.MULTILINE)
    train = train.replace("README.md", f"{REPOSITORY}/README.md")
    train = train.replace("CHANGELOG.md", f"{REPOSITORY}/CHANGELOG.md")
    quick = [
        "--steps=2",
        "--warmup_steps=1",
        "--num_layers=1",
        "--embed_dim=16",
        f"--out={tmp_path}",
    ]
    with jax.numpy_dtype_promotion("standard"):  # Optax promotes
        assert main.run(shlex.split(train) + quick) == 0
    generate = generate.replace("runs/readme/model", f"{tmp_path}/model")
    assert main.run(shlex.split(generate)) == 0
    assert "The KV cache" not in capsys.readouterr().err


def test_there_are_two_commands_for_a_fresh_machine():
    section = README.split("## Two commands")[1].split("##")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    commands = [line.split("#")[0].strip() for line in block.splitlines()]
    assert commands == ["make run", "make test"]


@pytest.mark.parametrize("line", re.findall(r"^kvlab (\w+) (.*)$", README, re.MULTILINE))
def test_every_command_line_names_flags_that_exist(line):

    name, rest = line
    flags = importlib.import_module(f"kvlab.experiments.{name}").FLAGS
    written = re.findall(r"--(\w+)", rest)
    assert set(written) <= set(flags)
