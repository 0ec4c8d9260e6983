"""Talk to the daemon and read what it wrote; standard library only, cheap to import.

Invariants: nothing here starts, signals or writes anything; every exchange has one total deadline.
"""

from __future__ import annotations

import json
import os
import socket
import time

from tdai_supervisor.decide import attachments as naming
from tdai_supervisor.decide import paths

TYPE_CHECKING = False  # typing itself costs 3 of the 50 ms that `status` may take
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from tdai_supervisor.decide.settings import Settings

MAX_REPLY = 4 * 1024 * 1024


class NoAnswerError(Exception):
    """The daemon did not answer in time although something listens (or listened) on its socket."""


class NotRunningError(Exception):
    """Nobody listens on the control socket."""


def connect(root: str, timeout: float) -> socket.socket:
    """A connection to the control socket; raises NotRunningError or NoAnswerError."""
    path = paths.socket(root)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = -1
    try:
        connection.settimeout(timeout)
        if len(os.fsencode(path)) > paths.SUN_PATH:
            # A socket address is short: a long root is reached through a descriptor of its directory.
            directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
            path = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        connection.close()
        raise NotRunningError(str(error)) from None
    except TimeoutError:
        connection.close()
        raise NoAnswerError(f"no answer in {timeout:g} s") from None
    except OSError as error:
        connection.close()
        if isinstance(error, BlockingIOError):  # a full backlog on a stopped daemon
            raise NoAnswerError("the daemon accepts nobody") from None
        raise
    finally:
        if directory >= 0:
            os.close(directory)
    return connection


def request(root: str, verb: str, timeout: float, /, **arguments: Any) -> dict[str, Any]:
    """One request, one reply: {"ok", "exit_code", "data", "errors"}.

    Raises NotRunningError (nobody there), NoAnswerError (nothing complete within timeout seconds), PermissionError
    (another user's socket), ValueError (not our protocol).
    """
    deadline = time.monotonic() + timeout
    with connect(root, timeout) as connection:
        try:
            line = json.dumps({"verb": verb, **arguments}) + "\n"
            connection.sendall(line.encode())
            data = b""
            while not data.endswith(b"\n"):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                more = connection.recv(65536)
                if not more:
                    raise NoAnswerError("the daemon closed the connection")
                data += more
                if len(data) > MAX_REPLY:
                    raise ValueError("a reply of more than 4 MiB")
        except TimeoutError:
            raise NoAnswerError(f"no answer in {timeout:g} s") from None
        except (ConnectionResetError, BrokenPipeError):
            raise NoAnswerError("the daemon closed the connection") from None
    reply = json.loads(data)
    if not isinstance(reply, dict):
        raise ValueError("a reply that is no object")
    return reply


def read_object(path: str) -> dict[str, Any] | None:
    """The JSON object in a small file, or None where there is none that can be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            value = json.loads(file.read(1024 * 1024))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_text(path: str) -> str | None:
    """The stripped text of a small file, or None."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            return file.read(4096).decode("utf-8", "surrogateescape").strip()
    except OSError:
        return None


def process_state(pid: Any, ticks: Any) -> str | None:
    """The state letter of a recorded process ("T" stopped, "Z" zombie), or None where it is another or gone."""
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError, TypeError):
        return None if os.path.isdir("/proc/self") else _kill_state(pid)
    return fields[0].decode() if int(fields[19]) == ticks else None


def _kill_state(pid: Any) -> str | None:
    """Without /proc only kill(0) can tell: alive ("S") or not."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return "S"
    except (OSError, ValueError, TypeError):
        return None
    return "S"


def daemon_process(root: str) -> dict[str, Any] | None:
    """The daemon by its pidfile, proven alive by start ticks: {"pid", "start_ticks", "state", ...}, or None."""
    about = read_object(paths.pidfile(root))
    if about is None:
        return None
    state = process_state(about.get("pid"), about.get("start_ticks"))
    return None if state is None or state in "ZX" else {**about, "state": state}


def read_text_whole(path: str) -> str | None:
    """The text of a settings file, or None where there is none that can be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(1024 * 1024)
    except OSError:
        return None


def record_process_lives(record: dict[str, Any]) -> bool:
    """Whether the process an endpoint record names lives: pid and start ticks, on this boot."""
    if (boot := _boot_id()) is not None and boot != record.get("boot_id"):
        return False
    state = process_state(record.get("pid"), record.get("start_ticks"))
    return state is not None and state not in "ZX"


def attachments(root: str) -> list[dict[str, Any]]:
    """The living attachments of a root, where no daemon keeps a view of them: read-only, dead ones are passed over."""
    folder, boot = os.path.join(root, "sessions"), _boot_id()
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    there = set(os.listdir("/proc")) if os.path.isdir("/proc/self") else None
    found = []
    for name in names:
        who = naming.identity(name)
        if who is None or (there is not None and str(who[0]) not in there):
            continue  # one list of pids tells most of them
        if process_state(*who) in (None, "Z", "X"):
            continue
        entry = read_object(os.path.join(folder, name)) or {}
        if entry.get("boot_id") in (None, boot):
            found.append(naming.shown(entry))
    return found


def _boot_id() -> str | None:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def url(host: str, port: int | None) -> str | None:
    """Where clients reach a Gateway; None where no port is known yet."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (compared, not bound)
    return None if port is None else f"http://{f'[{target}]' if ':' in target else target}:{port}"


def call(
    host: str, port: int, path: str, timeout: float, body: dict[str, Any] | None = None, key: str | None = None
) -> tuple[int, dict[str, Any]]:
    """One request to a Gateway on this machine: (HTTP status, the JSON object it answered with, {} for anything else).

    No proxy, no redirect, at most 1 MiB, timeout seconds in total. Raises OSError (TimeoutError included) or
    ValueError.
    """
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (compared, not bound)
    data = b"" if body is None else json.dumps(body).encode()
    name = f"[{target}]" if ":" in target else target
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {name}:{port}", "Connection: close"]
    head += ["Content-Type: application/json", f"Content-Length: {len(data)}"] if data else []
    head += [f"Authorization: Bearer {key}"] if key else []
    deadline = time.monotonic() + timeout
    with socket.create_connection((target, port), timeout) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
        answer = b""
        while len(answer) < 1024 * 1024:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            more = connection.recv(65536)
            if not more:
                break
            answer += more
    first, _, rest = answer.partition(b"\r\n")
    words = first.split()
    if len(words) < 2 or not words[1].isdigit():
        raise ValueError("no HTTP answer")
    try:
        value = json.loads(rest.partition(b"\r\n\r\n")[2])
    except ValueError:
        value = {}
    return int(words[1]), value if isinstance(value, dict) else {}


def probe(host: str, port: int, timeout: float) -> str | None:
    """Ask /health once; None when it answers 200, else what is wrong."""
    try:
        status, _ = call(host, port, "/health", timeout)
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except OSError as error:
        return f"{error.strerror or error} ({host}:{port})"
    except ValueError as error:
        return str(error)
    return None if status == 200 else f"HTTP {status}"


def read_journal(path: str) -> str | None:
    """The text of a journal file (a little over 1 MiB at most), or None."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(8 * 1024 * 1024)
    except OSError:
        return None


def running_environment(root: str) -> Mapping[str, str]:
    """What the living daemon runs by: what `start` kept for it; without one (or in the foreground) this shell's."""
    from tdai_supervisor.decide import settings  # noqa: PLC0415  (not of use to `status` with a daemon)

    about = daemon_process(root)
    kept = read_object(paths.environment(root))
    if about is None or about.get("keeper") == "none" or kept is None:
        return os.environ
    others = {k: v for k, v in os.environ.items() if not settings.ENVIRONMENT_NAMES.fullmatch(k)}
    return others | {k: v for k, v in kept.items() if isinstance(v, str)}


def configured(root: str) -> Settings:
    """The settings as the living daemon has them, else as this shell would start one. Raises SettingsError."""
    from tdai_supervisor.decide import settings  # noqa: PLC0415

    text = read_text_whole(paths.settings(root)) or ""
    return settings.load(root, text, running_environment(root), os.path.exists)
