"""Calls that leave the machine or speak TLS: a remote Gateway, usually https.

Invariants:
* A call ends for its caller at its total deadline. The library below may take longer (a name lookup, a dripping head);
  it then goes on in a daemon thread of its own until its own timeout, and its answer is dropped.
* No redirect is followed: a key goes to the host the user named and nowhere else.
* Proxies of the environment are honoured here, and only here; a ``direct`` request (https on loopback) passes them by.

``requests`` makes the call where it is installed; without it http.client does, without proxies.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from .. import wire


class Request:
    """One request to be made, ready but for its connection."""

    __slots__ = ("body", "direct", "headers", "method", "url")

    def __init__(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, direct: bool = False
    ) -> None:
        self.method, self.url, self.body, self.direct = method, url, body, direct
        self.headers = {**headers, **({"Content-Type": "application/json"} if body is not None else {})}


Outcome = wire.Response | wire.WireError


def run(
    requests: Sequence[Request],
    deadline: float,
    cancelled: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """The outcome of every request, in order, by ``deadline``. Never raises."""
    outcomes: list[Outcome] = [wire.Silent("no complete answer in time", sent=True) for _ in requests]

    def carry(index: int) -> None:
        outcomes[index] = call(requests[index], deadline - clock())

    threads = [
        threading.Thread(target=carry, args=(index,), name="memory_tencentdb-remote", daemon=True)
        for index in range(len(requests))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and clock() < deadline and not cancelled():
            thread.join(min(wire.TICK, max(0.0, deadline - clock())))
    return list(outcomes)


def call(request: Request, seconds: float) -> Outcome:
    """One request; ``seconds`` bound each of its steps. Never raises."""
    try:
        library = importlib.import_module("requests")
    except ImportError:
        return _by_stdlib(request, max(seconds, 0.01))
    errors = library.exceptions
    try:
        with library.Session() as session:
            session.trust_env = not request.direct
            session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
            answer = session.request(
                request.method,
                request.url,
                headers=request.headers,
                data=request.body,
                timeout=max(seconds, 0.01),
                allow_redirects=False,
                stream=True,
            )
            data = b""
            for piece in answer.iter_content(65536):
                data += piece
                if len(data) > wire.BODY_LIMIT:
                    break
            return _bounded(answer.status_code, dict(answer.headers), data)
    except errors.ConnectTimeout as error:
        return wire.Silent(_short(error))
    except errors.Timeout as error:
        return wire.Silent(_short(error), sent=True)
    except (errors.ConnectionError, errors.InvalidURL) as error:
        unsent = any(
            word in repr(error) for word in ("NewConnectionError", "NameResolutionError", "SSLError", "ProxyError")
        )
        return wire.Unreachable(_short(error)) if unsent else wire.Cut(_short(error), sent=True)
    except (errors.RequestException, OSError, ValueError) as error:
        return wire.Cut(_short(error), sent=True)


def _by_stdlib(request: Request, seconds: float) -> Outcome:
    http = importlib.import_module("http.client")
    parts = urlsplit(request.url)
    kind = http.HTTPSConnection if parts.scheme == "https" else http.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds)
    sent = False
    try:
        connection.connect()
        connection.request(
            request.method, parts.path, body=request.body, headers={**request.headers, "Connection": "close"}
        )
        sent = True
        answer = connection.getresponse()
        return _bounded(answer.status, dict(answer.getheaders()), answer.read(wire.BODY_LIMIT + 1))
    except TimeoutError as error:
        return wire.Silent(_short(error), sent=sent)
    except OSError as error:
        return wire.Cut(_short(error), sent=True) if sent else wire.Unreachable(_short(error))
    except (http.HTTPException, ValueError) as error:
        return wire.Cut(_short(error), sent=sent)
    finally:
        connection.close()


def _bounded(status: int, headers: Mapping[str, str], data: bytes) -> Outcome:
    if len(data) > wire.BODY_LIMIT:
        return wire.Cut(f"answer over {wire.BODY_LIMIT} bytes", sent=True)
    return wire.Response(status, {name.lower(): value for name, value in headers.items()}, data)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
