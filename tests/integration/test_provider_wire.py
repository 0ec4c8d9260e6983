"""The client against real sockets: bounds, proxies, redirects, keys, remote Gateways."""

from __future__ import annotations

import importlib
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_tencentdb import wire
from memory_tencentdb.aside import remote
from memory_tencentdb.endpoint import Away, Endpoint
from memory_tencentdb.gateway import Ask, Client, Reply
from memory_tencentdb.settings import Address, Settings

from tests.support.fake_gateway import FakeGateway, cut, drip, http, late, raw, silent


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """A Gateway of generation A."""
    with FakeGateway("A") as one:
        yield one


def client(root: Path, gateway: FakeGateway, cancelled: Any = wire.never, **settings: Any) -> Client:
    """A client of that Gateway."""
    address = settings.pop("address", Address("http", "127.0.0.1", gateway.port))
    return Client(Endpoint(Settings(str(root / "home"), str(root), address=address, **settings)), cancelled)


def one(client: Client, path: str = "/recall", seconds: float = 2.0) -> Reply | Away:
    """The outcome of one request."""
    (outcome,) = client.exchange([Ask("POST", path, {"query": "q", "session_key": "s"})], seconds)
    return outcome


@pytest.mark.parametrize("step", [silent(), drip("head"), drip("body"), late(5.0)])
def test_total_deadline(root: Path, gateway: FakeGateway, step: Any) -> None:
    """Silence, a dripping head, a dripping body and a late answer all cost the deadline and no more."""
    gateway.script("/recall", step)
    began = time.monotonic()
    outcome = one(client(root, gateway), seconds=0.5)
    assert 0.45 <= time.monotonic() - began < 0.9
    assert isinstance(outcome, Away)
    assert (outcome.kind, outcome.sent) == ("silent", True)


def test_two_requests_share_one_deadline(root: Path, gateway: FakeGateway) -> None:
    """What two requests need is not added up, and the slower one does not spoil the faster one."""
    gateway.script("/recall", late(0.3))
    gateway.script("/search/memories", silent())
    began = time.monotonic()
    asks = [Ask("POST", path, {"query": "q", "session_key": "s"}) for path in ("/recall", "/search/memories")]
    first, second = client(root, gateway).exchange(asks, 0.8)
    assert time.monotonic() - began < 1.2
    assert isinstance(first, Reply)
    assert isinstance(second, Away)


def test_refused(root: Path, gateway: FakeGateway) -> None:
    """Where nobody listens the answer is immediate, names errno and address, and nothing was sent."""
    gateway.stop()
    began = time.monotonic()
    with pytest.raises(Away, match=f"ECONNREFUSED 127.0.0.1:{gateway.port}") as away:
        one(client(root, gateway))
    assert time.monotonic() - began < 0.2
    assert (away.value.kind, away.value.sent) == ("down", False)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (cut(), "closed before an answer"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"), "closed within the body"),
        (raw(b"SSH-2.0-x\r\n\r\n"), "not HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"), "over 1048576 bytes"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"), "without a JSON object"),
    ],
)
def test_broken_answers(root: Path, gateway: FakeGateway, step: Any, words: str) -> None:
    """Half an answer, another protocol, a flood or no object: an error in words, known to have been sent."""
    gateway.script("/recall", step)
    outcome = one(client(root, gateway))
    assert isinstance(outcome, Away)
    assert (outcome.kind, outcome.sent) == ("cut", True)
    assert words in outcome.reason


def test_a_flood_is_not_read(root: Path, gateway: FakeGateway) -> None:
    """64 MiB without a length are not taken into memory."""

    def flood(_: FakeGateway, connection: socket.socket, request: object) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _block in range(1024):
            connection.sendall(b"x" * 65536)

    gateway.script("/recall", flood)
    outcome = one(client(root, gateway), seconds=5.0)
    assert isinstance(outcome, Away)
    assert "over 1048576" in outcome.reason


def test_proxies_never_see_loopback(root: Path, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy variable has any say for a Gateway on this machine."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert isinstance(one(client(root, gateway)), Reply)


def test_no_redirect_is_followed(root: Path, gateway: FakeGateway) -> None:
    """A redirect is an answer that is no success; nobody else hears of the request."""
    with FakeGateway("A") as other:
        gateway.script("/recall", http(307, headers={"Location": f"http://127.0.0.1:{other.port}/recall"}))
        outcome = one(client(root, gateway, key="k"))
        assert isinstance(outcome, Reply)
        assert outcome.error.startswith("HTTP 307")
        assert other.connections == 0


def test_cancelled_at_once(root: Path, gateway: FakeGateway) -> None:
    """A call that is cancelled ends within a tick, however long its deadline."""
    gateway.script("/recall", silent())
    closing = threading.Event()
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(one(client(root, gateway, closing.is_set), seconds=60.0)))
    thread.start()
    gateway.wait(lambda: bool(gateway.asked("/recall")))
    began = time.monotonic()
    closing.set()
    thread.join(5.0)
    assert time.monotonic() - began < 0.5
    assert outcome[0].kind == "closing"


def test_no_descriptor_is_left(root: Path, gateway: FakeGateway) -> None:
    """Whatever becomes of a call, its socket is closed."""
    gateway.script("/recall", cut(), raw(b"x\r\n\r\n"), http(500), silent())
    caller = client(root, gateway)
    one(caller)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        one(caller, seconds=0.2)
    gateway.stop()
    for _ in range(3):
        with pytest.raises(Away):
            one(caller)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_rotated_key_is_found(root: Path) -> None:
    """A 401 leads to one more try with the key that the record names now, and the stale key is not used again."""
    import json

    from memory_tencentdb import proof

    with FakeGateway("A", key="new") as gateway:
        me = {"pid": os.getpid(), "start_ticks": proof.start_ticks(os.getpid())}
        key_file = root / "run" / "default.key"
        key_file.parent.mkdir(parents=True)
        key_file.write_text("new\n")
        value = {
            "schema": 1,
            "state": "READY",
            "host": "127.0.0.1",
            "port": gateway.port,
            "api_key_file": str(key_file),
        }
        value |= {"boot_id": proof.boot_id(), "pid_ns": proof.pid_namespace(), "daemon": me, **me}
        (root / "run" / "default.json").write_text(json.dumps(value))
        caller = client(root, gateway, key="stale")
        outcome = one(caller)
        assert isinstance(outcome, Reply)
        assert outcome.status == 200
        assert [request.headers["authorization"] for request in gateway.requests] == ["Bearer stale", "Bearer new"]
        one(caller)
        assert gateway.requests[-1].headers["authorization"] == "Bearer new"


def test_nothing_reaches_a_foreign_listener(root: Path, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's process on the port sees a connection at most: no key, no word."""
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    if os.getuid() == 0:  # as root the listener would be root's, which everybody trusts
        from memory_tencentdb import proof

        real = proof.listeners
        monkeypatch.setattr(
            proof, "listeners", lambda port: [proof.Listener(x.address, 4711, x.inode) for x in real(port) or []]
        )
    with pytest.raises(Away, match="nothing is sent") as away:
        one(client(root, gateway, key="secret", trust=True))
    assert away.value.kind == "foreign"
    assert gateway.requests == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs to start a process of another user")
def test_an_impostor_of_another_user(root: Path) -> None:
    """A process of another uid that answers like a Gateway is refused by its uid, and nothing is sent to it."""
    code = (
        "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\n"
        "print(s.getsockname()[1], flush=True)\n"
        "while True:\n c, _ = s.accept(); print(c.recv(65536), flush=True); c.close()"
    )
    with subprocess.Popen(["python3", "-c", code], user=4711, stdout=subprocess.PIPE, cwd="/") as impostor:
        assert impostor.stdout is not None
        port = int(impostor.stdout.readline())
        gateway = FakeGateway("A", port=port)
        with pytest.raises(Away, match="uid 4711"):
            one(client(root, gateway, key="secret"))
        impostor.kill()
        assert impostor.stdout.read().strip() in (b"", b"b''")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1, made here."""
    path = tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += [
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout",
        str(path),
        "-out",
        str(tmp_path / "c"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs openssl")
    path.write_text(path.read_text() + (tmp_path / "c").read_text())
    return path


def serve_tls(certificate: Path, answer: bytes) -> tuple[int, list[bytes], socket.socket]:
    """A TLS server that gives one answer per connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    seen: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as connection:
                    connection.settimeout(5)
                    data = b""
                    while not data.endswith(b"}"):  # every request here carries a JSON object
                        data += connection.recv(65536)
                    seen.append(data)
                    connection.sendall(answer)
            except (OSError, ssl.SSLError):
                plain.close()

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1], seen, listener


@pytest.mark.parametrize("library", [True, False])
def test_https(certificate: Path, monkeypatch: pytest.MonkeyPatch, library: bool) -> None:
    """A remote Gateway is reached over TLS with its key, by requests or by the standard library."""
    body = b'{"l0_recorded": 2}'
    port, seen, listener = serve_tls(
        certificate, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
    )
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("no_proxy", "*")
    if not library:
        real = importlib.import_module

        def without(name: str) -> Any:
            if name == "requests":
                raise ImportError(name)
            return real(name)

        monkeypatch.setattr(importlib, "import_module", without)
    request = remote.Request("POST", f"https://localhost:{port}/capture", {"Authorization": "Bearer k"}, b"{}")
    (outcome,) = remote.run([request], time.monotonic() + 5, wire.never)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    assert isinstance(outcome, wire.Response), outcome
    assert (outcome.status, outcome.body) == (200, body)
    assert b"Authorization: Bearer k" in seen[0]


def test_https_on_loopback_is_proven_and_direct(root: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS on loopback is proven like any other listener there, and no proxy sees it."""
    body = b'{"context": "x"}'
    port, seen, listener = serve_tls(certificate, b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n" + body)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    settings = Settings(str(root), str(root), address=Address("https", "127.0.0.1", port), key="k")
    outcome = one(Client(Endpoint(settings)))
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    assert isinstance(outcome, Reply), outcome
    assert outcome.json == {"context": "x"}
    assert len(seen) == 1


def test_https_without_trust_in_the_certificate(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that nobody vouches for ends the call before a key leaves."""
    port, seen, listener = serve_tls(certificate, b"")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    request = remote.Request("POST", f"https://localhost:{port}/capture", {"Authorization": "Bearer k"}, b"{}")
    (outcome,) = remote.run([request], time.monotonic() + 5, wire.never)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    assert isinstance(outcome, wire.Unreachable)
    assert not outcome.sent
    assert seen == []


def test_remote_deadline(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote Gateway that drips its head costs its caller the deadline and no more."""
    monkeypatch.setenv("no_proxy", "*")
    gateway.script("/recall", drip("head", 0.05))
    request = remote.Request(
        "POST", f"http://127.0.0.1:{gateway.port}/recall", {}, b'{"query": "q", "session_key": "s"}'
    )
    began = time.monotonic()
    (outcome,) = remote.run([request], began + 0.5, wire.never)
    assert time.monotonic() - began < 0.9
    assert isinstance(outcome, wire.Silent)
