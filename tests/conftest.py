"""Fixtures for every ring: a root that leaves nothing behind, and the command to run on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.command import Ctl
from tests.support.kept import Kept


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home directory."""
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A supervisor root that does not exist yet; whatever the test leaves running in it is ended."""
    path = tmp_path / "root"
    yield path
    processes.end_all(path)


@pytest.fixture
def ctl(root: Path, home: Path) -> Ctl:
    """The command on `root`, whose Gateways take any free port unless the test asks for one."""
    command = Ctl(root, home)
    command.env["MEMORY_TENCENTDB_GATEWAY_PORT"] = str(processes.free_port())
    return command


@pytest.fixture
def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    return processes.free_port()


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The checkout these tests belong to."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def kept(root: Path, home: Path) -> Iterator[Kept]:
    """A root with a foreground daemon of this test's own; nothing of it is left afterwards."""
    daemon = Kept(root, home)
    yield daemon
    daemon.close()
