"""What a Gateway's answers mean."""

from __future__ import annotations

from typing import Any

import pytest
from memory_tencentdb import gateway as g
from memory_tencentdb.endpoint import Away
from memory_tencentdb.spool import Record

STORES = {"vectorStore": True, "embeddingService": False}


def reply(http: int = 200, headers: dict[str, str] | None = None, /, **body: Any) -> g.Reply:
    """An answer."""
    return g.Reply(http, headers or {}, body)


@pytest.mark.parametrize(
    ("body", "generation", "degraded", "keyed"),
    [
        ({"status": "ok", "stores": STORES}, "A", False, False),
        ({"status": "degraded", "stores": STORES}, "A", True, False),
        ({"status": "ok", "stores": STORES, "services": {}}, "B", False, False),
        ({"stores": STORES, "capabilities": ["idempotency-key", "session-flush"]}, "embedded", False, True),
        ({"status": "ok", "stores": STORES, "capabilities": ["session-flush"]}, "embedded", False, False),
        ({"status": "ok", "stores": STORES, "capabilities": "idempotency-key"}, "A", False, False),
    ],
)
def test_generations(body: dict[str, Any], generation: str, degraded: bool, keyed: bool) -> None:
    """`services` is generation B, capabilities are the embedded one's, and only what is offered is used."""
    health = g.read_health(reply(**body))
    assert health is not None
    assert (health.generation, health.degraded, health.keyed) == (generation, degraded, keyed)
    assert health.flushes == ("session-flush" in body.get("capabilities", []))


@pytest.mark.parametrize("answer", [reply(status="ok"), reply(404), reply(500, stores=STORES), reply(stores=1)])
def test_what_is_no_gateway(answer: g.Reply) -> None:
    """Another service on the port is not taken for a Gateway."""
    assert g.read_health(answer) is None


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (reply(l0_recorded=2), "accepted"),
        (reply(l0_recorded=1), "accepted"),
        (reply(l0_recorded=0), "dropped"),
        (reply(), "failed"),
        (reply(l0_recorded="2"), "failed"),
        (reply(l0_recorded=True), "failed"),
        (reply(code=10001, message="x"), "failed"),
        (reply(code=10001, message="x", retryable=False), "poison"),
        (reply(400, error="x"), "poison"),
        (reply(413), "poison"),
        (reply(422), "poison"),
        (reply(404), "failed"),
        (reply(302), "failed"),
        (reply(500, error="boom"), "failed"),
        (reply(502), "failed"),
    ],
)
def test_captures(answer: g.Reply, verdict: str) -> None:
    """Only a count of what was recorded is a success; 200 with a code is an error; 4xx about the body are final."""
    assert g.classify(answer, "hello", "hi").verdict == verdict


@pytest.mark.parametrize(("user", "assistant"), [("", "hi"), ("hello", "NO_REPLY"), ("/help", "hi")])
def test_a_turn_that_is_rightly_left_out(user: str, assistant: str) -> None:
    """Nothing recorded of blank, NO_REPLY or a slash command is no loss and is not sent again."""
    assert g.classify(reply(l0_recorded=0), user, assistant).verdict == "skipped"


@pytest.mark.parametrize(("status", "kind"), [(401, "auth"), (403, "auth"), (429, "busy"), (503, "busy")])
def test_answers_that_are_not_about_the_turn(status: int, kind: str) -> None:
    """A refused key and a Gateway that asks to wait burn no attempt of a record."""
    with pytest.raises(Away) as away:
        g.classify(reply(status, {"retry-after": "7"}), "hello", "hi")
    assert away.value.kind == kind
    assert away.value.wait == (7.0 if kind == "busy" else None)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("999999", 3600.0),
        ("-5", None),
        ("soon", None),
        ("", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
    ],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    """A number of seconds or a date, never negative, never more than an hour."""
    assert g.retry_after(value, 10.0) == seconds


def test_only_the_embedded_gateway_learns_when() -> None:
    """A turn delivered days later keeps its time where that is right; A and B would drop it for it."""
    record = Record("i", "s", "hello", "", at=1.5, who={"user_id": "u"})
    for generation in ("A", "B"):
        body = g.capture_body(record, generation)
        assert "messages" not in body
        assert "timestamp" not in str(body)
    body = g.capture_body(record, "embedded")
    assert body["messages"][0] == {"role": "user", "content": "hello", "timestamp": 1500}
    assert body["messages"][1]["content"] == body["assistant_content"] == "(no text)"
    assert (body["session_id"], body["user_id"]) == ("s", "u")


def test_errors_say_what_the_gateway_said() -> None:
    """The reason of a failure is the Gateway's own, with its status and code."""
    assert reply(code=10001, message="no embedding").error == "HTTP 200 code 10001: no embedding"
    assert reply(500, error="boom").error == "HTTP 500: boom"
    assert reply(502).error == "HTTP 502: no reason given"
    assert reply(code=0).error == ""


def test_bodies_are_utf_8() -> None:
    """CJK and emoji travel as they are; what UTF-8 cannot carry is replaced."""
    assert g.encode({"a": "记忆 🧠"}) == '{"a": "记忆 🧠"}'.encode()
    assert g.encode({"a": "\ud800"}) == b'{"a": "?"}'
    assert g.encode(None) is None
