"""Commands run in this process, and a tiny model folder without a tokenizer."""

import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Callable

import pytest

from kvlab.experiments import main

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


@dataclasses.dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on standard error."""
        (line,) = self.err.splitlines()
        return line


@pytest.fixture
def kvlab(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs `kvlab ARGUMENTS...` here, without its changes to the environment."""
    monkeypatch.setattr(main, "_keep_compiled_programs", lambda: None)

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = main.run([str(argument) for argument in arguments])
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny_families():
    """tests/goldens/tiny_families.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "kvlab_goldens_commands", GOLDENS / "tiny_families.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_folder(tiny_families, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A llama of 6 query heads and 3 KV heads, context 67, vocabulary 101, no tokenizer."""
    folder = tmp_path_factory.mktemp("commands") / "llama_gqa"
    return tiny_families.write_tiny_folder("llama_gqa", folder)
