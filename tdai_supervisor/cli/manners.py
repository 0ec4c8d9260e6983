"""Completion and the man page, both made from the parser: what is documented is what is parsed.

Invariants: nothing here knows a verb or an option by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tdai_supervisor import __version__
from tdai_supervisor.cli.envelope import USAGE, Result, failure

PROG = "memory-tencentdb-ctl"


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The verbs below a parser, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


Words = tuple[str, ...]


def walk(parser: argparse.ArgumentParser, path: Words = ()) -> Iterator[tuple[Words, argparse.ArgumentParser]]:
    """Every parser with the words that lead to it."""
    yield path, parser
    for name, sub in subparsers(parser).items():
        yield from walk(sub, (*path, name))


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The documented options of a parser."""
    return [a for a in parser._actions if a.option_strings and a.help is not argparse.SUPPRESS]


def words(parser: argparse.ArgumentParser) -> list[str]:
    """Everything that may come next after the words that lead to a parser."""
    return [*subparsers(parser), *(o for a in options(parser) for o in a.option_strings if o.startswith("--"))]


def completion(parser: argparse.ArgumentParser, shell: str) -> Result:
    """A completion script; load it as its first line says."""
    makers = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in makers:
        message = f"cannot complete for {shell!r}: known are {', '.join(makers)}"
        return failure("completion", "usage", message, None, USAGE)
    return Result("completion", {"shell": shell, "script": makers[shell](parser)})


def _bash(parser: argparse.ArgumentParser) -> str:
    cases = "\n".join(f'        "{" ".join(path)}") words="{" ".join(words(p))}" ;;' for path, p in walk(parser))
    return f"""# eval "$({PROG} completion bash)"
_memory_tencentdb_ctl() {{
    local path="" word words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        [[ $word == -* ]] || path="${{path:+$path }}$word"
    done
    while :; do
        case "$path" in
{cases}
        esac
        [[ -n $words || -z $path ]] && break
        [[ $path == *" "* ]] && path=${{path% *}} || path=""
    done
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}")
}}
complete -F _memory_tencentdb_ctl {PROG}
"""


def _zsh(parser: argparse.ArgumentParser) -> str:
    script = _bash(parser).split("\n", 1)[1]
    script = script.replace("mapfile -t COMPREPLY < <(compgen", "COMPREPLY=($(compgen")
    script = script.replace('COMP_CWORD]}")', 'COMP_CWORD]}"))')
    return f'# eval "$({PROG} completion zsh)"\nautoload -U +X bashcompinit && bashcompinit\n{script}'


def _fish(parser: argparse.ArgumentParser) -> str:
    lines = [f"# {PROG} completion fish | source", f"complete -c {PROG} -f"]
    for path, sub in walk(parser):
        when = f"__fish_seen_subcommand_from {path[-1]}" if path else "__fish_use_subcommand"
        for name, child in subparsers(sub).items():
            lines.append(f"complete -c {PROG} -n {_q(when)} -a {name} -d {_q(child.description or '')}")
        for action in options(sub):
            long = [o[2:] for o in action.option_strings if o.startswith("--")]
            if long:
                lines.append(f"complete -c {PROG} -n {_q(when)} -l {long[0]} -d {_q(action.help or '')}")
    return "\n".join(lines) + "\n"


def _q(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


EXITS = {
    "status": "0 every wanted Gateway READY; 1 one is not; 3 none wanted; 4 unknown NAME or no answer in 2 s",
    "health": "0 ok; 1 not ok; 7 not running",
    "others": "0 done; 1 failed; 2 usage; 4 not permitted; 5 not installed; 6 not configured; 7 not running; "
    "75 another daemon holds the root",
}


def man(parser: argparse.ArgumentParser) -> str:
    """The man page in roff, section 1."""
    lines = [f'.TH MEMORY-TENCENTDB-CTL 1 "" "{__version__}" "User Commands"', ".SH NAME"]
    lines += [f"{PROG} \\- run the memory Gateway and look after it", ".SH SYNOPSIS", f".B {PROG}"]
    lines += ["[\\fB\\-\\-json\\fR] [\\fB\\-\\-root\\fR \\fIDIR\\fR] \\fIVERB\\fR ..."]
    lines += [".SH DESCRIPTION", _roff(parser.description or ""), ".SH VERBS"]
    for path, sub in walk(parser):
        if path:
            lines += [".TP", f".B {_roff(' '.join((*path, *_positionals(sub))))}", _roff(sub.description or "")]
            own = [a for a in options(sub) if a.dest not in ("json", "root", "help")]
            lines += [line for a in own for line in (".RS", *_option(a), ".RE")]
    lines += [".SH OPTIONS", *(line for a in options(parser) for line in _option(a))]
    lines += [".SH EXIT STATUS", *(line for verb, text in EXITS.items() for line in (".TP", f".B {verb}", _roff(text)))]
    return "\n".join(line for line in lines if line) + "\n"


def _option(action: argparse.Action) -> list[str]:
    value = f" {action.metavar}" if action.metavar else ""
    return [".TP", f".B {_roff(', '.join(action.option_strings) + value)}", _roff(action.help or "")]


def _positionals(parser: argparse.ArgumentParser) -> list[str]:
    found = [a for a in parser._actions if not a.option_strings and not isinstance(a, argparse._SubParsersAction)]
    return [f"[{a.metavar or a.dest}]" if a.nargs == "?" else str(a.metavar or a.dest) for a in found]


def _roff(text: str) -> str:
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text
