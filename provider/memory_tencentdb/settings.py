"""What this profile's user asked for: the profile file, the environment, and where they disagree.

Invariants:
* Read once, in initialize(). Nothing later looks at the environment or at HERMES_HOME, so a thread of one profile never
  picks up the values of another.
* A profile file that cannot be read is a stated problem, never an empty file: falling through to another Gateway
  would mix the memories of two profiles. Its turns wait on disk.
* Order: profile file > MEMORY_TENCENTDB_GATEWAY_URL > _HOST/_PORT > endpoint record > 127.0.0.1:8420. A Gateway that
  the profile file *names* comes from its endpoint record alone.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

NAME = "memory_tencentdb"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8420
PROFILE_KEYS = (
    "gateway",
    "root",
    "gateway_url",
    "gateway_host",
    "gateway_port",
    "gateway_api_key",
    "trust",
    "autostart",
)
ENV_NAMES = (
    "MEMORY_TENCENTDB_GATEWAY_URL",
    "MEMORY_TENCENTDB_GATEWAY_HOST",
    "MEMORY_TENCENTDB_GATEWAY_PORT",
    "MEMORY_TENCENTDB_GATEWAY_API_KEY",
    "TDAI_GATEWAY_API_KEY",
    "MEMORY_TENCENTDB_ALLOW_HTTP",
    "MEMORY_TENCENTDB_ROOT",
)


class Address:
    """Where a Gateway is reached. ``prefix`` is a path without a slash at its end (a Gateway dies of ``GET //``)."""

    __slots__ = ("host", "port", "prefix", "scheme")

    def __init__(self, scheme: str, host: str, port: int, prefix: str = "") -> None:
        self.scheme, self.host, self.port, self.prefix = scheme, host, port, prefix

    @property
    def local(self) -> bool:
        """Whether it is this machine's loopback: there, and only there, the socket table proves the listener."""
        try:
            if ":" in self.host:
                return socket.inet_pton(socket.AF_INET6, self.host) == b"\0" * 15 + b"\1"
            return socket.inet_pton(socket.AF_INET, self.host)[0] == 127
        except OSError:
            return False

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.prefix}"


class Settings:
    """Everything initialize() binds. ``address`` is None where the endpoint record decides."""

    def __init__(
        self,
        home: str,
        root: str,
        *,
        gateway: str = "default",
        address: Address | None = None,
        origin: str = "default",
        key: str = "",
        key_origin: str = "",
        trust: bool = False,
        allow_http: bool = False,
        autostart: bool = False,
        broken: str = "",
        warnings: Sequence[str] = (),
    ) -> None:
        self.home, self.root, self.gateway = home, root, gateway
        self.address, self.origin = address, origin
        self.key, self.key_origin = key, key_origin
        self.trust, self.allow_http, self.autostart = trust, allow_http, autostart
        self.broken, self.warnings = broken, tuple(warnings)

    def __repr__(self) -> str:
        return f"<Settings of {self.home}>"  # never the key: this may stand in a log

    @property
    def named(self) -> bool:
        """Whether the profile asked for a Gateway by a name of its own: it must not end up at another one."""
        return self.gateway != "default"

    @property
    def spool(self) -> str:
        """The directory of this profile's spool."""
        return os.path.join(self.home, NAME)


def profile_path(home: str) -> str:
    """The profile file of a Hermes home."""
    return os.path.join(home, f"{NAME}.json")


def read_settings(
    home: str,
    env: Callable[[str], str | None],
    *,
    bound: Mapping[str, Any] | None = None,
    root: str | None = None,
) -> Settings:
    """The settings of the profile at ``home``. Never raises: what is wrong stands in ``broken`` and ``warnings``.

    ``bound``: what a session wrote down of its environment (spool.register), used where nothing else names a Gateway.
    ``root`` beats every other source.
    """
    warnings: list[str] = []
    values, broken, bound = {}, "", bound or {}
    address, origin = None, "default"
    try:
        values = read_profile(home)
        address, origin = _address(values, env, warnings)
        if origin == "default" and isinstance(bound.get("address"), str):
            address, origin = parse_url(bound["address"]), "the last session"
    except ValueError as error:
        broken = str(error)
    key, key_origin = _key(values, env)
    root = root or _text(values, "root") or (env("MEMORY_TENCENTDB_ROOT") or "").strip() or _text(bound, "root")
    return Settings(
        home,
        os.path.abspath(os.path.expanduser(root or "~/.memory-tencentdb")),
        gateway=_text(values, "gateway") or "default",
        address=address,
        origin=origin,
        key=key,
        key_origin=key_origin,
        trust=_truthy(str(values.get("trust"))),
        allow_http=_truthy(env("MEMORY_TENCENTDB_ALLOW_HTTP")) or bound.get("allow_http") is True,
        autostart=_truthy(str(values.get("autostart"))),
        broken=broken,
        warnings=warnings,
    )


def read_profile(home: str) -> dict[str, Any]:
    """The profile file, over what the host's dashboard keeps in memory_tencentdb/config.json.

    Raises ValueError("cannot read PATH: cause; ...") for a file that is there and is no JSON object.
    """
    values = _json_object(os.path.join(home, NAME, "config.json"))
    return {**values, **_json_object(profile_path(home))}


def _json_object(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        return {}
    except NotADirectoryError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}; mend it or move it away") from error
    if not isinstance(value, dict):
        raise ValueError(f"cannot read {path}: it holds no JSON object; mend it or move it away")
    return value


def parse_url(text: str) -> Address:
    """The address that a URL names; "host:port" means http. Raises ValueError saying what is wrong with it."""
    text = text.strip()
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise ValueError(f"cannot use Gateway URL {text!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"cannot use Gateway URL {text!r}: it must be http(s)://HOST[:PORT]")
    if parts.username or parts.password:
        raise ValueError("cannot use the Gateway URL: it holds a user or password; put the key into gateway_api_key")
    if parts.query or parts.fragment:
        raise ValueError(f"cannot use Gateway URL {text!r}: it must end before '?' and '#'")
    if port is None:
        port = 443 if parts.scheme == "https" else DEFAULT_PORT
    return Address(parts.scheme, reachable(parts.hostname), port, parts.path.rstrip("/"))


def reachable(host: str) -> str:
    """The host a client connects to: a bind address means loopback, and loopback needs no name lookup."""
    host = host.strip().strip("[]").lower()
    if host == "::":
        return "::1"
    return DEFAULT_HOST if host in ("", "localhost", "0.0.0.0") else host  # noqa: S104  recognised, never bound


def parse_port(value: object, name: str, warnings: list[str]) -> int:
    """A port 1..65535; anything else is 8420 with a warning."""
    text = str(value).strip()
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 65535:
        return int(text)
    warnings.append(f"{name}={text!r} is no port (1..65535); using {DEFAULT_PORT}")
    return DEFAULT_PORT


def _address(
    values: Mapping[str, Any], env: Callable[[str], str | None], warnings: list[str]
) -> tuple[Address | None, str]:
    """The address asked for, or None for the endpoint record, and what named it. Raises ValueError for a bad URL."""
    file, host, port = "profile file", _text(values, "gateway_host"), _text(values, "gateway_port")
    url = _text(values, "gateway_url")
    if not url and not host and not port:
        if _text(values, "gateway"):
            return None, file
        file, url = "MEMORY_TENCENTDB_GATEWAY_URL", (env("MEMORY_TENCENTDB_GATEWAY_URL") or "").strip()
        if not url:
            file = "MEMORY_TENCENTDB_GATEWAY_HOST/_PORT"
            host = (env("MEMORY_TENCENTDB_GATEWAY_HOST") or "").strip()
            port = (env("MEMORY_TENCENTDB_GATEWAY_PORT") or "").strip()
    if url:
        try:
            return parse_url(url), file
        except ValueError as error:
            raise ValueError(f"{error} (from {file})") from None
    if not host and not port:
        return None, "default"
    number = parse_port(port, f"port from {file}", warnings) if port else DEFAULT_PORT
    return Address("http", reachable(host), number), file


def _key(values: Mapping[str, Any], env: Callable[[str], str | None]) -> tuple[str, str]:
    if key := _text(values, "gateway_api_key"):
        return key, "profile file"
    for name in ("MEMORY_TENCENTDB_GATEWAY_API_KEY", "TDAI_GATEWAY_API_KEY"):
        if key := (env(name) or "").strip():
            return key, name
    return "", ""


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return "" if value is None or isinstance(value, (bool, dict, list)) else str(value).strip()


def _truthy(value: str | None) -> bool:
    return (value or "").strip().lower() in ("1", "true", "yes", "on")


def profile_environment(home: str) -> Callable[[str], str | None]:
    """How initialize() looks up one variable for this profile.

    Hermes loads $HERMES_HOME/.env into the process environment. Where it serves several profiles at once it keeps them
    apart in a secret scope, which refuses an unscoped look-up; then the profile's own .env is read.
    """
    try:
        get_secret = importlib.import_module("agent.secret_scope").get_secret
    except ImportError:
        return os.environ.get

    def look_up(name: str) -> str | None:
        try:
            value = get_secret(name)
        except RuntimeError:
            value = dotenv(home).get(name)
        return None if value is None else str(value)

    return look_up


def dotenv(home: str) -> dict[str, str]:
    """The variables of $HERMES_HOME/.env that concern a Gateway; empty when there is no such file."""
    found: dict[str, str] = {}
    try:
        with open(os.path.join(home, ".env"), encoding="utf-8", errors="replace") as file:
            for line in file:
                name, equals, value = line.strip().removeprefix("export ").partition("=")
                if equals and name.strip() in ENV_NAMES:
                    value = value.strip()
                    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
                    found[name.strip()] = value[1:-1] if quoted else value
    except OSError:
        return found
    return found


def save_profile(home: str, values: Mapping[str, Any]) -> None:
    """Merge ``values`` into the profile file: 0600, atomically, unknown keys kept; None and "" remove a key.

    Raises OSError when it cannot be written, ValueError when the present file cannot be read (it is not overwritten).
    """
    path = profile_path(home)
    merged = _json_object(path)
    for key, value in values.items():
        if value is None or value == "":
            merged.pop(key, None)
        else:
            merged[key] = int(value) if key == "gateway_port" and str(value).strip().isdigit() else value
    os.makedirs(home, exist_ok=True)
    write_json(path, merged, durable=True)


def write_json(path: str, value: object, *, durable: bool = False) -> None:
    """Replace ``path`` with ``value`` as JSON: 0600 whatever the umask, whole or not at all. Raises OSError."""
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.urandom(6).hex()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False, indent=None if not durable else 2)
            file.write("\n")
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
