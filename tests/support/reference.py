"""The chapter of docs/cli.md that lists every verb and option: made from the parser, so that it cannot lie.

    python -m tests.support.reference

writes it anew; a contract test compares.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tdai_supervisor.cli.arguments import parser

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
BEGIN = "<!-- made by python -m tests.support.reference: begin -->\n"
END = "<!-- made by python -m tests.support.reference: end -->\n"
COMMON = {"-h", "--help", "--json", "--root"}


def reference() -> str:
    """The chapter."""
    choices, helps = actions_of(parser())
    return "\n".join(line for verb, sub in choices.items() for line in _describe(verb, sub, helps[verb], 3)) + "\n"


def actions_of(of: argparse.ArgumentParser) -> tuple[dict[str, argparse.ArgumentParser], dict[str, str]]:
    """The subcommands of a parser and the line of help of each; empty where it has none."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices), {a.dest: a.help or "" for a in action._choices_actions}
    return {}, {}


def _describe(words: str, of: argparse.ArgumentParser, help_: str, level: int) -> Iterator[str]:
    choices, helps = actions_of(of)
    shown = [a for a in of._actions if a.help != argparse.SUPPRESS and not COMMON & set(a.option_strings)]
    arguments = [a for a in shown if not a.option_strings and not isinstance(a, argparse._SubParsersAction)]
    names = [f"[{a.metavar or a.dest}]" if a.nargs == "?" else str(a.metavar or a.dest) for a in arguments]
    yield f"{'#' * level} {' '.join([words, *(['ACTION'] if choices else []), *names])}"
    yield ""
    yield f"{help_[:1].upper()}{help_[1:]}." if help_ else "No words."
    yield ""
    rows = [_row(a) for a in shown if a.option_strings or (a in arguments and a.help)]
    if rows:
        yield from ("| option | meaning |", "|---|---|", *rows, "")
    for name, sub in choices.items():
        yield from _describe(f"{words} {name}", sub, helps[name], level + 1)


def _row(action: argparse.Action) -> str:
    value = ""
    if action.option_strings and action.nargs != 0:
        value = " " + (str(action.metavar) if action.metavar else "|".join(map(str, action.choices or ["VALUE"])))
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    cells = f"`{names}{value}`", action.help or ""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def split(page: str) -> tuple[str, str, str]:
    """(before, chapter, after); ValueError where the marks are missing."""
    before, begin, rest = page.partition(BEGIN)
    chapter, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: the marks of the made chapter are missing")
    return before, chapter, after


if __name__ == "__main__":
    before, _, after = split(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + BEGIN + "\n" + reference() + END + after, encoding="utf-8")
