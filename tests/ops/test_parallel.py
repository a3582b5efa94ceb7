"""Work shared among threads: a C++ program around `parallel.h`, watched for races."""

import os
import pathlib
import shlex
import shutil
import subprocess

import pytest

from kvlab.ops.cpu_kernels import library

CASES = pathlib.Path(__file__).with_name("parallel_cases.cc")
COMPILER = shlex.split(os.environ.get("CXX", "c++"))

pytestmark = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no C++ compiler here")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_every_index_is_run_once_whoever_calls(sanitizer, tmp_path):
    program = tmp_path / "parallel"
    kernels = pathlib.Path(library.__file__).parent
    flags = ["-std=c++17", "-O1", "-g1", "-pthread", f"-fsanitize={sanitizer}", f"-I{kernels}"]
    built = subprocess.run(
        [*COMPILER, *flags, str(CASES), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"{COMPILER[0]} has no {sanitizer} sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
