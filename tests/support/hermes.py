"""A real Hermes with our provider, offline: its language model is a fake one on loopback."""

from __future__ import annotations

import copy
import os
from pathlib import Path

from tests.support.command import Done, clean_environment, run
from tests.support.fake_llm import MODEL, FakeLLM

CONFIG = """\
model: {{provider: custom, base_url: "{url}", default: {model}, api_key: sk-fake, context_length: 200000}}
memory: {{provider: memory_tencentdb}}
security: {{allow_lazy_installs: false, tirith_enabled: false}}
"""


class Hermes:
    """One profile of the Hermes in HERMES_VENV, attached to a supervisor root."""

    def __init__(self, venv: str, home: Path, provider: Path, llm: FakeLLM, root: str) -> None:
        self.program = os.path.join(venv, "bin", "hermes")
        self.directory = home / ".hermes"
        self._provider, self._config = provider, CONFIG.format(url=llm.base_url, model=MODEL)
        self._furnish()
        self.env = clean_environment(
            home,
            HERMES_HOME=str(self.directory),
            MEMORY_TENCENTDB_ROOT=root,
            # Hermes would run pip in its own environment at the first session.
            HERMES_DISABLE_LAZY_INSTALLS="1",
            # The provider is linked from the checkout, which stays as it is.
            PYTHONDONTWRITEBYTECODE="1",
        )

    def _furnish(self) -> None:
        (self.directory / "plugins").mkdir(parents=True)
        (self.directory / "plugins" / "memory_tencentdb").symlink_to(self._provider)
        (self.directory / "config.yaml").write_text(self._config, encoding="utf-8")

    def profile(self, name: str) -> Hermes:
        """Another profile of the same Hermes, furnished like this one."""
        other = copy.copy(self)
        other.directory = self.directory / "profiles" / name
        other.env = {**self.env, "HERMES_HOME": str(other.directory)}
        other._furnish()
        return other

    def ask(self, prompt: str) -> Done:
        """One turn in a process of its own: hermes -z PROMPT."""
        return self.run("-z", prompt)

    def run(self, *words: str) -> Done:
        """A command of Hermes that must succeed."""
        done = run([self.program, *words], self.env, timeout=90)
        assert done.code == 0, done
        return done
