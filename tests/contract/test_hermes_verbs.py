"""`hermes`: profiles found, plugin linked, provider set, leftovers of today's installer removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import Ctl


@pytest.fixture
def hermes(home: Path) -> Path:
    """A Hermes home with two profiles."""
    path = home / ".hermes"
    (path / "profiles" / "work").mkdir(parents=True)
    (path / "config.yaml").write_text("# mine\nmemory:\n  provider: tdai  # old\n")
    (path / "profiles" / "work" / "config.yaml").write_text("model: {default: y}\n")
    (path / ".env").write_text("A=1\nMEMORY_TENCENTDB_GATEWAY_CMD='cd x && node'\nB=2\n")
    return path


def test_enable_and_disable_all(ctl: Ctl, hermes: Path) -> None:
    """Linked and set in every profile, the old name migrated, the old line gone; a dry run changes nothing."""
    before = {p: p.read_text() for p in hermes.rglob("*") if p.is_file()}
    dry = ctl("hermes", "enable", "--all", "--dry-run", "--json")
    assert dry.code == 0
    assert len(dry.data["changes"]) == 5
    assert {p: p.read_text() for p in hermes.rglob("*") if p.is_file()} == before
    done = ctl("hermes", "enable", "--all", "--json")
    assert [p["enabled"] for p in done.data["profiles"]] == [True, True]
    assert (hermes / "plugins" / "memory_tencentdb").is_symlink()
    assert (hermes / "config.yaml").read_text() == "# mine\nmemory:\n  provider: memory_tencentdb  # old\n"
    assert (hermes / ".env").read_text() == "A=1\nB=2\n"
    assert ctl("hermes", "enable", "--all", "--json").data["changes"] == []
    assert ctl("hermes", "disable", "--profile", "work").code == 0
    states = {p["name"]: p["enabled"] for p in ctl("hermes", "list", "--json").data["profiles"]}
    assert states == {"default": True, "work": False}


def test_list_names_what_is_wrong(ctl: Ctl, hermes: Path) -> None:
    """A cloned profile without plugin, a broken link, an old copy, an old name."""
    (hermes / "profiles" / "work" / "config.yaml").write_text("memory: {provider: memory_tencentdb}\n")
    (hermes / "plugins").mkdir()
    (hermes / "plugins" / "memory_tencentdb").symlink_to("/nonexistent/plugin")
    profiles = {p["name"]: p for p in ctl("hermes", "list", "--json").data["profiles"]}
    assert any("no plugin" in n for n in profiles["work"]["notes"])
    assert any("which is gone" in n for n in profiles["default"]["notes"])
    assert any("does not find" in n for n in profiles["default"]["notes"])
    assert ctl("hermes", "enable").code == 0


def test_another_provider_is_moved_aside_only_when_asked(ctl: Ctl, hermes: Path) -> None:
    """A directory that is not ours is never overwritten."""
    old = hermes / "plugins" / "memory_tencentdb"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text("# register_memory_provider: old, with a watchdog")
    refused = ctl("hermes", "enable")
    assert refused.code == 1
    assert "--replace" in refused.err
    assert old.is_dir()
    assert ctl("hermes", "enable", "--replace").code == 0
    assert list((hermes / "memory_tencentdb").glob("replaced-*/__init__.py"))
    assert old.is_symlink()


def test_the_bundled_link_is_found_and_removed(ctl: Ctl, hermes: Path, tmp_path: Path) -> None:
    """It would win over ours: a dry run names it, enable removes it; a real directory stays."""
    agent = tmp_path / "agent"
    link = agent / "plugins" / "memory" / "memory_tencentdb"
    link.parent.mkdir(parents=True)
    link.symlink_to("/somewhere")
    env = {"HERMES_AGENT_DIR": str(agent)}
    assert str(link) in ctl("hermes", "enable", "--dry-run", env=env).out
    assert link.is_symlink()
    assert ctl("hermes", "enable", env=env).code == 0
    assert not link.is_symlink()


def test_mistakes(ctl: Ctl, home: Path) -> None:
    """No Hermes, an unknown profile, a broken config.yaml: one sentence, nothing changed."""
    assert "there is no" in ctl("hermes", "enable").err
    (home / ".hermes").mkdir()
    (home / ".hermes" / "config.yaml").write_text("memory: {provider\n: [")
    for words in (("enable",), ("enable", "--profile", "nobody")):
        done = ctl("hermes", *words)
        assert done.code == 1
        assert "Traceback" not in done.err
    assert (home / ".hermes" / "config.yaml").read_text() == "memory: {provider\n: ["
