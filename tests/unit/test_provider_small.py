"""Pacing, notices, tools, checkpoints and setup: small decisions, one by one."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from memory_tencentdb import tools
from memory_tencentdb.aside import checkpoint, configure, pacing
from memory_tencentdb.endpoint import Away
from memory_tencentdb.notice import Watch


def test_backoff() -> None:
    """1, 2, 4 … 60 seconds."""
    assert [pacing.backoff(n) for n in (0, 1, 2, 3, 6, 7, 8, 1000)] == [1, 1, 2, 4, 32, 60, 60, 60]


@pytest.mark.parametrize(
    ("kind", "age", "wait", "seconds"),
    [
        ("down", 0, None, 1),
        ("state", 59, None, 1),
        ("down", 61, None, 5),
        ("silent", 0, None, 0.5),
        ("silent", 100, None, 10),
        ("cut", 9999, None, 30),
        ("busy", 0, 17, 17),
        ("busy", 0, None, 1),
        ("busy", 8, None, 8),
        ("busy", 999, None, 60),
        ("auth", 0, None, 10),
        ("hold", 0, None, 1),
    ],
)
def test_pauses(kind: str, age: float, wait: float | None, seconds: float) -> None:
    """A free look is taken every second, a costly one ever more rarely, and a Gateway's own wish counts."""
    assert pacing.pause_length(kind, age, wait) == seconds


def test_a_silent_gateway_is_seen_within_a_second() -> None:
    """Early in a silence look and pause together take a second at most; late ones wait long enough for a slow one."""
    assert pacing.probe_deadline("silent", 0) + pacing.pause_length("silent", 0, None) <= 1.0
    assert pacing.probe_deadline("silent", 60) == 10.0
    assert pacing.probe_deadline("down", 60) == 2.0


def test_bursts() -> None:
    """Five turns at once, then ten seconds from the first of them; the embedded Gateway takes any number."""
    sent = deque([1.0, 1.1, 1.2, 1.3], maxlen=pacing.BURST)
    assert pacing.burst_over(None, "A") == 0
    assert pacing.burst_over(sent, "A") == 0
    sent.append(1.4)
    assert pacing.burst_over(sent, "A") == 11.0
    assert pacing.burst_over(sent, "embedded") == 0


def test_change_is_told_once() -> None:
    """The user hears of a change once; the model hears of an outage in every turn, with the turns that wait."""
    watch = Watch()
    calm = watch.look(None, 0, 0.0)
    assert (calm.model, calm.user) == ("", "")
    first = watch.look(Away("down", "ECONNREFUSED"), 0, 100.0)
    assert "memory is away since" in first.user
    assert "ECONNREFUSED" in first.model
    second = watch.look(Away("silent", "no answer"), 3, 200.0)
    assert second.user == ""
    assert "3 turns are kept on disk and will be saved" in second.model
    back = watch.look(None, 1, 300.0)
    assert "memory is back" in back.user
    assert "Of 3 turns kept meanwhile 2 are saved, 1 being saved" in back.model
    calm = watch.look(None, 0, 301.0)
    assert (calm.model, calm.user) == ("", "")


def test_turns_that_are_only_in_memory_are_said() -> None:
    """The model is not told that a turn is on disk when it is not."""
    told = Watch().look(Away("down", "x"), 3, 0.0, 2)
    assert "2 of them only in memory" in told.model


def test_hold_is_no_outage() -> None:
    """On hold memory can still be read: the model is told, but not to do without."""
    watch = Watch()
    told = watch.look(Away("hold", "disk full"), 1, 0.0)
    assert "not taking anything in" in told.model
    assert "1 turn is kept" in told.model
    assert "Answer without it" not in told.model
    assert watch.look(Away("down", "x"), 1, 1.0).user


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (None, 5),
        ("", 5),
        (True, 5),
        (False, 5),
        (0, 1),
        (-3, 1),
        (7, 7),
        (7.9, 7),
        ("7.9", 7),
        (" 12 ", 12),
        (99, 20),
        ("1e9", 20),
        ("many", 5),
        ([], 5),
        (float("nan"), 5),
        (float("inf"), 5),
    ],
)
def test_limits(value: object, limit: int) -> None:
    """Whatever a model writes becomes 1..20, 5 where it means nothing."""
    assert tools.read_limit(value) == limit


def test_bad_limits_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """A limit that means nothing leaves a warning; a missing one does not."""
    tools.read_limit(None)
    assert not caplog.records
    tools.read_limit(True)
    tools.read_limit("many")
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("other", {"query": "x"}, "Unknown tool: other"),
        (tools.MEMORY_SEARCH, {}, "Missing required parameter: query"),
        (tools.MEMORY_SEARCH, {"query": "  "}, "Missing required parameter: query"),
        (tools.CONVERSATION_SEARCH, {"query": None}, "Missing required parameter: query"),
    ],
)
def test_tool_arguments_that_cannot_be_used(name: str, args: dict[str, Any], words: str) -> None:
    """The model is told in the words that it knows from today's provider."""
    with pytest.raises(ValueError, match=words):
        tools.request(name, args)


def test_tool_requests() -> None:
    """A kind is passed on only where there is one, and only to the search of memories."""
    args = {"query": " cat ", "limit": "3", "type": "persona"}
    body = {"query": "cat", "limit": 3}
    assert tools.request(tools.MEMORY_SEARCH, args) == ("/search/memories", {**body, "type": "persona"})
    assert tools.request(tools.CONVERSATION_SEARCH, args) == ("/search/conversations", body)
    assert "type" not in tools.request(tools.MEMORY_SEARCH, {"query": "cat", "type": "other"})[1]


def test_schemas_are_made_anew() -> None:
    """A host that writes into a schema does not change what the next session offers."""
    tools.schemas()[0]["parameters"]["properties"]["query"]["x"] = 1
    assert "x" not in tools.schemas()[0]["parameters"]["properties"]["query"]
    assert [each["name"] for each in tools.schemas()] == [tools.MEMORY_SEARCH, tools.CONVERSATION_SEARCH]


def test_unavailable_ends_the_matter() -> None:
    """The model is told not to try again, and what else there is."""
    answer = json.loads(tools.unavailable(Away("down", "ECONNREFUSED 127.0.0.1:8420")))
    assert "ECONNREFUSED" in answer["error"]
    assert "Do not call this tool again" in answer["instruction"]
    assert "built-in memory" in answer["instruction"]
    assert answer["retry"] is False


MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": [{"type": "text", "text": "hi"}], "tool_calls": []},
    {"role": "tool", "content": "x"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "summary", "_compressed_summary": True},
]


def test_checkpoint_keeps_words_once(tmp_path: Path) -> None:
    """What user and assistant said, each message once however often it is kept; equal messages are told apart."""
    first = checkpoint.keep(str(tmp_path), "s", MESSAGES, 1.0)
    again = checkpoint.keep(str(tmp_path), "s", MESSAGES, 2.0)
    assert first is not None
    assert again is not None
    assert (first.messages, first.added, again.added) == (3, 3, 0)
    assert first.digest == again.digest
    assert first.digest in first.words()
    grown = checkpoint.keep(str(tmp_path), "s", [*MESSAGES, {"role": "user", "content": "more"}], 3.0)
    assert grown is not None
    assert (grown.messages, grown.added) == (4, 1)


def test_checkpoint_of_nothing(tmp_path: Path) -> None:
    """No words, no file."""
    assert checkpoint.keep(str(tmp_path), "s", MESSAGES[:1], 1.0) is None
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_that_cannot_be_kept(tmp_path: Path) -> None:
    """A disk that refuses is an error of the call, never a silent success."""
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(OSError, match="checkpoints"):
        checkpoint.keep(str(tmp_path), "s", MESSAGES, 1.0)


def test_schema_asks_for_nothing() -> None:
    """Nothing is required, and the keys of today's provider are all there."""
    fields = configure.schema()
    assert not any(field.get("required") for field in fields)
    keys = {field["key"] for field in fields}
    today = {"gateway_cmd", "gateway_host", "gateway_port", "gateway_api_key"}
    assert today | {"llm_api_key", "llm_base_url", "llm_model"} <= keys


@pytest.mark.parametrize(
    "values",
    [
        {"gateway_api_key": "sk-***"},
        {"gateway_api_key": "<your key>"},
        {"gateway_port": "x"},
        {"gateway_url": "ftp://x"},
    ],
)
def test_setup_refuses_what_cannot_be_used(tmp_path: Path, values: dict[str, str]) -> None:
    """A masked key, a bad port or URL is refused with words, and nothing is written."""
    with pytest.raises(ValueError, match="cannot use"):
        configure.save(values, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_setup_leaves_defaults_alone(tmp_path: Path) -> None:
    """A default that was merely confirmed is not written down: it would beat the endpoint record."""
    configure.save({"gateway_host": "127.0.0.1", "gateway_port": "8420", "gateway": "work"}, str(tmp_path))
    assert json.loads((tmp_path / "memory_tencentdb.json").read_text()) == {"gateway": "work"}
