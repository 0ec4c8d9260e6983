"""The acceptance scripts of the provider, where they lie beside the checkout; they are not part of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.command import Ctl, Done, clean_environment, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def script(checkout: Path) -> Path:
    """run_e2e.py."""
    path = checkout.parent / "shared" / "acceptance" / "hermes" / "run_e2e.py"
    if not path.is_file():
        pytest.skip("no acceptance scripts beside the checkout (../shared/acceptance/hermes)")
    return path


def accept(script: Path, checkout: Path, hermes_venv: str, home: Path, *words: str) -> Done:
    """Run it on our provider in an environment of its own; everything it writes stays below home."""
    env = clean_environment(home, HERMES_VENV=hermes_venv, PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(home))
    plugin = str(checkout / "provider" / "memory_tencentdb")
    return run([sys.executable, str(script), "--plugin", plugin, *words], env, timeout=280)


def test_with_a_fake_gateway(script: Path, checkout: Path, hermes_venv: str, home: Path) -> None:
    """All surfaces, by the strict rules."""
    done = accept(script, checkout, hermes_venv, home, "--strict")
    assert done.code == 0, done.out + done.err
    assert "PASS" in done.out


def test_with_our_gateway(script: Path, checkout: Path, hermes_venv: str, home: Path, ctl: Ctl) -> None:
    """The surfaces that a real Gateway can be seen through, against one that the daemon owns."""
    gateway = ctl.start()
    key = ctl.file("run/default.key").strip()
    words = (
        "--gateway",
        gateway["url"],
        "--surface",
        "z,chat,tool",
        "--env",
        f"MEMORY_TENCENTDB_GATEWAY_API_KEY={key}",
    )
    done = accept(script, checkout, hermes_venv, home, *words)
    assert done.code == 0, done.out + done.err
    assert "PASS" in done.out
