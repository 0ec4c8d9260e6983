"""What a verb returns, and the one JSON object that --json prints. The key set is frozen by a contract test."""

from __future__ import annotations

import json

TYPE_CHECKING = False  # typing itself costs 3 of the 50 ms that `status` may take
if TYPE_CHECKING:
    from typing import Any

SCHEMA = 1
OK, FAILED, USAGE, NOT_PERMITTED, NOT_INSTALLED, NOT_CONFIGURED, NOT_RUNNING, HELD = 0, 1, 2, 4, 5, 6, 7, 75
UNKNOWN = 4  # status: unknown NAME, or no answer in time
STOPPED = 3  # status: nothing is wanted
INTERRUPTED = 130


class Result:
    """The outcome of a verb: data for the renderer, errors with code, message and hint, the exit code."""

    def __init__(
        self, command: str, data: Any = None, exit_code: int = OK, errors: list[dict[str, Any]] | None = None
    ) -> None:
        self.command, self.data, self.exit_code, self.errors = command, data, exit_code, errors or []

    def but(self, **changes: Any) -> Result:
        """The same Result with some fields changed."""
        return Result(**{**vars(self), **changes})

    def to_json(self) -> str:
        """The envelope, one line."""
        errors = [{"hint": None, **e} for e in self.errors]
        envelope = {
            "schema": SCHEMA,
            "command": self.command,
            "ok": self.exit_code == OK,
            "exit_code": self.exit_code,
            "data": self.data,
            "errors": errors,
        }
        return json.dumps(envelope, ensure_ascii=True)


def failure(command: str, code: str, message: str, hint: str | None = None, exit_code: int = FAILED) -> Result:
    """A Result with one error."""
    return Result(command, None, exit_code, [{"code": code, "message": message, "hint": hint}])


def from_reply(command: str, reply: dict[str, Any]) -> Result:
    """The daemon's reply as a Result."""
    return Result(command, reply.get("data"), int(reply.get("exit_code", FAILED)), list(reply.get("errors") or []))
