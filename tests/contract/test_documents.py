"""What the documents say is what the program does: every verb, option, key and link."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from tdai_supervisor.cli.main import parser
from tdai_supervisor.decide.settings import GatewaySettings, Policy

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md", "docs/cli.md")
CLI = (CHECKOUT / "docs/cli.md").read_text(encoding="utf-8")
# Attributes of GatewaySettings that are no keys of supervisor.toml.
NOT_KEYS = {"name", "config_file", "log_dir", "api_key"}


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Every verb and its parser."""
    action = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def section(title: str) -> str:
    """The text of one verb's section."""
    found = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##)", CLI, re.MULTILINE | re.DOTALL)
    assert found, f"docs/cli.md has no section {title}"
    return found[1]


def table(after: str) -> dict[str, str]:
    """The rows of the first table after a line: what stands in backquotes in the first column -> the second column."""
    rows = CLI.partition(after)[2].strip().partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: row[1] for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


def test_every_verb_has_a_section() -> None:
    """docs/cli.md describes the verbs there are, in the order --help shows them, and no others."""
    chapter = CLI.partition("\n## Verbs\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^### (\S+)$", chapter, re.MULTILINE)) == sorted(verbs())


@pytest.mark.parametrize("verb", verbs())
def test_every_option_is_described(verb: str) -> None:
    """A verb's section names each of its options, and no option it does not have."""
    common = {"-h", "--help", "--json", "--root"}
    known = {o for a in verbs()[verb]._actions if a.help != argparse.SUPPRESS for o in a.option_strings} - common
    named = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", section(verb).partition("\n\n")[0]))
    assert named - {"--version"} == known


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
