"""A Gateway that does what a test tells it, in this process or as a process of its own.

In a test:   with FakeGateway("A") as gateway: gateway.script("/capture", http(500), cut()); ...
As a process: python -m tests.support.fake_gateway PORT JOURNAL [GENERATION]   (it answers POST /__mode like a script)

What is scripted for a route is used up one request at a time; then the Gateway behaves as its generation does:
A and B store a capture however often it comes, the embedded one honours idempotency keys; B's /recall answers 200 with
code 10001. Everything asked and stored is kept in ``requests`` and ``stored``.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

GENERATIONS = ("A", "B", "embedded")


class Request(NamedTuple):
    """One request as it came. Header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float


class Stored(NamedTuple):
    """One turn that the Gateway has stored; ``at`` is wall time."""

    session: str
    user: str
    assistant: str
    key: str
    at: float


Step = Callable[["FakeGateway", socket.socket, Request], None]


class FakeGateway:
    """Listens on 127.0.0.1 from start() to stop(), which may be repeated on the same port."""

    def __init__(self, generation: str = "embedded", *, port: int = 0, key: str = "") -> None:
        assert generation in GENERATIONS, generation
        self.generation, self.port, self.key = generation, port, key
        self.context = "- [persona] The cat is called ZORBLAX."
        self.memories = ""
        self.degraded = False
        self.delay = 0.0
        self.requests: list[Request] = []
        self.stored: list[Stored] = []
        self.ended: list[str] = []
        self.connections = 0
        self._always: dict[str, Step] = {}
        self._scripts: dict[str, deque[Step]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()

    def __enter__(self) -> FakeGateway:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> FakeGateway:
        """Listen; at the first time on any free port, later on the same one."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="fake-gateway", daemon=True).start()
        return self

    def stop(self) -> None:
        """End at once, as kill -9 would: connections are cut."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._changed:
            for connection in self._open:
                _shut(connection)

    def script(self, path: str, *steps: Step) -> None:
        """Do these to the next requests for ``path``, in order."""
        self._scripts[path].extend(steps)

    def always(self, path: str, step: Step | None) -> None:
        """Do this to every request for ``path`` ("*": any) that has no script; None ends it."""
        if step is None:
            self._always.pop(path, None)
        else:
            self._always[path] = step

    def asked(self, path: str) -> list[Request]:
        """The requests for ``path`` so far, in order."""
        return [request for request in self.requests if request.path == path]

    def users(self) -> list[str]:
        """The user's side of every stored turn, in order."""
        return [turn.user for turn in self.stored]

    def wait(self, true: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait until ``true()``, looked at after each request. Fails after ``seconds``."""
        end = time.monotonic() + seconds
        with self._changed:
            while not true():
                left = end - time.monotonic()
                if left <= 0:
                    seen = [(request.path, request.body.get("user_content")) for request in self.requests[-20:]]
                    raise AssertionError(f"not within {seconds} s; the last requests: {seen}")
                self._changed.wait(min(left, 0.05))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._changed:
                self.connections += 1
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="fake-gateway-call", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            request = _read(connection)
            if request is not None:
                with self._changed:
                    self.requests.append(request)
                    script = self._scripts[request.path]
                    step = script.popleft() if script else self._always.get(request.path, self._always.get("*"))
                    self._changed.notify_all()
                if self.delay:
                    time.sleep(self.delay)
                (step or plain)(self, connection, request)
        except OSError:
            pass  # the client has gone, or stop() has cut it
        finally:
            with self._changed:
                self._open.discard(connection)
                self._changed.notify_all()
            connection.close()

    def answer(self, request: Request) -> tuple[int, dict[str, Any]]:
        """What a Gateway of this generation does and answers."""
        if request.path == "/health":
            return 200, self.health()
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized: invalid token"}
        routes = {
            "/recall": self._recall,
            "/capture": self._capture,
            "/search/memories": self._memories,
            "/search/conversations": self._conversations,
            "/session/end": self._end,
        }
        if request.method != "POST" or request.path not in routes:
            return 404, {"error": f"Not found: {request.method} {request.path}"}
        return routes[request.path](request.body)

    def health(self) -> dict[str, Any]:
        """The body of /health."""
        stores = {"vectorStore": not self.degraded, "embeddingService": False}
        status = "degraded" if self.degraded else "ok"
        body: dict[str, Any] = {"status": status, "version": "0.1.0", "uptime": 3, "stores": stores}
        if self.generation == "B":
            body["services"] = {"stateBackend": "connected"}
        if self.generation == "embedded":
            body["capabilities"] = ["idempotency-key", "session-flush", "live-seed"]
        return body

    def _recall(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not body.get("query") or not body.get("session_key"):
            return 400, {"error": "Missing required fields: query, session_key"}
        if self.generation == "B":
            return 200, {"context": "", "memory_count": 0, "code": 10001, "message": "no EmbeddingService"}
        return 200, {"context": self.context, "strategy": "fts", "memory_count": 1 if self.context else 0}

    def _capture(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not all(body.get(key) for key in ("user_content", "assistant_content", "session_key")):
            return 400, {"error": "Missing required fields: user_content, assistant_content, session_key"}
        self.store(body)
        return 200, {"l0_recorded": 2, "scheduler_notified": True}

    def store(self, body: dict[str, Any]) -> None:
        """Store a capture; once per key where keys are honoured."""
        key = str(body.get("__key") or "")
        with self._changed:
            if self.generation == "embedded" and key and any(turn.key == key for turn in self.stored):
                return
            session, user, assistant = (body[name] for name in ("session_key", "user_content", "assistant_content"))
            self.stored.append(Stored(session, user, assistant, key, time.time()))
            self._changed.notify_all()

    def _memories(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        words = self.memories or "No matching memories found."
        return 200, {"results": words, "total": int(bool(self.memories)), "strategy": "fts"}

    def _conversations(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        wanted = " ".join(str(body["query"]).split())
        hits = []
        for turn in self.stored:
            for role, words in (("user", turn.user), ("assistant", turn.assistant)):
                if wanted in " ".join(words.split()) and body.get("session_key") in (None, turn.session):
                    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(turn.at))
                    hits.append(f"---\n**[{role}]** Session: {turn.session} [{stamp}] (score: 0.4)\n\n{words}\n")
        hits = hits[: int(body.get("limit", 5))]
        head = f"Found {len(hits)} matching message(s):\n\n" if hits else "No matching conversation messages found."
        return 200, {"results": head + "\n".join(hits), "total": len(hits)}

    def _end(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.ended.append(body["session_key"])
        return 200, {"flushed": True}


def plain(gateway: FakeGateway, connection: socket.socket, request: Request) -> None:
    """Behave as the generation does."""
    connection.sendall(_http(*gateway.answer(request)))


def http(status: int, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> Step:
    """Answer this, and do nothing."""
    return lambda gateway, connection, request: connection.sendall(_http(status, body or {"error": "told to"}, headers))


def raw(data: bytes) -> Step:
    """Answer these bytes and close."""
    return lambda gateway, connection, request: connection.sendall(data)


def silent(seconds: float = 3600.0) -> Step:
    """Say nothing until the other side goes, at most ``seconds``."""

    def step(gateway: FakeGateway, connection: socket.socket, request: Request) -> None:
        connection.settimeout(seconds)
        try:
            connection.recv(1)
        except TimeoutError:
            return

    return step


def cut(*, after: bool = False) -> Step:
    """Close without an answer; ``after`` having done what was asked."""

    def step(gateway: FakeGateway, connection: socket.socket, request: Request) -> None:
        if after:
            gateway.answer(request)

    return step


def late(seconds: float) -> Step:
    """Do it, and answer after ``seconds``."""

    def step(gateway: FakeGateway, connection: socket.socket, request: Request) -> None:
        time.sleep(seconds)
        plain(gateway, connection, request)

    return step


def drip(where: str, every: float = 0.2) -> Step:
    """Send one byte at a time: ``where`` is "head" or "body"."""

    def step(gateway: FakeGateway, connection: socket.socket, request: Request) -> None:
        data = _http(*gateway.answer(request))
        at = 0 if where == "head" else data.index(b"\r\n\r\n") + 4
        connection.sendall(data[:at])
        for index in range(at, len(data)):
            connection.sendall(data[index : index + 1])
            time.sleep(every)

    return step


def _http(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    data = json.dumps(body, ensure_ascii=False).encode()
    lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


def _read(connection: socket.socket) -> Request | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        more = connection.recv(65536)
        if not more:
            return None
        body += more
    method, path, _ = first.split(" ", 2)
    parsed = json.loads(body) if body else {}
    if headers.get("idempotency-key"):
        parsed["__key"] = headers["idempotency-key"]
    return Request(method, path, headers, parsed, time.monotonic())


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def main() -> None:
    """Serve until killed; a stored turn is a line of JSON in the journal. POST /__mode {"mode": "ok|silent|late:S"}."""
    port, journal, generation = int(sys.argv[1]), sys.argv[2], (sys.argv[3:] or ["embedded"])[0]

    class Journalling(FakeGateway):
        def store(self, body: dict[str, Any]) -> None:
            known = len(self.stored)
            super().store(body)
            with open(journal, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(turn._asdict()) + "\n" for turn in self.stored[known:])

    gateway = Journalling(generation, port=port)
    modes: dict[str, Callable[[str], Step | None]] = {
        "ok": lambda _: None,
        "silent": lambda _: silent(),
        "late": lambda seconds: late(float(seconds)),
    }

    def mode(_: FakeGateway, connection: socket.socket, request: Request) -> None:
        name, _, argument = request.body["mode"].partition(":")
        gateway.always("*", modes[name](argument))
        connection.sendall(_http(200, {"done": True}))

    gateway.always("/__mode", mode)
    gateway.start()
    print(gateway.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
