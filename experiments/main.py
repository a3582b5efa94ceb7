"""The console script: finds a command, parses its flags, and turns errors into one line.

absl lists no commands, shows the flags of every imported module, and lets errors out as tracebacks,
so the command line is read here and absl only keeps the values.
"""

import ast
import difflib
import importlib
import os
import pathlib
import shutil
import signal
import sys
import textwrap
import traceback
import types
import warnings
from collections.abc import Callable, Sequence

from absl import flags as absl_flags

from kvlab.models.package_index import FetchError
from kvlab.ops.cache_folder import cache_folder

_COMMAND_ERROR = 1
_USAGE_ERROR = 2
_HELP = ("--help", "-help", "-h")
_HELP_COLUMN = 26
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs `kvlab <command> ...`.

    Args:
      arguments: what follows the name of the program; `sys.argv` by default.

    Returns:
      The exit status.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    known = commands()
    if not arguments or arguments[0] in (*_HELP, "help"):
        return _guarded("kvlab", lambda: print(_overview(known)))
    name, *rest = arguments
    if name not in known:
        near = difflib.get_close_matches(name.lstrip("-"), list(known), n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        return _complain("kvlab", f"there is no command {name!r}; {advice}")
    return _guarded(
        f"kvlab {name}",
        lambda: execute(importlib.import_module(f"kvlab.experiments.{name}"), rest),
    )


def commands() -> dict[str, str]:
    """Every command with the first line of its description.

    They are read from the source, not imported: a command is a module of this folder that has a
    `main` function.
    """
    found = {}
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_bytes())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
    return found


def execute(module: types.ModuleType, arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      module: has `FLAGS` (of `flags.command_flags`), `main(argv)`, which may return an exit
        status, and, if the command takes arguments beside flags, their form as `ARGUMENTS`.
      arguments: its flags and arguments; `sys.argv` by default.

    Returns:
      The exit status: 0, 1 for an error of the command, 2 for a wrong command line.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    qualified = module.__spec__.name if module.__spec__ else module.__name__  # not __main__
    program, values = f"kvlab {qualified.rpartition('.')[2]}", module.FLAGS
    if set(arguments) & set(_HELP):
        return _guarded(program, lambda: print(_usage(program, module)))
    _keep_compiled_programs()  # first: the parsers of some flags import JAX
    for flag in values:
        values[flag].unparse()  # a second run in one process starts from the defaults
    try:
        argv = values([program, *arguments])
    except absl_flags.UnrecognizedFlagError as error:
        nearest = _nearest(error.flagname, values)
        return _complain(program, f"there is no flag --{error.flagname}; nearest: --{nearest}")
    except absl_flags.Error as error:
        return _complain(program, str(error).removeprefix("flag "))
    if len(argv) > 1 and not hasattr(module, "ARGUMENTS"):
        given = " ".join(argv[1:])
        return _complain(program, f"takes flags only, and {given!r} is none; see {program} --help")
    return _guarded(program, lambda: module.main(argv), debug=values.debug)


def _guarded(program: str, action: Callable[[], int | None], *, debug: bool = False) -> int:
    """Runs something; an error of the user's, or of the machine, becomes one line."""
    try:
        status = action() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone (`| head`); Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        return _complain(program, "interrupted", 128 + signal.SIGINT)
    except (ValueError, OSError, MemoryError, FetchError) as error:
        if debug:
            traceback.print_exc()
        return _complain(program, _message(error), _COMMAND_ERROR)
    except RuntimeError as error:
        # JAX's own class, which is not imported for this. Anything else is a fault of the program.
        if debug or not any(mark in str(error) for mark in _OUT_OF_MEMORY):
            raise
        advice = "use fewer slots, or a smaller max_length, chunk or page_size"
        return _complain(program, f"out of memory ({_message(error)}); {advice}", _COMMAND_ERROR)


def _message(error: Exception) -> str:
    """What an error says, on one line."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        said = f"{error.filename}: {error.strerror}"
    return " ".join(said.split()) or type(error).__name__


def _complain(program: str, message: str, status: int = _USAGE_ERROR) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return status


def _nearest(written: str, legal: "Sequence[str] | dict[str, str] | absl_flags.FlagValues") -> str:
    return difflib.get_close_matches(written, list(legal), n=1, cutoff=0.0)[0]


def _keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs on disk, so that a command compiles them once a machine.

    Through the environment, which JAX reads when it is imported: commands that do not need JAX
    stay quick, and who has set the variables keeps the last word.
    """
    folder = cache_folder() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a cache is a convenience: without one everything is compiled again
    # A damaged or full cache only means that a program is compiled again.
    warnings.filterwarnings("ignore", "Error .* persistent compilation cache")
    if os.access(folder, os.W_OK):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _overview(known: dict[str, str]) -> str:
    width = max(map(len, known)) + 2
    lines = [f"  {name:<{width}}{description}" for name, description in known.items()]
    return "\n".join(
        [
            "usage: kvlab COMMAND [--flag=value ...]",
            "",
            "commands:",
            *lines,
            "",
            "kvlab COMMAND --help lists the flags of a command.",
        ]
    )


def _usage(program: str, module: types.ModuleType) -> str:
    """The help of one command: its usage, its description and its own flags."""
    arguments = f" {module.ARGUMENTS}" if hasattr(module, "ARGUMENTS") else ""
    description = (module.__doc__ or "").strip()
    lines = [f"usage: {program}{arguments} [--flag=value ...]", "", description, "", "flags:"]
    width = min(shutil.get_terminal_size().columns, 100)
    for name in module.FLAGS:
        lines += _flag_help(module.FLAGS[name], width)
    return "\n".join(lines)


def _flag_help(flag: absl_flags.Flag, width: int) -> list[str]:
    """A flag's form, and beside it what it means."""
    form = f"  --{flag.name}"
    if not flag.boolean:
        form += f"={flag.parser.syntactic_help}"
    shown = flag.help
    if flag.default is not None and not (flag.boolean or isinstance(flag, absl_flags.MultiFlag)):
        shown += f" (default: {flag.default})"
    told = textwrap.wrap(shown, max(width - _HELP_COLUMN, 20), break_on_hyphens=False)
    if len(form) + 1 < _HELP_COLUMN:
        return [f"{form:<{_HELP_COLUMN}}{told[0]}", *(" " * _HELP_COLUMN + t for t in told[1:])]
    return [form, *(" " * _HELP_COLUMN + line for line in told)]


if __name__ == "__main__":
    sys.exit(run())
