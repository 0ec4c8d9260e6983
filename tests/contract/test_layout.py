"""The shape of the code: who may import whom, what stays small, what the documents promise about it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tdai_supervisor.decide.table import diagram

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = {"tdai_supervisor": CHECKOUT / "tdai_supervisor", "memory_tencentdb": CHECKOUT / "provider/memory_tencentdb"}
MODULES = sorted(path for directory in PACKAGES.values() for path in directory.rglob("*.py"))
MAX_LINES = 400

# ring -> the rings whose modules it may import ("." is the package itself: its version)
RINGS = {
    "decide": {"decide"},
    "host": {"decide", "host"},
    "engine": {"decide", "host", "engine", "gwconfig", "."},
    "client": {"decide"},
    "gwconfig": {"decide"},
    "cli": {"cli", "decide", "client", "gwconfig", "."},
    "embedded": {"embedded", "."},
    "__main__": {"cli"},
    ".": set(),
    "memory_tencentdb": {"memory_tencentdb"},
}
# What these verbs may also reach, but only when they run: inside a function.
WHEN_NEEDED = {
    "tdai_supervisor.cli.lifecycle": {"host", "engine"},
    "tdai_supervisor.cli.service": {"host"},  # systemd, the atomic write
    "tdai_supervisor.cli.config": {"host"},  # the atomic write, the check call
    "tdai_supervisor.cli.doctor": {"host"},  # the check call
    "tdai_supervisor.cli.gateways": {"host"},  # who lives in a directory, who holds a port
    "tdai_supervisor.cli.kinds": {"host"},  # whether the package could run
    "tdai_supervisor.cli.package": {"host"},  # npm, Node, versions, the trial
    "tdai_supervisor.cli.hermes": {"host"},  # the atomic write
    "tdai_supervisor.cli.legacy": {"host"},  # who uses a directory
    "tdai_supervisor.cli.tables": {"host"},  # the atomic write, the lock
}
# Libraries: ring -> distribution -> only inside a function?
LIBRARIES = {
    "host": {"filelock": False, "psutil": True, "requests": True},
    "embedded": {"aiohttp": False},
    "gwconfig": {"ruamel": True},
    "cli": {"ruamel": True, "termcolor": True, "tomlkit": True},
    "memory_tencentdb": {"requests": True},
}
# Modules of the host Hermes that the provider looks for while it runs in it.
HERMES = {"agent", "hermes_cli", "hermes_constants", "plugins", "utils"}
# decide has no clock, no chance, no files, no sockets, no processes.
IMPURE = {
    *("time", "datetime", "random", "secrets", "uuid", "os", "io", "pathlib", "tempfile", "shutil", "glob", "socket"),
    *("subprocess", "threading", "asyncio", "multiprocessing", "fcntl", "select", "platform", "http", "urllib"),
}


class Import(NamedTuple):
    """One import statement: what, at which line, and whether it waits inside a function (or for a type checker)."""

    module: str
    line: int
    late: bool
    for_types: bool


def name_of(path: Path) -> str:
    """The dotted name of a module file."""
    package = "tdai_supervisor" if path.is_relative_to(PACKAGES["tdai_supervisor"]) else "memory_tencentdb"
    parts = [package, *path.relative_to(PACKAGES[package]).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def ring_of(module: str) -> str | None:
    """The ring of a dotted name of ours, None for a library."""
    head, _, rest = module.partition(".")
    if head == "memory_tencentdb":
        return head
    return None if head != "tdai_supervisor" else rest.partition(".")[0] or "."


def imports_of(path: Path) -> Iterator[Import]:
    """Every import statement of a module, with names resolved to modules of ours where there are such."""
    own = name_of(path)
    package = own if path.name == "__init__.py" else own.rpartition(".")[0]

    def resolve(node: ast.ImportFrom) -> list[str]:
        base = node.module or ""
        if node.level:
            up = package.split(".")
            base = ".".join([*up[: len(up) - node.level + 1], *([base] if base else [])])
        inner = [f"{base}.{alias.name}" for alias in node.names]
        known = {name_of(p) for p in MODULES}
        return [full if full in known else base for full in inner]

    def walk(node: ast.AST, late: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, late, for_types) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from (Import(name, child.lineno, late, for_types) for name in resolve(child))
            else:
                checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from walk(child, late or function, for_types or checking)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False, False)


def is_standard(module: str) -> bool:
    """Whether a module is of the standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


def complaints(path: Path) -> Iterator[str]:
    """What is wrong with the imports of a module."""
    own, ring = name_of(path), ring_of(name_of(path))
    assert ring in RINGS, f"{path}: a ring that design does not know"
    for found in imports_of(path):
        where, other = f"{path.relative_to(CHECKOUT)}:{found.line}", ring_of(found.module)
        if other is not None:
            if other in RINGS[ring] or ((found.late or found.for_types) and other in WHEN_NEEDED.get(own, ())):
                continue
            yield f"{where}: {ring} imports {found.module}"
        elif is_standard(found.module):
            if ring == "decide" and found.module.partition(".")[0] in IMPURE and found.module != "os.path":
                yield f"{where}: decide imports {found.module}"
        elif not found.for_types:
            head = found.module.partition(".")[0]
            if ring == "memory_tencentdb" and head in HERMES and found.late:
                continue
            if head not in LIBRARIES.get(ring, {}):
                yield f"{where}: {ring} imports the library {head}"
            elif LIBRARIES[ring][head] and not found.late:
                yield f"{where}: {head} must be imported where it is used"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_stay_in_their_ring(path: Path) -> None:
    """decide <- host <- engine; cli <- decide, client, gwconfig; the provider stands alone on the standard library."""
    assert list(complaints(path)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tdai_supervisor/decide/x.py", "import time"),
        ("tdai_supervisor/decide/x.py", "from tdai_supervisor.host import disk"),
        ("tdai_supervisor/host/x.py", "from tdai_supervisor.engine import daemon"),
        ("tdai_supervisor/host/x.py", "import psutil"),
        ("tdai_supervisor/cli/x.py", "def f():\n    from tdai_supervisor.engine import daemon"),
        ("tdai_supervisor/engine/x.py", "import aiohttp"),
        ("provider/memory_tencentdb/x.py", "import requests"),
        ("provider/memory_tencentdb/x.py", "def f():\n    import filelock"),
        ("provider/memory_tencentdb/x.py", "from tdai_supervisor import client"),
    ],
)
def test_the_ring_test_can_fail(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Each forbidden kind of import is really found."""
    path = CHECKOUT / name
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda p, **k: text if p == path else read(p, **k))
    assert list(complaints(path)) != []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_size(path: Path) -> None:
    """No module is longer than what one sitting can read."""
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES, f"{path.relative_to(CHECKOUT)} has {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_docstring(path: Path) -> None:
    """A module says what it is for."""
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_no_soft_lock() -> None:
    """A lock that is only a file's existence is never used, not even as a fallback."""
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert "SoftFileLock" not in text, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("FileLock"):
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert keywords.get("fallback_to_soft") == "False", f"{path}:{node.lineno}"
                assert keywords.get("mode") == "384", f"{path}:{node.lineno}: a lock file must be 0600"


def test_architecture_shows_the_table() -> None:
    """docs/architecture.md holds exactly the diagram that the table prints."""
    assert f"```mermaid\n{diagram()}```\n" in (CHECKOUT / "docs/architecture.md").read_text(encoding="utf-8")
