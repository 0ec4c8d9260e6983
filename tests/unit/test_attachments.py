"""Attachments: judged by name, removed only when proven dead, ended only when nobody resumed them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tdai_supervisor import client
from tdai_supervisor.decide.attachments import by_profile, identity
from tdai_supervisor.engine.attachments import IDLE, Attachments
from tdai_supervisor.host import process

ME = process.read_stat(os.getpid())
assert ME is not None
TICKS = ME.ticks


def dead_pid() -> int:
    """The pid of a process that was there a moment ago."""
    child = subprocess.Popen([sys.executable, "-I", "-c", ""])
    child.wait()
    return child.pid


def attach(root: Path, pid: int, ticks: int, number: int = 1, **more: Any) -> Path:
    """The file of one session."""
    path = root / "sessions" / f"{pid}-{ticks}-{number}.json"
    path.parent.mkdir(exist_ok=True)
    about = {"schema": 1, "pid": pid, "start_ticks": ticks, "boot_id": process.boot_id(), "profile": "work"}
    path.write_text(
        json.dumps({**about, "pid_ns": process.pid_namespace(), "session": "s", "gateway": "default", **more})
    )
    return path


@pytest.mark.parametrize("name", ["1-2.json", "1-2-3", "0-2-3.json", "-1-2-3.json", "a-2-3.json", ".1-2-3.json.x"])
def test_other_names_are_none(name: str) -> None:
    """Only PID-TICKS-N.json is an attachment."""
    assert identity(name) is None
    assert identity("12-345-6.json") == (12, 345)


def test_only_the_living_are_shown_and_only_the_dead_removed(tmp_path: Path) -> None:
    """By pid, ticks and boot; a file of another namespace, or one that is no attachment, is left alone."""
    gone = dead_pid()
    mine = attach(tmp_path, os.getpid(), TICKS)
    recycled = attach(tmp_path, os.getpid(), TICKS + 1)
    dead = attach(tmp_path, gone, 77)
    old = attach(tmp_path, os.getpid(), TICKS, 2, boot_id="another")
    far = attach(tmp_path, gone, 78, pid_ns="pid:[1]")
    (tmp_path / "sessions" / "note.txt").write_text("mine")
    seen = Attachments(str(tmp_path))
    assert [e["session"] for e in seen.look(0.0)] == ["s"], "a look that may not remove"
    assert len(client.attachments(str(tmp_path))) == 1, "without a daemon the same are shown"
    assert len(list((tmp_path / "sessions").iterdir())) == 6
    seen.look(0.0, 100)
    assert sorted(p.name for p in (tmp_path / "sessions").iterdir()) == sorted([mine.name, far.name, "note.txt"])
    assert not any(p.exists() for p in (recycled, dead, old))
    attach(tmp_path, os.getpid(), TICKS, session="t")
    assert [e["session"] for e in seen.look(1.0)] == ["t"], "a session that switched"


def test_a_dead_session_with_turns_is_ended_after_idle_time(tmp_path: Path) -> None:
    """Kept until it is idle for long enough and its end is in the spool; one that was resumed is left to who did."""
    gone = dead_pid()
    left = attach(tmp_path, gone, 77, spool="/s", open=["a", "b", "c"])
    attach(tmp_path, os.getpid(), TICKS, spool="/s", open=["b"], session="b")
    seen = Attachments(str(tmp_path))
    seen.look(0.0, 100)
    assert seen.due(IDLE - 1) == {}
    assert seen.due(IDLE + 1) == {"/s": ["a", "c"]}
    seen.ended("/s", ["a"])
    assert left.exists() and seen.due(IDLE + 1) == {"/s": ["c"]}
    seen.ended("/s", ["c"])
    assert not left.exists()


def test_ten_thousand_dead_ones_cost_a_look_little(tmp_path: Path) -> None:
    """Relative to a look at one: reading 10,000 files would be a hundred times slower than a look may be."""
    few, many = tmp_path / "few", tmp_path / "many"
    gone = dead_pid()
    for root, count in ((few, 1), (many, 10_000)):
        root.mkdir()
        attach(root, os.getpid(), TICKS)
        folder = root / "sessions"
        for n in range(count):
            (folder / f"{gone}-{n + 1}-1.json").write_text("{}")

    def cost(root: Path) -> tuple[float, float]:
        seen, began = Attachments(str(root)), time.perf_counter()
        seen.look(0.0)
        first = time.perf_counter()
        seen.look(0.0)
        return first - began, time.perf_counter() - first

    reading = time.perf_counter()
    for path in (many / "sessions").iterdir():
        path.read_text()
    reading = time.perf_counter() - reading
    first, again = min(cost(many) for _ in range(3))
    assert first - cost(few)[0] < reading / 2, "opening them all takes longer than looking at all of them"
    assert again < reading / 5
    began = time.perf_counter()
    assert len(client.attachments(str(many))) == 1
    assert time.perf_counter() - began < reading, "without a daemon too"
    seen = Attachments(str(many))
    for _ in range(12):
        seen.look(0.0, 1000)
    assert len(list((many / "sessions").iterdir())) == 1


def test_counted_by_profile() -> None:
    """Sessions, not files: of many providers that a host made for one session, one counts; nameless ones are told."""
    seen = [
        {"profile": "b", "pid": 1, "session": "s"},
        {"profile": "b", "pid": 1, "session": "s"},
        {"profile": "b", "pid": 1, "session": "t"},
        {"profile": "a", "pid": 2, "session": "s"},
        {"profile": None, "pid": 3, "session": None},
    ]
    assert by_profile(seen) == {"a": 1, "b": 2, "unknown": 1}
