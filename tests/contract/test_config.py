"""`config`: every action, on a file of its own."""

from __future__ import annotations

import json
import stat
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.command import Ctl

SECRET = "a%b\"c,d'e$f密-0123456789"


@pytest.fixture
def file(ctl: Ctl) -> Path:
    """Where the Gateway's file is."""
    return Path(ctl.root, "memory-tdai", "tdai-gateway.json")


def test_llm_is_written_0600_and_never_shown(ctl: Ctl, file: Path) -> None:
    """Byte-exact in the file, redacted everywhere else; the key also from stdin or a variable."""
    done = ctl("config", "llm", "--api-key", SECRET, "--base-url", "https://x.example/v1", "--model", "m", "--json")
    assert done.code == 0, done
    assert json.loads(file.read_text())["llm"]["apiKey"] == SECRET
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    said = [
        done,
        ctl("config", "show"),
        ctl("config", "show", "--origin", "--json"),
        ctl("config", "get", "llm.apiKey"),
    ]
    assert all(SECRET not in d.out + d.err for d in said)
    assert ctl("config", "llm", "--api-key-env", "MY_KEY", env={"MY_KEY": SECRET + "2"}).code == 0
    assert json.loads(file.read_text())["llm"]["apiKey"] == SECRET + "2"
    assert ctl("config", "llm", "--api-key-env", "MISSING").code == 1


def test_dry_run_writes_nothing(ctl: Ctl, file: Path) -> None:
    """The redacted difference, and no file."""
    done = ctl("config", "llm", "--model", "m", "--dry-run", "--json")
    assert (done.code, done.data["written"], done.data["diff"]) == (0, False, ['+ llm.model: "m"'])
    assert not file.exists()


def test_vdb_and_back(ctl: Ctl, file: Path, tmp_path: Path) -> None:
    """Credentials, backend, off with and without purging them."""
    assert ctl("config", "vdb", "--url", "http://v:80", "--api-key", SECRET, "--database", "d").code == 0
    assert json.loads(file.read_text())["memory"]["storeBackend"] == "tcvdb"
    assert ctl("config", "vdb-off").code == 0
    assert json.loads(file.read_text())["memory"]["tcvdb"]["apiKey"] == SECRET
    assert ctl("config", "vdb-on").code == 0
    assert ctl("config", "vdb-off", "--purge-creds").code == 0
    assert not json.loads(file.read_text())["memory"]["tcvdb"]
    assert ctl("config", "vdb-on").code == 1, "without credentials there is nothing to switch on"
    assert ctl("config", "vdb", "--url", "http://v:80", "--ca-pem", str(tmp_path / "none.pem")).code == 1


def test_embedding_none_and_qclaw(ctl: Ctl, file: Path) -> None:
    """none is written as the Gateway wants it; qclaw needs a proxy."""
    assert ctl("config", "embedding", "--provider", "none").code == 0
    assert json.loads(file.read_text())["memory"]["embedding"] == {"provider": "none", "enabled": False}
    assert "proxyUrl" in ctl("config", "embedding", "--provider", "qclaw").err
    assert ctl("config", "embedding", "--dimensions", "-3").code == 1


def test_a_broken_file_is_never_overwritten(ctl: Ctl, file: Path) -> None:
    """It names line and column, and stays byte for byte."""
    file.parent.mkdir(parents=True)
    file.write_text('{"llm": {"model": }}')
    done = ctl("config", "set", "llm.model", "x")
    assert done.code == 1
    assert "line 1 column 19" in done.err
    assert file.read_text() == '{"llm": {"model": }}'
    assert ctl("config", "validate").code == 1


def test_mistakes(ctl: Ctl) -> None:
    """A masked key, an unknown key, a wrong URL: one sentence each, exit 1; a missing action: exit 2."""
    for words, says in (
        (("set", "llm.apiKey", "****cdef"), "masked"),
        (("set", "llm.modell", "x"), "did you mean llm.model?"),
        (("set", "llm.baseUrl", "x"), "http or https"),
        (("llm",), "nothing to set"),
        (("get", "llm.model"), "not set"),
    ):
        done = ctl("config", *words)
        assert done.code == 1
        assert says in done.err
        assert "Traceback" not in done.err
    assert ctl("config").code == 2


def test_import_env_and_origins(ctl: Ctl, file: Path) -> None:
    """The shell's variables become the file's values; show says where a value comes from."""
    env = {"MEMORY_TENCENTDB_LLM_MODEL": "from-env"}
    shown = ctl("config", "show", "--origin", "--json", env=env).data["values"]
    assert shown["llm.model"] == {"value": "from-env", "origin": "MEMORY_TENCENTDB_LLM_MODEL"}
    assert ctl("config", "import-env", env=env).code == 0
    assert json.loads(file.read_text())["llm"]["model"] == "from-env"
    assert ctl("config", "path").out.strip() == str(file)


def test_a_profile_is_asked_last_for_the_language_model(ctl: Ctl, file: Path, home: Path) -> None:
    """`.env` of the default Hermes profile gives what neither environment nor file say; the origin names it."""
    env_file = home / ".hermes" / ".env"
    env_file.parent.mkdir()
    lines = ["# don't touch", "MEMORY_TENCENTDB_LLM_API_KEY='s3#cret'", "TDAI_LLM_MODEL=from-profile # old", "OTHER=1"]
    env_file.write_text("\n".join([*lines, "TDAI_LLM_BASE_URL=http://127.0.0.1:9/v1#x"]))
    assert ctl("config", "set", "llm.model", "from-file").code == 0
    ctl.start()
    environ = Path(f"/proc/{ctl.gateway()['pid']}/environ").read_bytes().split(b"\0")
    assert b"TDAI_LLM_API_KEY=s3#cret" in environ
    assert b"TDAI_LLM_BASE_URL=http://127.0.0.1:9/v1#x" in environ
    assert not [line for line in environ if line.startswith(b"TDAI_LLM_MODEL=")]
    shown = ctl("config", "show", "--origin", "--json")
    assert shown.data["values"]["llm.baseUrl"]["origin"] == str(env_file)
    assert shown.data["values"]["llm.model"] == {"value": "from-file", "origin": str(file)}
    assert "s3#cret" not in shown.out
    assert ctl.gateway()["drift"] == []
    env_file.write_text("")
    assert ctl.gateway()["drift"] == ["TDAI_LLM_API_KEY", "TDAI_LLM_BASE_URL"]


def test_show_tells_the_daemon_environment_from_this_shell(ctl: Ctl, file: Path) -> None:
    """While a daemon lives, what it was started with is in force; this shell's variables are not."""
    ctl.start(env={"TDAI_LLM_MODEL": "first"})
    shown = ctl("config", "show", "--origin", "--json", env={"TDAI_LLM_MODEL": "second"}).data["values"]
    assert shown["llm.model"] == {"value": "first", "origin": "TDAI_LLM_MODEL"}


def test_check_quotes_the_http_code(ctl: Ctl, file: Path) -> None:
    """A19: the wrong base URL is found by one cheap call, and nothing is written."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200 if self.path == "/v1/chat/completions" else 404)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Endpoint) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        words = ("config", "llm", "--check", "--model", "m", "--api-key", "k1", "--base-url")
        bad = ctl(*words, base)
        assert bad.code == 1
        assert "HTTP 404" in bad.err
        assert not file.exists()
        assert ctl(*words, base + "/v1").code == 0
        server.shutdown()
