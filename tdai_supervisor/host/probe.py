"""One bounded GET /health, without a library: the loop owns the socket and its deadline.

Invariants: no proxy, no redirect, at most 64 KiB read; the connection stays open until the answer is complete or the
caller gives up; a header or body that drips never resets a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass, field
from typing import Any

MAX_ANSWER = 64 * 1024
CLIENT_HOSTS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104  (bind addresses that clients cannot use)


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer: its HTTP status, and its body where that is a JSON object."""

    status: int
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def hold(self) -> str | None:
        """Why nothing should be delivered although it is alive, or None: anything but 200 with status "ok"."""
        if self.status != 200:
            return f"/health answered HTTP {self.status}"
        status = self.body.get("status", "ok")
        return None if status == "ok" else f"/health says {str(status)[:40]!r}"

    @property
    def generation(self) -> str | None:
        """ "embedded", "A" or "B" by the shape of /health, None where it is no Gateway's."""
        if self.body.get("generation") == "embedded":
            return "embedded"
        if not isinstance(self.body.get("stores"), dict):
            return None
        return "B" if "services" in self.body else "A"


def client_host(host: str) -> str:
    """The address a client uses for a bind address."""
    return CLIENT_HOSTS.get(host, host)


async def ask(host: str, port: int) -> Answer:
    """The answer to GET /health. Raises OSError (refused, cut) or ValueError (not HTTP); the caller bounds the time."""
    loop = asyncio.get_running_loop()
    host = client_host(host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, (host, port))
        name = f"[{host}]" if ":" in host else host
        request = (
            f"GET /health HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\nAccept: application/json\r\n\r\n"
        )
        await loop.sock_sendall(connection, request.encode("ascii"))
        data = b""
        while True:
            more = await loop.sock_recv(connection, 16 * 1024)
            data += more
            answer = parse(data, complete=not more)
            if answer is not None:
                return answer
            if len(data) > MAX_ANSWER:
                raise ValueError("an answer of more than 64 KiB")


def parse(data: bytes, *, complete: bool) -> Answer | None:
    """The answer in data, None while more must come. complete: the peer closed. Raises ValueError, OSError."""
    head, gap, body = data.partition(b"\r\n\r\n")
    if not gap:
        if complete:
            raise ConnectionResetError("the connection was closed before the headers were complete")
        return None
    lines = head.split(b"\r\n")
    version, _, rest = lines[0].partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise ValueError("an answer that is not HTTP")
    status, length = int(rest[:3]), None
    for line in lines[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-length" and value.strip().isdigit():
            length = int(value.strip())
    if not complete and (length is None or len(body) < min(length, MAX_ANSWER)):
        return None
    with contextlib.suppress(ValueError):
        parsed = json.loads(_dechunk(body) if length is None and b"chunked" in head.lower() else body)
        if isinstance(parsed, dict):
            return Answer(status, parsed)
    return Answer(status)


def _dechunk(body: bytes) -> bytes:
    """The content of a complete chunked body; a broken one gives what came before the break."""
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        try:
            length = int(size.split(b";")[0], 16)
        except ValueError:
            break
        content, body = content + body[:length], body[length + 2 :]
    return content
