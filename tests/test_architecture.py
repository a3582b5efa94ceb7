"""The rules of DESIGN section 1: which way imports run, what is packaged, how large files are."""

import ast
import configparser
import importlib
import pathlib
import re
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[1]
# Each may import those before it, and itself.
LAYERS = ("ops", "models", "research", "experiments")
MAX_LINES = 400
SOURCES = sorted(path for layer in LAYERS for path in (REPOSITORY / layer).rglob("*.py"))
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))


def name_of(path):
    return path.relative_to(REPOSITORY).as_posix()


def imports_of(path):
    """Dotted names that a file imports anywhere, inside functions and type checks too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: import kvlab.x, not a relative one"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


IMPORTS = {path: set(imports_of(path)) for path in SOURCES}


def importers_of(library):
    """Layers whose files import a library."""
    return {
        path.relative_to(REPOSITORY).parts[0]
        for path, names in IMPORTS.items()
        if any(name.split(".")[0] == library for name in names)
    }


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_run_one_way(path):
    layer = path.relative_to(REPOSITORY).parts[0]
    legal = LAYERS[: LAYERS.index(layer) + 1]
    for name in IMPORTS[path]:
        first, _, rest = name.partition(".")
        assert first not in LAYERS, f"{name_of(path)} imports {name}: write kvlab.{name}"
        if first == "kvlab":
            target = rest.split(".")[0]
            assert target in legal, f"{name_of(path)} imports {name}: {layer} may use {legal}"


def test_ops_stand_on_jax_alone():
    ops = [path for path in SOURCES if name_of(path).startswith("ops/")]
    used = {name.split(".")[0] for path in ops for name in IMPORTS[path]}
    assert used - sys.stdlib_module_names == {"jax", "jaxtyping", "kvlab", "numpy"}


@pytest.mark.parametrize(
    ("library", "layers"),
    [
        ("flax", {"models"}),
        ("absl", {"experiments"}),
        ("torch", {"experiments"}),
        ("transformers", {"experiments"}),
        ("llama_cpp", {"experiments"}),
        ("kvpress", set()),
    ],
)
def test_a_library_is_imported_in_its_layer_alone(library, layers):
    assert importers_of(library) == layers


def test_peers_are_imported_by_golden_scripts_peer_tests_and_peer_systems_alone():
    peers = {"torch", "transformers", "llama_cpp", "kvpress"}
    for path in SOURCES:
        if peers & {name.split(".")[0] for name in IMPORTS[path]}:
            assert path.parent.name == "peer_systems", name_of(path)
    for path in TESTS:
        text = path.read_text()
        if peers & {name.split(".")[0] for name in imports_of(path)}:
            assert path.parent.name == "goldens", name_of(path)
        if re.search(rf'importorskip\("({"|".join(peers)})"', text):
            assert "pytest.mark.peers" in text, name_of(path)


def test_no_two_files_of_the_library_import_each_other():
    """Module-level imports form no cycle, and none is hidden inside a function."""
    modules = {
        "kvlab." + ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path
        for path in SOURCES
        if not name_of(path).startswith("experiments/")  # commands load theirs when they run
    }
    needs = {
        path: {
            modules[known]
            for name in IMPORTS[path]
            for known in (name, name.rpartition(".")[0])
            if known in modules
        }
        for path in modules.values()
    }
    while needs:
        free = {path for path, others in needs.items() if not (others & needs.keys()) - {path}}
        assert free, f"these import each other: {sorted(map(name_of, needs))}"
        needs = {path: others for path, others in needs.items() if path not in free}


def test_setup_lists_every_folder_that_holds_python():
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    listed = setup["options"]["packages"].split()
    folders = {path.parent.relative_to(REPOSITORY) for path in SOURCES}
    assert sorted(listed) == sorted("kvlab." + ".".join(folder.parts) for folder in folders)
    mapping = dict(re.findall(r"(\S+) = (\S+)", setup["options"]["package_dir"]))
    assert mapping == {f"kvlab.{layer}": layer for layer in LAYERS}
    assert all((REPOSITORY / folder / "__init__.py").exists() for folder in folders)


def test_setup_lists_every_file_that_is_not_python():
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    packaged = {
        path
        for package, patterns in setup["options.package_data"].items()
        for pattern in patterns.split()
        for path in (REPOSITORY / pathlib.Path(*package.split(".")[1:])).glob(pattern)
    }
    present = {
        path
        for layer in LAYERS
        for path in (REPOSITORY / layer).rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    assert packaged == present


def test_the_library_is_one_namespace_of_these_files():
    for layer in LAYERS:
        module = importlib.import_module(f"kvlab.{layer}")
        assert pathlib.Path(module.__file__) == REPOSITORY / layer / "__init__.py"
    assert not (REPOSITORY / "kvlab").exists()


def test_typing_links_point_to_the_folders():
    links = REPOSITORY / ".typing" / "kvlab"
    assert sorted(link.name for link in links.iterdir()) == sorted(LAYERS)
    for layer in LAYERS:
        assert (links / layer).readlink() == pathlib.Path("../..") / layer
        assert (links / layer).resolve() == REPOSITORY / layer


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name_of)
def test_long_files_say_why(path):
    text = path.read_text()
    if text.count("\n") > MAX_LINES:
        reason = ast.get_docstring(ast.parse(text)) or ""
        assert f"Over {MAX_LINES} lines" in reason, (
            f"{name_of(path)} has {text.count(chr(10))} lines: split it, or say at its top "
            f'"Over {MAX_LINES} lines, because ..."'
        )


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_are_named_for_what_they_hold(path):
    assert not set(path.stem.split("_")) & {"utils", "util", "common", "helpers", "manager", "misc"}
