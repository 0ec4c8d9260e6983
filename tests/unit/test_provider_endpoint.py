"""Endpoint records, whose process listens, and how long turns do not wait for a Gateway."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_tencentdb import endpoint as e
from memory_tencentdb import proof
from memory_tencentdb.settings import Address, Settings


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket of this process."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock


def record(root: Path, port: int, name: str = "default", **changes: Any) -> Path:
    """Write the endpoint record of a Gateway that is this very process."""
    me = {"pid": os.getpid(), "start_ticks": proof.start_ticks(os.getpid())}
    value = {
        "schema": 1,
        "seq": 1,
        "name": name,
        "state": "READY",
        "host": "127.0.0.1",
        "port": port,
        "boot_id": proof.boot_id(),
        "pid_ns": proof.pid_namespace(),
        "hold": None,
        "cause": "",
        "api_key_file": None,
        "daemon": me,
        **me,
        **changes,
    }
    path = root / "run" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)
    return path


def endpoint(root: Path, **settings: Any) -> e.Endpoint:
    """An endpoint of a profile with that root."""
    return e.Endpoint(Settings(str(root / "home"), str(root), **settings))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"schema": 2}', b"\xff\xfe"])
def test_half_a_record_is_none(data: bytes) -> None:
    """An empty, torn or foreign record never raises and says nothing."""
    assert e.parse_record(data) is None


def test_record_with_wrong_types_says_nothing(root: Path) -> None:
    """Fields of the wrong type count as missing."""
    got = e.parse_record(b'{"schema": 1, "port": "8420", "pid": true, "hold": true, "state": 3, "host": null}')
    assert got is not None
    assert (got.port, got.pid, got.hold, got.state, got.host) == (0, 0, "on hold", "", "127.0.0.1")


def test_record_gives_the_address(root: Path) -> None:
    """Without anything asked for, the record decides; 0.0.0.0 is reached through 127.0.0.1."""
    record(root, 8425, host="0.0.0.0")
    assert str(endpoint(root).address()) == "http://127.0.0.1:8425"


def test_no_record_is_8420(root: Path) -> None:
    """The last resort is 127.0.0.1:8420."""
    assert str(endpoint(root).address()) == "http://127.0.0.1:8420"


def test_a_named_gateway_is_no_other(root: Path) -> None:
    """A profile that names its Gateway never ends up at the default one."""
    record(root, 8420)
    with pytest.raises(e.Away, match="no Gateway named work") as away:
        endpoint(root, gateway="work").address()
    assert away.value.kind == "config"


@pytest.mark.parametrize("state", ["STOPPED", "STARTING", "STOPPING", "BACKOFF", "BLOCKED", "FATAL"])
def test_only_ready_receives(root: Path, state: str) -> None:
    """A state in which the Gateway does not serve costs no network at all, and its cause is told."""
    record(root, 8420, state=state, cause="port is taken")
    with pytest.raises(e.Away, match=f"{state}: port is taken") as away:
        endpoint(root).target()
    assert away.value.kind == "state"


@pytest.mark.parametrize(
    "dead",
    [
        {"boot_id": "another boot"},
        {"pid": 2**22 + 1, "daemon": {"pid": 2**22 + 1, "start_ticks": 1}},
        {"start_ticks": 1, "daemon": {"pid": os.getpid(), "start_ticks": 1}},
    ],
)
def test_a_record_of_the_dead_does_not_count(root: Path, dead: dict[str, Any]) -> None:
    """After a reboot, or once Gateway and daemon are gone, the record decides nothing but the address."""
    record(root, 8425, state="STOPPED", **dead)
    target = endpoint(root).target()
    assert (target.address.port, target.record) == (8425, None)


def test_record_speaks_for_an_address_asked_for_otherwise(root: Path) -> None:
    """A port from the environment that a Gateway of the daemon has is judged by that Gateway's record."""
    record(root, 8426, name="work", state="BLOCKED", cause="x")
    with pytest.raises(e.Away, match="work is BLOCKED"):
        endpoint(root, address=Address("http", "127.0.0.1", 8426)).target()
    assert endpoint(root, address=Address("http", "127.0.0.1", 8427)).target().record is None


def test_a_removed_gateway_does_not_speak_for_the_port_it_had(root: Path) -> None:
    """A record that says STOPPED is passed over where a running Gateway has the same address."""
    address = Address("http", "127.0.0.1", 8421)
    for name, state in (("a-removed", "STOPPED"), ("work", "READY"), ("z-removed", "STOPPED")):
        record(root, 8421, name, state=state)
    found = endpoint(root, address=address, origin="profile file").target().record
    assert found is not None and found.name == "work"


def test_record_is_read_again_when_it_changes(root: Path) -> None:
    """A change of the file is seen at the next look; half a record does not replace a whole one."""
    path = record(root, 8425)
    one = endpoint(root)
    assert one.address().port == 8425
    before = one.changes()
    record(root, 8426, seq=2)
    assert one.changes() != before
    assert one.address().port == 8426
    path.write_text("{")
    assert one.address().port == 8426


def test_another_users_record_is_not_believed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that another user could have written says nothing."""
    record(root, 8425)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    real = os.fstat

    def theirs(fd: int) -> os.stat_result:
        values = list(real(fd))
        values[4] = 4711
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", theirs)
    assert endpoint(root).address().port == 8420


def test_own_listener_is_proven(root: Path, listener: socket.socket) -> None:
    """Our own process on the port is ours, by the socket table alone and by the record."""
    port = listener.getsockname()[1]
    one = endpoint(root, address=Address("http", "127.0.0.1", port))
    inode = os.fstat(listener.fileno()).st_ino
    assert one.identity(one.target()) == (inode,)
    record(root, port)
    assert one.identity(one.target()) == (inode,)
    assert one.prove(one.target(), (inode,))
    assert not one.prove(one.target(), (inode + 1,))


def test_foreign_listener_gets_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user is named and refused, also with trust."""
    monkeypatch.setattr(proof, "listeners", lambda port: [proof.Listener(b"\x7f\0\0\1", 4711, 1)])
    one = endpoint(root, trust=True, address=Address("http", "127.0.0.1", 9))
    with pytest.raises(e.Away, match="uid 4711") as away:
        one.identity(one.target())
    assert away.value.kind == "foreign"


@pytest.mark.parametrize("table", [None, [proof.Listener(b"\x7f\0\0\1", proof.OVERFLOW_UID, 1)]])
def test_unknown_needs_trust(root: Path, monkeypatch: pytest.MonkeyPatch, table: list[proof.Listener] | None) -> None:
    """Where nobody can tell whose the listener is, the user must say so."""
    monkeypatch.setattr(proof, "listeners", lambda port: table)
    address = Address("http", "127.0.0.1", 9)
    one = endpoint(root, address=address)
    with pytest.raises(e.Away, match="set trust to true") as away:
        one.identity(one.target())
    assert away.value.kind == "unproven"
    trusting = endpoint(root, address=address, trust=True)
    trusting.identity(trusting.target())


def test_an_answer_without_a_listener_needs_trust(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that succeeds although nobody here listens (a redirected port) is unproven."""
    monkeypatch.setattr(proof, "listeners", lambda port: [])
    one = endpoint(root, address=Address("http", "127.0.0.1", 9))
    with pytest.raises(e.Away) as away:
        one.prove(one.target(), ())
    assert away.value.kind == "unproven"


def test_listener_of_another_process_than_the_records(root: Path, listener: socket.socket) -> None:
    """Where a record names the port, a listener outside that Gateway's session gets nothing, be the uid right."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        record(root, listener.getsockname()[1], pid=other.pid, start_ticks=proof.start_ticks(other.pid))
        one = endpoint(root)
        with pytest.raises(e.Away, match="held by another process") as away:
            one.identity(one.target())
        other.kill()
    assert away.value.kind == "foreign"


def test_listener_behind_a_wrapper(root: Path) -> None:
    """The recorded process may be a wrapper: a listener in its session is that Gateway's."""
    code = (
        "import socket,time; s=socket.socket(); s.bind(('127.0.0.1',0)); s.listen();"
        "print(s.getsockname()[1],flush=True); time.sleep(60)"
    )
    shell = f'"{sys.executable}" -c "{code}" & wait'
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, start_new_session=True) as wrapper:
        assert wrapper.stdout is not None
        record(root, int(wrapper.stdout.readline()), pid=wrapper.pid, start_ticks=proof.start_ticks(wrapper.pid))
        one = endpoint(root)
        assert one.identity(one.target())
        os.killpg(wrapper.pid, 9)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"key": "k"}, "config"),
        ({"key": "k", "trust": True}, "config"),
        ({}, "unproven"),
        ({"trust": True}, None),
        ({"allow_http": True, "key": "k"}, None),
    ],
)
def test_plain_http_over_the_network(root: Path, settings: dict[str, Any], kind: str | None) -> None:
    """A key crosses a network unencrypted only when the user allows it; words only when the user trusts the host."""
    one = endpoint(root, address=Address("http", "192.0.2.1", 8420), **settings)
    if kind is None:
        assert one.target().address.host == "192.0.2.1"
        return
    with pytest.raises(e.Away) as away:
        one.target()
    assert away.value.kind == kind


def test_key_of_a_record_stays_with_its_address(root: Path) -> None:
    """The key that the daemon made for one Gateway goes to that host:port and to no other."""
    key_file = root / "run" / "default.key"
    record(root, 8425, api_key_file=str(key_file))
    key_file.write_text("daemon-key\n")
    one = endpoint(root)
    assert one.key(one.target()) == "daemon-key"
    elsewhere = endpoint(root, address=Address("https", "m.example", 443))
    assert elsewhere.key(elsewhere.target()) == ""


def test_a_refused_key_is_read_again_once(root: Path) -> None:
    """After a 401 the key of the record replaces a stale one from the environment; the same key is no news."""
    key_file = root / "run" / "default.key"
    record(root, 8425, api_key_file=str(key_file))
    key_file.write_text("new")
    one = endpoint(root, key="stale", key_origin="env")
    target = one.target()
    assert one.key(target) == "stale"
    assert one.other_key(target, "stale")
    assert one.key(target) == "new"
    assert not one.other_key(target, "new")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0: 0100007F:20E4 00000000:0000 0A 0:0 0:0 0 1000 0 777 1", (b"\x7f\0\0\1", 1000, 777)),
        ("0: 0100007F:20E4 00000000:0000 01 0:0 0:0 0 1000 0 777 1", None),
        ("0: 0100007F:20E5 00000000:0000 0A 0:0 0:0 0 1000 0 777 1", None),
        ("0: 00000000000000000000000000000000:20E4 0:0 0A 0:0 0:0 0 0 0 5 1", (b"\0" * 16, 0, 5)),
    ],
)
def test_rows_of_the_socket_table(line: str, expected: tuple[bytes, int, int] | None) -> None:
    """A row counts when it listens on the port; its address is in the order of the network."""
    if struct.pack("=H", 1) != b"\1\0":
        pytest.skip("the rows above are of a little-endian kernel")
    row = proof.parse_row(line, 0x20E4)
    assert (row and (row.address, row.uid, row.inode)) == expected


def test_the_most_specific_listener_decides() -> None:
    """127.0.0.1 beats 0.0.0.0 beats [::], as in the kernel; a listener on another address has no say."""
    exact, wild, six = (proof.Listener(a, 0, i) for i, a in enumerate((b"\x7f\0\0\1", b"\0" * 4, b"\0" * 16)))
    other = proof.Listener(b"\x0a\0\0\1", 4711, 9)
    assert proof.deciding([other, six, wild, exact], "127.0.0.1") == [exact]
    assert proof.deciding([other, six, wild], "127.0.0.1") == [wild]
    assert proof.deciding([other, six], "127.0.0.1") == [six]
    assert proof.deciding([other], "127.0.0.1") == []
    assert proof.deciding([wild, six], "::1") == [six]


def test_both_tables_agree(listener: socket.socket) -> None:
    """sock_diag and /proc/net/tcp name the same owner."""
    port, inode = listener.getsockname()[1], os.fstat(listener.fileno()).st_ino
    for table in (proof.listeners(port), proof._from_proc(port)):
        assert table is not None
        assert [(each.address, each.uid, each.inode) for each in table] == [(b"\x7f\0\0\1", os.geteuid(), inode)]


def test_life_is_pid_and_ticks() -> None:
    """A reused pid is another process; a pid that never was is gone; unknown counts as alive."""
    me = os.getpid()
    ticks = proof.start_ticks(me)
    assert ticks is not None
    assert proof.alive(me, ticks)
    assert not proof.alive(me, ticks + 1)
    assert not proof.alive(2**22 + 1, 1)


def away(kind: str = "silent", wait: float | None = None) -> e.Away:
    """Some trouble."""
    return e.Away(kind, "x", wait=wait)


def test_cooldown_doubles_to_a_minute(root: Path) -> None:
    """5, 10, 20, 40, 60, 60 seconds, each begun by a failure after the one before has ended."""
    cooldown, one, now, lengths = e.Cooldown(), endpoint(root), 0.0, []
    for _ in range(6):
        cooldown.failed(away(), one.changes(), now, 0.0)
        began = now
        while cooldown.refuses(one, now) is not None:
            now += 0.5
        lengths.append(now - began)
    assert lengths == [5, 10, 20, 40, 60, 60]


def test_cooldown_ends_with_the_record(root: Path) -> None:
    """Whatever the daemon writes ends it at once."""
    cooldown, one = e.Cooldown(), endpoint(root)
    cooldown.failed(away(), one.changes(), 0.0, 0.0)
    assert cooldown.refuses(one, 0.1) is not None
    record(root, 8425)
    assert cooldown.refuses(one, 0.2) is None


def test_cooldown_where_nobody_listens(root: Path) -> None:
    """A look that costs nothing is taken once a second; a tool, which must not connect, takes none."""
    cooldown, one = e.Cooldown(), endpoint(root)
    cooldown.failed(away("down"), one.changes(), 0.0, 0.0)
    assert cooldown.refuses(one, 0.9) is not None
    assert cooldown.refuses(one, 1.1, quiet=True) is not None
    assert cooldown.refuses(one, 5.1, quiet=True) is None
    assert cooldown.refuses(one, 1.1) is None
    assert cooldown.refuses(one, 1.2) is not None


def test_cooldown_of_a_stopped_gateway_costs_nothing(root: Path) -> None:
    """Where the record says STOPPED every turn looks again: it costs a stat."""
    cooldown, one = e.Cooldown(), endpoint(root)
    cooldown.failed(away("state"), one.changes(), 0.0, 0.0)
    assert cooldown.refuses(one, 0.0) is None


def test_cooldown_as_long_as_the_gateway_asks(root: Path) -> None:
    """Retry-After is the length, up to a minute."""
    cooldown, one = e.Cooldown(), endpoint(root)
    cooldown.failed(away("busy", wait=7.0), one.changes(), 0.0, 0.0)
    assert cooldown.refuses(one, 6.9) is not None
    assert cooldown.refuses(one, 7.1) is None


def test_cooldown_is_prolonged_from_the_background(root: Path) -> None:
    """A failure within it, seen by the drainer, puts the end off without doubling; a success ends it."""
    cooldown, one = e.Cooldown(), endpoint(root)
    cooldown.failed(away(), one.changes(), 0.0, 100.0)
    cooldown.failed(away(), one.changes(), 4.0, 104.0)
    assert cooldown.refuses(one, 8.9) is not None
    assert cooldown.refuses(one, 9.1) is None
    assert cooldown.since == 100.0
    cooldown.succeeded()
    assert cooldown.refuses(one, 4.1) is None
