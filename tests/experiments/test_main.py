"""The console script: what it lists, what it refuses, and how errors look."""

import os
import pathlib
import subprocess
import sys
import types

import pytest

from kvlab.experiments import main
from kvlab.experiments.flags import command_flags

COMMANDS = {"fetch", "generate", "logits", "report", "rerun", "roofline", "sweep", "tokenizers"}
COMMANDS |= {"verify"}


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if "COMPIL" not in k}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=inherited | environment,
        check=False,
    )


def command(action, **extra) -> types.ModuleType:
    """A command module that does what a test wants."""
    module = types.ModuleType("kvlab.experiments.probe")
    module.__doc__ = "Probe errors.\n"
    module.FLAGS = command_flags("slots")
    module.main = action
    for name, value in extra.items():
        setattr(module, name, value)
    return module


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(main, "_keep_compiled_programs", lambda: None)


def test_alone_it_lists_every_command_with_one_line_each(kvlab):
    for arguments in ([], ["--help"], ["help"]):
        shown = kvlab(*arguments)
        assert shown.status == 0
        assert not shown.err
        lines = shown.out.split("commands:\n")[1].split("\n\n")[0].splitlines()
        listed = dict(line.split(maxsplit=1) for line in lines)
        assert set(listed) >= COMMANDS
        assert all(len(description) > 10 for description in listed.values())
        assert all(len(line) <= 100 for line in lines)


def test_an_unknown_command_names_the_nearest(kvlab):
    refused = kvlab("generat")
    assert refused.status == 2
    assert refused.error == "kvlab: there is no command 'generat'; did you mean 'generate'?"
    assert "'tokenizers'" in kvlab("--tokenizer").error


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_shows_the_commands_own_flags_only(kvlab, name):
    shown = kvlab(name, "--help")
    assert shown.status == 0
    assert shown.out.startswith(f"usage: kvlab {name}")
    flags = {line.split()[0].split("=")[0] for line in shown.out.splitlines() if "  --" in line}
    flags = {flag for flag in flags if flag.startswith("--")}
    assert flags == {f"--{flag}" for flag in sys.modules[f"kvlab.experiments.{name}"].FLAGS}
    assert ("--prompt" in flags) == (name == "generate")
    assert "--verbosity" not in flags


def test_a_wrong_flag_names_the_nearest(kvlab):
    refused = kvlab("generate", "--promt=x")
    assert refused.status == 2
    assert refused.error == "kvlab generate: there is no flag --promt; nearest: --prompt"


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--placement=pagd", "legal values: recompute, contiguous, paged"),
        ("--storage=float8", "legal values: float32, bfloat16"),
        ("--attention=mla", "legal values: mha, gqa, gqa:K (K KV heads, such as gqa:2), mqa"),
        ("--attention=mha,gqa", "this command runs one point"),
        ("--implementation=flash", "legal values: reference, chunked"),
        ("--weights=int3", "legal values: float32, bfloat16, int8, int4"),
        ("--page_size=0", "a whole number, 1 or more"),
        ("--slots=two", "a whole number, 1 or more"),
        ("--temperature=warm", "a number is wanted"),
        ("--json=perhaps", "legal values: true, false"),
        ("--max_tokens", "Missing value"),
    ],
)
def test_an_illegal_value_lists_the_legal_ones(kvlab, flag, told):
    refused = kvlab("generate", flag)
    assert refused.status == 2
    assert refused.error.startswith("kvlab generate: ")
    assert flag.split("=")[0].strip("-") in refused.error
    assert told in refused.error


def test_arguments_that_a_command_does_not_take_are_refused(kvlab):
    refused = kvlab("generate", "Hello there")
    assert refused.status == 2
    assert "'Hello there'" in refused.error


def test_flags_may_follow_arguments_and_start_from_defaults_each_time():
    seen = []
    module = command(lambda argv: seen.append((argv[1:], module.FLAGS.slots)), ARGUMENTS="X")
    assert main.execute(module, ["a", "--slots=5", "b"]) == 0
    assert main.execute(module, []) == 0
    assert seen == [(["a", "b"], 5), ([], None)]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\n  b"), "a b"),
        (FileNotFoundError(2, "No such file or directory", "/x/y"), "/x/y: No such file or dir"),
        (FileNotFoundError("no tokenizer at x"), "no tokenizer at x"),
        (MemoryError(), "MemoryError"),
        (main.FetchError("get it"), "get it"),
        (RuntimeError("RESOURCE_EXHAUSTED: allocating 9 bytes."), "fewer slots"),
        (RuntimeError("INTERNAL: Out of memory allocating 9 bytes."), "fewer slots"),
    ],
)
def test_an_error_of_the_user_or_the_machine_is_one_line(capsys, error, line):
    def fail(argv):
        raise error

    assert main.execute(command(fail), []) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert line in err
    assert "Traceback" not in err
    if not isinstance(error, RuntimeError) or isinstance(error, main.FetchError):
        assert main.execute(command(fail), ["--debug"]) == 1
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [TypeError("x"), AssertionError("x"), RuntimeError("x")])
def test_a_fault_of_the_program_keeps_its_traceback(error):
    def fail(argv):
        raise error

    with pytest.raises(type(error)):
        main.execute(command(fail), [])


def test_an_interrupt_is_one_line(capsys):
    def fail(argv):
        raise KeyboardInterrupt

    assert main.execute(command(fail), []) == 130
    assert capsys.readouterr().err == "kvlab probe: interrupted\n"


def test_the_status_of_a_command_is_the_exit_status():
    assert main.execute(command(lambda argv: 3), []) == 3


def test_listing_and_help_import_no_jax():
    code = (
        "import sys; from kvlab.experiments import main; main.run([]); "
        f"[main.run([name, '--help']) for name in {sorted(COMMANDS)}]; "
        "print(sorted({'jax', 'flax', 'matplotlib'} & set(sys.modules)))"
    )
    assert python("-c", code).stdout.splitlines()[-1] == "[]"


def test_a_command_is_also_a_module():
    shown = python("-m", "kvlab.experiments.fetch", "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: kvlab fetch [smollm2-135m] [--flag=value ...]\n")
    refused = python("-m", "kvlab.experiments.report", "--ot=x")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "kvlab report: there is no flag --ot; nearest: --out\n"


def test_a_reader_that_leaves_early_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlab.experiments.main"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=600) == 141


def test_compiled_programs_are_kept_in_the_cache_folder(tmp_path):
    code = (
        "from kvlab.experiments import main; main._keep_compiled_programs(); import jax; "
        "jax.jit(lambda x: x + 7)(1.0); print(jax.config.jax_compilation_cache_dir)"
    )
    for _ in range(2):
        done = python("-c", code, KVLAB_CACHE=str(tmp_path))
        assert done.stdout.strip() == str(tmp_path / "xla")
        assert not done.stderr
        (entry,) = (tmp_path / "xla").glob("*lambda*-cache")
        entry.write_bytes(entry.read_bytes()[:20])  # a damaged entry is no error either


def test_a_cache_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    code = "import os; from kvlab.experiments import main; main._keep_compiled_programs(); "
    code += "print('JAX_COMPILATION_CACHE_DIR' in os.environ)"
    done = python("-c", code, KVLAB_CACHE=str(tmp_path / "file"))
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_every_command_module_is_listed_and_nothing_else():
    folder = pathlib.Path(main.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {
        "__init__",
        "flags",
        "main",
        "run_folder",
        "simulated",
    }
    assert set(main.commands()) == modules
