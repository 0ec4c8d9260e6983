"""What a request body must hold, and what is made of it. Pure: the time is passed in.

Invariants:
- A body that is accepted is stored whole: nothing in it is cut, cleaned or guessed, except lone surrogates, which no
  UTF-8 file can hold and which become U+FFFD.
- What is refused is refused as a whole, with the field at fault by name and without its value.
"""

import json
import math
import re
from datetime import UTC, datetime
from typing import Any

from tdai_supervisor.embedded.turns import Message, Turn, key_of

LAST_MS = 253_402_300_799_999
"""The end of the year 9999 in ms, the last time that can be shown."""
MAX_FAULTS = 50
"""Faults of one seed that are listed."""

_SURROGATES = re.compile("[\ud800-\udfff]")

Body = dict[str, Any]


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None, **more: Any) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = {"error": message, **more}


def clean(value: str) -> str:
    """The text with lone surrogates replaced: JSON can hold what UTF-8 cannot."""
    return _SURROGATES.sub("\ufffd", value)


def optional(body: Body, name: str) -> str | None:
    """A text field, or None. Raises Refused."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise Refused(400, f"{name} must be a string")
    return None if value is None else clean(value)


def required(body: Body, *names: str, blank: tuple[str, ...] = ()) -> list[str]:
    """Text fields that must be there and, but for those in `blank`, not empty. Raises Refused."""
    values = [optional(body, name) for name in names]
    if any(value is None or (value == "" and name not in blank) for name, value in zip(names, values, strict=True)):
        raise Refused(400, f"Missing required field{'s' * (len(names) > 1)}: {', '.join(names)}")
    return [value for value in values if value is not None]


def limit_of(body: Body, highest: int) -> int:
    """`limit` of a search: 5 unless given; numbers and numeric strings are truncated and clamped to 1..highest."""
    value = body.get("limit")
    if value is None:
        return 5
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise Refused(400, "limit must be a number")
    return int(max(1, min(highest, number)))


def time_of(value: Any, now: int) -> int:
    """A timestamp as ms since the epoch: such a number, ISO 8601 text, or `now` where there is none.

    Raises ValueError or OverflowError.
    """
    if value is None:
        return now
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LAST_MS:
        raise ValueError("not a time")
    return int(value)


def worth_keeping(role: str, content: str) -> bool:
    """What the real Gateway records too: nothing blank, no bare NO_REPLY, no slash command of the user."""
    words = content.strip()
    return bool(words) and words != "NO_REPLY" and not (role == "user" and words.startswith("/"))


def _list(value: Any, path: str, faults: list[str]) -> list[Any]:
    if isinstance(value, list):
        return value
    faults.append(f"{path}: must be a list")
    return []


def _messages(value: Any, path: str, now: int, faults: list[str], *, strict: bool) -> list[Message]:
    """What users and assistants said. Unless `strict`, other roles and messages without content (tool calls) are passed
    over; what is wrong is added to `faults`."""
    said = []
    for number, one in enumerate(_list(value, path, faults)):
        where = f"{path}[{number}]"
        role, content = (one.get("role"), one.get("content")) if isinstance(one, dict) else (None, None)
        if not isinstance(role, str) or (strict and role not in ("user", "assistant")):
            faults.append(f"{where}.role: must be user or assistant")
        elif not strict and (role not in ("user", "assistant") or content is None):
            continue
        elif not isinstance(content, str):
            faults.append(f"{where}.content: must be a string")
        else:
            try:
                said.append(Message(role, clean(content), time_of(one.get("timestamp"), now)))
            except (ValueError, OverflowError):
                faults.append(f"{where}.timestamp: must be ms since the epoch or ISO 8601")
    return said


def _kept(messages: list[Message]) -> tuple[Message, ...]:
    return tuple(message for message in messages if worth_keeping(message.role, message.content))


def turn_of(body: Body, idempotency_key: str | None, now: int) -> Turn:
    """The turn of a /capture: its `messages` where there are any, else the two contents. Raises Refused."""
    names = ("user_content", "assistant_content", "session_key")
    user, assistant, session = required(body, *names, blank=names[:2])
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= 256:
        raise Refused(400, "Idempotency-Key must have 1 to 256 characters")
    faults: list[str] = []
    given = body.get("messages")
    said = [] if given is None else _messages(given, "messages", now, faults, strict=False)
    if faults:
        raise Refused(400, faults[0])
    return Turn(
        session=session,
        at=now,
        messages=_kept(said or [Message("user", user, now), Message("assistant", assistant, now)]),
        key=None if idempotency_key is None else key_of("capture", clean(idempotency_key)),
        session_id=optional(body, "session_id"),
        user_id=optional(body, "user_id"),
    )


def seed_of(body: Body, now: int) -> tuple[list[Turn], int, int]:
    """(turns, sessions, messages) of a /seed. A turn's key is its session, its place and what was said when.

    Raises Refused with `validation_errors`.
    """
    data = body.get("data")
    if data is None:
        raise Refused(400, "Missing required field: data")
    faults: list[str] = []
    turns: list[Turn] = []
    count = 0
    sessions = _list(data.get("sessions") if isinstance(data, dict) else data, "sessions", faults)
    for s, session in enumerate(sessions):
        fields = session if isinstance(session, dict) else {}
        name, path = fields.get("sessionKey"), f"sessions[{s}].conversations"
        if not isinstance(name, str) or not name:
            faults.append(f"sessions[{s}].sessionKey: must be a string that is not empty")
            name = ""
        for r, round_ in enumerate(_list(fields.get("conversations"), path, faults)):
            said = _messages(round_, f"{path}[{r}]", now, faults, strict=True)
            count += len(said)
            if not faults:
                content = json.dumps([[one.get(key) for key in ("role", "content", "timestamp")] for one in round_])
                key = key_of("seed", clean(name), str(r), content)
                turns.append(Turn(clean(name), said[0].at if said else now, _kept(said), key))
    if faults:
        raise Refused(400, "Seed input validation failed", validation_errors=faults[:MAX_FAULTS])
    return turns, len(sessions), count
