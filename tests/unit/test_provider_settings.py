"""Which Gateway a profile asked for, and what is said of values that cannot be used."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from memory_tencentdb import settings as s


def read(home: Path, profile: object = None, **env: str) -> s.Settings:
    """The settings of a profile with that file and environment."""
    home.mkdir(exist_ok=True)
    if profile is not None:
        (home / "memory_tencentdb.json").write_text(profile if isinstance(profile, str) else json.dumps(profile))
    return s.read_settings(str(home), env.get)


URL, HOST, PORT = (f"MEMORY_TENCENTDB_GATEWAY_{name}" for name in ("URL", "HOST", "PORT"))
ENV = "MEMORY_TENCENTDB_GATEWAY_HOST/_PORT"


@pytest.mark.parametrize(
    ("profile", "env", "address", "origin"),
    [
        ({}, {}, None, "default"),
        ({"gateway_url": "http://127.0.0.1:1"}, {URL: "http://h:2"}, "http://127.0.0.1:1", "profile file"),
        ({"gateway_port": 9}, {URL: "http://h:2"}, "http://127.0.0.1:9", "profile file"),
        ({"gateway": "work"}, {PORT: "9"}, None, "profile file"),
        ({}, {URL: " https://m.example/x/ ", PORT: "9"}, "https://m.example:443/x", URL),
        ({}, {PORT: " 8421 "}, "http://127.0.0.1:8421", ENV),
        ({}, {HOST: "0.0.0.0"}, "http://127.0.0.1:8420", ENV),
        ({}, {HOST: "::"}, "http://[::1]:8420", ENV),
        ({}, {HOST: "localhost"}, "http://127.0.0.1:8420", ENV),
    ],
)
def test_order(home: Path, profile: dict[str, object], env: dict[str, str], address: str | None, origin: str) -> None:
    """Profile file > URL > host and port > endpoint record; a bind address means loopback."""
    got = read(home, profile, **env)
    assert (None if got.address is None else str(got.address), got.origin) == (address, origin)
    assert not got.broken


@pytest.mark.parametrize("port", ["0", "65536", "abc", "-1", "84x", "８４２１"])
def test_bad_port_is_8420_with_a_warning(home: Path, port: str) -> None:
    """A port that is none is said, and the default is used."""
    got = read(home, None, MEMORY_TENCENTDB_GATEWAY_PORT=port)
    assert got.address is not None
    assert got.address.port == 8420
    assert "no port" in got.warnings[0]


@pytest.mark.parametrize("content", ["{", "[]", "null", '"x"'])
def test_unreadable_profile_goes_nowhere(home: Path, content: str) -> None:
    """A profile file that cannot be read must not send its turns to somebody else's Gateway."""
    got = read(home, content, MEMORY_TENCENTDB_GATEWAY_PORT="9")
    assert "cannot read" in got.broken
    assert "memory_tencentdb.json" in got.broken


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://u:p@h", "http://h/?q=1", "http://h:99999"])
def test_bad_url_goes_nowhere(home: Path, url: str) -> None:
    """A URL that cannot be used is a stated problem, not the default Gateway."""
    got = read(home, {"gateway_url": url})
    assert "cannot use" in got.broken


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0:0:0:0:0:0:0:1", True),
        ("::1:5:6", False),
        ("::ffff:127.0.0.1", False),
        ("128.0.0.1", False),
        ("127.example.org", False),
        ("1.127.0.1", False),
        ("m.example", False),
    ],
)
def test_only_loopback_is_local(host: str, local: bool) -> None:
    """What counts as this machine is an address, never a name that looks like one."""
    assert s.Address("http", host, 1).local is local


def test_key_order(home: Path) -> None:
    """Profile file > MEMORY_TENCENTDB_GATEWAY_API_KEY > TDAI_GATEWAY_API_KEY; blank counts as unset."""
    env = {"MEMORY_TENCENTDB_GATEWAY_API_KEY": "b", "TDAI_GATEWAY_API_KEY": "c"}
    assert read(home, {"gateway_api_key": "a"}, **env).key == "a"
    assert read(home, {"gateway_api_key": " "}, **env).key == "b"
    assert read(home, {}, MEMORY_TENCENTDB_GATEWAY_API_KEY=" ", TDAI_GATEWAY_API_KEY="c").key == "c"


def test_settings_never_show_the_key(home: Path) -> None:
    """Settings that land in a log or a traceback hold no key."""
    assert "secret" not in repr(read(home, {"gateway_api_key": "secret"}))


def test_root(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is absolute whatever way it is written."""
    monkeypatch.setenv("HOME", "/home/u")
    assert read(home).root == "/home/u/.memory-tencentdb"
    assert read(home, None, MEMORY_TENCENTDB_ROOT="~/r s").root == "/home/u/r s"
    assert read(home, {"root": "/x"}, MEMORY_TENCENTDB_ROOT="/y").root == "/x"


def test_dashboard_values_lie_under_the_profile_file(home: Path) -> None:
    """What the host's dashboard keeps counts, unless the profile file says otherwise."""
    (home / "memory_tencentdb").mkdir()
    (home / "memory_tencentdb" / "config.json").write_text('{"gateway": "work", "gateway_url": "http://127.0.0.1:5"}')
    got = read(home, {"gateway_url": "http://127.0.0.1:6"})
    assert (str(got.address), got.gateway) == ("http://127.0.0.1:6", "work")


def test_save_merges_and_stays_private(home: Path) -> None:
    """Answers are merged, unknown keys kept, the file is 0600 under umask 000."""
    old = os.umask(0)
    try:
        s.save_profile(str(home), {"gateway_url": "http://127.0.0.1:1", "gateway_api_key": "k"})
        path = home / "memory_tencentdb.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "mine": 1}))
        s.save_profile(str(home), {"gateway_url": "", "gateway_port": "8421"})
    finally:
        os.umask(old)
    assert json.loads(path.read_text()) == {"gateway_api_key": "k", "mine": 1, "gateway_port": 8421}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in home.iterdir()] == ["memory_tencentdb.json"]


def test_save_never_overwrites_what_it_cannot_read(home: Path) -> None:
    """A broken profile file is the user's; it is not replaced by a guess."""
    (home / "memory_tencentdb.json").write_text("{broken")
    with pytest.raises(ValueError, match="cannot read"):
        s.save_profile(str(home), {"gateway": "x"})
    assert (home / "memory_tencentdb.json").read_text() == "{broken"


def test_dotenv(home: Path) -> None:
    """The daemon reads of a profile's .env what names a Gateway, and nothing else."""
    (home / ".env").write_text(
        "# x\nexport MEMORY_TENCENTDB_GATEWAY_PORT=1\nTDAI_GATEWAY_API_KEY='k v'\nOPENAI_API_KEY=no\nbroken\n"
    )
    assert s.dotenv(str(home)) == {"MEMORY_TENCENTDB_GATEWAY_PORT": "1", "TDAI_GATEWAY_API_KEY": "k v"}
    assert s.dotenv(str(home / "none")) == {}


def test_bound_address_is_the_lowest_source(home: Path) -> None:
    """What the last session wrote down is used only where nothing else names a Gateway."""
    bound = {"address": "http://127.0.0.1:7", "root": "/r", "allow_http": True}
    nothing: dict[str, str] = {}
    got = s.read_settings(str(home), nothing.get, bound=bound)
    assert (str(got.address), got.origin) == ("http://127.0.0.1:7", "the last session")
    assert (got.root, got.allow_http) == ("/r", True)
    got = s.read_settings(str(home), {"MEMORY_TENCENTDB_GATEWAY_PORT": "8"}.get, bound=bound, root="/other")
    assert (str(got.address), got.root) == ("http://127.0.0.1:8", "/other")
