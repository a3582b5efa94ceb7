"""Both CPU kernels built with address and undefined-behaviour sanitizers, in other processes."""

import os
import pathlib
import subprocess
import sys

import pytest

from kvlab.ops.cpu_kernels import library

HERE = pathlib.Path(__file__).parent
COMPILER = os.environ.get("CXX", "c++")
pytestmark = pytest.mark.skipif(not library.available(), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Environment of a process that builds and loads the kernels with sanitizers, built once."""

    def found(name):
        asked = [COMPILER, f"-print-file-name={name}"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()

    preload = [found("libasan.so"), found("libstdc++.so")]  # the second for its exceptions
    if not all(map(os.path.isabs, preload)):
        pytest.skip(f"{COMPILER} has no address sanitizer")
    return {
        "CXXFLAGS": "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all",
        "KVLAB_CACHE": str(tmp_path_factory.mktemp("sanitized")),
        "LD_PRELOAD": ":".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",
    }


def ran(arguments, environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_wrong_ids_and_lengths_read_nothing_outside_the_pool(sanitized):
    done = ran([str(HERE / "stored_pools.py")], sanitized)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nothing was read outside a pool" in done.stdout


def test_products_of_every_format_and_shape_are_clean(sanitized):
    done = ran([str(HERE / "cpu_linear_cases.py")], sanitized)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[0] == "cpu"
    assert "runtime error" not in done.stderr


def test_the_sanitizer_would_have_noticed(sanitized):
    script = (
        "import ctypes\n"
        "from kvlab.ops.cpu_kernels import library\n"
        "malloc = ctypes.CDLL(None).malloc\n"
        "malloc.restype = ctypes.c_void_p\n"
        "room = ctypes.c_void_p(malloc(400))\n"
        "library.load().KvlabElementwise(0, room, room, ctypes.c_int64(101))\n"
    )
    done = ran(["-c", script], sanitized)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
