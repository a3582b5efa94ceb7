"""A command that runs again compiles nothing: the persistent cache has all that it asks for."""

import os
import subprocess
import sys

import pytest

from kvlab.ops.cache_folder import cache_folder
from kvlab.ops.cpu_kernels import library

# Counts what JAX asks the persistent cache for, and what it gets, from JAX's first import on.
_COUNTING = """
import collections, sys
from kvlab.experiments import main
counts, keep = collections.Counter(), main._keep_compiled_programs
def counted():
    keep()
    import jax
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
main._keep_compiled_programs = counted
status = main.run(sys.argv[1:])
names = "compile_requests_use_cache", "cache_hits"
print(status, *(counts[f"/jax/compilation_cache/{name}"] for name in names))
"""
_TINY = ("--model=random:tiny-gqa", "--attention=gqa")  # whose parser imports JAX
_SMALL = ("--batch_sizes=2", "--prompt_tokens=5", "--decode_tokens=2", "--repeats=1")
COMMANDS = {
    "generate": ("--prompt=abc", "--max_tokens=3", "--weights=int8", "--num_samples=2"),
    # Compiles a point on one thread while another is scored.
    "sweep": (*_SMALL, "--storage=float32,int4", "--quality_tokens=9", "--max_length=64"),
}


@pytest.mark.parametrize("command", ["generate", pytest.param("sweep", marks=pytest.mark.long)])
def test_a_second_run_compiles_nothing(command, tmp_path):
    environment = {name: value for name, value in os.environ.items() if "COMPIL" not in name}
    environment |= {"KVLAB_CACHE": str(tmp_path)}
    if library.available():  # its C++ need not be compiled anew
        (tmp_path / "cpu_kernels").symlink_to(cache_folder() / "cpu_kernels")

    def run(number):
        out = (f"--out={tmp_path}/run{number}",) if command == "sweep" else ()
        done = subprocess.run(
            [sys.executable, "-c", _COUNTING, command, *_TINY, *COMMANDS[command], *out],
            capture_output=True,
            text=True,
            timeout=600,
            env=environment,
            check=False,
        )
        assert done.stdout, done.stderr
        return tuple(map(int, done.stdout.splitlines()[-1].split()))

    status, requests, hits = run(1)
    assert status == 0
    assert requests > hits
    assert run(2) == (0, requests, requests)
