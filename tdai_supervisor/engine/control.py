"""The control socket: one JSON line in, one JSON line out.

Invariants: 0600 and only our own uid (or root) is answered; a request is at most 64 KiB and must come within 5 s; a
bad or huge one costs its own connection and nothing else; a live socket of another daemon is never unlinked (we bind
only while holding the supervisor lock).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from tdai_supervisor.decide import paths

log = logging.getLogger("tdai_supervisor")
MAX_REQUEST = 64 * 1024
REQUEST_TIME = 5.0  # s
MAX_BACKLOG = 1024 * 1024  # bytes a subscriber may be behind
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def listen(root: str) -> socket.socket:
    """The bound control socket of a root, what lay there removed. Call only under the supervisor lock."""
    path = paths.socket(root)
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        short = path
        if len(os.fsencode(path)) > paths.SUN_PATH:
            short = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
        before = os.umask(0o177)
        try:
            server.bind(short)
        finally:
            os.umask(before)
        server.listen(128)
    except BaseException:
        server.close()
        raise
    finally:
        os.close(directory)
    return server


def peer_uid(connection: socket.socket) -> int | None:
    """The uid at the other end, or None where the system does not say (then the socket's mode alone protects)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", data)[1])


class Control:
    """Serves requests on a bound socket until closed."""

    def __init__(self, listener: socket.socket, handler: Handler) -> None:
        self._listener, self._handler = listener, handler
        self._subscribers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Begin to answer."""
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listener, limit=MAX_REQUEST)

    def tell(self, entry: dict[str, Any]) -> None:
        """Send a transition to every subscriber; one that does not read is cut off, never waited for."""
        line = (json.dumps(entry, ensure_ascii=True) + "\n").encode()
        for writer in list(self._subscribers):
            if writer.transport.get_write_buffer_size() > MAX_BACKLOG:
                writer.close()
            else:
                writer.write(line)

    def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._serving):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(writer)
        try:
            uid = peer_uid(writer.get_extra_info("socket"))
            if uid not in (None, 0, os.geteuid()):
                log.warning("Refused uid %s on the control socket", uid)
                return
            request = await self._request(reader)
            answer = request if "ok" in request else await self._handler(request)
            writer.write((json.dumps(answer, ensure_ascii=True) + "\n").encode())
            await writer.drain()
            if request.get("verb") == "subscribe" and answer["ok"]:
                self._subscribers.add(writer)
                await reader.read()  # until the other end closes
        except (ConnectionError, TimeoutError):
            pass  # whoever asked is gone: nothing to tell
        finally:
            self._serving.discard(writer)
            self._subscribers.discard(writer)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        """The request, or the refusal (which has "ok") of what is none."""
        try:
            async with asyncio.timeout(REQUEST_TIME):
                line = await reader.readuntil(b"\n")
            request = json.loads(line)
            if not isinstance(request, dict) or not isinstance(request.get("verb"), str):
                raise ValueError("no verb")
            request.pop("ok", None)
        except asyncio.LimitOverrunError:
            return refusal("bad-request", "cannot read the request: it is longer than 64 KiB")
        except (asyncio.IncompleteReadError, TimeoutError):
            return refusal("bad-request", f"cannot read the request: no complete line within {REQUEST_TIME:g} s")
        except ValueError as error:
            return refusal("bad-request", f"cannot read the request: {error}")
        return request


def refusal(code: str, message: str, hint: str | None = None, exit_code: int = 1) -> dict[str, Any]:
    """A reply that says why not."""
    error = {"code": code, "message": message, "hint": hint}
    return {"ok": False, "exit_code": exit_code, "data": None, "errors": [error]}


def reply(data: Any, errors: list[dict[str, Any]] | None = None, exit_code: int = 0) -> dict[str, Any]:
    """A reply with data."""
    return {"ok": not errors and exit_code == 0, "exit_code": exit_code, "data": data, "errors": errors or []}
