"""The kept daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kept import Kept


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    """A root with a daemon of this test's own; nothing of it is left afterwards."""
    home = tmp_path / "home"
    home.mkdir()
    daemon = Kept(tmp_path / "root", home)
    yield daemon
    daemon.close()
