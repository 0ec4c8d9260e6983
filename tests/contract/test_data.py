"""backup and restore."""

from __future__ import annotations

import json
import sqlite3
import tarfile
import threading
from pathlib import Path

from tdai_supervisor import client
from tdai_supervisor.cli import data
from tests.support.command import Ctl


def capture(ctl: Ctl, text: str) -> None:
    g = ctl.gateway()
    body = {"user_content": text, "assistant_content": "ok", "session_key": "s"}
    status, _ = client.call("127.0.0.1", g["port"], "/capture", 5, body, ctl.file("run/default.key").strip())
    assert status == 200


def found(ctl: Ctl, text: str) -> bool:
    g = ctl.gateway()
    key = ctl.file("run/default.key").strip()
    _, answer = client.call("127.0.0.1", g["port"], "/search/conversations", 5, {"query": text}, key)
    return text in str(answer.get("results"))


def test_backup_and_restore_round_trip(ctl: Ctl, tmp_path: Path) -> None:
    """What was captured before comes back, what came after is kept aside; the Gateway runs again afterwards."""
    ctl.settings('[gateway.default]\nkind = "embedded"\n')
    ctl.start()
    capture(ctl, "before-the-backup")
    archive = tmp_path / "b.tar.gz"
    done = ctl("backup", str(archive), "--json")
    assert done.code == 0, done
    assert archive.stat().st_mode & 0o077 == 0
    assert ctl("backup", str(archive)).code == 1, "an archive is never overwritten"
    capture(ctl, "after-the-backup")
    restored = ctl("restore", str(archive), "--json")
    assert restored.code == 0, restored
    assert (found(ctl, "before-the-backup"), found(ctl, "after-the-backup")) == (True, False)
    assert Path(restored.data["kept"], "memory.db").exists()
    assert ctl.gateway()["state"] == "READY"
    assert ctl("stop").code == 0


def test_a_damaged_archive_changes_nothing(ctl: Ctl, tmp_path: Path) -> None:
    """Cut, no archive at all, or leading out of the directory: an error, and the Gateway runs on."""
    ctl.settings('[gateway.default]\nkind = "embedded"\n')
    pid = ctl.start()["pid"]
    archive = tmp_path / "b.tar.gz"
    assert ctl("backup", str(archive)).code == 0
    (tmp_path / "cut.tar.gz").write_bytes(archive.read_bytes()[:-200])
    (tmp_path / "none.tar.gz").write_text("no archive")
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as evil:
        raw = json.dumps({"files": {"../../evil": "00"}}).encode()
        info = tarfile.TarInfo("manifest.json")
        info.size = len(raw)
        import io

        evil.addfile(info, io.BytesIO(raw))
    for name in ("cut", "none", "evil", "missing"):
        done = ctl("restore", str(tmp_path / f"{name}.tar.gz"))
        assert done.code == 1
        assert "Traceback" not in done.err
    assert ctl.gateway()["pid"] == pid
    assert not [p for p in Path(ctl.root).iterdir() if "restoring" in p.name]
    assert ctl("stop").code == 0


def test_copies_under_write_load_are_sound(tmp_path: Path) -> None:
    """B23: 20 copies while a writer commits: each passes the integrity check and holds a prefix of the writes."""
    source = tmp_path / "live.db"
    writer = sqlite3.connect(source, check_same_thread=False, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("CREATE TABLE t(n INTEGER, pad BLOB)")
    stop = threading.Event()

    def write() -> None:
        n = 0
        while not stop.is_set():
            writer.execute("INSERT INTO t VALUES (?, zeroblob(2000))", (n,))
            n += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for n in range(20):
            copy = tmp_path / f"copy{n}.db"
            data.copy_database(str(source), str(copy))
            reading = sqlite3.connect(copy)
            rows = [row[0] for row in reading.execute("SELECT n FROM t ORDER BY n")]
            reading.close()
            assert rows == list(range(len(rows)))
    finally:
        stop.set()
        thread.join()
        writer.close()


def state_database(path: Path) -> None:
    """A Hermes state.db as far as it is read: two sessions of a person, one of cron."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE sessions(id TEXT PRIMARY KEY, source TEXT NOT NULL, started_at REAL NOT NULL)")
        db.execute(
            "CREATE TABLE messages(id INTEGER PRIMARY KEY, session_id TEXT, role TEXT, content TEXT,"
            " timestamp REAL, active INTEGER NOT NULL DEFAULT 1)"
        )
        db.executemany(
            "INSERT INTO sessions VALUES (?,?,?)", [("s1", "cli", 1e9), ("s2", "cli", 1.1e9), ("c", "cron", 1e9)]
        )
        said = [("s1", "user", "my cat is Zorblax"), ("s1", "assistant", "nice"), ("s1", "tool", "{}")]
        said += [("s1", "user", "and the dog 小黑 is old"), ("s1", "assistant", "hm"), ("s1", "assistant", "he is 14")]
        said += [("s2", "user", "unanswered"), ("c", "user", "cronjob"), ("c", "assistant", "done")]
        db.executemany(
            "INSERT INTO messages(session_id, role, content, timestamp) VALUES (?,?,?,?)",
            [(*row, 1e9 + n) for n, row in enumerate(said)],
        )
    db.close()


def test_import_hermes_is_counted_resumable_and_doubles_nothing(ctl: Ctl, home: Path) -> None:
    """Past turns are found afterwards, with their own dates; a second run imports nothing."""
    ctl.settings('[gateway.default]\nkind = "embedded"\n')
    state_database(home / ".hermes" / "state.db")
    assert ctl("import", "hermes").code == 7, "nothing runs yet"
    ctl.start()
    dry = ctl("import", "hermes", "--dry-run", "--json").data["profiles"][0]
    assert (dry["turns"], dry["imported"]) == (2, 0)
    first = ctl("import", "hermes", "--json").data["profiles"][0]
    assert (first["turns"], first["imported"], first["already"], first["failed"]) == (2, 2, 0, 0)
    second = ctl("import", "hermes", "--json").data["profiles"][0]
    assert (second["imported"], second["already"]) == (0, 2)
    assert found(ctl, "Zorblax")
    assert found(ctl, "小黑")
    assert not found(ctl, "cronjob")
    g, key = ctl.gateway(), ctl.file("run/default.key").strip()
    _, answer = client.call("127.0.0.1", g["port"], "/search/conversations", 5, {"query": "Zorblax"}, key)
    assert "2001-09-09" in answer["results"]
    assert answer["total"] == 1
    assert ctl("stop").code == 0
