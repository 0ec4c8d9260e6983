"""The Gateway's own file, as the daemon takes it: key, port, drift, settings that pay, and files that do not parse."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.fault.test_guards import fake_node, package
from tests.support.kept import Kept


def config(kept: Kept) -> Path:
    """Where the file of "default" is."""
    path = kept.root / "memory-tdai" / "tdai-gateway.json"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return path


def test_key_and_port_of_the_file_are_taken(kept: Kept) -> None:
    """server.apiKey becomes the key that clients find; server.port is a port that was asked for."""
    kept.write('[gateway.default]\nkind = "embedded"\n')
    config(kept).write_text(json.dumps({"server": {"port": kept.port, "apiKey": "from-the-file"}}))
    kept.start()
    assert kept.gateway()["port"] == kept.port
    assert (kept.root / "run" / "default.key").read_text().strip() == "from-the-file"


def test_drift_names_the_keys_and_restart_ends_it(kept: Kept) -> None:
    """A changed file, a changed supervisor.toml: named in status until `restart`, also after adoption."""
    kept.write('[gateway.default]\nkind = "embedded"\n')
    config(kept).write_text(json.dumps({"server": {"port": kept.port}}))
    kept.start()
    assert kept.gateway()["drift"] == []
    config(kept).write_text(json.dumps({"server": {"port": kept.port}, "llm": {"model": "new"}}))
    kept.write('[gateway.default]\nkind = "embedded"\nhost = "localhost"\n')
    assert kept.gateway()["drift"] == ["gateway.default.host", "llm.model"]
    kept.kill()
    kept.start()
    assert kept.gateway()["origin"] == "adopted"
    assert kept.gateway()["drift"] == ["gateway.default.host", "llm.model"]
    assert kept.ask("restart")["ok"]
    assert kept.gateway()["drift"] == []


def test_a_file_that_does_not_parse_is_fatal_with_its_place(kept: Kept) -> None:
    """Never silently ignored, never overwritten."""
    kept.write(f'[gateway.default]\nkind = "embedded"\nport = {kept.port}\n')
    config(kept).write_text('{"server": {"apiKey": "k",}}')
    kept.start(ready=False)
    assert "line 1 column" in kept.wait(state="FATAL")["cause"]
    assert config(kept).read_text() == '{"server": {"apiKey": "k",}}'
    config(kept).write_text("{}")
    assert kept.ask("start")["ok"]


def test_settings_that_pay_are_written_only_where_nobody_chose(kept: Kept, tmp_path: Path) -> None:
    """For kind node on sqlite without embeddings: bm25 off unless chosen, recall by keyword; 0600; the rest kept."""
    node = fake_node(tmp_path / "bin", "v22.16.0")
    kept.write(f'[gateway.default]\nkind = "node"\nnode = "{node}"\nport = {kept.port}\n')
    config(kept).write_text('{"memory": {"bm25": {"enabled": true}, "mine": 1}}')
    kept.start(TDAI_INSTALL_DIR=str(package(tmp_path / "pkg")))
    written = json.loads(config(kept).read_text())
    assert written == {"memory": {"bm25": {"enabled": True}, "mine": 1, "recall": {"strategy": "keyword"}}}
    assert stat.S_IMODE(config(kept).stat().st_mode) == 0o600
    assert kept.gateway()["drift"] == []
    words = [sys.executable, "-m", "tdai_supervisor", "--root", str(kept.root), "config", "show", "--origin", "--json"]
    shown = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)["data"]["values"]
    assert "it pays" in shown["memory.recall.strategy"]["origin"]
    assert shown["memory.bm25.enabled"]["origin"] == str(config(kept))


def test_two_gateways_nobody_gave_a_port_get_one_each(kept: Kept) -> None:
    """Neither bumps into the other, and both keep theirs."""
    kept.write('[gateway.default]\nkind = "embedded"\n[gateway.work]\nkind = "embedded"\n')
    kept.start()
    kept.wait(name="work", state="READY")
    ports = {kept.gateway()["port"], kept.gateway("work")["port"]}
    assert len(ports) == 2
    assert kept.gateway("work")["restarts"] == 0
    kept.end()
    kept.start()
    kept.wait(name="work", state="READY")
    assert {kept.gateway()["port"], kept.gateway("work")["port"]} == ports


def test_three_snapshots_are_kept(kept: Kept) -> None:
    """The newest three, each a complete archive that only its owner reads."""
    kept.write(f'[gateway.default]\nkind = "embedded"\nport = {kept.port}\n')
    kept.start()
    folder = kept.root / "snapshots"
    folder.mkdir(mode=0o700)
    for day in (1, 2, 3):
        (folder / f"default-2001010{day}T030000Z.tar.gz").write_text("old")
    names = kept.ask("snapshot")["data"]["default"]
    assert names[:2] == ["default-20010102T030000Z.tar.gz", "default-20010103T030000Z.tar.gz"]
    assert len(names) == 3
    with tarfile.open(folder / names[-1]) as archive:
        assert {"manifest.json", "data/memory.db"} <= set(archive.getnames())
    assert stat.S_IMODE((folder / names[-1]).stat().st_mode) == 0o600
