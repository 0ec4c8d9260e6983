"""The spool on disk: frames, segments, acknowledgements, what is put away and what is dropped."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_tencentdb import spool as s
from memory_tencentdb.aside.ledger import Counts, Ledger, keep_dead_letter, read_counts
from memory_tencentdb.settings import Address, Settings
from memory_tencentdb.spool import Record, Spool


def turn(number: int, session: str = "s", **more: Any) -> Record:
    """A record."""
    return Record(f"id-{session}-{number}", session, f"user {number}", f"assistant {number}", at=float(number), **more)


def ledger(path: Path) -> Ledger:
    """What is pending in a spool now."""
    one = Ledger(str(path))
    one.refresh()
    return one


def users(one: Ledger, session: str = "s") -> list[str]:
    """The user's side of the pending records of a session, in order."""
    return [one.load(entry).user for entry in one.sessions.get(session, ())]


@given(st.lists(st.binary(max_size=60).map(lambda b: json.dumps(b.hex()).encode()), max_size=6), st.data())
def test_frames_survive_what_is_torn(payloads: list[bytes], data: st.DataObject) -> None:
    """Whatever a crash leaves before, between or after frames, each whole frame is read and nothing else is."""
    parts, whole = [], []
    for payload in payloads:
        full = s.frame(payload)
        if data.draw(st.booleans()):
            parts.append(full)
            whole.append(payload)
        else:
            parts.append(full[: data.draw(st.integers(0, len(full) - 2))])
    got = [payload for _, payload in s.unframe(b"".join(parts)) if payload is not None]
    assert got == whole


@given(st.binary(max_size=300))
def test_noise_is_no_record(noise: bytes) -> None:
    """Arbitrary bytes never raise and never pass for a record."""
    assert all(payload is None for _, payload in s.unframe(noise))


def test_flipped_bit_is_seen(tmp_path: Path) -> None:
    """A record that the disk has changed is counted as torn and not delivered; the ones around it are."""
    spool = Spool(str(tmp_path))
    for number in range(3):
        assert spool.append(turn(number))
    path = tmp_path / "spool" / "00000001.seg"
    path.write_bytes(path.read_bytes().replace(b"user 1", b"user X"))
    one = ledger(tmp_path)
    assert users(one) == ["user 0", "user 2"]
    assert one.torn == 1


def test_records_keep_everything(tmp_path: Path) -> None:
    """What goes in comes out, whatever characters it holds; a newer writer's fields are passed over."""
    record = Record("i", "s\n", "记忆 🧠\n\0", 'a"\\', "turn", 1.5, "sid", {"user_id": "u"})
    assert s.decode_record(record.encode()).as_json() == record.as_json()
    raw = {**record.as_json(), "new": 1}
    assert s.decode_record(json.dumps(raw).encode()).user == record.user


def test_private_under_any_umask(tmp_path: Path) -> None:
    """Directories are 0700 and files 0600, also those that were looser."""
    old = os.umask(0)
    try:
        (tmp_path / "m").mkdir(mode=0o755)
        Spool(str(tmp_path / "m")).append(turn(1))
        s.register(Settings(str(tmp_path), str(tmp_path / "root")), "p")
        Counts().save(str(tmp_path / "m"))
        keep_dead_letter(str(tmp_path / "m"), turn(1), "r", 1, 1.0)
    finally:
        os.umask(old)
    seen = [tmp_path / "m", *(tmp_path / "m").rglob("*"), *(tmp_path / "root").rglob("*"), tmp_path / "root"]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in seen}
    assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
    assert len(modes) > 6


def test_segments_roll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full segment is followed by the next; order goes on over segments."""
    monkeypatch.setattr(s, "SEGMENT_BYTES", 200)
    spool = Spool(str(tmp_path))
    for number in range(6):
        spool.append(turn(number))
    assert len(s.segments(str(tmp_path / "spool"))) > 2
    assert users(ledger(tmp_path)) == [f"user {number}" for number in range(6)]


def test_two_writers_share_a_segment(tmp_path: Path) -> None:
    """Two processes append to the same file; nothing is lost and each keeps its order."""
    first, second = Spool(str(tmp_path)), Spool(str(tmp_path))
    for number in range(4):
        (first if number % 2 else second).append(turn(number))
    assert users(ledger(tmp_path)) == [f"user {number}" for number in range(4)]
    assert s.segments(str(tmp_path / "spool")) == [1]


def test_a_link_in_the_place_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    """A record never goes through a symlink to some other file."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "m" / "spool").mkdir(parents=True)
    (tmp_path / "m" / "spool" / "00000001.seg").symlink_to(victim)
    assert not Spool(str(tmp_path / "m")).append(turn(1))
    assert victim.read_text() == "mine"


def test_marks(tmp_path: Path) -> None:
    """What became of a record is known to the next drainer: done and dead are over, an unanswered try may be stored."""
    spool = Spool(str(tmp_path))
    for number in range(5):
        spool.append(turn(number))
    one = ledger(tmp_path)
    queue = list(one.sessions["s"])
    one.mark(queue[0], "done", 1.0)
    one.mark(queue[1], "dead", 1.0)
    one.mark(queue[2], "try", 7.0)
    queue[3].attempts = 2
    one.mark(queue[3], "try", 8.0)
    one.mark(queue[3], "fail", 9.0)
    one.mark(queue[4], "try", 8.0)
    one.mark(queue[4], "back", 9.0)
    again = ledger(tmp_path)
    assert [(e.id, e.maybe, e.attempts) for e in again.sessions["s"]] == [
        ("id-s-2", True, 0),
        ("id-s-3", False, 2),
        ("id-s-4", False, 0),
    ]
    assert again.sessions["s"][0].since == 7.0


def test_a_torn_mark_is_no_mark(tmp_path: Path) -> None:
    """A half-written acknowledgement leaves its record pending."""
    spool = Spool(str(tmp_path))
    spool.append(turn(1))
    one = ledger(tmp_path)
    one.mark(one.sessions["s"][0], "done", 1.0)
    path = tmp_path / "spool" / "00000001.ack"
    path.write_bytes(path.read_bytes()[:-4])
    assert ledger(tmp_path).pending == 1


def test_a_record_that_was_written_twice_is_one(tmp_path: Path) -> None:
    """The same id appended again (a failed sync, then a retry) is delivered once."""
    spool = Spool(str(tmp_path))
    spool.append(turn(1))
    spool.append(turn(1))
    assert ledger(tmp_path).pending == 1


def test_delivered_segments_are_put_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment with nothing pending moves to delivered/ once a newer one exists; the newest stays."""
    monkeypatch.setattr(s, "SEGMENT_BYTES", 200)
    spool = Spool(str(tmp_path))
    for number in range(4):
        spool.append(turn(number))
    one = ledger(tmp_path)
    for entry in list(one.sessions["s"]):
        one.mark(entry, "done", 1.0)
    one.tidy(1.0)
    numbers = s.segments(str(tmp_path / "spool"))
    assert len(numbers) == 1
    assert len(list((tmp_path / "delivered").iterdir())) == numbers[0] - 1
    assert one.drained() == [numbers[0], (tmp_path / "spool" / f"{numbers[0]:08d}.seg").stat().st_size]
    spool.append(turn(9))
    one.refresh()
    assert users(one) == ["user 9"]


def test_a_torn_tail_does_not_keep_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash left at the end of an older segment is counted once and goes with it."""
    spool = Spool(str(tmp_path))
    spool.append(turn(1))
    with (tmp_path / "spool" / "00000001.seg").open("ab") as file:
        file.write(b"\n12345678 {torn")
    monkeypatch.setattr(s, "SEGMENT_BYTES", 10)
    spool.append(turn(2))
    one = ledger(tmp_path)
    one.mark(one.sessions["s"][0], "done", 1.0)
    one.tidy(1.0)
    assert s.segments(str(tmp_path / "spool")) == [2]
    assert one.torn == 1


def test_retention_of_what_is_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven days or 50 MB, whichever comes first; the newest are kept."""
    kept = tmp_path / "delivered"
    kept.mkdir()
    now = 1_000_000_000.0
    for age in range(10):
        path = kept / f"{age:08d}.seg"
        path.write_bytes(b"x" * 100)
        os.utime(path, (now - age * 86400, now - age * 86400))
    one = Ledger(str(tmp_path))
    one.tidy(now)
    assert sorted(path.name for path in kept.iterdir()) == [f"{age:08d}.seg" for age in range(8)]
    monkeypatch.setattr(s, "KEEP_BYTES", 250)
    one.tidy(now)
    assert sorted(path.name for path in kept.iterdir()) == ["00000000.seg", "00000001.seg"]


def test_full_spool_drops_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only when the bound is passed, the oldest segment goes, and its pending records are counted."""
    monkeypatch.setattr(s, "SEGMENT_BYTES", 400)
    monkeypatch.setattr(s, "PENDING_BYTES", 2000)
    spool = Spool(str(tmp_path))
    for number in range(5):
        spool.append(turn(number))
    one = ledger(tmp_path)
    one.tidy(1.0)
    assert one.dropped == 0
    for number in range(5, 20):
        spool.append(turn(number))
    one.refresh()
    one.tidy(1.0)
    left = users(one)
    assert left == [f"user {number}" for number in range(20 - len(left), 20)]
    assert one.dropped == 20 - len(left) > 0
    assert sum(path.stat().st_size for path in (tmp_path / "spool").glob("*.seg")) <= 2000


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "write", "fdatasync", "mkdir"])
def test_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str) -> None:
    """The turn waits in memory, counted as not durable, and goes to disk in order as soon as that is possible again."""
    spool = Spool(str(tmp_path / "m"))
    with monkeypatch.context() as broken:

        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(code, os.strerror(code))

        broken.setattr(os, call, refuse)
        assert not spool.append(turn(1))
        assert not spool.append(turn(2))
    assert (spool.not_durable, len(spool.volatile)) == (2, 2)
    assert os.strerror(code) in spool.last_error
    assert spool.append(turn(3))
    assert not spool.volatile
    assert users(ledger(tmp_path / "m")) == ["user 1", "user 2", "user 3"]


def test_short_write_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes only half of a record has not taken it; the half does not harm the next one."""
    spool = Spool(str(tmp_path))
    real = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
        assert not spool.append(turn(1))
    assert spool.append(turn(2))
    one = ledger(tmp_path)
    assert users(one) == ["user 1", "user 2"]
    assert one.torn == 1


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no disk the oldest turn in memory goes when it is too much, and is counted."""
    monkeypatch.setattr(s, "VOLATILE_BYTES", 1000)
    (tmp_path / "m").write_text("in the way")
    spool = Spool(str(tmp_path / "m"))
    for number in range(10):
        assert not spool.append(turn(number))
    assert len(spool.volatile) == 10 - spool.forgotten
    assert 0 < spool.forgotten < 10
    assert spool.volatile[-1].user == "user 9"


def test_removed_directory_is_made_again(tmp_path: Path) -> None:
    """A spool that somebody removed under a session costs nothing but what was in it."""
    spool = Spool(str(tmp_path / "m"))
    spool.append(turn(1))
    import shutil

    shutil.rmtree(tmp_path / "m")
    assert spool.append(turn(2))
    assert users(ledger(tmp_path / "m")) == ["user 2"]


def test_memory_records_come_last(tmp_path: Path) -> None:
    """What the disk refused stands behind what it holds, and is one record when the disk takes it after all."""
    spool = Spool(str(tmp_path))
    spool.append(turn(1))
    one = ledger(tmp_path)
    one.take_from_memory([turn(2), turn(3)])
    assert users(one) == ["user 1", "user 2", "user 3"]
    tried = one.sessions["s"][1]
    tried.maybe, tried.attempts = True, 2
    spool.append(turn(2))
    one.refresh()
    one.take_from_memory([turn(3)])
    assert users(one) == ["user 1", "user 2", "user 3"]
    twin = one.sessions["s"][1]
    assert (twin.memory, twin.maybe, twin.attempts) == (None, True, 2)
    one.mark(one.sessions["s"][2], "done", 1.0)
    spool.append(turn(3))
    one.refresh()
    one.take_from_memory([])
    assert users(one) == ["user 1", "user 2"]
    assert users(ledger(tmp_path)) == ["user 1", "user 2"]


def test_idle_by_a_few_stats(tmp_path: Path) -> None:
    """A session start sees without reading whether something waits."""
    spool = Spool(str(tmp_path))
    assert spool.idle()
    spool.append(turn(1))
    assert not spool.idle()
    one = ledger(tmp_path)
    one.mark(one.sessions["s"][0], "done", 1.0)
    (tmp_path / "drained.json").write_text(json.dumps({"until": one.drained()}))
    assert spool.idle()
    spool.append(turn(2))
    assert not spool.idle()
    assert one.behind()


def test_registration(tmp_path: Path) -> None:
    """The daemon finds spool and profile in the root, and beside the spool where it is delivered to, without a key."""
    home, root = tmp_path / "h h", tmp_path / "root"
    settings = Settings(str(home), str(root), address=Address("http", "127.0.0.1", 9), key="secret", gateway="work")
    home.mkdir()
    s.register(settings, "coder")
    (entry,) = (root / "spools").iterdir()
    assert json.loads(entry.read_text()) == {"schema": 1, "path": str(home / "memory_tencentdb"), "profile": "coder"}
    beside = (home / "memory_tencentdb" / "endpoint.json").read_text()
    assert json.loads(beside)["address"] == "http://127.0.0.1:9"
    assert json.loads(beside)["gateway"] == "work"
    assert "secret" not in beside + entry.read_text()
    before = entry.stat().st_mtime_ns
    s.register(settings, "coder")
    assert entry.stat().st_mtime_ns == before


def test_counts_survive_nonsense(tmp_path: Path) -> None:
    """Counts are a note: what is unreadable in them is zero."""
    (tmp_path / "stats.json").write_text('{"delivered": 3, "dead": "x", "last_error": 5, "holding": "h", "other": 1}')
    counts = read_counts(str(tmp_path))
    assert (counts.delivered, counts.dead, counts.last_error, counts.holding) == (3, 0, "", "h")
    (tmp_path / "stats.json").write_text("{")
    assert read_counts(str(tmp_path)).as_json() == Counts().as_json()


def test_dead_letters_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of dead letters is put aside when it is large; one older file is kept."""
    from memory_tencentdb.aside import doctor, ledger

    monkeypatch.setattr(ledger, "DEAD_BYTES", 100)
    for number in range(3):
        keep_dead_letter(str(tmp_path), turn(number), f"reason {number}", 1, 1.0)
    assert [letter["reason"] for letter in doctor.dead_letters(str(tmp_path))] == ["reason 1", "reason 2"]


def test_dead_letters_are_taken_up_again(tmp_path: Path) -> None:
    """flush --dead appends them under their own keys; their file is put aside, not deleted."""
    from memory_tencentdb.aside import doctor

    spool = Spool(str(tmp_path))
    spool.append(turn(1))
    one = ledger(tmp_path)
    keep_dead_letter(str(tmp_path), one.load(one.sessions["s"][0]), "r", 1, 1.0)
    one.mark(one.sessions["s"][0], "dead", 1.0)
    assert doctor.revive(spool) == 1
    again = ledger(tmp_path)
    assert [(entry.id, entry.maybe) for entry in again.sessions["s"]] == [("id-s-1", True)]
    assert list(doctor.dead_letters(str(tmp_path))) == []
    assert (tmp_path / "dead.jsonl.revived").exists()


def test_a_dead_letter_stays_where_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken up again only once it is in the spool for good; until then its file has it, and nothing is lost."""
    from memory_tencentdb.aside import letters

    keep_dead_letter(str(tmp_path), turn(1), "r", 1, 1.0)
    with monkeypatch.context() as refusing:
        refusing.setattr(s, "append_frame", _no_space)
        with pytest.raises(OSError, match="cannot put it into the spool"):
            letters.revive(Spool(str(tmp_path)))
    assert [letter["record"]["id"] for letter in letters.dead_letters(str(tmp_path))] == ["id-s-1"]
    assert letters.revive(Spool(str(tmp_path))) == 1
    assert [entry.id for entry in ledger(tmp_path).sessions["s"]] == ["id-s-1"]


def _no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_replay_takes_what_was_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flush --replay appends every delivered turn once, asks the Gateway for each, and leaves out what waits anyway."""
    from memory_tencentdb.aside import doctor

    monkeypatch.setattr(s, "SEGMENT_BYTES", 200)
    spool = Spool(str(tmp_path))
    for number in range(3):
        spool.append(turn(number))
    spool.append(Record("e", "s", kind="end"))
    one = ledger(tmp_path)
    for entry in list(one.sessions["s"]):
        one.mark(entry, "done", 1.0)
    one.tidy(1.0)
    spool.append(turn(9))
    assert doctor.replay(spool) == 3
    assert doctor.replay(spool) == 0
    again = ledger(tmp_path)
    assert users(again) == ["user 9", "user 0", "user 1", "user 2"]
    assert [entry.maybe for entry in again.sessions["s"]] == [False, True, True, True]
