"""The commands of README.md, run one block after the other as they stand there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.command import clean_environment, machine_environment, run
from tests.support.fake_llm import MODEL, FakeLLM
from tests.support.hermes import CONFIG

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def blocks(text: str) -> Iterator[str]:
    """Every shell block of a document."""
    yield from re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_every_command_works(clone: Path, home: Path, hermes_venv: str, llm: FakeLLM) -> None:
    """Whoever types what README says, in this order, gets a Gateway, an answer, and a Hermes that remembers."""
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    port = processes.free_port()
    env = clean_environment(home, **machine_environment())
    env["PATH"] = f"{home}/.local/bin:{hermes_venv}/bin:{env['PATH']}"
    env |= {"MEMORY_TENCENTDB_GATEWAY_PORT": str(port), "HERMES_DISABLE_LAZY_INSTALLS": "1"}
    hermes_home = home / ".hermes"
    hermes_home.mkdir()
    model = CONFIG.replace("memory: {{provider: memory_tencentdb}}\n", "").format(url=llm.base_url, model=MODEL)
    for profile in (hermes_home, hermes_home / "profiles" / "work"):
        profile.mkdir(parents=True, exist_ok=True)
        (profile / "config.yaml").write_text(model, encoding="utf-8")
    readme = (clone / "README.md").read_text(encoding="utf-8")
    said = []
    try:
        for block in blocks(readme):
            script = block.replace("127.0.0.1:8420", f"127.0.0.1:{port}")
            done = run(["sh", "-euc", script], env, timeout=120, cwd=str(clone))
            assert done.code == 0, (block, done)
            said.append(done.out)
        assert "READY" in said[0]
        assert any("My cat is called Mia." in text for text in said)
        # Upgrades must reach the plugin, and none may take it away: the link goes through the path that they switch.
        assert os.readlink(hermes_home / "plugins/memory_tencentdb").startswith(f"{home}/.memory-tencentdb/venv/")
        # Hermes is connected: it recalls what was captured by hand.
        done = run(["hermes", "-z", "What is my cat called?"], env, timeout=90)
        assert done.code == 0, done
        assert "Mia" in llm.shown("user")
    finally:
        processes.end_all(home / ".memory-tencentdb")
