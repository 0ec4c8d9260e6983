"""Which version of the package runs and which is installed."""

from __future__ import annotations

import json
from pathlib import Path

from tdai_supervisor import __version__
from tests.fault.test_guards import fake_node, package
from tests.support.kept import Kept


def test_d7_an_upgrade_under_a_running_gateway_shows(kept: Kept, tmp_path: Path) -> None:
    """running is what was there at the spawn, also after adoption; installed is what is there now; restart ends it."""
    install = package(tmp_path / "pkg")
    (install / "package.json").write_text(json.dumps({"version": "1.0.1"}))
    node = fake_node(tmp_path / "bin", "v22.16.0")
    kept.write(f'[gateway.default]\nkind = "node"\nnode = "{node}"\nport = {kept.port}\n')
    kept.start(TDAI_INSTALL_DIR=str(install))
    assert kept.gateway()["version"] == {"running": "1.0.1", "installed": "1.0.1"}
    (install / "package.json").write_text(json.dumps({"version": "1.0.2"}))
    assert kept.gateway()["version"] == {"running": "1.0.1", "installed": "1.0.2"}
    kept.kill()
    kept.start(TDAI_INSTALL_DIR=str(install))
    assert kept.gateway()["origin"] == "adopted"
    assert kept.gateway()["version"] == {"running": "1.0.1", "installed": "1.0.2"}
    assert kept.ask("restart")["ok"]
    assert kept.gateway()["version"] == {"running": "1.0.2", "installed": "1.0.2"}
    assert kept.ask("stop")["ok"]
    assert kept.gateway()["version"] == {"running": None, "installed": "1.0.2"}


def test_the_embedded_gateway_has_the_version_of_this_program(kept: Kept) -> None:
    """An upgrade of the program is one of the embedded Gateway."""
    kept.write(f'[gateway.default]\nkind = "embedded"\nport = {kept.port}\n')
    kept.start()
    assert kept.gateway()["version"] == {"running": __version__, "installed": __version__}


def test_a_command_has_no_version(kept: Kept) -> None:
    """Nobody knows what a command runs."""
    kept.settings()
    kept.start()
    assert kept.gateway()["version"] == {"running": None, "installed": None}
