"""Versions of the npm package: complete ones beside the install directory, which is a link to one of them.

Invariants: a version is never changed once it has its name, so a Gateway that runs keeps its files; the link is
replaced by one rename; what lay at the install directory and is not of ours is moved aside, never deleted; a version
goes only when it is neither current nor the one before, and no process of ours works in it.

    DIR                            link to DIR.versions/VERSION-DIGEST
    DIR.versions/VERSION-DIGEST/   complete, with .memory-tencentdb.json
    DIR.versions/before-TIME       what lay at DIR before there were versions
    DIR.versions/.stage-XXXXXX/    being made; whoever holds the lock may clear it away
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tdai_supervisor.decide.launch import INSTALLED
from tdai_supervisor.host import disk, locks, node, tree

ASIDE, STAGE = "before-", ".stage-"
END_WITHIN = 10.0  # s for leftovers to go


class Versions:
    """The versions of one install directory. Everything that changes them needs `held`."""

    def __init__(self, install_dir: str) -> None:
        self.link = install_dir
        self.folder = install_dir + ".versions"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, with what a killed run left behind cleared away. Raises BusyError, OSError."""
        disk.private_dir(self.folder)
        with locks.exclusive(os.path.join(self.folder, ".lock")):
            self._heal()
            yield

    def _heal(self) -> None:
        # First the processes: one that still writes would bring back what is removed.
        tree.end_below(self.folder, END_WITHIN)
        names = sorted(os.listdir(self.folder))
        for name in names:
            if name.startswith(STAGE):
                shutil.rmtree(os.path.join(self.folder, name))
        aside = [n for n in names if n.startswith(ASIDE)]
        if aside and not os.path.lexists(self.link):
            self._point(aside[-1])  # cut short between moving it aside and putting the link there

    def stage(self) -> str:
        """A new private directory to make a version in."""
        return tempfile.mkdtemp(prefix=STAGE, dir=self.folder)

    def path(self, name: str) -> str:
        """Where the version of a name lies, or would lie."""
        return os.path.join(self.folder, name)

    def find(self, integrity: str, abi: str | None) -> str | None:
        """The name of the complete version that was made from that source, for a Node with that ABI, and is whole."""
        for name in sorted(os.listdir(self.folder)):
            about = self._about(name)
            made_for = about.get("node")
            if about.get("integrity") == integrity and isinstance(made_for, dict) and made_for.get("abi") == abi:
                with contextlib.suppress(node.NodeError):
                    node.package(self.path(name))
                    return name
        return None

    def free(self, name: str) -> str:
        """name, or where a damaged version has it, the next that nobody has."""
        free, n = name, 1
        while os.path.lexists(self.path(free)):
            n += 1
            free = f"{name}.{n}"
        return free

    def _about(self, name: str) -> dict[str, Any]:
        if name.startswith((".", ASIDE)):
            return {}
        try:
            return disk.read_object(os.path.join(self.path(name), INSTALLED)) or {}
        except (OSError, ValueError):
            return {}

    def complete(self, made: str, name: str, about: Mapping[str, Any]) -> None:
        """Give what was made its name, with what is known about it. Raises OSError."""
        disk.write(os.path.join(made, INSTALLED), json.dumps(about, indent=1) + "\n", durable=True)
        os.rename(made, self.path(name))

    @property
    def current(self) -> str | None:
        """The name of the version in use; None where there is none, or what lies there is not of ours."""
        try:
            target = os.path.join(os.path.dirname(self.link), os.readlink(self.link))
        except OSError:
            return None
        folder, name = os.path.split(os.path.normpath(target))
        return name if folder == os.path.normpath(self.folder) else None

    def switch(self, name: str) -> str | None:
        """Make that version the current one; the name of what was there before, if anything. Raises OSError."""
        before = self.current
        aside = None
        if before is None and os.path.lexists(self.link):
            before = aside = f"{ASIDE}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
            os.rename(self.link, self.path(aside))
        try:
            self._point(name)
        except OSError:
            if aside is not None:
                os.rename(self.path(aside), self.link)
            raise
        return before

    def _point(self, name: str) -> None:
        fresh = os.path.join(self.folder, ".link")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        # Relative, so that a root that is moved as a whole still works.
        os.symlink(os.path.join(os.path.basename(self.folder), name), fresh)
        os.replace(fresh, self.link)
        directory = os.open(os.path.dirname(self.link), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def prune(self, keep: str | None) -> list[str]:
        """Remove versions of ours but the current one, `keep`, and those a process works in; their names."""
        gone = []
        for name in sorted(os.listdir(self.folder)):
            if name in (keep, self.current) or not self._about(name):
                continue
            if tree.works_below(self.path(name)):
                continue
            # Renamed first: half a version must not look like one.
            stale = os.path.join(self.folder, f"{STAGE}old-{name}")
            os.rename(self.path(name), stale)
            shutil.rmtree(stale)
            gone.append(name)
        return gone


def safe_version(version: object) -> str | None:
    """A version as part of a file name, or None where it is no version."""
    return version if isinstance(version, str) and re.fullmatch(r"\d[0-9A-Za-z.+-]{0,63}", version) else None
