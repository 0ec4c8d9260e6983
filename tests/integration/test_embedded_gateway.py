"""The embedded Gateway as a process: started, asked, killed, filled up, attacked, ended."""

import http.client
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tdai_supervisor import __version__
from tdai_supervisor.embedded.turns import SCHEMA_VERSION

DEADLINE = 15.0
"""Seconds for anything that must happen at all."""
HOST = b"Host: 127.0.0.1\r\n"
JSON = b"Content-Type: application/json\r\n"
Answer = tuple[int, dict[str, Any], dict[str, str]]


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {DEADLINE} s: {what}"
        select.select([], [], [], 0.01)
    return value


class Gateway:
    """One process; `data` may be used by several, one after the other."""

    def __init__(self, data: Path, env: dict[str, str], prefix: tuple[str, ...] = ()) -> None:
        self.data = data
        self.errors = data.parent / f"{data.name}.stderr"
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        with self.errors.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-I", "-m", "tdai_supervisor.embedded"],
                env={**inherited, "TDAI_GATEWAY_PORT": "0", "TDAI_DATA_DIR": str(data), **env},
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE)
        self.line = self.process.stdout.readline().decode() if ready else ""
        match = re.fullmatch(r"listening on http://(?:127\.0\.0\.1|\[::1\]|0\.0\.0\.0):(\d+)\n", self.line)
        assert match is not None, (self.line, self.stderr())
        self.port = int(match[1])

    def stderr(self) -> str:
        return self.errors.read_text()

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """(status, JSON, headers) of one request on a connection of its own."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        try:
            sent = {"Content-Type": "application/json"} if raw is not None else {}
            connection.request(method, path, raw, {**sent, **(headers or {})})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else {}, dict(answer.getheaders())
        finally:
            connection.close()

    def health(self) -> dict[str, Any]:
        status, body, _ = self.ask("GET", "/health")
        assert status == 200
        return body

    def capture(self, user: str, assistant: str = "noted", key: str | None = None, session: str = "s1") -> Answer:
        body = {"user_content": user, "assistant_content": assistant, "session_key": session}
        return self.ask("POST", "/capture", body, {"Idempotency-Key": key} if key else {})

    def found(self, query: str, **more: Any) -> int:
        status, body, _ = self.ask("POST", "/search/conversations", {"query": query, "limit": 100, **more})
        assert status == 200, body
        return int(body["total"])

    def raw(self, data: bytes) -> bytes:
        """What comes back for these bytes until the other side closes, or a whole answer is there."""
        with self.connect() as sock:
            sock.sendall(data)
            return received(sock)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """(exit code, seconds)"""
        began = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(DEADLINE), time.monotonic() - began


def received(sock: socket.socket) -> bytes:
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
        head, gap, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"\r\nContent-Length: (\d+)", head)
        if gap and length and len(body) >= int(length[1]):
            break
    return data


def unsent(local: int, remote: int) -> int:
    """Bytes the kernel still holds for a connection of this machine, as its sender sees it."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, here, there, _, queues, *_ = line.split()
        if (int(here[-4:], 16), int(there[-4:], 16)) == (local, remote):
            return int(queues.partition(":")[0], 16)
    return 0


Start = Callable[..., Gateway]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a Gateway on `tmp_path/data`; whatever was started is gone afterwards."""
    started: list[Gateway] = []

    def begin(prefix: tuple[str, ...] = (), **env: str) -> Gateway:
        gateway = Gateway(tmp_path / "data", env, prefix)
        started.append(gateway)
        return gateway

    yield begin
    for gateway in started:
        gateway.kill()
        assert gateway.process.stdout is not None
        gateway.process.stdout.close()


def fails(data: Path, **env: str) -> tuple[int, str]:
    """(exit code, stderr) of a start that does not come up."""
    inherited = {"PATH": os.environ["PATH"], "TDAI_GATEWAY_PORT": "0", "TDAI_DATA_DIR": str(data)}
    done = subprocess.run(
        [sys.executable, "-I", "-m", "tdai_supervisor.embedded"],
        env={**inherited, **env},
        capture_output=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1, done.stderr
    return done.returncode, done.stderr.decode()


# --- start and settings ---------------------------------------------------------------------------------------------


def test_a_fresh_start_is_healthy_and_private(tmp_path: Path, start: Start) -> None:
    """/health has the fields of the real Gateway plus what this one can do; files are private under umask 0."""
    directory = tmp_path / "a" / "b"
    before = os.umask(0)
    try:
        gateway = start(TDAI_DATA_DIR=str(directory))
    finally:
        os.umask(before)
    body = gateway.health()
    uptime = body.pop("uptime")
    assert isinstance(uptime, int)
    assert body == {
        "status": "ok",
        "version": __version__,
        "stores": {"vectorStore": True, "embeddingService": False},
        "capabilities": ["idempotency-key", "session-flush", "live-seed"],
        "generation": "embedded",
    }
    gateway.capture("hello")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (directory.parent, directory)} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    assert gateway.ask("GET", "/health?x=1")[0] == 200
    assert gateway.raw(b"HEAD /health HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n").startswith(b"HTTP/1.1 200 ")
    assert gateway.stderr() == ""


@pytest.mark.parametrize(
    ("env", "code", "words"),
    [
        ({"TDAI_GATEWAY_PORT": "84x"}, 2, "cannot use 84x as TDAI_GATEWAY_PORT"),
        ({"TDAI_GATEWAY_PORT": "65536"}, 2, "from 0 to 65535"),
        ({"TDAI_MAX_BODY_BYTES": "0"}, 2, "TDAI_MAX_BODY_BYTES"),
        ({"TDAI_GATEWAY_HOST": "0.0.0.0"}, 2, "cannot listen on 0.0.0.0 without a token"),
        ({"TDAI_GATEWAY_HOST": "::"}, 2, "cannot listen on :: without a token"),
        ({"TDAI_GATEWAY_HOST": "203.0.113.1", "TDAI_GATEWAY_API_KEY": "k"}, 1, "cannot listen on 203.0.113.1:0"),
        ({"TDAI_GATEWAY_HOST": "a" * 70, "TDAI_GATEWAY_API_KEY": "k"}, 1, "cannot listen on"),
        ({"TDAI_GATEWAY_CONFIG": "{tmp}"}, 1, "Is a directory"),
        ({"TDAI_GATEWAY_CONFIG": "{tmp}/bad.json"}, 1, "bad.json: line 2: "),
        ({"TDAI_DATA_DIR": "{tmp}/bad.json"}, 1, "cannot use the data directory {tmp}/bad.json: File exists"),
        ({"TDAI_DATA_DIR": "{tmp}/bad.json/x"}, 1, "{tmp}/bad.json/x: Not a directory"),
    ],
)
def test_a_start_that_must_fail_says_why_in_one_line(
    tmp_path: Path, env: dict[str, str], code: int, words: str
) -> None:
    """Exit 2 for what must not run as configured, 1 for what cannot run here; no file is left behind."""
    (tmp_path / "bad.json").write_text('{"server":\n{"apiKey": "k",}}')
    filled = {name: value.replace("{tmp}", str(tmp_path)) for name, value in env.items()}
    got, line = fails(tmp_path / "data", **filled)
    assert (got, words.replace("{tmp}", str(tmp_path)) in line) == (code, True), line
    assert not (tmp_path / "data").exists()


def test_a_port_in_use_is_named_and_the_data_directory_left_alone(tmp_path: Path) -> None:
    """The line holds EADDRINUSE and the address, as the real Gateway's does."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, line = fails(tmp_path / "data", TDAI_GATEWAY_PORT=str(port))
    assert (code, f"EADDRINUSE: address already in use 127.0.0.1:{port}" in line) == (1, True), line
    assert not (tmp_path / "data").exists()


def test_a_port_taken_while_starting_is_named_too(tmp_path: Path) -> None:
    """A socket that is bound but does not listen yet may be overtaken: the same line, no traceback."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "tdai_supervisor.embedded"],
            env={"PATH": os.environ["PATH"], "TDAI_GATEWAY_PORT": str(port), "TDAI_DATA_DIR": str(tmp_path / "data")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        until(lambda: (tmp_path / "data" / "memory.db").exists() or process.poll() is not None, "its store")
        other.listen()
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert errors.decode().endswith(f"EADDRINUSE: address already in use 127.0.0.1:{port}\n")
    assert errors.count(b"\n") == 1


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """A downgrade says which file and why, and exits 1."""
    (tmp_path / "data").mkdir()
    con = sqlite3.connect(tmp_path / "data" / "memory.db")
    con.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    con.close()
    code, line = fails(tmp_path / "data")
    assert (code, f"{tmp_path}/data/memory.db: a newer release wrote it" in line) == (1, True), line


def test_the_config_file_stands_below_the_environment(tmp_path: Path, start: Start) -> None:
    """Port, key and origins of the file count where the environment says nothing."""
    (tmp_path / "c.json").write_text('{"server": {"port": 1, "apiKey": "k", "corsOrigins": ["https://ok.example"]}}')
    gateway = start(TDAI_GATEWAY_CONFIG=str(tmp_path / "c.json"))
    assert gateway.capture("hello")[0] == 401
    assert gateway.ask("OPTIONS", "/capture", headers={"Origin": "https://ok.example"})[0] == 204


def test_awkward_paths(tmp_path: Path, start: Start) -> None:
    """Spaces, %, quotes, Unicode and many characters in the data directory."""
    directory = tmp_path / "记忆 data's %2f" / ("x" * 120)
    gateway = start(TDAI_DATA_DIR=str(directory), LANG="C", LC_ALL="C")
    assert gateway.capture("东京")[1]["l0_recorded"] == 2
    assert gateway.found("东京") == 1
    assert (directory / "memory.db").exists()


def test_another_interface_needs_a_token_and_takes_any_host(start: Start) -> None:
    """Bound beyond loopback, the token protects, and the names by which it is reached are not known."""
    gateway = start(TDAI_GATEWAY_HOST="0.0.0.0", TDAI_GATEWAY_API_KEY="k")
    token = {"Authorization": "Bearer k"}
    assert (
        gateway.ask("POST", "/recall", {"query": "x", "session_key": "s"}, {**token, "Host": "box.lan:8420"})[0] == 200
    )
    assert gateway.ask("POST", "/recall", {"query": "x", "session_key": "s"}, {**token, "Host": "a b"})[0] == 400


def test_ipv6(start: Start) -> None:
    """::1 works, in the announced URL with brackets."""
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    gateway = start(TDAI_GATEWAY_HOST="::1")
    assert "http://[::1]:" in gateway.line
    with socket.create_connection(("::1", gateway.port), timeout=DEADLINE) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: [::1]:%d\r\n\r\n" % gateway.port)
        assert received(sock).startswith(b"HTTP/1.1 200 ")


# --- routes -----------------------------------------------------------------------------------------------------------


def test_a_turn_is_captured_recalled_and_found(start: Start) -> None:
    """The main job, with the fields of the real Gateway, and what it gets wrong: memory reaches /recall."""
    gateway = start()
    assert gateway.capture("My cat is called ZORBLAX-42", "A fine name 👍🏽")[:2] == (
        200,
        {"l0_recorded": 2, "scheduler_notified": False},
    )
    gateway.capture("我的猫叫橘子", "东京タワー 학교")
    _, recalled, _ = gateway.ask("POST", "/recall", {"query": "what is my cat called?", "session_key": "other"})
    assert set(recalled) == {"context", "strategy", "memory_count"}
    assert (recalled["strategy"], recalled["memory_count"]) == ("fts", 1)
    assert re.fullmatch(
        r"## [^\n]+\n"
        r"- \d{4}-\d\d-\d\d \d\d:\d\d UTC, session s1, user: My cat is called ZORBLAX-42\n"
        r"- \d{4}-\d\d-\d\d \d\d:\d\d UTC, session s1, assistant: A fine name 👍🏽",
        recalled["context"],
    )
    for query in ("ZORBLAX", "zorblax-42", "👍🏽", "👍", "橘子", "东京", "タワー", "학교"):
        assert gateway.found(query) == 1, query
    assert gateway.found("橘子", session_key="s1") == 1
    assert gateway.found("橘子", session_key="s2") == 0
    _, memories, _ = gateway.ask("POST", "/search/memories", {"query": "zorblax", "type": "persona", "limit": 99})
    assert (memories["total"], memories["strategy"]) == (1, "l0-fts")
    assert memories["results"].startswith("No extracted memories yet.")
    assert gateway.ask("POST", "/session/end", {"session_key": "s1"})[:2] == (200, {"flushed": True})
    assert gateway.ask("POST", "/session/end", {"session_key": "s1"})[:2] == (200, {"flushed": True})
    assert gateway.stderr() == ""


def test_nothing_found_reads_as_the_real_gateway_says_it(start: Start) -> None:
    """Empty answers keep their fields; odd queries are no errors."""
    gateway = start()
    for query in ("unknown", "?!", "\"' OR * NEAR(", "\x00", " "):
        body = {"query": query, "session_key": "s"}
        assert gateway.ask("POST", "/recall", body)[1] == {"context": "", "strategy": "fts", "memory_count": 0}
        assert gateway.ask("POST", "/search/conversations", {"query": query})[1] == {
            "results": "No matching conversation messages found.",
            "total": 0,
        }
        assert gateway.ask("POST", "/search/memories", body)[1]["results"] == "No matching memories found."


def test_limits(start: Start) -> None:
    """Default 5, numeric strings, clamping at 1 and 100 (memories 20), and 400 for anything else."""
    gateway = start()
    turns = [[{"role": "user", "content": f"needle {n}"}] for n in range(120)]
    gateway.ask("POST", "/seed", {"data": {"sessions": [{"sessionKey": "s", "conversations": turns}]}})

    def total(path: str, limit: Any) -> int:
        status, body, _ = gateway.ask("POST", path, {"query": "needle", "limit": limit})
        return int(body["total"]) if status == 200 else status

    limits = [None, 3, "3", 2.9, 0, -1, 1e9, "x", True]
    assert [total("/search/conversations", limit) for limit in limits] == [5, 3, 3, 2, 1, 1, 100, 400, 400]
    assert [total("/search/memories", limit) for limit in limits] == [5, 3, 3, 2, 1, 1, 20, 400, 400]


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/recall", {"query": "x"}, "Missing required fields: query, session_key"),
        ("/recall", {"query": "", "session_key": "s"}, "Missing required fields: query, session_key"),
        ("/recall", {"query": 5, "session_key": "s"}, "query must be a string"),
        ("/capture", {}, "Missing required fields: user_content, assistant_content, session_key"),
        ("/search/memories", {}, "Missing required field: query"),
        ("/search/conversations", {"query": "x", "session_key": 1}, "session_key must be a string"),
        ("/session/end", {}, "Missing required field: session_key"),
        ("/seed", {}, "Missing required field: data"),
        ("/recall", b"", "Invalid JSON body"),
        ("/recall", b"{", "Invalid JSON body"),
        ("/recall", b"\xff\xfe{", "Invalid JSON body"),
        ("/recall", b"[" * 100_000, "Invalid JSON body"),
        ("/recall", b"null", "Body must be a JSON object"),
        ("/recall", [], "Body must be a JSON object"),
    ],
)
def test_bad_bodies_are_400(served: Gateway, path: str, body: Any, error: str) -> None:
    """Never 500, and the error in words."""
    assert served.ask("POST", path, body)[:2] == (400, {"error": error})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One Gateway for the tests that only ask; it must have survived all of them."""
    gateway = Gateway(tmp_path_factory.mktemp("served") / "data", {"TDAI_CORS_ORIGINS": "https://ok.example"})
    yield gateway
    assert gateway.health()["status"] == "ok"
    assert "Traceback" not in gateway.stderr()
    gateway.kill()
    assert gateway.process.stdout is not None
    gateway.process.stdout.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/", 404, None),
        ("GET", "/health/", 404, None),
        ("POST", "/v3/conversation/add", 404, None),
        ("POST", "/health", 405, "GET, HEAD, OPTIONS"),
        ("PUT", "/capture", 405, "POST, OPTIONS"),
        ("GET", "/recall", 405, "POST, OPTIONS"),
    ],
)
def test_paths_and_methods(served: Gateway, method: str, path: str, status: int, allow: str | None) -> None:
    """404 for a path there is not, 405 with Allow for a method, both JSON."""
    got, body, headers = served.ask(method, path)
    assert (got, headers.get("Allow"), headers["Content-Type"][:16]) == (status, allow, "application/json")
    assert body["error"].endswith(f": {method} {path}")


def test_content_types(served: Gateway) -> None:
    """A web page can send text/plain without asking first: only application/json is read."""
    body = {"query": "x", "session_key": "s"}
    for kind, status in (
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        (";;=", 415),
        ("Application/JSON; charset=utf-8", 200),
    ):
        assert served.ask("POST", "/recall", body, {"Content-Type": kind})[0] == status
    assert b" 415 " in served.raw(b"POST /recall HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{}")


def test_origins(served: Gateway) -> None:
    """A page of another origin is refused before anything happens, unless it was configured."""
    body = {"user_content": "evil", "assistant_content": "evil", "session_key": "s"}
    for origin in ("https://evil.example", "null", "https://ok.example.evil.example", ""):
        assert served.ask("POST", "/capture", body, {"Origin": origin})[0] == 403
        assert served.ask("OPTIONS", "/capture", headers={"Origin": origin})[0] == 403
    assert served.ask("OPTIONS", "/capture")[0] == 403
    assert served.found("evil") == 0
    status, _, headers = served.ask("OPTIONS", "/capture", headers={"Origin": "https://ok.example"})
    assert (status, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (204, "https://ok.example", "Origin")
    assert "Idempotency-Key" in headers["Access-Control-Allow-Headers"]
    status, _, headers = served.ask("GET", "/health", headers={"Origin": "https://ok.example"})
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://ok.example")
    assert "Access-Control-Allow-Origin" not in served.ask("GET", "/health")[2]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1", "[::1]:8420"])
def test_hosts_of_this_machine_are_let_in(served: Gateway, host: str) -> None:
    """Whatever port a forwarder was reached by."""
    assert served.ask("GET", "/health", headers={"Host": host})[0] == 200


HOSTILE = {
    "another name": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
    "spaces in Host": (b"GET /health HTTP/1.1\r\nHost: a b c\r\n\r\n", 400),
    "empty Host": (b"GET /health HTTP/1.1\r\nHost:\r\n\r\n", 400),
    "no Host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "no Host in 1.0": (b"GET /health HTTP/1.0\r\n\r\n", 400),
    "port of Host": (b"GET /health HTTP/1.1\r\nHost: x:99999\r\n\r\n", 400),
    "half an address": (b"GET /health HTTP/1.1\r\nHost: [::1\r\n\r\n", 400),
    "two Hosts": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    "//": (b"GET // HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "//[": (b"GET //[ HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "http://": (b"GET http:// HTTP/1.1\r\n" + HOST + b"\r\n", None),
    "http://[": (b"GET http://[ HTTP/1.1\r\n" + HOST + b"\r\n", None),
    "a path of bytes": (b"GET /%ff%fe/%00 HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a raw path of bytes": (b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n", None),
    "OPTIONS *": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 403),
    "CONNECT": (b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n", None),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "no HTTP": (b"HELLO\r\n\r\n", 400),
    "a long line": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a long header": (b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 20_000 + b"\r\n\r\n", 400),
    "many headers": (b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 5_000 + b"\r\n", None),
    "two lengths": (
        b"POST /recall HTTP/1.1\r\n"
        + HOST
        + JSON
        + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "a negative length": (b"POST /recall HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: -5\r\n\r\n", 400),
    "a chunk size": (b"POST /recall HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "no gzip": (
        b"POST /recall HTTP/1.1\r\n" + HOST + JSON + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
        400,
    ),
    "an upgrade": (b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_requests_are_answered_in_json_and_survived(served: Gateway, name: str) -> None:
    """One malformed request ends the real Gateway (facts 4.10); this one answers and goes on. Where no status is given,
    releases of aiohttp differ: some close the connection, some take it for a path."""
    data, status = HOSTILE[name]
    answer = served.raw(data)
    if answer or status is not None:
        got = int(answer.split(b" ", 2)[1])
        assert got == status or (status is None and got < 500), answer[:200]
        assert isinstance(json.loads(answer.partition(b"\r\n\r\n")[2]), dict)
        assert b"Traceback" not in answer
    assert served.health()["status"] == "ok"


def test_tokens_guard_every_path_but_health(start: Start) -> None:
    """401 with WWW-Authenticate for known and unknown paths, the scheme in any case, and no key in any answer."""
    gateway = start(TDAI_GATEWAY_API_KEY=" s3cret-key ")
    assert gateway.health()["status"] == "ok"
    body = {"query": "x", "session_key": "s"}
    for path in ("/recall", "/unknown"):
        status, answer, headers = gateway.ask("POST", path, body)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert answer == {"error": "Unauthorized: missing Bearer token"}
        assert gateway.ask("POST", path, body, {"Authorization": "Bearer wrong"})[:2] == (
            401,
            {"error": "Unauthorized: invalid token"},
        )
    assert gateway.ask("POST", "/recall", body, {"Authorization": "bearer s3cret-key"})[0] == 200
    assert gateway.ask("POST", "/unknown", body, {"Authorization": "Bearer s3cret-key"})[0] == 404
    assert "s3cret" not in gateway.stderr()


# --- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_of_the_limit_is_stored_whole_and_one_byte_more_is_refused(start: Start) -> None:
    """1 MiB by default; the refusal is readable and the connection of the next request works."""
    gateway = start()
    shell = len(json.dumps({"user_content": "", "assistant_content": "", "session_key": "s"}))
    text = ("lorem ipsum 0123456789 " * 50_000)[: (1 << 20) - shell]
    body = {"user_content": text, "assistant_content": "", "session_key": "s"}
    assert len(json.dumps(body)) == 1 << 20
    assert gateway.ask("POST", "/capture", body)[:2] == (200, {"l0_recorded": 1, "scheduler_notified": False})
    _, answer, _ = gateway.ask("POST", "/search/conversations", {"query": "ipsum"})
    assert answer["results"].endswith(f"\n\n{text}\n")
    assert gateway.ask("POST", "/capture", {**body, "user_content": text + "x"})[:2] == (
        413,
        {"error": f"Body over {1 << 20} bytes"},
    )


def test_a_chunked_body_over_the_limit_is_refused_while_it_comes(start: Start) -> None:
    """No length is announced, so bytes are counted; the limit can be set."""
    gateway = start(TDAI_MAX_BODY_BYTES="1000")
    head = b"POST /capture HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
    assert b" 413 " in gateway.raw(head + b"3e9\r\n" + b" " * 1001 + b"\r\n")
    assert b" 413 " in gateway.raw(b"POST /capture HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: 1001\r\n\r\n")
    assert b" 400 " in gateway.raw(head + b"3e8\r\n" + b" " * 1000 + b"\r\n0\r\n\r\n")
    bomb = subprocess.run(["gzip", "-c"], input=b" " * (64 << 20), capture_output=True, check=True).stdout
    head = b"POST /capture HTTP/1.1\r\n" + HOST + JSON + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    before = psutil.Process(gateway.process.pid).memory_info().rss
    assert b" 413 " in gateway.raw(head % 900 + bomb[:900])
    assert psutil.Process(gateway.process.pid).memory_info().rss - before < 16 << 20


def test_expect_continue_is_answered_before_the_body(served: Gateway) -> None:
    """curl waits for it with larger bodies; a refused body is not asked for."""
    body = json.dumps({"query": "x", "session_key": "s"}).encode()
    head = b"POST /recall HTTP/1.1\r\n" + HOST + JSON + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with served.connect() as sock:
        sock.sendall(head % len(body))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert received(sock).startswith(b"HTTP/1.1 200 ")
    assert served.raw(head % (1 << 30)).startswith(b"HTTP/1.1 413 ")


def test_health_answers_while_a_large_capture_is_indexed(start: Start) -> None:
    """The disk and the index have a thread of their own: /health takes no longer than a moment (facts 4.11)."""
    gateway = start()
    body = json.dumps(
        {"user_content": "我的猫叫橘子。" * 24_000, "assistant_content": "", "session_key": "s"}, ensure_ascii=False
    )
    slowest = 0.0
    with ThreadPoolExecutor() as pool:
        captures = [pool.submit(gateway.ask, "POST", "/capture", body.encode()) for _ in range(3)]
        while not all(capture.done() for capture in captures):
            began = time.monotonic()
            gateway.health()
            slowest = max(slowest, time.monotonic() - began)
    assert [capture.result()[0] for capture in captures] == [200] * 3
    assert slowest < 0.5


# --- nothing is lost, nothing is doubled -----------------------------------------------------------------------------


def test_sigkill_right_after_an_answer_loses_nothing(start: Start) -> None:
    """Eight starts, each killed while four writers write: every acknowledged turn is there once."""
    acked: list[str] = []

    def write(gateway: Gateway, number: int) -> None:
        for n in range(10_000):
            word = f"w{gateway.process.pid}x{number}x{n}"
            try:
                status, body, _ = gateway.capture(word, "", key=word)
            except (OSError, http.client.HTTPException):
                return
            assert (status, body["l0_recorded"]) == (200, 1)
            acked.append(word)

    for _ in range(8):
        gateway = start()
        have = len(acked)
        with ThreadPoolExecutor(4) as pool:
            writers = [pool.submit(write, gateway, number) for number in range(4)]
            until(lambda: len(acked) >= have + 25, "25 more answers")  # noqa: B023 - called in this round
            gateway.kill()
        for writer in writers:
            writer.result()
    gateway = start()
    assert len(acked) >= 200
    assert gateway.health()["status"] == "ok"
    assert [word for word in acked if gateway.found(word) != 1] == []
    con = sqlite3.connect(gateway.data / "memory.db")
    assert con.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    con.close()


def test_a_repeated_key_counts_once_also_after_sigkill(start: Start) -> None:
    """The same answer again plus `duplicate`, whatever the body is by then."""
    gateway = start()
    assert gateway.capture("alpha", "beta", key="k1")[1] == {"l0_recorded": 2, "scheduler_notified": False}
    again = {"l0_recorded": 2, "scheduler_notified": False, "duplicate": True}
    assert gateway.capture("alpha", "beta", key="k1")[1] == again
    gateway.kill()
    gateway = start()
    assert gateway.capture("alpha", "beta", key="k1")[1] == again
    assert gateway.capture("gamma", "", key="k1")[1] == again
    assert (gateway.found("alpha"), gateway.found("gamma")) == (1, 0)
    assert gateway.capture("alpha", "beta", key="k" * 256)[1] == {"l0_recorded": 2, "scheduler_notified": False}
    assert gateway.capture("alpha", "beta", key="k" * 257)[0] == 400
    assert gateway.ask("POST", "/capture", {}, {"Idempotency-Key": ""})[0] == 400


def test_a_key_that_arrives_many_times_at_once_counts_once(start: Start) -> None:
    """One of the answers is the first, all others are duplicates of it."""
    gateway = start()
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: gateway.capture("alpha", "beta", key="k")[:2], range(20)))
    assert {status for status, _ in answers} == {200}
    assert {body["l0_recorded"] for _, body in answers} == {2}
    assert sum("duplicate" not in body for _, body in answers) == 1
    assert gateway.found("alpha") == 1


def test_fifty_captures_at_once_are_all_stored(start: Start) -> None:
    """None is lost between the requests that share a commit."""
    gateway = start()
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda n: gateway.capture(f"common word{n}", "")[0], range(50)))
    assert answers == [200] * 50
    assert gateway.found("common") == 50
    assert all(gateway.found(f"word{n}") == 1 for n in range(50))


def test_a_seed_is_live_keeps_its_times_and_doubles_nothing(start: Start) -> None:
    """Searchable at once (on the real Gateway it never is), and a second or longer run adds only what is new."""
    gateway = start()
    rounds = [
        [
            {"role": "user", "content": "where is ZORBLAX", "timestamp": 1_700_000_000_000},
            {"role": "assistant", "content": "in the garden", "timestamp": "2023-11-14T22:13:21Z"},
        ]
    ]
    body = {"data": {"sessions": [{"sessionKey": "old", "conversations": rounds}]}}
    status, answer, _ = gateway.ask("POST", "/seed", body)
    assert status == 200
    assert answer.pop("duration_ms") >= 0
    assert answer == {
        "sessions_processed": 1,
        "rounds_processed": 1,
        "messages_processed": 2,
        "l0_recorded": 2,
        "duplicates": 0,
        "output_dir": str(gateway.data),
    }
    _, hits, _ = gateway.ask("POST", "/search/conversations", {"query": "zorblax garden"})
    assert "[2023-11-14T22:13:20.000Z]" in hits["results"]
    assert "[2023-11-14T22:13:21.000Z]" in hits["results"]
    assert gateway.ask("POST", "/seed", body)[1]["l0_recorded"] == 0
    rounds.append([{"role": "user", "content": "and ZORBLAX now"}])
    for recorded, duplicates in ((1, 1), (0, 2)):
        answer = gateway.ask("POST", "/seed", body)[1]
        assert (answer["l0_recorded"], answer["duplicates"]) == (recorded, duplicates)
    assert gateway.found("zorblax") == 2
    status, answer, _ = gateway.ask("POST", "/seed", {"data": {"sessions": [{"conversations": []}]}})
    assert (status, len(answer["validation_errors"])) == (400, 1)
    assert answer["error"].startswith("Seed input validation failed")


# --- disks and files --------------------------------------------------------------------------------------------------


def test_a_corrupt_database_is_quarantined_and_shown(start: Start) -> None:
    """It is kept byte for byte, /health names it at every start, and new turns are stored."""
    gateway = start()
    gateway.capture("before")
    gateway.kill()
    damage = b"not a database any more " * 500
    for name in ("memory.db-wal", "memory.db-shm"):
        (gateway.data / name).unlink(missing_ok=True)
    (gateway.data / "memory.db").write_bytes(damage)
    for _ in range(2):
        gateway = start()
        health = gateway.health()
        assert health["status"] == "ok"
        (name,) = health["quarantined"]
        assert (gateway.data / name).read_bytes() == damage
        assert gateway.capture("after", key="k")[0] == 200
        assert (gateway.found("after"), gateway.found("before")) == (1, 0)
        gateway.kill()


def test_a_disk_that_takes_no_more_is_degraded_and_heals(start: Start) -> None:
    """503 with Retry-After, not a 200 for something lost (facts 4.8); reading goes on; it heals without a restart."""
    gateway = start()
    assert gateway.capture("before")[0] == 200
    size = max(path.stat().st_size for path in gateway.data.iterdir())
    resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (size + 8192, resource.RLIM_INFINITY))
    acked = []
    for n in range(100):
        status, body, headers = gateway.capture(f"word{n} " + f"filler{n} " * 100, "", key=f"k{n}")
        if status != 200:
            break
        acked.append(n)
    assert (status, headers["Retry-After"]) == (503, "5")
    assert set(body) == {"error"}
    health = gateway.health()
    assert (health["status"], health["stores"]["vectorStore"]) == ("degraded", False)
    assert health["cause"].startswith("cannot store: ")
    assert gateway.found("before") == 1
    resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    until(lambda: gateway.health()["status"] == "ok", "healthy again")
    for n in range(len(acked) + 1):
        assert gateway.capture(f"word{n} " + f"filler{n} " * 100, "", key=f"k{n}")[1].get("duplicate", False) == (
            n in acked
        )
        assert gateway.found(f"word{n}") == 1
    lines = gateway.stderr().splitlines()
    assert 2 <= len(lines) <= 4, lines
    assert "filler" not in gateway.stderr()


needs_mounts = pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs unshare -m",
)


def mounted(tmp_path: Path, options: str) -> tuple[str, ...]:
    (tmp_path / "data").mkdir()
    script = 'mount -t tmpfs -o "$1" tmpfs "$0" && shift && exec "$@"'
    return ("unshare", "-m", "sh", "-c", script, str(tmp_path / "data"), options)


def inside(gateway: Gateway, *command: str) -> None:
    subprocess.run(["nsenter", "-m", "-t", str(gateway.process.pid), *command], check=True, timeout=DEADLINE)


@needs_mounts
def test_a_full_file_system_is_degraded_and_heals(tmp_path: Path, start: Start) -> None:
    """Every 200 before, during and after is found; the rest was 503."""
    gateway = start(mounted(tmp_path, "size=4m,mode=0700"))
    text = " ".join(f"filler{n}" for n in range(2000))
    acked = [n for n in range(200) if gateway.capture(f"word{n} {text}", "")[0] == 200]
    assert 0 < len(acked) < 200
    assert gateway.health()["status"] == "degraded"
    assert all(gateway.found(f"word{n}") == 1 for n in acked)
    inside(gateway, "mount", "-o", "remount,size=64m", str(gateway.data))
    until(lambda: gateway.health()["status"] == "ok", "healthy again")
    assert gateway.capture("afterwards", "")[0] == 200
    assert gateway.found("afterwards") == 1
    assert all(gateway.found(f"word{n}") == 1 for n in acked)
    assert gateway.found("filler7", limit=100) == len(acked)


@needs_mounts
def test_a_start_on_a_read_only_file_system_is_degraded_and_heals(tmp_path: Path, start: Start) -> None:
    """Alive and honest: a restart would not help, so it must not end."""
    gateway = start(mounted(tmp_path, "size=16m,ro"))
    health = gateway.health()
    assert (health["status"], health["cause"]) == ("degraded", "cannot open the database: Read-only file system")
    for _ in range(5):
        assert gateway.capture("lost")[0] == 503
        assert gateway.ask("POST", "/recall", {"query": "x", "session_key": "s"})[0] == 503
    inside(gateway, "mount", "-o", "remount,rw", str(gateway.data))
    until(lambda: gateway.health()["status"] == "ok", "healthy again")
    assert gateway.capture("kept")[0] == 200
    assert len(gateway.stderr().splitlines()) == 2


def test_a_directory_without_permission_is_degraded_and_heals(tmp_path: Path, start: Start) -> None:
    """A directory that may be entered and not written is a disk problem, not a wrong setting: alive, and it heals."""
    prefix = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    if prefix and not shutil.which(prefix[0]):
        pytest.skip("modes do not stop root, and there is no setpriv to take that from it")
    (tmp_path / "data").mkdir(mode=0o500)
    gateway = start(prefix)
    health = gateway.health()
    assert (health["status"], health["cause"]) == ("degraded", "cannot open the database: Permission denied")
    assert gateway.capture("lost")[0] == 503
    (tmp_path / "data").chmod(0o700)
    until(lambda: gateway.health()["status"] == "ok", "healthy again")
    assert gateway.capture("kept")[0] == 200


def test_a_deleted_data_directory_is_never_acknowledged_into(start: Start) -> None:
    """The real Gateway answers 200 into the void (facts 4.8); here it is 503 until a restart."""
    gateway = start()
    gateway.capture("before")
    shutil.rmtree(gateway.data)
    assert gateway.capture("lost")[0] == 503
    assert gateway.health()["status"] == "degraded"
    gateway.data.mkdir()
    assert gateway.capture("lost")[0] == 503
    assert "restart" in gateway.health()["cause"]
    assert gateway.end()[0] == 0
    assert start().capture("kept")[0] == 200


def test_a_deleted_database_is_replaced_before_the_next_answer(start: Start) -> None:
    """Who deletes memory.db wants an empty memory, and what comes after it to be kept."""
    gateway = start()
    gateway.capture("before")
    for path in gateway.data.iterdir():
        path.unlink()
    assert gateway.capture("after", key="k")[0] == 200
    gateway.kill()
    gateway = start()
    assert (gateway.found("before"), gateway.found("after")) == (0, 1)


# --- clients that do not behave, and the end --------------------------------------------------------------------------

CLIENTS: dict[str, bytes] = {
    "nothing": b"",
    "half a header": b"GET /health HTTP/1.1\r\nHost: 127",
    "half a body": b"POST /capture HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: 100\r\n\r\n{",
    "half a chunk": b"POST /capture HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\n40\r\n{",
    "an idle connection": b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n",
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("client", [*CLIENTS, "a slow reader", "all of them"])
def test_it_ends_within_a_second_whatever_clients_do(start: Start, client: str, number: int) -> None:
    """Exit 0 on TERM and INT, where the real Gateway never exits beside half a request (facts section 5)."""
    gateway = start()
    gateway.capture("x" * 900_000, "")
    socks = []
    for name in CLIENTS if client == "all of them" else [client]:
        sock = gateway.connect()
        socks.append(sock)
        sock.sendall(CLIENTS.get(name, b""))
        if name == "an idle connection":
            assert received(sock)
    if client in ("a slow reader", "all of them"):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", gateway.port))
        socks.append(sock)
        body = json.dumps({"query": "x" * 64, "limit": 1}).encode()
        head = b"POST /search/conversations HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: %d\r\n\r\n" % len(body)
        sock.sendall((head + body) * 20)  # 18 MB of answers: more than the kernel takes
        port = sock.getsockname()[1]
        until(lambda: unsent(gateway.port, port) > 1 << 20, "a megabyte that the reader does not take")
    gateway.health()  # whatever was sent before was read
    code, seconds = gateway.end(number)
    for sock in socks:
        sock.close()
    assert (code, seconds < 1.0) == (0, True), seconds
    assert gateway.stderr() == ""


def test_it_ends_under_load_and_keeps_what_it_answered(start: Start) -> None:
    """TERM twice while eight writers write: exit 0, and each 200 is found after the next start."""
    gateway = start()
    acked: list[str] = []
    stopped = threading.Event()

    def write(number: int) -> None:
        for n in range(10_000):
            word = f"w{number}x{n}"
            try:
                if stopped.is_set() or gateway.capture(word, "")[0] != 200:
                    return
            except (OSError, http.client.HTTPException):
                return
            acked.append(word)

    with ThreadPoolExecutor(8) as pool:
        for number in range(8):
            pool.submit(write, number)
        until(lambda: len(acked) > 50, "50 answers")
        gateway.process.send_signal(signal.SIGTERM)
        code, seconds = gateway.end()
        stopped.set()
    assert (code, seconds < 1.0) == (0, True), seconds
    gateway = start()
    assert [word for word in acked if gateway.found(word) != 1] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_may_be_ended_while_it_starts(tmp_path: Path, number: int) -> None:
    """Exit 0 also before it listens, and the next start finds nothing amiss."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-m", "tdai_supervisor.embedded"],
        env={"PATH": os.environ["PATH"], "TDAI_GATEWAY_PORT": "0", "TDAI_DATA_DIR": str(tmp_path / "data")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    until(lambda: (tmp_path / "data").exists(), "its data directory")
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (0, b"")


def test_an_orderly_end_leaves_one_file(start: Start) -> None:
    """The WAL is written back, so that a copy of memory.db alone is a backup."""
    gateway = start()
    gateway.capture("kept")
    assert gateway.end()[0] == 0
    assert [path.name for path in gateway.data.iterdir()] == ["memory.db"]


def test_descriptors_do_not_gather(start: Start) -> None:
    """Two hundred clients that break off at some point leave nothing behind."""
    gateway = start()
    gateway.health()
    process = psutil.Process(gateway.process.pid)
    before = process.num_fds()
    for n in range(200):
        with gateway.connect() as sock:
            sock.sendall(
                [*CLIENTS.values(), *(data for data, _ in HOSTILE.values())][n % (len(CLIENTS) + len(HOSTILE))]
            )
    until(lambda: process.num_fds() <= before, f"{before} descriptors again")
    assert process.num_threads() == 2
    assert gateway.health()["status"] == "ok"
    assert "Traceback" not in gateway.stderr()


@pytest.mark.parametrize("how", ["pipes without a reader", "closed"])
def test_it_lives_without_its_output(tmp_path: Path, how: str) -> None:
    """The real Gateway exits 1 with its next log line (facts 4.13); a closed one must not become one of our sockets."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    redirections = " <&- >&- 2>&-" if how == "closed" else ""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@"' + redirections, "sh", sys.executable, "-I", "-m", "tdai_supervisor.embedded"],
        env={"PATH": os.environ["PATH"], "TDAI_GATEWAY_PORT": str(port), "TDAI_DATA_DIR": str(tmp_path / "data")},
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)

    def answers() -> bool:
        assert process.poll() is None
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as sock:
                sock.sendall(b"HELLO\r\n\r\n")
                return b" 400 " in sock.recv(1000)
        except ConnectionError:
            return False

    try:
        until(answers, "an answer, though its log line goes nowhere")
        assert answers()
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()


def test_what_users_said_is_not_logged(start: Start) -> None:
    """No text, query or key on stderr, also when things go wrong."""
    gateway = start(TDAI_GATEWAY_API_KEY="s3cret-key")
    token = {"Authorization": "Bearer s3cret-key", "Idempotency-Key": "s3cret-idem"}
    body = {"user_content": "s3cret-text", "assistant_content": "a", "session_key": "s3cret-session"}
    gateway.ask("POST", "/capture", body, token)
    gateway.ask("POST", "/recall", {"query": "s3cret-query", "session_key": "s"}, token)
    gateway.ask("POST", "/capture", {**body, "user_content": 5}, token)
    gateway.raw(b"POST /s3cret HTTP/1.1\r\nAuthorization: Bearer s3cret-key\r\nHost: x\r\nbroken header s3cret\r\n\r\n")
    shutil.rmtree(gateway.data)
    gateway.ask("POST", "/capture", body, token)
    assert "s3cret" not in gateway.stderr()
    assert len(gateway.stderr().splitlines()) >= 2
