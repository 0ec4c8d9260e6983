"""supervisor.toml as commands change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tdai_supervisor.cli import tables
from tdai_supervisor.decide.checks import SettingsError

WRITTEN = "# mine\n[gateway.default]   # the shared one\nport = 9000\n\n[policy]\nbackoff_max = 20\n"


def test_what_a_user_wrote_stays(tmp_path: Path) -> None:
    """A changed key changes its line only; a new Gateway gets a table of its own; the file is private."""
    path = tmp_path / "supervisor.toml"
    path.write_text(WRITTEN)
    tables.change(str(tmp_path), lambda d: tables.gateway(d, "default").update({"kind": "embedded"}))
    _, after, made = tables.change(str(tmp_path), lambda d: tables.gateway(d, "work").update({"port": 9001}))
    assert path.read_text() == after
    assert path.stat().st_mode & 0o777 == 0o600
    for line in WRITTEN.splitlines():
        assert line in after.splitlines()
    assert made.gateways["default"].kind == "embedded" and made.gateways["default"].port == 9000
    assert made.gateways["work"].port == 9001


def test_nothing_unusable_is_written(tmp_path: Path) -> None:
    """A change that the daemon could not start with is refused, and the file is as it was."""
    path = tmp_path / "supervisor.toml"
    path.write_text(WRITTEN)
    with pytest.raises(SettingsError, match="same port 9000"):
        tables.change(str(tmp_path), lambda d: tables.gateway(d, "work").update({"port": 9000}))
    assert path.read_text() == WRITTEN


def test_a_broken_file_is_left_alone(tmp_path: Path) -> None:
    """A file that is no TOML is named, and never overwritten."""
    path = tmp_path / "supervisor.toml"
    path.write_text("[gateway\n")
    with pytest.raises(SettingsError, match=r"cannot read supervisor\.toml"):
        tables.change(str(tmp_path), lambda d: None)
    assert path.read_text() == "[gateway\n"


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    """The text that would be written is returned, and no file is made."""
    before, after, _ = tables.change(
        str(tmp_path / "root"), lambda d: tables.gateway(d, "work").update({"port": 9001}), dry_run=True
    )
    assert (before, after) == ("", "[gateway.work]\nport = 9001\n")
    assert not (tmp_path / "root").exists()
