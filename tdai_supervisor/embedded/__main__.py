"""`python -m tdai_supervisor.embedded`: read the environment, bind, open the store, serve.

Invariants:
- Configured by the environment and the file it names, nothing else; what cannot be read or understood ends the process
  with one line on stderr. Exit 0 ended by TERM or INT, 1 it cannot run here, 2 it must not run as configured.
- The port is bound before the store is opened, and both before aiohttp is imported: a start that must fail fails at
  once and leaves no file behind. It listens last: whoever connects is answered.
- Nothing is finalised at the end (`os._exit`): the store is closed, and a second TERM cannot change the exit code.
"""

import errno
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = "8420"
DEFAULT_MAX_BODY = "1048576"


class CannotRun(Exception):
    """Why not, in one line, and the exit code to end with."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Settings(NamedTuple):
    """`data_dir` is absolute; `api_key` empty means none."""

    host: str
    port: int
    api_key: str
    origins: frozenset[str]
    data_dir: str
    max_body: int


def log(line: str) -> None:
    """One line to stderr, whatever became of it."""
    try:
        os.write(2, f"memory gateway: {line}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        return  # stderr is gone: there is nobody left to tell


def _config_file(path: str) -> dict[str, Any]:
    """The `server` table of the config file, empty where there is no file. Raises CannotRun."""
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise CannotRun(1, f"cannot read {path}: {exc.strerror}; try another TDAI_GATEWAY_CONFIG") from exc
    except (ValueError, RecursionError) as exc:
        where = f"line {exc.lineno}: {exc.msg}" if isinstance(exc, json.JSONDecodeError) else "not UTF-8 JSON"
        raise CannotRun(1, f"cannot read {path}: {where}; try a file that is valid JSON") from exc
    server = config.get("server", {}) if isinstance(config, dict) else None
    kinds = {"host": str, "port": int, "apiKey": str, "corsOrigins": list}
    if not isinstance(server, dict):
        raise CannotRun(1, f"cannot use {path}: it must be an object, and `server` in it too")
    for name, kind in kinds.items():
        if name in server and (not isinstance(server[name], kind) or isinstance(server[name], bool)):
            raise CannotRun(1, f"cannot use {path}: server.{name} must be of type {kind.__name__}")
    if not all(isinstance(origin, str) for origin in server.get("corsOrigins", [])):
        raise CannotRun(1, f"cannot use {path}: server.corsOrigins must be a list of strings")
    return server


def _number(name: str, value: str, lowest: int, highest: int) -> int:
    if not value.isascii() or not value.isdigit() or not lowest <= int(value[:20]) <= highest:
        raise CannotRun(2, f"cannot use {value} as {name}: it must be a number from {lowest} to {highest}")
    return int(value)


def settings_of(env: Mapping[str, str]) -> Settings:
    """Settings from the environment, then the config file, then defaults; blank counts as unset.

    Raises CannotRun.
    """
    given = {name: value.strip() for name, value in env.items() if value.strip()}
    path = given.get("TDAI_GATEWAY_CONFIG")
    file = _config_file(os.path.expanduser(path)) if path else {}
    if "TDAI_GATEWAY_PORT" in given or "port" not in file:
        port = _number("TDAI_GATEWAY_PORT", given.get("TDAI_GATEWAY_PORT", DEFAULT_PORT), 0, 65535)
    else:
        port = _number(f"server.port in {path}", str(file["port"]), 0, 65535)
    root = given.get("MEMORY_TENCENTDB_ROOT", "~/.memory-tencentdb")
    data_dir = given.get("TDAI_DATA_DIR", os.path.join(root, "memory-tdai"))
    origins = given["TDAI_CORS_ORIGINS"].split(",") if "TDAI_CORS_ORIGINS" in given else file.get("corsOrigins", [])
    return Settings(
        host=given.get("TDAI_GATEWAY_HOST", file.get("host", "").strip()).strip("[]").lower() or DEFAULT_HOST,
        port=port,
        api_key=given.get("TDAI_GATEWAY_API_KEY", file.get("apiKey", "").strip()),
        origins=frozenset(origin.strip() for origin in origins if origin.strip()),
        data_dir=os.path.abspath(os.path.expanduser(data_dir)),
        max_body=_number("TDAI_MAX_BODY_BYTES", given.get("TDAI_MAX_BODY_BYTES", DEFAULT_MAX_BODY), 1, 1 << 30),
    )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1")


def _cannot_listen(exc: OSError, settings: Settings) -> CannotRun:
    where = f"{settings.host}:{settings.port}"
    if exc.errno == errno.EADDRINUSE:
        return CannotRun(1, f"EADDRINUSE: address already in use {where}")
    return CannotRun(1, f"cannot listen on {where}: {exc.strerror}; try another TDAI_GATEWAY_HOST or _PORT")


def bind(settings: Settings) -> socket.socket:
    """A bound socket that does not listen yet. IPv4 first where a name has both. Raises CannotRun."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        if not settings.api_key and not _is_loopback(str(address[0])):
            raise CannotRun(2, f"cannot listen on {settings.host} without a token: try TDAI_GATEWAY_API_KEY")
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as exc:
        raise _cannot_listen(
            exc if isinstance(exc, OSError) else OSError(errno.EINVAL, "no such host"), settings
        ) from exc
    return sock


def _announce(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:
        log("stdout is gone")


def hosts_of(settings: Settings, address: str) -> frozenset[str] | None:
    """Names a Host header may hold: those of this machine's loopback, so that no other name can be rebound to it.

    None, for any, where the Gateway listens beyond loopback, which needs a token.
    """
    if not _is_loopback(address):
        return None
    return frozenset(
        {"127.0.0.1", "localhost", "[::1]", f"[{settings.host}]" if ":" in settings.host else settings.host}
    )


def run(settings: Settings) -> None:
    """Serve until TERM or INT. Raises CannotRun."""
    sock = bind(settings)
    address, port = sock.getsockname()[:2]
    # This server never speaks TLS and aiohttp works without ssl: not loading it, and the system's certificates with it,
    # saves 120 of 420 ms.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    from tdai_supervisor.embedded.store import Store, Unusable  # noqa: PLC0415 - after the bind

    store = Store(settings.data_dir, log)
    try:
        store.open()
    except Unusable as exc:
        raise CannotRun(1, str(exc)) from exc
    import asyncio  # noqa: PLC0415 - here already, with the store

    from tdai_supervisor.embedded.app import Policy, serve  # noqa: PLC0415 - most of the start, for nothing if it fails

    gc.freeze()
    gc.enable()
    policy = Policy(hosts_of(settings, address), settings.origins, settings.api_key, settings.max_body)
    shown = f"[{address}]" if ":" in address else address
    try:
        asyncio.new_event_loop().run_until_complete(
            serve(sock, store, policy, log, lambda: _announce(f"listening on http://{shown}:{port}"))
        )
    except OSError as exc:
        raise _cannot_listen(exc, settings) from exc


def main() -> NoReturn:
    """Run as configured by the environment; does not return."""
    for fd in range(3):  # what was closed must not become a socket that log lines go to
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # until there is something to end properly
    gc.disable()  # until everything is imported: saves 40 of 330 ms
    os.umask(0o077)
    code = 0
    try:
        run(settings_of(os.environ))
    except CannotRun as exc:
        log(str(exc))
        code = exc.code
    os._exit(code)


if __name__ == "__main__":
    main()
