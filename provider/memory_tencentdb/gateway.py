"""The Gateway's language: routes, bodies, generations, and what an answer means.

Invariants:
* A fresh connection for every request: a Gateway closes idle ones after 5 s, and a POST on a dying one is lost (facts:
  Gateway, 4.14).
* Only the v1 routes, which both generations and the embedded Gateway serve with the same bodies.
* Nothing carries a time of its own to A and B: A drops a turn whose messages are older than its cursor (4.2).
* 200 with a ``code`` other than 0 is an error (generation B answers /recall so, 7).
"""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import text, wire
from .endpoint import Away, Endpoint, Target
from .spool import Record

RECALL_DEADLINE = 3.0
TOOL_DEADLINE = 4.0
HEALTH_DEADLINE = 2.0
CAPTURE_DEADLINE = 10.0
"""Seconds. A capture of 10 MB takes a Gateway 2.5 s, 50 at once 1 s (facts: Gateway, 3); ours are at most 256 KB."""

QUERY_LIMIT = 8_000
ASK_LIMIT = 20
"""Results looked through for a turn whose reply was lost; with so many there may be more, and nothing is known."""
AGENT = "memory_tencentdb"


class Ask:
    """One request to be made."""

    __slots__ = ("body", "idempotency_key", "method", "path")

    def __init__(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, idempotency_key: str = ""
    ) -> None:
        self.method, self.path, self.body, self.idempotency_key = method, path, body, idempotency_key


class Reply:
    """One complete answer: status, headers, and the JSON object in it ({} where there is none)."""

    __slots__ = ("headers", "json", "status")

    def __init__(self, status: int, headers: Mapping[str, str], json: Mapping[str, Any]) -> None:
        self.status, self.headers, self.json = status, headers, json

    @property
    def error(self) -> str:
        """Why this answer is no success, in the Gateway's words; "" when it is one."""
        if 200 <= self.status < 300 and self.json.get("code", 0) in (0, None):
            return ""
        words = self.json.get("error") or self.json.get("message") or "no reason given"
        return f"HTTP {self.status}{f' code {code}' if (code := self.json.get('code')) else ''}: {str(words)[:300]}"


class Health:
    """What /health says. ``generation``: A, B or embedded."""

    __slots__ = ("capabilities", "degraded", "generation")

    def __init__(self, generation: str, degraded: bool, capabilities: frozenset[str]) -> None:
        self.generation, self.degraded, self.capabilities = generation, degraded, capabilities

    @property
    def keyed(self) -> bool:
        """Whether it keeps idempotency keys: then a lost reply may simply be sent again."""
        return "idempotency-key" in self.capabilities

    @property
    def flushes(self) -> bool:
        """Whether /session/end helps; on generations A and B it cancels extraction (4.5)."""
        return "session-flush" in self.capabilities


def read_health(reply: Reply) -> Health | None:
    """What a /health answer says; None when it is no answer of a Gateway."""
    if reply.status != 200 or not isinstance(reply.json.get("stores"), Mapping):
        return None
    offered = reply.json.get("capabilities")
    capabilities = frozenset(str(each) for each in offered) if isinstance(offered, list) else frozenset()
    generation = "embedded" if capabilities else "B" if "services" in reply.json else "A"
    return Health(generation, reply.json.get("status") == "degraded", capabilities)


class Outcome:
    """What became of one capture.

    ``verdict``: accepted · skipped (the Gateway rightly records nothing of it) · dropped (it silently recorded nothing,
    4.2) · poison (it will never take it) · failed (it may take it later). ``reason`` in words.
    """

    __slots__ = ("reason", "verdict")

    def __init__(self, verdict: str, reason: str = "") -> None:
        self.verdict, self.reason = verdict, reason


def capture_body(record: Record, generation: str) -> dict[str, Any]:
    """The body of /capture for a record. Content over the limit is cut with a mark; an empty side, which a Gateway
    refuses, is named as such. The embedded Gateway also learns when it was said."""
    user, assistant = (text.cut_content(said or "(no text)") for said in (record.user, record.assistant))
    body: dict[str, Any] = {
        "user_content": user,
        "assistant_content": assistant,
        "session_key": record.session_key,
        "session_id": record.session_id or record.session_key,
        **record.who,
    }
    if generation == "embedded" and record.at:
        said_at = round(record.at * 1000)
        body["messages"] = [
            {"role": "user", "content": user, "timestamp": said_at},
            {"role": "assistant", "content": assistant, "timestamp": said_at},
        ]
    return body


def classify(reply: Reply, user: str, assistant: str) -> Outcome:
    """What an answer to /capture means for the turn. Raises Away(auth | busy) when it is not about the turn at all."""
    raise_away(reply)
    if reply.status in (400, 413, 422):
        return Outcome("poison", reply.error)
    if reply.error:
        final = 200 <= reply.status < 300 and reply.json.get("retryable") is False
        return Outcome("poison" if final else "failed", reply.error)
    recorded = reply.json.get("l0_recorded")
    if not isinstance(recorded, int) or isinstance(recorded, bool):
        return Outcome("failed", "the answer does not say what was recorded; is this a Gateway?")
    if recorded > 0:
        return Outcome("accepted")
    return (
        Outcome("skipped")
        if text.explained(user, assistant)
        else Outcome("dropped", "the Gateway recorded nothing of it")
    )


def raise_away(reply: Reply) -> None:
    """Raise what an answer says about the Gateway rather than about the request: Away(auth | busy)."""
    if reply.status in (401, 403):
        raise Away("auth", f"the Gateway refuses the key ({reply.error}); set gateway_api_key in the profile file")
    if reply.status in (429, 503):
        wait = retry_after(reply.headers.get("retry-after", ""), time.time())
        raise Away("busy", f"the Gateway asks to wait ({reply.error})", wait=wait)


def retry_after(value: str, wall: float) -> float | None:
    """Seconds that a Retry-After header asks for (a number or a date), 0..3600; None when it says nothing."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(float(value), 3600.0)
    try:
        moment = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError):
        return None
    return min(max(moment - wall, 0.0), 3600.0)


class Client:
    """Speaks to the Gateway of one endpoint. Threads may share it; it holds no connection."""

    def __init__(
        self,
        endpoint: Endpoint,
        cancelled: Callable[[], bool] = wire.never,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self._cancelled = cancelled
        self._clock = clock

    def health(self, seconds: float = HEALTH_DEADLINE) -> Health:
        """What the Gateway says of itself. Raises Away, kind "config" when something else answers there."""
        reply = self._one(Ask("GET", "/health"), seconds)
        raise_away(reply)
        health = read_health(reply)
        if health is None:
            raise Away(
                "config", f"what answers at {self.endpoint.address()} is no Gateway (/health: HTTP {reply.status})"
            )
        return health

    def recall(self, query: str, who: Mapping[str, str], session: str) -> tuple[str, str, str]:
        """(context, memories, trouble) of one /recall and one /search/memories, made at the same time, 3 s in total.

        ``trouble`` says what one of them failed of when the other brought something. Raises Away when neither did.
        """
        query = query[:QUERY_LIMIT]
        both = self.exchange(
            [
                Ask("POST", "/recall", {"query": query, "session_key": session, **who}),
                Ask("POST", "/search/memories", {"query": query, "limit": 5}),
            ],
            RECALL_DEADLINE,
        )
        for each in both:
            if isinstance(each, Reply):
                raise_away(each)
            elif each.kind == "closing":
                raise each
        recall, search = both
        if isinstance(recall, Away) and isinstance(search, Away):
            raise recall
        if isinstance(recall, Reply) and isinstance(search, Reply) and min(recall.status, search.status) >= 500:
            raise Away("failing", f"the Gateway fails ({recall.error})")
        trouble = "; ".join(
            reason for each in both if (reason := each.reason if isinstance(each, Away) else each.error)
        )
        return _words(recall, "context"), _words(search, "results") if _total(search) else "", trouble

    def search(self, path: str, body: Mapping[str, Any], deadline: float = TOOL_DEADLINE) -> Reply:
        """One search, for a tool or to ask after a turn. Raises Away."""
        reply = self._one(Ask("POST", path, body), deadline)
        raise_away(reply)
        return reply

    def capture(self, body: Mapping[str, Any], idempotency_key: str) -> Reply:
        """Hand over one turn. Raises Away (``sent`` says whether the Gateway may have it all the same)."""
        return self._one(Ask("POST", "/capture", body, idempotency_key), CAPTURE_DEADLINE)

    def holds(self, user: str, assistant: str, session: str, since: float) -> bool | None:
        """Whether a turn sent at or after ``since`` (wall seconds) is stored; None when that cannot be asked.

        Raises Away.
        """
        wanted = text.needle(user) or text.needle(assistant)
        reply = self.search("/search/conversations", {"query": wanted, "limit": ASK_LIMIT, "session_key": session})
        results, total = reply.json.get("results"), reply.json.get("total")
        if reply.error or not isinstance(results, str):
            return None
        if text.found(results, wanted, since):
            return True
        return False if isinstance(total, int) and total < ASK_LIMIT else None

    def end_session(self, session: str) -> Reply:
        """Tell that a session ended; only for a Gateway whose health ``flushes``. Raises Away."""
        return self._one(Ask("POST", "/session/end", {"session_key": session}), CAPTURE_DEADLINE)

    def _one(self, ask: Ask, seconds: float) -> Reply:
        (outcome,) = self.exchange([ask], seconds)
        if isinstance(outcome, Away):
            raise outcome
        return outcome

    def exchange(self, asks: Sequence[Ask], seconds: float) -> list[Reply | Away]:
        """Make all requests at the same time, within ``seconds`` in total.

        After a 401 the key is read again, and if it is another one the requests are made once more. Raises Away when
        nothing could be sent at all.
        """
        deadline = self._clock() + seconds
        target = self.endpoint.target()
        key = self.endpoint.key(target)
        outcomes = self._carry(target, asks, key, deadline)
        refused = any(isinstance(each, Reply) and each.status == 401 for each in outcomes)
        if refused and self.endpoint.other_key(target, key):
            outcomes = self._carry(target, asks, self.endpoint.key(target), deadline)
        return outcomes

    def _carry(self, target: Target, asks: Sequence[Ask], key: str, deadline: float) -> list[Reply | Away]:
        if not target.address.local or target.address.scheme == "https":
            from .aside import remote  # noqa: PLC0415  most sessions never need it

            if target.address.local:
                self.endpoint.prove(target, self.endpoint.identity(target))
            url, direct = str(target.address), target.address.local
            sending = [remote.Request(a.method, url + a.path, _headers(a, key), encode(a.body), direct) for a in asks]
            return [_outcome(each) for each in remote.run(sending, deadline, self._cancelled, self._clock)]
        calls: list[wire.Call] = []
        try:
            self._connect(target, calls, len(asks), deadline)
            for call, ask in zip(calls, asks, strict=True):
                call.outgoing = memoryview(
                    wire.request(
                        ask.method,
                        target.address.prefix + ask.path,
                        target.address.netloc,
                        _headers(ask, key),
                        encode(ask.body),
                    )
                )
        except wire.WireError as error:
            _close(calls)
            raise _away(error) from error
        except BaseException:
            _close(calls)
            raise
        wire.run(calls, deadline, self._cancelled, self._clock)
        return [_outcome(call.response if call.response is not None else call.error) for call in calls]

    def _connect(self, target: Target, calls: list[wire.Call], count: int, deadline: float) -> None:
        """Open proven connections. The proof stands between connecting and sending; Endpoint.prove says why."""
        for _ in range(3):
            before = self.endpoint.identity(target)
            for _ in range(count):
                sock = wire.connect(target.address.host, target.address.port, deadline, self._cancelled, self._clock)
                calls.append(wire.Call(sock, memoryview(b"")))
            if self.endpoint.prove(target, before):
                return
            _close(calls)
            calls.clear()
        raise Away(
            "unproven", f"the process that listens at {target.address.netloc} changes faster than it can be looked at"
        )


def encode(body: Mapping[str, Any] | None) -> bytes | None:
    """A body as UTF-8 JSON; what UTF-8 cannot carry becomes a question mark."""
    return None if body is None else json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def _headers(ask: Ask, key: str) -> dict[str, str]:
    headers = {"User-Agent": AGENT}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    if ask.idempotency_key:
        headers["Idempotency-Key"] = ask.idempotency_key
    return headers


def _close(calls: Sequence[wire.Call]) -> None:
    for call in calls:
        call.sock.close()


def _outcome(result: wire.Response | wire.WireError | None) -> Reply | Away:
    if isinstance(result, wire.Response):
        try:
            parsed = json.loads(result.body) if result.body else {}
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            if 200 <= result.status < 300:
                return Away("cut", f"HTTP {result.status} without a JSON object", sent=True)
            parsed = {}
        return Reply(result.status, result.headers, parsed)
    return _away(result or wire.Cut("no answer"))


def _away(error: wire.WireError) -> Away:
    kinds = {wire.Unreachable: "down", wire.Silent: "silent", wire.Cancelled: "closing"}
    return Away(kinds.get(type(error), "cut"), str(error), sent=error.sent)


def _words(outcome: Reply | Away, key: str) -> str:
    if isinstance(outcome, Away) or outcome.error:
        return ""
    value = outcome.json.get(key)
    return value if isinstance(value, str) else ""


def _total(outcome: Reply | Away) -> bool:
    return isinstance(outcome, Reply) and outcome.json.get("total") not in (0, None)
