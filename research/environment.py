"""What a figure was measured on: versions, machine, device and revision of the source.

Every results row carries this, so a row can be read without the run that made it.
"""

import functools
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

PACKAGES = ("kvlab", "jax", "jaxlib", "flax", "numpy")

_SOURCE_FILE = pathlib.Path(__file__).resolve()
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def environment() -> dict[str, Any]:
    """Describes the software and the machine that this process runs on.

    Returns:
        A JSON-ready mapping: `python`, one entry per package of `PACKAGES` (its version, or
        "not installed"), `platform`, `cpu` (model name), `cores` (that this process may use),
        `backend`, `device_kind` and `device_count` (as JAX sees them), and `git_revision`.
    """
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "backend": jax.default_backend(),
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "git_revision": git_revision(),
    }


def device_bytes() -> int:
    """Memory of the device that JAX computes on: its own, or the machine's where that is a CPU."""
    known = jax.local_devices()[0].memory_stats() or {}
    return known.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def git_revision(source_file: pathlib.Path = _SOURCE_FILE) -> str | None:
    """Finds the commit that the running source was checked out from.

    Args:
        source_file: a file whose checkout is meant; this module by default.

    Returns:
        The full commit hash, with `-dirty` appended where tracked files differ from it; None
        where the file is not tracked by git (an installed wheel, even one inside somebody
        else's checkout) or git is not there.
    """
    if _git(source_file, "ls-files", "--error-unmatch", source_file.name) is None:
        return None
    # No tag matches the pattern "*" once it is excluded, so this is always the bare hash.
    return _git(source_file, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(source_file: pathlib.Path, *arguments: str) -> str | None:
    # A git hook exports GIT_DIR, which would answer for another repository.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        finished = subprocess.run(
            ["git", "-C", str(source_file.parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            env=variables,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout.strip() if finished.returncode == 0 else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use."""
    # A container or taskset may grant fewer cores than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
