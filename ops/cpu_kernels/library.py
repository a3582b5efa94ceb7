"""The shared library of the CPU kernels: compiled once, kept in the cache folder, registered.

The file's name holds a hash of all it depends on (sources, jaxlib, compiler, flags, processor), so
nothing stale is ever loaded. Without a compiler there is no library, and callers go through XLA.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile

import jax

from kvlab.ops.cache_folder import cache_folder

_LOG = logging.getLogger(__name__)
_FOLDER = pathlib.Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++17 -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math "
    "-fvisibility=hidden -fPIC -shared -pthread -Wall -Wextra -Werror=vla"
)
TARGETS: dict[str, str] = {"kvlab_attention": "KvlabAttention", "kvlab_linear": "KvlabLinear"}
"""Names of FFI targets, and the symbols of the library that serve them."""


class UnavailableError(ValueError):
    """The kernels cannot be had on this machine; the message says why and how to mend it."""


def available() -> bool:
    """Whether the kernels can serve; the reason why not is logged, once."""
    try:
        load()
    except UnavailableError as error:
        _log_once(str(error))
        return False
    return True


@functools.cache
def _log_once(reason: str) -> None:
    _LOG.warning("CPU kernels are off, everything runs through XLA: %s", reason)


def load() -> ctypes.CDLL:
    """Compiles the library if need be, loads it and registers its FFI targets.

    `$CXX` names the compiler and `$CXXFLAGS` adds to its flags.

    Raises:
      UnavailableError: no compiler, one that fails, or a cache folder that cannot be written.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise UnavailableError(loaded)
    return loaded


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none: a machine is asked once."""
    try:
        library = ctypes.CDLL(str(_compiled()))
        handlers = {
            target: jax.ffi.pycapsule(getattr(library, symbol))
            for target, symbol in TARGETS.items()
        }
    except (UnavailableError, OSError, AttributeError) as error:  # the last: no such symbol
        return str(error)
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return library


def _compiled() -> pathlib.Path:
    """The path of the library; compiles it where it is not in the cache folder."""
    command = [*_compiler(), *_FLAGS.split(), *_words("CXXFLAGS")]
    sources = sorted(_FOLDER.glob("*.cc"))
    digest = hashlib.sha256()
    for part in (
        importlib.metadata.version("jaxlib"),
        " ".join(command),
        _version(command[0]),
        _processor(),
    ):
        digest.update(part.encode() + b"\0")
    for source in sorted([*sources, *_FOLDER.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    path = cache_folder() / "cpu_kernels" / f"{digest.hexdigest()[:24]}.so"
    if _is_whole(path):
        return path
    include = f"-isystem{jax.ffi.include_dir()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Into a file of its own, then renamed: two processes may compile at once.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = pathlib.Path(scratch) / path.name
        _run([*command, include, *map(str, sources), "-o", str(made)])
        if not made.exists():
            raise UnavailableError(f"{command[0]} succeeded and wrote no library; check $CXXFLAGS")
        checksum = made.with_suffix(".sha256")
        checksum.write_text(_checksum(made))
        checksum.replace(path.with_suffix(".sha256"))
        made.replace(path)
    return path


def _is_whole(path: pathlib.Path) -> bool:
    """Whether a library is there as it was written: to load half of one would end the process."""
    try:
        return path.with_suffix(".sha256").read_text() == _checksum(path)
    except FileNotFoundError:
        return False


def _checksum(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _words(variable: str) -> list[str]:
    """The words of an environment variable, as a shell would cut it."""
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        given = os.environ[variable]
        raise UnavailableError(f"${variable} is {given!r}, which no shell reads: {error}") from None


def _compiler() -> list[str]:
    chosen = _words("CXX")
    found = chosen[:1] if chosen else _COMPILERS
    for name in found:
        if shutil.which(name):
            return [name, *chosen[1:]]
    raise UnavailableError(
        f"no C++ compiler found (looked for {', '.join(found)}); install g++ or clang++, or name "
        "one by CXX"
    )


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _run(command: list[str]) -> str:
    """Runs the compiler.

    Raises:
      UnavailableError: it fails; with the first lines of what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        said = [line for line in lines if "error" in line.lower()] or lines
        raise UnavailableError(f"{command[0]} failed ({done.returncode}): {' | '.join(said[:3])}")
    return done.stdout
