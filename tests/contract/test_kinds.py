"""`gateway use`: the other kind on the same data, with every conversation once; and back where it does not run."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sqlite3
import sys
from pathlib import Path

import pytest

from tdai_supervisor import client
from tests.support import npm_package
from tests.support.command import PATH, Ctl, run

CODE = "look:\n```py\nprint(1)\n```\nthat is it"


@pytest.fixture
def installed(ctl: Ctl, tmp_path: Path) -> Ctl:
    """A root with the stand-in package, whose Gateway runs embedded."""
    ctl.env["PATH"] = f"{npm_package.node(tmp_path / 'bin')}:{PATH}"
    done = ctl("gateway", "install", "--package", str(npm_package.make(tmp_path / "pkg", "1.0.0")))
    assert done.code == 0, done
    ctl.settings('# mine\n[gateway.default]\nkind = "embedded"  # for now\n')
    ctl.start()
    return ctl


def capture(ctl: Ctl, session: str, user: str, assistant: str = "ok") -> None:
    """One turn, sent as the provider does: again until it is recorded."""
    g, key = ctl.gateway(), ctl.file("run/default.key").strip()
    body = {"user_content": user, "assistant_content": assistant, "session_key": session}
    for _ in range(3):
        status, answer = client.call("127.0.0.1", g["port"], "/capture", 5, body, key)
        assert status == 200
        if answer["l0_recorded"]:
            return
    raise AssertionError(f"not recorded: {user}")


def embedded(ctl: Ctl) -> list[str]:
    """What users said, in the embedded Gateway's store."""
    database = sqlite3.connect(f"file:{ctl.root}/memory-tdai/memory.db?mode=ro", uri=True)
    try:
        return sorted(t for (t,) in database.execute("SELECT content FROM message WHERE role = 'user'"))
    finally:
        database.close()


def real(ctl: Ctl) -> list[str]:
    """What users said, in the package's store."""
    files = sorted(Path(ctl.root, "memory-tdai", "conversations").glob("*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return sorted(line["content"] for line in lines if line["role"] == "user")


def use(ctl: Ctl, kind: str) -> dict[str, int]:
    """`gateway use`, which must succeed; its counts."""
    done = ctl("gateway", "use", kind, "--json")
    assert done.code == 0, done
    assert ctl.gateway()["state"] == "READY"
    assert ctl.gateway()["kind"] == kind
    return {k: done.data["conversations"][k] for k in ("turns", "carried", "already", "left_out", "failed")}


def counts(turns: int, carried: int) -> dict[str, int]:
    """All turns carried or there already."""
    return {"turns": turns, "carried": carried, "already": turns - carried, "left_out": 0, "failed": 0}


def test_there_and_back_and_there_again(installed: Ctl) -> None:
    """Every turn is in both stores once: also a repeated one, one that a store changed, and those said in between."""
    ctl = installed
    for n in range(8):
        capture(ctl, f"s{n % 4}", f"embedded {n}", CODE if n == 3 else "ok")
    capture(ctl, "s0", "embedded 0")
    said = sorted([f"embedded {n}" for n in range(8)] + ["embedded 0"])
    assert use(ctl, "node") == counts(9, 9)
    assert real(ctl) == said
    assert use(ctl, "node") == counts(9, 0)
    for n in range(5):
        capture(ctl, f"s{n}", f"node {n}", CODE)
    capture(ctl, "s0", "embedded 0")
    said = sorted([*said, *(f"node {n}" for n in range(5)), "embedded 0"])
    assert use(ctl, "embedded") == counts(15, 6)
    assert embedded(ctl) == said
    assert use(ctl, "embedded") == counts(15, 0)
    capture(ctl, "s9", "embedded 半 9")
    said = sorted([*said, "embedded 半 9"])
    assert use(ctl, "node") == counts(16, 1)
    assert use(ctl, "embedded") == counts(16, 0)
    assert (real(ctl), embedded(ctl)) == (said, said)
    text = ctl.file("supervisor.toml")
    assert text.startswith("# mine\n[gateway.default]\n") and "# for now" in text
    assert list(Path(ctl.root, "snapshots").glob("default-*.tar.gz"))
    assert ctl("stop").code == 0


@pytest.mark.parametrize("to", ["node", "embedded"])
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_killed_in_the_middle_and_run_again(installed: Ctl, to: str, when: str) -> None:
    """kill -9 around a request: the rest is carried by the next run, and nothing twice."""
    ctl = installed
    if to == "embedded":
        use(ctl, "node")
    for n in range(6):
        capture(ctl, f"s{n}", f"turn {n}", CODE)
    point = "tdai_supervisor.cli.carry._send"
    argv = [sys.executable, "-m", "tests.support.crashing", "ctl", point, when, "4", "gateway", "use", to]
    killed = run(argv, {**ctl.env, "PYTHONPATH": str(Path(__file__).resolve().parents[2])})
    assert killed.code == -signal.SIGKILL, killed
    there = 3 + (when == "after")
    assert use(ctl, to) == counts(6, 6 - there)
    assert (real if to == "node" else embedded)(ctl) == [f"turn {n}" for n in range(6)]
    assert ctl("stop").code == 0


@pytest.mark.parametrize("point", ["tables.change", "lifecycle.restart"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_before_the_new_kind_runs(installed: Ctl, point: str, when: str) -> None:
    """Again does what is left to do."""
    ctl = installed
    capture(ctl, "s", "hello")
    words = ["ctl", f"tdai_supervisor.cli.{point}", when, "1", "gateway", "use", "node"]
    env = {**ctl.env, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    assert run([sys.executable, "-m", "tests.support.crashing", *words], env).code == -signal.SIGKILL
    assert use(ctl, "node") == counts(1, 1)
    assert ctl("stop").code == 0


def test_a_kind_that_does_not_get_ready_is_taken_back(installed: Ctl) -> None:
    """The old kind runs again, said with the cause; nothing was carried."""
    ctl = installed
    server = Path(ctl.root, "tdai-memory-openclaw-plugin", "src", "gateway", "server.ts")
    server.write_text('{"boot": "exit"}')
    capture(ctl, "s", "hello")
    done = ctl("gateway", "use", "node", "--json")
    assert done.code == 1
    error = done.json["errors"][0]
    assert "kind embedded is back and runs again" in error["message"]
    assert any("Cannot find module" in line for line in error["log"])
    assert (ctl.gateway()["kind"], ctl.gateway()["state"]) == ("embedded", "READY")
    assert 'kind = "embedded"' in ctl.file("supervisor.toml")
    assert real(ctl) == []
    assert ctl("stop").code == 0


@pytest.mark.parametrize("missing", ["package", "node"])
def test_node_that_is_not_there(ctl: Ctl, tmp_path: Path, missing: str) -> None:
    """Exit 5 and one line; the embedded Gateway runs on, with its pid and its settings."""
    node = npm_package.node(tmp_path / "bin", "v18.0.0" if missing == "node" else "v24.0.0") / "node"
    if missing == "node":
        ctl.env["TDAI_INSTALL_DIR"] = str(npm_package.make(tmp_path / "pkg", "1.0.0"))
    text = f'[gateway.default]\nkind = "embedded"\nnode = "{node}"\n'
    ctl.settings(text)
    pid = ctl.start()["pid"]
    done = ctl("gateway", "use", "node")
    assert (done.code, len(done.err.splitlines())) == (5, 1), done
    assert ("v18.0.0" if missing == "node" else "server.ts") in done.err
    assert "gateway install" in done.err
    assert ctl.gateway()["pid"] == pid
    assert ctl.file("supervisor.toml") == text
    assert ctl("stop").code == 0


def test_a_turn_that_fails_is_named_and_tried_again(installed: Ctl) -> None:
    """Exit 1 with counts; the others are carried, and the next run carries that one."""
    ctl = installed
    server = Path(ctl.root, "tdai-memory-openclaw-plugin", "src", "gateway", "server.ts")
    server.write_text(json.dumps({"boot": "ok", "refuse": "poison"}))
    for text in ("one", "poison", "two"):
        capture(ctl, "s", text)
    done = ctl("gateway", "use", "node", "--json")
    assert (done.code, done.data["conversations"]["carried"], done.data["conversations"]["failed"]) == (1, 2, 1)
    assert "run the same command again" in done.json["errors"][0]["hint"]
    server.write_text('{"boot": "ok"}')
    assert ctl("restart").code == 0
    assert use(ctl, "node") == counts(3, 1)
    assert ctl("stop").code == 0


def test_a_store_that_keeps_no_ids(installed: Ctl) -> None:
    """The list of what was sent keeps it from being sent again, although code was taken out of it."""
    ctl = installed
    server = Path(ctl.root, "tdai-memory-openclaw-plugin", "src", "gateway", "server.ts")
    server.write_text('{"boot": "ok", "ids": "own"}')
    for n in range(3):
        capture(ctl, "s", f"turn {n}", CODE)
    assert use(ctl, "node") == counts(3, 3)
    assert use(ctl, "node") == counts(3, 0)
    assert len(real(ctl)) == 3
    assert ctl("stop").code == 0


def test_without_a_daemon(installed: Ctl) -> None:
    """The kind is set for the next start, and the same command carries over then; --dry-run only counts."""
    ctl = installed
    capture(ctl, "s", "hello")
    assert ctl("stop").code == 0
    text = ctl.file("supervisor.toml")
    dry = ctl("gateway", "use", "node", "--dry-run", "--json")
    assert dry.code == 0 and "carry 1 of 1" in dry.data["changes"][0]
    assert ctl.file("supervisor.toml") == text
    done = ctl("gateway", "use", "node", "--json")
    assert (done.code, done.data["conversations"]) == (0, None)
    assert "this command again" in done.data["changes"][-1]
    ctl.start()
    assert use(ctl, "node") == counts(1, 1)
    assert ctl("stop").code == 0


def test_two_at_once_and_a_daemon_that_does_not_answer(installed: Ctl) -> None:
    """Each is said in one line, and nothing is changed."""
    ctl = installed
    with open(Path(ctl.root, "run", "default.use.lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = ctl("gateway", "use", "node", "--json")
    assert (done.code, done.json["errors"][0]["code"]) == (1, "busy")
    pid = ctl.status()["daemon"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        done = ctl("gateway", "use", "node")
        assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
        assert str(pid) in done.err
    finally:
        os.kill(pid, signal.SIGCONT)
    assert 'kind = "embedded"' in ctl.file("supervisor.toml")
    assert ctl("stop").code == 0


def test_wrong_use(ctl: Ctl) -> None:
    """An unknown kind is a usage error, an unknown name exit 6, a broken supervisor.toml exit 6."""
    assert ctl("gateway", "use", "deno").code == 2
    assert ctl("gateway").code == 2
    assert ctl("gateway", "use", "embedded", "nobody").code == 6
    ctl.settings("[gateway.default]\nhots = 1\n")
    assert ctl("gateway", "use", "embedded").code == 6
    assert ctl("gateway", "install").code == 6
