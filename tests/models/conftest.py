"""The tiny models of every family, and stories260K, as folders and parameters."""

import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable

import pytest

from kvlab.models.checkpoints.errors import CheckpointError

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


def load_module(name: str) -> types.ModuleType:
    """A script of tests/goldens as a module: with importlib imports, tests share no package."""
    spec = importlib.util.spec_from_file_location(f"kvlab_goldens_{name}", GOLDENS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_families() -> types.ModuleType:
    """tests/goldens/tiny_families.py: CASES, tokens, write_tiny_folder."""
    return load_module("tiny_families")


@pytest.fixture(scope="session")
def tiny_folder(
    tiny_families: types.ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], pathlib.Path]:
    """Writes a case's Hugging Face folder once a session. Tests must not change it."""
    root = tmp_path_factory.mktemp("tiny_families")

    def folder(case: str) -> pathlib.Path:
        path = root / case
        return path if path.exists() else tiny_families.write_tiny_folder(case, path)

    return folder


@pytest.fixture(scope="session")
def golden_script() -> Callable[[str], types.ModuleType]:
    """Loads a generator of tests/goldens by name, for tests that run it live."""
    return load_module


@pytest.fixture(scope="session")
def stories260k(golden_script: Callable, data_path: Callable) -> tuple:
    """Config and parameters of stories260K, and the script that knows its ids and text."""
    script = golden_script("stories260k")
    path = data_path("tinylm/stories260K/stories260K.bin")
    return (*script.load_stories260k(path), script)


@pytest.fixture(scope="session")
def tiny_gguf(golden_script: Callable) -> types.ModuleType:
    """tests/goldens/tiny_gguf.py."""
    return golden_script("tiny_gguf")


@pytest.fixture
def llama(tiny_gguf: types.ModuleType, tiny_families: types.ModuleType) -> tuple[dict, dict]:
    """Keys and tensors of a small llama GGUF file, to spoil."""
    config = tiny_families.CASES["llama_sharded"].config
    return tiny_gguf.metadata(config), tiny_gguf.tensors(
        config, tiny_families.tensors("llama_sharded")
    )


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """Expects a CheckpointError of one line that holds all the words, and gives the line."""

    def refused_call(call: Callable[[], object], *words: str) -> str:
        with pytest.raises(CheckpointError) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert word in message
        return message

    return refused_call
