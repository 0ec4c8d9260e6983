"""One running root that the tests of the contract look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import processes
from tests.support.command import Ctl


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ctl]:
    """A root with one embedded Gateway, for tests that leave it as they found it."""
    directory = tmp_path_factory.mktemp("shared")
    home, root = directory / "home", directory / "root"
    home.mkdir(mode=0o700)
    command = Ctl(root, home)
    command.env["MEMORY_TENCENTDB_GATEWAY_PORT"] = str(processes.free_port())
    yield command
    processes.end_all(root)


@pytest.fixture
def running(shared_root: Ctl) -> Ctl:
    """The shared root with its Gateway READY, whatever the test before has done."""
    shared_root.start()
    return shared_root
