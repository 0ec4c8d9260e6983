"""What the end-to-end tests share: a real Hermes, clones to install from, wheels for installing without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Ctl, clean_environment, machine_environment
from tests.support.fake_llm import FakeLLM
from tests.support.hermes import Hermes

SOURCES = ("install.sh", "pyproject.toml", "README.md", "LICENSE", "tdai_supervisor", "provider", "systemd")


@pytest.fixture(scope="session")
def hermes_venv() -> str:
    """The environment with the real Hermes."""
    path = os.environ.get("HERMES_VENV", "")
    if not os.access(os.path.join(path, "bin", "hermes"), os.X_OK):
        pytest.skip("no Hermes: tests/run makes one, or set HERMES_VENV")
    return path


@pytest.fixture
def llm() -> Iterator[FakeLLM]:
    """A fake language model, serving."""
    with FakeLLM() as model:
        yield model


@pytest.fixture
def hermes(hermes_venv: str, home: Path, checkout: Path, llm: FakeLLM, ctl: Ctl) -> Hermes:
    """A Hermes profile attached to the root of `ctl`."""
    return Hermes(hermes_venv, home, checkout / "provider" / "memory_tencentdb", llm, ctl.root)


def copy_sources(checkout: Path, to: Path) -> Path:
    """What a clone of the checkout would hold, as far as an installation needs it."""
    to.mkdir(parents=True)
    for name in SOURCES:
        source = checkout / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, to / name)
    return to


@pytest.fixture
def clone(checkout: Path, tmp_path: Path) -> Path:
    """A clone in a directory whose name is as bad as a name gets."""
    return copy_sources(checkout, tmp_path / "a clone, 100% 'ours'")


@pytest.fixture(scope="session")
def wheelhouse(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels that an installation without a network needs."""
    directory = tmp_path_factory.mktemp("wheels") / "wheel house"
    # By a pip of the interpreter that install.sh will use, from a copy: the checkout stays as it is.
    sources = copy_sources(checkout, directory.with_name("sources"))
    words = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(directory),
        str(sources),
        "hatchling",
    ]
    env = clean_environment(directory.with_name("home"), **machine_environment())
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    return directory
