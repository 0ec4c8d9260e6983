"""Directories of earlier installations, as `migrate` finds them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.command import Ctl


def earlier(home: Path) -> Path:
    """Data where it used to be."""
    path = home / "memory-tdai"
    (path / "conversations").mkdir(parents=True)
    (path / "conversations" / "2026-01-01.jsonl").write_text("{}\n")
    return path


def test_what_nothing_uses_is_moved_once(ctl: Ctl, home: Path) -> None:
    """Said first, then done; a second run has nothing to do; the Gateway finds the data in its new place."""
    old, new = earlier(home), Path(ctl.root) / "memory-tdai"
    plan = ctl("migrate", "--dry-run", "--json").data
    assert plan["changes"] == [f"move {old} to {new}"]
    assert old.is_dir()
    assert ctl("migrate", "--json").data["changes"] == plan["changes"]
    assert (new / "conversations" / "2026-01-01.jsonl").read_text() == "{}\n"
    assert new.stat().st_mode & 0o077 == 0
    assert not old.exists()
    assert ctl("migrate").out == "nothing to do\n"
    assert ctl.start()["data_dir"] == str(new)


def test_what_is_used_stays_and_its_user_is_named(ctl: Ctl, home: Path) -> None:
    """A Gateway of ours that runs there, and any process with a file open there."""
    old = earlier(home)
    gateway = ctl.start()
    assert gateway["data_dir"] == str(old)
    kept = ctl("migrate", "--json")
    assert kept.code == 1
    assert kept.json["data"]["kept"][0]["path"] == str(old)
    daemon = ctl.status()["daemon"]["pid"]
    assert any(f"pid {pid} " in kept.json["errors"][0]["message"] for pid in (gateway["pid"], daemon))
    assert ctl("stop").code == 0
    program = "import sys; f = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", program, str(old / "conversations" / "2026-01-01.jsonl")]
    with subprocess.Popen(words, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        assert f"pid {reader.pid}" in ctl("migrate", "--json").json["errors"][0]["message"]
        reader.communicate()
    assert old.is_dir()
    assert ctl("migrate").code == 0


def test_of_two_the_new_one_stays(ctl: Ctl, home: Path) -> None:
    """Both present: neither is touched, and both are named."""
    old, new = earlier(home), Path(ctl.root) / "memory-tdai"
    new.mkdir(parents=True)
    done = ctl("migrate", "--json")
    assert done.code == 1
    assert str(old) in done.json["errors"][0]["message"]
    assert str(new) in done.json["errors"][0]["message"]
    assert old.is_dir() and new.is_dir()


def test_links(ctl: Ctl, home: Path) -> None:
    """A link to the new place is removed, a link to data elsewhere stays."""
    new, elsewhere = Path(ctl.root) / "memory-tdai", home / "elsewhere"
    new.mkdir(parents=True)
    elsewhere.mkdir()
    (home / "memory-tdai").symlink_to(new)
    (home / "tdai-memory-openclaw-plugin").symlink_to(elsewhere)
    done = ctl("migrate", "--json").json
    assert done["data"]["changes"] == [f"remove the link {home / 'memory-tdai'}"]
    assert [k["path"] for k in done["data"]["kept"]] == [str(home / "tdai-memory-openclaw-plugin")]
    assert not (home / "memory-tdai").is_symlink()
    assert elsewhere.is_dir()
    assert json.dumps(done)


def test_what_a_variable_asks_for_is_left_alone(ctl: Ctl, home: Path) -> None:
    """Who says where the data is means it."""
    old = earlier(home)
    assert ctl("migrate", env={"TDAI_DATA_DIR": str(old)}).out == "nothing to do\n"
    assert old.is_dir()
