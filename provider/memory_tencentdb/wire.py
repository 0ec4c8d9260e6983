"""Bounded HTTP over loopback.

Invariants:
* A call ends at its total deadline, whatever the other side does: the time left is set anew before every send and
  receive, so a header or body that drips one byte per second costs no more than silence.
* No proxy, no redirect, no name lookup: an address is an IP literal, a 3xx is an answer like any other.
* At most BODY_LIMIT bytes of a body are read, HEAD_LIMIT of a head.
* A cancelled call ends within TICK, so that no thread sits in a blocking call when the interpreter ends.
* Every failure says whether the request had been handed over whole (``sent``): only then can the other side have acted.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Sequence

BODY_LIMIT = 1024 * 1024
HEAD_LIMIT = 64 * 1024
TICK = 0.1
"""Seconds between two looks at ``cancelled`` while nothing arrives."""


class WireError(Exception):
    """The call brought no complete answer. ``sent``: the whole request had been handed to the kernel."""

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


class Unreachable(WireError):
    """Nobody accepts connections there (refused, no route): certain, and at once."""


class Silent(WireError):
    """Connected, but no complete answer before the deadline."""


class Cut(WireError):
    """The connection ended, or what arrived was no HTTP, before the answer was complete."""


class Cancelled(WireError):
    """This side is closing."""


class Response:
    """One complete answer. Header names are lower case."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


class Call:
    """One request on its own connection, and what became of it: in the end one of ``response`` and ``error``."""

    __slots__ = ("error", "incoming", "outgoing", "response", "sock")

    def __init__(self, sock: socket.socket, outgoing: memoryview) -> None:
        self.sock = sock
        self.outgoing = outgoing
        self.incoming = bytearray()
        self.response: Response | None = None
        self.error: WireError | None = None

    @property
    def done(self) -> bool:
        return self.response is not None or self.error is not None

    @property
    def sent(self) -> bool:
        return not self.outgoing


def never() -> bool:
    """The ``cancelled`` of a call that nobody cancels."""
    return False


def connect(
    host: str,
    port: int,
    deadline: float,
    cancelled: Callable[[], bool] = never,
    clock: Callable[[], float] = time.monotonic,
) -> socket.socket:
    """A non-blocking connection to an IP literal. ``deadline`` is a moment of ``clock``.

    Raises Unreachable (refused, no route, no descriptors left), Silent, Cancelled.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"no socket: {error.strerror}") from error
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex((host, port))
        if code == errno.EINPROGRESS:
            _wait([sock], select.POLLOUT, deadline, cancelled, clock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            name = errno.errorcode.get(code, str(code))
            raise Unreachable(f"{name} {format_address(host, port)}")
    except BaseException:
        sock.close()
        raise
    return sock


def request(method: str, path: str, host: str, headers: dict[str, str], body: bytes | None) -> bytes:
    """The bytes of one request on a connection of its own. ``host`` is the Host header: host:port, nothing odder."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Accept: application/json"]
    lines += [f"{name}: {_header_safe(value)}" for name, value in headers.items()]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + (body or b"")


def _header_safe(value: str) -> str:
    if any(ch in value for ch in "\r\n\0"):
        raise ValueError("cannot send a header value with a line break in it")
    return value


def run(
    calls: Sequence[Call],
    deadline: float,
    cancelled: Callable[[], bool] = never,
    clock: Callable[[], float] = time.monotonic,
    limit: int = BODY_LIMIT,
) -> None:
    """Carry all calls at once to their end, closing their sockets. Never raises: each call holds its own outcome."""
    try:
        while waiting := [call for call in calls if not call.done]:
            try:
                ready = _wait_all(waiting, deadline, cancelled, clock)
            except WireError as error:
                for call in waiting:
                    call.error = type(error)(str(error), sent=call.sent)
                return
            for call in ready:
                _advance(call, limit)
    finally:
        for call in calls:
            call.sock.close()


def _wait_all(
    calls: Sequence[Call], deadline: float, cancelled: Callable[[], bool], clock: Callable[[], float]
) -> list[Call]:
    poller = select.poll()
    by_fd = {call.sock.fileno(): call for call in calls}
    for fd, call in by_fd.items():
        poller.register(fd, select.POLLIN if call.sent else select.POLLIN | select.POLLOUT)
    return [by_fd[fd] for fd in _poll(poller, deadline, cancelled, clock)]


def _wait(
    socks: Sequence[socket.socket],
    event: int,
    deadline: float,
    cancelled: Callable[[], bool],
    clock: Callable[[], float],
) -> None:
    poller = select.poll()
    for sock in socks:
        poller.register(sock, event)
    _poll(poller, deadline, cancelled, clock)


def _poll(poller: select.poll, deadline: float, cancelled: Callable[[], bool], clock: Callable[[], float]) -> list[int]:
    while True:
        if cancelled():
            raise Cancelled("closing")
        left = deadline - clock()
        if left <= 0:
            raise Silent("no complete answer in time")
        if ready := poller.poll(max(1.0, min(left, TICK) * 1000)):
            return [fd for fd, _ in ready]


def _advance(call: Call, limit: int) -> None:
    try:
        if call.outgoing:
            call.outgoing = call.outgoing[call.sock.send(call.outgoing) :]
        data = call.sock.recv(65536)
        call.incoming += data
        call.response = parse(call.incoming, ended=not data, limit=limit)
    except (BlockingIOError, InterruptedError):
        return
    except OSError as error:
        call.error = Cut(f"connection cut: {error.strerror or error}", sent=call.sent)
    except ValueError as error:
        call.error = Cut(str(error), sent=call.sent)


def parse(data: bytes | bytearray, *, ended: bool, limit: int = BODY_LIMIT) -> Response | None:
    """The answer in ``data``, or None while more must arrive. ``ended``: the other side has closed.

    Raises ValueError when it is no HTTP answer, is over a limit, or ended too early.
    """
    head, blank, rest = bytes(data).partition(b"\r\n\r\n")
    if not blank:
        if len(head) > HEAD_LIMIT:
            raise ValueError(f"answer head over {HEAD_LIMIT} bytes")
        if ended:
            raise ValueError("connection closed before an answer" if not head else "connection closed within the head")
        return None
    status, headers = _parse_head(head)
    if 100 <= status < 200:
        return parse(rest, ended=ended, limit=limit)
    body = _body(status, headers, rest, ended, limit)
    return None if body is None else Response(status, headers, body)


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, tail = first.partition(" ")
    code = tail[:3]
    if not version.startswith("HTTP/1.") or not code.isdigit() or len(code) != 3:
        raise ValueError("the answer is not HTTP")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(code), headers


def _body(status: int, headers: dict[str, str], rest: bytes, ended: bool, limit: int) -> bytes | None:
    if status in (204, 304):
        return b""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return _chunks(rest, ended, limit)
    length = headers.get("content-length")
    if length is not None and not length.isdigit():
        raise ValueError("the answer has no valid length")
    if (int(length) if length is not None else len(rest)) > limit:
        raise ValueError(f"answer over {limit} bytes")
    if length is None:
        return rest if ended else None
    if len(rest) >= int(length):
        return rest[: int(length)]
    if ended:
        raise ValueError("connection closed within the body")
    return None


def _chunks(rest: bytes, ended: bool, limit: int) -> bytes | None:
    body, at = bytearray(), 0
    while True:
        line_end = rest.find(b"\r\n", at)
        if line_end < 0:
            break
        try:
            size = int(rest[at:line_end].split(b";")[0], 16)
        except ValueError:
            raise ValueError("the answer has a broken chunk") from None
        if size < 0 or len(body) + size > limit:
            raise ValueError(f"answer over {limit} bytes")
        if size == 0:
            return bytes(body)
        start = line_end + 2
        if len(rest) < start + size + 2:
            break
        body += rest[start : start + size]
        at = start + size + 2
    if ended:
        raise ValueError("connection closed within the body")
    if len(rest) > 2 * limit + HEAD_LIMIT:
        raise ValueError(f"answer over {limit} bytes")
    return None


def format_address(host: str, port: int) -> str:
    """host:port as it is written in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
