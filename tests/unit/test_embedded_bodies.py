"""Request bodies and settings of the embedded Gateway: what is accepted, what is refused, and how it says so."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tdai_supervisor.embedded.__main__ import CannotRun, settings_of
from tdai_supervisor.embedded.app import host_name, token_fault
from tdai_supervisor.embedded.bodies import Refused, limit_of, seed_of, time_of, turn_of

NOW = 1_795_971_939_042
SESSION = {"user_content": "u", "assistant_content": "a", "session_key": "s"}
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a loaded machine is no finding
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def said(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in turn_of({**SESSION, **body}, None, NOW).messages]


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({}, [("user", "u"), ("assistant", "a")]),
        ({"user_content": " /new"}, [("assistant", "a")]),
        ({"assistant_content": "/etc/hosts"}, [("user", "u"), ("assistant", "/etc/hosts")]),
        ({"assistant_content": " NO_REPLY\n"}, [("user", "u")]),
        ({"user_content": "NO_REPLY", "assistant_content": " \n"}, []),
        ({"user_content": "", "assistant_content": ""}, []),
        ({"user_content": "say NO_REPLY"}, [("user", "say NO_REPLY"), ("assistant", "a")]),
        ({"user_content": "\ud800x"}, [("user", "\ufffdx"), ("assistant", "a")]),
        ({"messages": []}, [("user", "u"), ("assistant", "a")]),
        ({"messages": [{"role": "user", "content": "m"}]}, [("user", "m")]),
        (
            {"messages": [{"role": "tool", "content": [1]}, {"role": "assistant", "content": None}]},
            [("user", "u"), ("assistant", "a")],
        ),
    ],
)
def test_what_of_a_turn_is_kept(body: dict[str, Any], kept: list[tuple[str, str]]) -> None:
    """Blank text, a bare NO_REPLY and slash commands of the user are left out; nothing else is."""
    assert said(body) == kept


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"user_content": None}, "Missing required fields: user_content, assistant_content, session_key"),
        ({"session_key": ""}, "Missing required fields: user_content, assistant_content, session_key"),
        ({"session_key": 7}, "session_key must be a string"),
        ({"session_id": []}, "session_id must be a string"),
        ({"user_id": 1}, "user_id must be a string"),
        ({"messages": "x"}, "messages: must be a list"),
        ({"messages": {}}, "messages: must be a list"),
        ({"messages": ["x"]}, "messages[0].role: must be user or assistant"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content: must be a string"),
        (
            {"messages": [{"role": "user", "content": "x", "timestamp": "soon"}]},
            "messages[0].timestamp: must be ms since the epoch or ISO 8601",
        ),
    ],
)
def test_what_of_a_turn_is_refused(body: dict[str, Any], error: str) -> None:
    """The error names the field and never holds its value."""
    with pytest.raises(Refused) as refused:
        turn_of({**SESSION, **body}, None, NOW)
    assert (refused.value.status, refused.value.body) == (400, {"error": error})


@pytest.mark.parametrize("key", ["", "x" * 257])
def test_an_idempotency_key_has_a_length(key: str) -> None:
    """1 to 256 characters; each such key is another key, whatever its text."""
    with pytest.raises(Refused):
        turn_of(SESSION, key, NOW)
    assert turn_of(SESSION, "x" * 256, NOW).key != turn_of(SESSION, "x" * 255, NOW).key
    assert turn_of(SESSION, None, NOW).key is None


@calm
@given(st.dictionaries(st.sampled_from([*SESSION, "messages", "data", "limit", "session_id"]), values))
def test_no_json_breaks_a_body(body: dict[str, Any]) -> None:
    """Whatever JSON comes, it is accepted or refused with 400."""
    for read in (lambda: turn_of(body, None, NOW), lambda: seed_of(body, NOW), lambda: limit_of(body, 100)):
        try:
            read()
        except Refused as refused:
            assert refused.status == 400
            json.dumps(refused.body)


@pytest.mark.parametrize(
    ("given_limit", "used"),
    [(None, 5), (3, 3), ("3", 3), (" 7.9 ", 7), (2.9, 2), (0, 1), (-1, 1), (1e9, 100), ("1e9", 100), (10**400, 0)],
)
def test_limits_are_truncated_and_clamped(given_limit: Any, used: int) -> None:
    """1..100, where the real Gateway returned nothing for 0 and dropped the last for -1."""
    if used == 0:
        with pytest.raises(Refused):
            limit_of({"limit": given_limit}, 100)
    else:
        assert limit_of({"limit": given_limit}, 100) == used


@pytest.mark.parametrize("given_limit", ["x", "", True, [], {}, float("nan"), "nan"])
def test_limits_that_are_no_number_are_refused(given_limit: Any) -> None:
    """Silence about a wrong limit would look like an empty memory."""
    with pytest.raises(Refused, match="limit must be a number"):
        limit_of({"limit": given_limit}, 100)


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (None, NOW),
        (1_700_000_000_123, 1_700_000_000_123),
        (1_700_000_000_123.9, 1_700_000_000_123),
        ("2026-11-29T17:05:39.042Z", NOW),
        ("2026-11-29T18:05:39.042+01:00", NOW),
        ("2026-11-29T17:05:39.042", NOW),
        (0, 0),
    ],
)
def test_times(value: Any, ms: int) -> None:
    """Numbers are ms since the epoch; ISO text without a zone is UTC."""
    assert time_of(value, NOW) == ms


@pytest.mark.parametrize(
    "value", [True, -1, "x", "", float("inf"), float("nan"), 10**20, [], "9999-12-31T23:59:59-23:00"]
)
def test_times_that_are_refused(value: Any) -> None:
    """What cannot be shown as a date is refused where it comes in."""
    with pytest.raises((ValueError, OverflowError)):
        time_of(value, NOW)


def seeds(*rounds: Any, name: str = "s") -> dict[str, Any]:
    return {"data": {"sessions": [{"sessionKey": name, "conversations": list(rounds)}]}}


def test_a_seed_keeps_times_and_order() -> None:
    """Each round is a turn with the times it was given."""
    first = [
        {"role": "user", "content": "q", "timestamp": 1000},
        {"role": "assistant", "content": "a", "timestamp": 2000},
    ]
    turns, sessions, messages = seed_of(seeds(first, [{"role": "user", "content": "/new"}]), NOW)
    assert (sessions, messages) == (1, 3)
    assert [[message.at for message in turn.messages] for turn in turns] == [[1000, 2000], []]
    assert [turn.at for turn in turns] == [1000, NOW]


def test_a_seed_key_is_session_place_and_content() -> None:
    """The same round twice in a session is two turns; the same seed again is none, later or longer too."""
    one, two = [{"role": "user", "content": "q"}], [{"role": "user", "content": "q2"}]

    def keys(body: dict[str, Any], now: int = NOW) -> list[bytes | None]:
        return [turn.key for turn in seed_of(body, now)[0]]

    assert len({*keys(seeds(one, one)), *keys(seeds(one, name="t")), *keys(seeds(two))}) == 4
    assert keys(seeds(one, two))[:1] == keys(seeds(one), NOW + 1)


def test_a_seed_at_fault_lists_its_faults() -> None:
    """All faults at once, by place, and not one turn of it."""
    body = {
        "data": {
            "sessions": [
                {"conversations": [[{"role": "robot", "content": "x"}, {"role": "user"}]]},
                {"sessionKey": "s", "conversations": [{}, [7]]},
                7,
            ]
        }
    }
    with pytest.raises(Refused) as refused:
        seed_of(body, NOW)
    assert refused.value.body["error"].startswith("Seed input validation failed")
    assert refused.value.body["validation_errors"] == [
        "sessions[0].sessionKey: must be a string that is not empty",
        "sessions[0].conversations[0][0].role: must be user or assistant",
        "sessions[0].conversations[0][1].content: must be a string",
        "sessions[1].conversations[0]: must be a list",
        "sessions[1].conversations[1][0].role: must be user or assistant",
        "sessions[2].sessionKey: must be a string that is not empty",
        "sessions[2].conversations: must be a list",
    ]
    for data in (7, {}, {"sessions": {}}):
        with pytest.raises(Refused):
            seed_of({"data": data}, NOW)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["LOCALHOST:8420"], "localhost"),
        (["[::1]:1"], "[::1]"),
        (["evil.example"], "evil.example"),
        ([], None),
        ([""], None),
        (["a b c"], None),
        (["x:99999"], None),
        (["x:"], None),
        (["[::1"], None),
        (["::1"], None),
        (["a/b"], None),
        (["a@b"], None),
        (["localhost\n"], None),
        (["localhost", "localhost"], None),
    ],
)
def test_host_names(values: list[str], name: str | None) -> None:
    """One valid name with an optional port, or nothing."""
    assert host_name(values) == name


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ("Bearer sécret", None),
        ("bEARER   sécret ", None),
        (None, "Unauthorized: missing Bearer token"),
        ("", "Unauthorized: missing Bearer token"),
        ("Basic sécret", "Unauthorized: missing Bearer token"),
        ("Bearer", "Unauthorized: missing Bearer token"),
        ("Bearer secret", "Unauthorized: invalid token"),
        ("Bearer s\udcc3", "Unauthorized: invalid token"),
    ],
)
def test_tokens(header: str | None, fault: str | None) -> None:
    """The scheme in any case, the token exactly, and no exception for bytes that are not text."""
    assert token_fault(header, "sécret") == fault


def config(tmp_path: Path, text: str) -> dict[str, str]:
    (tmp_path / "c.json").write_text(text)
    return {"TDAI_GATEWAY_CONFIG": str(tmp_path / "c.json")}


def test_settings_come_from_the_environment_then_the_file_then_defaults(tmp_path: Path) -> None:
    """Values are trimmed, blank counts as unset."""
    env = config(
        tmp_path, '{"server": {"port": 1, "host": "localhost", "apiKey": " k ", "corsOrigins": ["https://a"]}}'
    )
    read = settings_of({**env, "TDAI_GATEWAY_PORT": " 2 ", "TDAI_GATEWAY_HOST": " ", "TDAI_DATA_DIR": "/x/../y"})
    assert read[:4] == ("localhost", 2, "k", frozenset({"https://a"}))
    assert read.data_dir == "/y"
    assert settings_of({**env, "TDAI_CORS_ORIGINS": "https://b, https://c"}).origins == {"https://b", "https://c"}
    read = settings_of({"MEMORY_TENCENTDB_ROOT": "/r", "TDAI_GATEWAY_CONFIG": str(tmp_path / "missing")})
    assert read == ("127.0.0.1", 8420, "", frozenset(), "/r/memory-tdai", 1 << 20)
    assert settings_of({"TDAI_GATEWAY_HOST": "[::1]"}).host == "::1"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"server": []}',
        '{"server": {"port": "1"}}',
        '{"server": {"port": true}}',
        '{"server": {"corsOrigins": [1]}}',
        '{"server": {"apiKey": 1}}',
    ],
)
def test_a_config_file_that_cannot_be_used_is_an_error(tmp_path: Path, text: str) -> None:
    """A typo in a file with a key in it must not turn the token off."""
    with pytest.raises(CannotRun, match=r"c\.json") as why:
        settings_of(config(tmp_path, text))
    assert why.value.code == 1


@pytest.mark.parametrize("port", ["abc", "84x", "99999", "-5", "1.5", "٣", "65536", "1" * 5000])
def test_a_port_that_is_none_is_an_error(port: str) -> None:
    """0..65535, where the real Gateway took 8420 for abc and 84 for 84x."""
    with pytest.raises(CannotRun, match="TDAI_GATEWAY_PORT") as why:
        settings_of({"TDAI_GATEWAY_PORT": port})
    assert why.value.code == 2
