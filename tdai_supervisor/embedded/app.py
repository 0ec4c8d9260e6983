"""The HTTP face: who may ask, what a body must hold, what is answered. Routes and bodies are those of the real Gateway.

Invariants:
- No request is acted on before Host, Origin and token were looked at, in this order; /health alone needs no token.
- 200 to /capture or /seed means on disk. What cannot be stored is 503 with Retry-After.
- Every answer of the application is JSON; no exception text, no path of the user and no content reaches an error.
- /health never waits for the disk.
"""

import asyncio
import hmac
import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import web

from tdai_supervisor import __version__
from tdai_supervisor.embedded import text, turns
from tdai_supervisor.embedded.bodies import Body, Refused, clean, limit_of, optional, required, seed_of, turn_of
from tdai_supervisor.embedded.store import Store, StoreDown, Worker

BODY_TIMEOUT = 30.0
"""Seconds for a body to arrive."""
KEEPALIVE = 75.0
"""Seconds an idle connection is kept."""
RETRY_AFTER = 5
GRACE = 0.2
"""Seconds for running handlers at the end, and again for cancelled ones; with STORE_GRACE below 1 s together."""
STORE_GRACE = 0.25

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]

_CORS = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "Content-Type, Authorization, Idempotency-Key",
    "Vary": "Origin",
}


class Policy(NamedTuple):
    """Who may ask. `hosts`: names that Host may hold, or None for any; `api_key` empty: no token is needed."""

    hosts: frozenset[str] | None
    origins: frozenset[str]
    api_key: str
    max_body: int


def host_name(values: list[str]) -> str | None:
    """The name in the Host headers of a request, lower case and without a port; None unless it is one valid name."""
    match = _HOST.fullmatch(values[0]) if len(values) == 1 else None
    if match is None or int(match[2] or 0) > 65535:
        return None
    return match[1].lower()


def token_fault(header: str | None, api_key: str) -> str | None:
    """Why an Authorization header does not open, or None. Constant time in the token."""
    match = _BEARER.fullmatch(header or "")
    if match is None:
        return "Unauthorized: missing Bearer token"
    given, wanted = (part.encode("utf-8", "surrogateescape") for part in (match[1], api_key))
    return None if hmac.compare_digest(given, wanted) else "Unauthorized: invalid token"


def _json(status: int, body: Body, headers: dict[str, str] | None = None) -> web.Response:
    raw = json.dumps(body, ensure_ascii=False).encode()
    return web.Response(status=status, body=raw, content_type="application/json", headers=headers)


def _place(exc: BaseException) -> str:
    """File and line an exception came from: what a log may say of it."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else "?"


class Gateway:
    """Requests to answers, over a store."""

    def __init__(self, worker: Worker, store: Store, policy: Policy, log: Callable[[str], None]) -> None:
        self._worker = worker
        self._store = store
        self._policy = policy
        self._log = log
        self._started = time.monotonic()
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health, "HEAD": self._health},
            "/recall": {"POST": self._recall},
            "/capture": {"POST": self._capture},
            "/search/memories": {"POST": self._search_memories},
            "/search/conversations": {"POST": self._search_conversations},
            "/session/end": {"POST": self._session_end},
            "/seed": {"POST": self._seed},
        }

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """The answer to a request, whatever happens."""
        try:
            self._admit(request)
            response = (
                web.Response(status=204) if request.method == "OPTIONS" else await self._handler(request)(request)
            )
        except Refused as exc:
            response = _json(exc.status, exc.body, exc.headers)
        except StoreDown as exc:
            response = _json(503, {"error": f"Store not available: {exc}"}, {"Retry-After": str(RETRY_AFTER)})
        except Exception as exc:  # noqa: BLE001 - the last barrier of a request; logged by kind and place
            self._log(f"error in {request.method} {request.path[:80]!r}: {type(exc).__name__} at {_place(exc)}")
            response = _json(500, {"error": "Internal error"})
        response.headers.update({"Server": "memory-gateway-embedded", "Cache-Control": "no-store"})
        origin = request.headers.get("Origin")
        if origin in self._policy.origins:
            response.headers.update({**_CORS, "Access-Control-Allow-Origin": origin})
        return response

    def _handler(self, request: web.BaseRequest) -> Handler:
        methods = self._routes.get(request.path)
        if methods is None:
            raise Refused(404, clean(f"Not found: {request.method} {request.path}"))
        if request.method not in methods:
            what = f"Method not allowed: {request.method} {request.path}"
            raise Refused(405, what, {"Allow": ", ".join([*methods, "OPTIONS"])})
        return methods[request.method]

    def _admit(self, request: web.BaseRequest) -> None:
        host = host_name(request.headers.getall("Host", []))
        if host is None:
            raise Refused(400, "Host is missing or malformed")
        if self._policy.hosts is not None and host not in self._policy.hosts:
            raise Refused(403, "Host not allowed")
        origin = request.headers.get("Origin")
        if origin not in self._policy.origins and (origin is not None or request.method == "OPTIONS"):
            raise Refused(403, "Origin not allowed")
        if self._policy.api_key and request.path != "/health" and request.method != "OPTIONS":
            fault = token_fault(request.headers.get("Authorization"), self._policy.api_key)
            if fault:
                raise Refused(401, fault, {"WWW-Authenticate": "Bearer"})

    async def _body(self, request: web.BaseRequest) -> Body:
        if request.content_type != "application/json":
            raise Refused(415, "Content-Type must be application/json")
        limit = self._policy.max_body
        too_large = Refused(413, f"Body over {limit} bytes")
        if (request.content_length or 0) > limit:
            raise too_large
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer itself has not begun
        raw = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for chunk in request.content.iter_any():
                    raw += chunk
                    if len(raw) > limit:
                        raise too_large
        except TimeoutError as exc:
            raise Refused(408, "Body did not arrive in time") from exc
        except (OSError, web.RequestPayloadError) as exc:
            raise Refused(400, "Body cannot be read") from exc
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as exc:
            raise Refused(400, "Invalid JSON body") from exc
        if not isinstance(body, dict):
            raise Refused(400, "Body must be a JSON object")
        return body

    async def _health(self, request: web.BaseRequest) -> web.Response:
        cause = self._worker.cause()
        body: Body = {
            "status": "degraded" if cause else "ok",
            "version": __version__,
            "uptime": int(time.monotonic() - self._started),
            "stores": {"vectorStore": not cause, "embeddingService": False},
            "capabilities": ["idempotency-key", "session-flush", "live-seed"],
            "generation": "embedded",
        }
        if cause:
            body["cause"] = cause
        if self._store.quarantined:
            body["quarantined"] = self._store.quarantined
        return _json(200, body)

    async def _capture(self, request: web.BaseRequest) -> web.Response:
        turn = turn_of(await self._body(request), request.headers.get("Idempotency-Key"), _now())
        done = await self._worker.write(lambda con: turns.capture(con, turn))
        answer: Body = {"l0_recorded": done.recorded, "scheduler_notified": False}
        return _json(200, {**answer, "duplicate": True} if done.duplicate else answer)

    async def _recall(self, request: web.BaseRequest) -> web.Response:
        body = await self._body(request)
        query, _ = required(body, "query", "session_key")
        optional(body, "user_id")
        context, count = await self._worker.read(
            lambda con: text.recall_context(turns.recall(con, query, 2 * text.RECALL_TURNS), query)
        )
        return _json(200, {"context": context, "strategy": "fts", "memory_count": count})

    async def _search_memories(self, request: web.BaseRequest) -> web.Response:
        body = await self._body(request)
        (query,) = required(body, "query")
        limit = limit_of(body, 20)
        for name in ("type", "scene"):
            optional(body, name)
        results, total = await self._worker.read(lambda con: text.memory_results(turns.search(con, query, limit)))
        return _json(200, {"results": results, "total": total, "strategy": "l0-fts"})

    async def _search_conversations(self, request: web.BaseRequest) -> web.Response:
        body = await self._body(request)
        (query,) = required(body, "query")
        limit, session = limit_of(body, 100), optional(body, "session_key") or None
        results, total = await self._worker.read(
            lambda con: text.conversation_results(turns.search(con, query, limit, session))
        )
        return _json(200, {"results": results, "total": total})

    async def _session_end(self, request: web.BaseRequest) -> web.Response:
        (session,) = required(await self._body(request), "session_key")
        now = _now()
        await self._worker.write(lambda con: turns.end_session(con, session, now))
        return _json(200, {"flushed": True})

    async def _seed(self, request: web.BaseRequest) -> web.Response:
        began = time.monotonic()
        found, sessions, messages = seed_of(await self._body(request), _now())
        done = await self._worker.write(lambda con: turns.seed(con, found))
        return _json(
            200,
            {
                "sessions_processed": sessions,
                "rounds_processed": len(found),
                "messages_processed": messages,
                "l0_recorded": sum(one.recorded for one in done if not one.duplicate),
                "duplicates": sum(one.duplicate for one in done),
                "duration_ms": int((time.monotonic() - began) * 1000),
                "output_dir": self._store.directory,
            },
        )


def _now() -> int:
    return time.time_ns() // 1_000_000


class _Connection(web.RequestHandler):
    """A connection whose protocol errors are answered in JSON too and never echo what came in."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        self.logger.warning("a request was not HTTP", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = _json(status, {"error": "Malformed request" if status == 400 else "Internal error"})
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        loop = asyncio.get_running_loop()
        off: Any = None  # what turns the access log off is not in the type of the argument
        return _Connection(self, loop=loop, access_log=off, keepalive_timeout=KEEPALIVE)


class _OneLine(logging.Handler):
    """Warnings of the libraries, one line each: what happened, never an exception's text or a traceback."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        exc = record.exc_info[1] if record.exc_info else None
        what = str(record.msg).partition("\n")[0]
        self._log(f"{record.name}: {what}" + (f": {type(exc).__name__} at {_place(exc)}" if exc else ""))


async def serve(
    sock: socket.socket, store: Store, policy: Policy, log: Callable[[str], None], ready: Callable[[], None]
) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; `ready` is called once it listens. Raises OSError.

    Ends within 2 * GRACE + STORE_GRACE whatever clients do.
    """
    logging.getLogger().addHandler(_OneLine(log))
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    worker = Worker(store, loop)
    runner = web.ServerRunner(_Server(Gateway(worker, store, policy, log).answer), shutdown_timeout=GRACE)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=512).start()
    ready()
    await ended.wait()
    # Connections first: a capture that is being committed gets its answer before the store closes.
    await runner.cleanup()
    worker.stop(STORE_GRACE)
