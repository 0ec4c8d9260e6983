"""What the documents say is what the program does: every verb, option, key and link."""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from tdai_supervisor.cli.arguments import parser
from tdai_supervisor.decide.settings import GatewaySettings, Policy
from tests.support.reference import actions_of, reference, split

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md", "docs/cli.md", "docs/service.md")
CLI = (CHECKOUT / "docs/cli.md").read_text(encoding="utf-8")
# Attributes of GatewaySettings that are no keys of supervisor.toml.
NOT_KEYS = {"name", "config_file", "log_dir", "api_key"}


def table(after: str) -> dict[str, str]:
    """The rows of the first table after a line: what stands in backquotes in the first column -> the second column."""
    rows = CLI.partition(after)[2].strip().partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: row[1] for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


def test_every_verb_and_option_is_described() -> None:
    """docs/cli.md lists what --help lists; `python -m tests.support.reference` writes it anew."""
    assert split(CLI)[1].strip() == reference().strip()


def test_the_reference_is_complete() -> None:
    """Every verb is in it, with its options."""
    text = reference()
    assert re.findall(r"^### (\S+)", text, re.MULTILINE) == list(actions_of(parser())[0])
    assert "| `--timeout S` | wait at most S seconds |" in text
    assert "--keeper" not in text


def test_every_setting_is_described() -> None:
    """The keys of supervisor.toml, with their defaults where those are numbers."""
    documented = table("`[gateway.NAME]`:")
    assert set(documented) == {f.name for f in fields(GatewaySettings)} - NOT_KEYS
    for field in fields(GatewaySettings):
        if isinstance(field.default, float):
            assert float(documented[field.name]) == field.default, field.name
    policy = table("`[policy]`:")
    assert {name: float(text) for name, text in policy.items()} == asdict(Policy())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    """A link to a file of the repository names one that is there."""
    path = CHECKOUT / document
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target
