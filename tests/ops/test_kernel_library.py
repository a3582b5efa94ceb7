"""The compiled library: what is damaged is compiled again, what cannot be had is one line."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from kvlab.ops.cpu_kernels import library

KERNELS = pathlib.Path(library.__file__).parent
USE = """
import logging
logging.basicConfig(format="%(message)s")
from kvlab.ops.cpu_kernels import library
print(library.available())
"""
COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")


def loaded(cache: pathlib.Path, **environment: str) -> tuple[bool, str]:
    """Whether a fresh process has the kernels, and what it logged."""
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env=os.environ
        | {"KVLAB_CACHE": str(cache), "CXX": str(COMPILER), "CXXFLAGS": "-O0"}
        | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return done.stdout.strip() == "True", done.stderr.strip()


def test_a_library_that_is_not_whole_is_compiled_again(tmp_path):
    assert loaded(tmp_path) == (True, "")
    (made,) = (tmp_path / "cpu_kernels").glob("*.so")
    whole, before = made.read_bytes(), made.stat().st_ino
    assert loaded(tmp_path) == (True, "")
    assert made.stat().st_ino == before  # found, not compiled
    made.write_bytes(whole[: len(whole) // 2])
    assert loaded(tmp_path) == (True, "")
    assert len(made.read_bytes()) == len(whole)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"CXXFLAGS": "'-O2"}, '$CXXFLAGS is "\'-O2", which no shell reads: No closing quotation'),
        ({"CXX": "'g++"}, '$CXX is "\'g++", which no shell reads: No closing quotation'),
        ({"CXXFLAGS": "-O0 -DKvlabLinear=other"}, "undefined symbol: KvlabLinear"),
        ({"CXX": "true"}, "true succeeded and wrote no library; check $CXXFLAGS"),
    ],
)
def test_what_spoils_the_library_is_one_line(environment, said, tmp_path):
    there, logged = loaded(tmp_path, **environment)
    assert not there
    assert logged.startswith("CPU kernels are off, everything runs through XLA: ")
    assert logged.endswith(said)
    assert "\n" not in logged


@pytest.mark.parametrize("source", sorted(path.name for path in KERNELS.glob("*.cc")))
def test_the_kernels_build_for_arm(source, tmp_path):
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no aarch64-linux-gnu-g++ here")
    flags = [flag for flag in library._FLAGS.split() if flag not in ("-march=native", "-shared")]
    command = [compiler, *flags, f"-isystem{jax.ffi.include_dir()}", "-c", str(KERNELS / source)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "built.o")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
