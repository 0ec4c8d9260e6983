"""memory.provider in config.yaml: only its bytes change."""

from __future__ import annotations

import pytest

from tdai_supervisor.cli.hermes import provider_of, with_provider
from tdai_supervisor.decide.checks import SettingsError

CASES = [
    ("", "memory:\n  provider: memory_tencentdb\n"),
    ("a: 1", "a: 1\nmemory:\n  provider: memory_tencentdb\n"),
    ("memory:\n  provider: tdai   # old\nb: 2\n", "memory:\n  provider: memory_tencentdb   # old\nb: 2\n"),
    ("memory:\n  provider: ''\n", "memory:\n  provider: memory_tencentdb\n"),
    ("memory:\n  provider:\n  x: 1\n", "memory:\n  provider: memory_tencentdb\n  x: 1\n"),
    ("memory:\n    x: 1 # c\n", "memory:\n    provider: memory_tencentdb\n    x: 1 # c\n"),
    ("memory: {}\n", "memory: {provider: memory_tencentdb}\n"),
    ("memory: {x: 1}\n", "memory: {provider: memory_tencentdb, x: 1}\n"),
    ("memory:\nb: 2\n", "memory:\n  provider: memory_tencentdb\nb: 2\n"),
    ("{a: 1}\n", "{memory: {provider: memory_tencentdb}, a: 1}\n"),
    ("# only a comment\n", "# only a comment\nmemory:\n  provider: memory_tencentdb\n"),
    ("a: 'x'\n\n\nmemory: {provider: \"tdai\"}\n# end", "a: 'x'\n\n\nmemory: {provider: memory_tencentdb}\n# end"),
]


@pytest.mark.parametrize(("before", "after"), CASES)
def test_only_the_provider_changes(before: str, after: str) -> None:
    """Comments, quotes, order and blank lines stay; a second time changes nothing."""
    assert with_provider(before, "memory_tencentdb") == after
    assert with_provider(after, "memory_tencentdb") == after
    assert provider_of(after) == "memory_tencentdb"
    assert provider_of(with_provider(after, "")) == ""


@pytest.mark.parametrize("text", ["a: [1\n", "memory: {provider: x\n", "- 1\n", "a: b: c\n"])
def test_what_cannot_be_edited_is_left_alone(text: str) -> None:
    """An error, never a guess."""
    with pytest.raises(SettingsError):
        with_provider(text, "memory_tencentdb")
