"""`gateway`, `profile` and `spool` as a user runs them: success, mistakes, no daemon, broken files, dry runs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from memory_tencentdb import spool
from memory_tencentdb.aside.ledger import Ledger, keep_dead_letter

from tests.support import processes
from tests.support.attached import Child
from tests.support.command import Ctl


@pytest.fixture
def hermes(home: Path, ctl: Ctl) -> Path:
    """A Hermes home with the profiles default, work and play; the first two have our plugin."""
    path = home / ".hermes"
    for name in ("work", "play"):
        (path / "profiles" / name).mkdir(parents=True)
        (path / "profiles" / name / "config.yaml").write_text("model: {default: y}\n")
    (path / "config.yaml").write_text("model: {default: x}\n")
    for words in ([], ["--profile", "work"]):
        assert ctl("hermes", "enable", *words).code == 0
    return path


def profiles(ctl: Ctl) -> dict[str, dict[str, Any]]:
    """`profile list`, by name."""
    return {p["name"]: p for p in ctl("profile", "list", "--json").data["profiles"]}


def test_gateway_add_list_remove(ctl: Ctl, hermes: Path) -> None:
    """Added it runs; NAME works with every verb; removed, its process is gone and its data kept."""
    default = ctl.start()
    dry = ctl("gateway", "add", "work", "--dry-run", "--json")
    assert dry.code == 0 and dry.data["changes"] and [g["name"] for g in ctl.status()["gateways"]] == ["default"]
    added = ctl("gateway", "add", "work", "--json")
    assert added.code == 0, added
    assert added.data["gateways"][0]["state"] == "READY"
    assert ctl("gateway", "add", "work", "--json").data["changes"] == [], "again: nothing to do"
    work = ctl.gateway("work")
    assert work["port"] != default["port"] and work["data_dir"] == str(Path(ctl.root) / "gateways" / "work")
    for words in (["status"], ["health"], ["logs"], ["restart"], ["stop"], ["start"], ["config", "path", "--gateway"]):
        assert ctl(*words, "work").code in (0, 3), words
    assert ctl.gateway("work")["port"] == work["port"]
    listed = {g["name"]: g for g in ctl("gateway", "list", "--json").data["gateways"]}
    assert listed["default"]["profiles"] == ["default", "work"] and listed["work"]["profiles"] == []
    pid = ctl.gateway("work")["pid"]
    assert ctl("gateway", "remove", "work", "--purge", "--dry-run", "--json").code == 0
    assert ctl("gateway", "remove", "work", "--json").code == 0
    assert not processes.alive(pid)
    assert [g["name"] for g in ctl.status()["gateways"]] == ["default"]
    assert ctl.record("work")["state"] == "STOPPED"
    assert os.listdir(work["data_dir"]), "its data is kept"
    assert "work" not in ctl.file("supervisor.toml")
    assert ctl.gateway()["pid"] == default["pid"]


def test_gateway_without_a_daemon(ctl: Ctl) -> None:
    """Written, not started; then started with the others, stopped and purged, without a daemon at the end."""
    added = ctl("gateway", "add", "work", "--json")
    assert added.code == 0 and "no daemon" in added.data["changes"][-1]
    assert processes.of_root(ctl.root) == []
    ctl.start()
    assert ctl.gateway("work")["state"] == "READY"
    assert ctl("stop").code == 0
    data = Path(ctl.root) / "gateways" / "work"
    snapshots = Path(ctl.root) / "snapshots"
    snapshots.mkdir()
    (snapshots / "work-20260101T030000Z.tar.gz").write_text("")
    (snapshots / "work-2-20260101T030000Z.tar.gz").write_text("of another")
    assert ctl("gateway", "remove", "work", "--purge").code == 0
    assert not data.exists()
    assert [p.name for p in snapshots.iterdir()] == ["work-2-20260101T030000Z.tar.gz"]
    assert ctl("gateway", "add", "wide", "--data-dir", ctl.home).code == 0
    refused = ctl("gateway", "remove", "wide", "--purge")
    assert refused.code == 1 and "lies in it" in refused.err and Path(ctl.home).is_dir()
    assert ctl("gateway", "remove", "wide").code == 0


def test_gateway_mistakes(ctl: Ctl, hermes: Path, free_port: int) -> None:
    """What can be known is refused before anything is written, with the one who is in the way."""
    default = ctl.start()
    before = Path(ctl.root, "supervisor.toml")
    data = default["data_dir"]
    for words, said in (
        (["add", "no/name"], "cannot use the Gateway name"),
        (["add", "daemon"], "cannot use the Gateway name"),
        (["add", "x", "--port", str(default["port"])], f"port {default['port']} is that of Gateway default"),
        (["add", "x", "--data-dir", data], f"(pid {default['pid']}, port {default['port']})"),
        (["add", "x", "--data-dir", f"{data}/below"], "of Gateway default"),
        (["remove", "default"], "cannot remove default"),
        (["remove", "nobody"], "configured are default"),
    ):
        done = ctl("gateway", *words)
        assert done.code != 0 and said in done.err and "Traceback" not in done.err, done
    assert not before.exists()
    assert ctl("gateway", "add", "x", "--port", "0").code == 2
    ctl.settings("[gateway.default]\nhots = 1\n")
    assert ctl("gateway", "add", "x").code == 6


def test_a_stranger_in_the_directory_is_named(ctl: Ctl, tmp_path: Path) -> None:
    """A Gateway that somebody else started there: refused at once, with its pid and port."""
    place = tmp_path / "place"
    port = processes.free_port()
    env = {"TDAI_GATEWAY_PORT": str(port), "TDAI_DATA_DIR": str(place), "HOME": ctl.home}
    other = subprocess.Popen([sys.executable, "-I", "-m", "tdai_supervisor.embedded"], env=env, stderr=subprocess.PIPE)
    try:
        processes.wait_for(lambda: not _free(port), 10)
        done = ctl("gateway", "add", "work", "--data-dir", str(place))
        assert done.code == 1 and f"pid {other.pid}, port {port}" in done.err
        done = ctl("gateway", "add", "work", "--port", str(port))
        assert done.code == 1 and f"taken by pid {other.pid}" in done.err
    finally:
        other.kill()
        other.communicate()


def _free(port: int) -> bool:
    from tdai_supervisor.host import ports

    return not ports.on("127.0.0.1", port)


def test_profile_use_own_and_back(ctl: Ctl, hermes: Path) -> None:
    """Own: started, proven apart, written 0600 with unknown keys kept; shared: the key goes, the Gateway stays."""
    ctl.start()
    file = hermes / "profiles" / "work" / "memory_tencentdb.json"
    file.write_text('{"mine": 1}')
    shared = profiles(ctl)
    assert shared["work"]["shared_with"] == ["default"] and shared["default"]["shared"]
    assert not shared["play"]["enabled"]
    assert ctl("profile", "use", "work", "own", "--dry-run", "--json").code == 0
    assert file.read_text() == '{"mine": 1}' and len(ctl.status()["gateways"]) == 1
    done = ctl("profile", "use", "work", "own", "--json")
    assert done.code == 0, done
    assert done.data["proof"] == {"gateways": ["work", "default"], "apart": True}
    assert "keep their Gateway until they end" in done.data["words"][-1]
    assert json.loads(file.read_text()) == {"mine": 1, "gateway": "work"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    mine = profiles(ctl)["work"]
    assert (mine["gateway"], mine["shared"], mine["address"]) == ("work", False, ctl.gateway("work")["url"])
    refused = ctl("gateway", "remove", "work")
    assert refused.code == 1 and "the profile work would have no memory" in refused.err
    assert ctl("profile", "use", "work", "shared").code == 0
    assert json.loads(file.read_text()) == {"mine": 1}
    assert "work" in [g["name"] for g in ctl.status()["gateways"]]
    assert ctl("profile", "use", "work", "own").code == 0, "again, with the Gateway that is there"
    assert ctl("gateway", "remove", "work", "--force").code == 0


def test_a_running_session_keeps_its_gateway(ctl: Ctl, hermes: Path) -> None:
    """What it says after the change is still where it was; the next session of that profile is where it is now."""
    ctl.start()
    ctl.env.pop("MEMORY_TENCENTDB_GATEWAY_PORT")
    work = hermes / "profiles" / "work"
    running = Child(ctl.root, work, "s1", "work")
    assert ctl("profile", "use", "work", "own").code == 0
    assert running.tell("turn zorblax said by the running one") == "kept"
    processes.wait_for(lambda: "zorblax" in running.tell("recall zorblax"), 10, "it is kept and found")
    after = Child(ctl.root, work, "s2", "work")
    assert {a["session"]: a["gateway"] for a in ctl.status()["attachments"]} == {"s1": "default", "s2": "work"}
    assert after.tell("turn quuxified said by the next one") == "kept"
    processes.wait_for(lambda: "quuxified" in after.tell("recall quuxified"), 10, "so is that")
    assert "quuxified" not in running.tell("recall quuxified")
    assert "zorblax said" not in after.tell("recall zorblax")
    assert running.end() == after.end() == 0


def test_profile_of_another_root_names_it(ctl: Ctl, hermes: Path) -> None:
    """Where the session would look into another root, the root is written beside the name."""
    ctl.start()
    plain = {k: v for k, v in ctl.env.items() if k != "MEMORY_TENCENTDB_ROOT"}
    ctl.env = plain
    assert ctl("profile", "use", "work", "own", "--root", ctl.root).code == 0
    written = json.loads((hermes / "profiles" / "work" / "memory_tencentdb.json").read_text())
    assert written == {"gateway": "work", "root": ctl.root}


def test_profile_mistakes(ctl: Ctl, hermes: Path) -> None:
    """Nothing is written for an unknown profile or Gateway, a broken file, an address, or what cannot be proven."""
    file = hermes / "profiles" / "work" / "memory_tencentdb.json"
    assert "cannot find the profile 'nobody'" in ctl("profile", "use", "nobody", "own").err
    assert "cannot find a Gateway named 'x'" in ctl("profile", "use", "work", "x").err
    file.write_text("{")
    assert "cannot read" in ctl("profile", "use", "work", "shared").err
    assert file.read_text() == "{"
    ctl.start()
    ctl("gateway", "add", "other")
    file.write_text('{"gateway_url": "http://127.0.0.1:9"}')
    assert "which would win" in ctl("profile", "use", "work", "other").err
    assert "which would win" in ctl("profile", "use", "work", "shared").err
    file.unlink()
    ctl("stop", "default")
    unproven = ctl("profile", "use", "work", "own")
    assert unproven.code == 1 and "Gateway default is STOPPED" in unproven.err
    assert not file.exists()


def left(home: Path, root: str, profile: str = "work") -> spool.Spool:
    """A registered spool with three waiting turns and one dead letter."""
    from memory_tencentdb.settings import read_settings

    settings = read_settings(str(home), {"MEMORY_TENCENTDB_ROOT": root}.get)
    one = spool.Spool(settings.spool)
    for n in range(4):
        assert one.append(spool.Record(f"id{n}", "s1", f"secret word {n}", "a", at=1e9 + n, session_id="s1"))
    ledger = Ledger(settings.spool)
    ledger.refresh()
    first = ledger.sessions["s1"][0]
    keep_dead_letter(settings.spool, ledger.load(first), "HTTP 400", 1, 1e9)
    ledger.mark(first, "dead", 1e9)
    spool.register(settings, profile)
    return one


def test_spool_list_show_replay_drop_retry(ctl: Ctl, hermes: Path) -> None:
    """Counted by profile; no words without --text; keys kept; what is dropped is named and counted."""
    left(hermes / "profiles" / "work", ctl.root)
    (listed,) = [s for s in ctl("spool", "list", "--json").data["spools"] if s["profile"] == "work"]
    assert (listed["waiting"], listed["dead_letters"], listed["gone"]) == (3, 1, False)
    assert listed["oldest_s"] > 1e8
    shown = ctl("spool", "show", "work", "--json")
    assert [r["id"] for r in shown.data["records"]] == ["id1", "id2", "id3"]
    assert "secret" not in shown.out and "secret" not in ctl("spool", "show", "work").out
    assert "secret word 1" in ctl("spool", "show", listed["path"], "--text").out
    dead = ctl("spool", "show", "work", "--dead", "--json").data["records"]
    assert [(r["id"], r["state"], r["error"]) for r in dead] == [("id0", "dead", "HTTP 400")]
    assert ctl("spool", "drop", "work", "id3", "--dry-run").code == 0
    assert ctl("spool", "drop", "work", "id2", "nope").code == 1
    assert ctl("spool", "drop", "work").code == 2
    assert len(ctl("spool", "show", "work", "--json").data["records"]) == 3
    assert ctl("spool", "drop", "work", "id3", "--json").data["spools"][0]["removed"] == 1
    assert ctl("spool", "replay", "work").code == 2
    assert ctl("spool", "replay", "work", "id0", "--json").data["changes"]
    assert ctl("spool", "show", "work", "--dead", "--json").data["records"] == []
    waits = ctl("spool", "retry", "work", "--timeout", "1")
    assert waits.code == 1 and "3 turns wait" in waits.err, "no Gateway runs"
    ctl.start()
    assert ctl("spool", "retry", "work", "--json").data["spools"][0]["waiting"] == 0
    assert ctl("spool", "list", "--json").data["spools"][0]["delivered"] == 3


def test_spool_mistakes(ctl: Ctl, hermes: Path) -> None:
    """An unknown spool, an ambiguous profile; a spool that is gone is shown as gone until it is dropped."""
    import shutil

    assert "cannot find a spool" in ctl("spool", "show", "nobody").err
    assert ctl("spool", "list").code == 0
    one = left(hermes / "profiles" / "work", ctl.root)
    other = left(hermes / "profiles" / "play", ctl.root)
    assert "cannot tell which spool" in ctl("spool", "show", "work").err
    shutil.rmtree(other.path)
    gone = {s["path"]: s["gone"] for s in ctl("spool", "list", "--json").data["spools"]}
    assert gone == {one.path: False, other.path: True}
    assert "GONE" in ctl("spool", "list").out
    assert ctl("spool", "drop", other.path).code == 0
    assert len(ctl("spool", "list", "--json").data["spools"]) == 1


def test_a_session_that_delivers_has_the_right_of_way(ctl: Ctl, hermes: Path) -> None:
    """While another process holds the drain lock nothing is changed, and that is said."""
    from memory_tencentdb.aside.lock import Lock

    one = left(hermes / "profiles" / "work", ctl.root)
    lock = Lock(one.path)
    assert lock.acquire()
    try:
        for words in (["drop", "work", "id1"], ["replay", "work", "--all"], ["retry", "work"]):
            done = ctl("spool", *words)
            assert done.code == 1 and "delivers this spool now" in done.err, done
    finally:
        lock.release()
    assert len(ctl("spool", "show", "work", "--json").data["records"]) == 3


def test_a_copy_of_the_plugin_is_current_while_it_is_one(ctl: Ctl, hermes: Path) -> None:
    """A copied plugin that an upgrade left behind is named."""
    assert ctl("hermes", "enable", "--profile", "play", "--copy").code == 0
    assert profiles(ctl)["play"]["current"] and profiles(ctl)["work"]["current"]
    with (hermes / "profiles" / "play" / "plugins" / "memory_tencentdb" / "spool.py").open("a") as file:
        file.write("# older")
    play = profiles(ctl)["play"]
    assert not play["current"] and any("not that of this installation" in note for note in play["notes"])
