"""memory-tencentdb-ctl: parse, call the verb, print its result.

Invariants: a verb's modules are imported when the verb runs; with --json exactly one object goes to stdout, on every
failure too; a user's mistake is a sentence and an exit code, never a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from tdai_supervisor.cli import envelope
from tdai_supervisor.cli.envelope import Result, failure
from tdai_supervisor.decide.checks import SettingsError

EXAMPLE = "example: memory-tencentdb-ctl start && memory-tencentdb-ctl status\n\n"


class _UsageError(Exception):
    """argparse is not satisfied."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}; try `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--json", action="store_true", help="print one JSON object")
    common.add_argument("--root", metavar="DIR", help="supervisor root (default: $MEMORY_TENCENTDB_ROOT)")
    top = _Parser(
        prog="memory-tencentdb-ctl",
        description=EXAMPLE + "Run the memory Gateway and look after it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    top.add_argument("--version", action="store_true", dest="show_version", help="print the versions")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)

    def verb(name: str, help_: str, named: bool = True) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help_, description=help_, parents=[common])
        if named:
            sub.add_argument("name", nargs="?", metavar="NAME", help="one Gateway (default: all)")
        return sub

    start = verb("start", "have the Gateway run, and return when it is READY")
    start.add_argument("--no-wait", action="store_true", help="return at once")
    start.add_argument("--timeout", type=_seconds, metavar="S", help="wait at most S seconds")
    start.add_argument("--take-over", action="store_true", help="end a Gateway somebody else started, and run ours")
    verb("stop", "end the Gateway; without NAME also daemon and keeper")
    again = verb("restart", "end the Gateway and start it again")
    again.add_argument("--daemon", action="store_true", help="re-exec the daemon instead; Gateways run on")
    again.add_argument("--timeout", type=_seconds, metavar="S", help="wait at most S seconds")
    status = verb("status", "show what runs and why")
    status.add_argument("--watch", action="store_true", help="show it again every second")
    health = verb("health", "whether the Gateway may receive: exit 0 ok, 1 not ok, 7 not running")
    health.add_argument("--deep", action="store_true", help="capture and find a canary, look at LLM, disk, extraction")
    verb("doctor", "examine everything; each finding with the command that mends it", named=False)
    diagnose = verb("diagnose", "write one redacted archive for a bug report", named=False)
    diagnose.add_argument("file", nargs="?", metavar="FILE", help="where to (default: in this directory)")
    diagnose.add_argument("--with-logs", action="store_true", help="include the Gateways' logs, which hold user text")
    logs = verb("logs", "show the Gateway's logs", named=False)
    logs.add_argument("name", nargs="?", default="default", metavar="NAME", help="which Gateway")
    logs.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="how many lines (default 50)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on printing new lines")
    logs.add_argument("--stream", choices=("all", "out", "err", "stdout", "stderr"), default="all", help="which log")
    events = verb("events", "show what happened, one transition a line")
    events.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="how many (default 50)")
    events.add_argument("-f", "--follow", action="store_true", help="go on printing new ones")
    events.add_argument("--since", metavar="T", help="only since T: 10m, 2h, 3d, or an RFC 3339 time")
    verb("why", "tell the last transitions as sentences")
    verb("metrics", "print OpenMetrics text", named=False)
    for name, help_ in (
        ("backup", "write all data into an archive, while the Gateway runs"),
        ("restore", "put an archive in place of the data"),
    ):
        data = verb(name, help_, named=False)
        data.add_argument("file", metavar="FILE")
        data.add_argument("--gateway", default="default", metavar="NAME", help="whose data (default: default)")
    _config_verbs(verbs, common)
    _hermes_verbs(verbs, common)
    daemon = verb("daemon", "run the daemon in the foreground", named=False)
    keepers = ("none", "supervisord", "systemd-user", "systemd-system")
    daemon.add_argument("--keeper", choices=keepers, default="none", help=argparse.SUPPRESS)
    completion = verb("completion", "print a completion script for bash, zsh or fish", named=False)
    completion.add_argument("shell", metavar="SHELL")
    verb("man", "print the man page", named=False)
    verb("version", "print the versions of this command and of the daemon", named=False)
    return top


def _config_verbs(verbs: Any, common: argparse.ArgumentParser) -> None:
    """config ACTION …"""
    top = verbs.add_parser("config", help="read and change the Gateway's configuration", parents=[common])
    actions = top.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=_Parser)

    def action(name: str, help_: str, *, changes: bool, checked: bool = False) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = actions.add_parser(name, help=help_, description=help_, parents=[common])
        sub.add_argument("--gateway", default="default", metavar="NAME", help="whose file (default: default)")
        if changes:
            sub.add_argument("--dry-run", action="store_true", help="show the difference, write nothing")
            sub.add_argument("--restart", action="store_true", help="restart the Gateway afterwards")
        if checked:
            sub.add_argument("--check", action="store_true", help="make one cheap call first; write only if it works")
        return sub

    def keyed(sub: argparse.ArgumentParser, *options: str) -> None:
        sub.add_argument("--api-key", metavar="KEY", help='the key, or "-" to read it from standard input')
        sub.add_argument("--api-key-env", metavar="VAR", help="read the key from this environment variable")
        for option in options:
            sub.add_argument(option, metavar=option.strip("-").upper())

    keyed(action("llm", "the language model", changes=True, checked=True), "--base-url", "--model")
    embedding = action("embedding", "the embedding model", changes=True, checked=True)
    keyed(embedding, "--provider", "--base-url", "--model", "--dimensions", "--proxy-url")
    vdb = action("vdb", "the Tencent VectorDB backend", changes=True)
    keyed(vdb, "--url", "--username", "--database", "--alias", "--embedding-model", "--ca-pem")
    vdb.add_argument("--no-set-backend", action="store_true", help="store the credentials, keep the backend")
    off = action("vdb-off", "back to SQLite", changes=True)
    off.add_argument("--purge-creds", action="store_true", help="remove the credentials too")
    action("vdb-on", "use the VectorDB credentials that are there", changes=True)
    action("set", "set one key", changes=True).add_argument("key", metavar="KEY")
    actions.choices["set"].add_argument("value", metavar="VALUE")
    action("unset", "remove one key", changes=True).add_argument("key", metavar="KEY")
    action("get", "show one key, secrets redacted", changes=False).add_argument("key", metavar="KEY")
    action("show", "show all of it, secrets redacted", changes=False).add_argument("--origin", action="store_true")
    action("path", "where the file is", changes=False)
    action("validate", "say what is wrong with it", changes=False)
    action("import-env", "write this shell's LLM variables into it", changes=True)


def _hermes_verbs(verbs: Any, common: argparse.ArgumentParser) -> None:
    """hermes ACTION …"""
    top = verbs.add_parser("hermes", help="bring the plugin to Hermes' profiles", parents=[common])
    actions = top.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=_Parser)
    helps = {
        "list": "show every profile and what is wrong with it",
        "install": "link the plugin into a profile",
        "enable": "link the plugin and make it the memory provider",
        "disable": "make it the memory provider no longer",
    }
    for name, help_ in helps.items():
        sub = actions.add_parser(name, help=help_, description=help_, parents=[common])
        which = sub.add_mutually_exclusive_group()
        which.add_argument("--profile", metavar="NAME", help="one profile (default: the default one)")
        which.add_argument("--all", action="store_true", help="every profile")
        if name != "list":
            sub.add_argument("--dry-run", action="store_true", help="say what would change, change nothing")
            sub.set_defaults(copy=False, replace=False)
        if name in ("install", "enable"):
            sub.add_argument("--copy", action="store_true", help="copy the plugin instead of linking it")
            sub.add_argument("--replace", action="store_true", help="move another provider in its place aside")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError("must be more than 0 and at most 86400 seconds")
    return value


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    words = sys.argv[1:] if argv is None else argv
    as_json = "--json" in words
    command = next((w for w in words if not w.startswith("-")), "")
    try:
        arguments = parser().parse_args(words)
        as_json = getattr(arguments, "json", False)
        command = "version" if arguments.show_version else arguments.verb or ""
        if not command:
            raise _UsageError("no verb given; try `memory-tencentdb-ctl --help`")
        result = _run(command, arguments)
    except _UsageError as error:
        result = failure(command, "usage", str(error), None, envelope.USAGE)
    except SettingsError as error:
        result = failure(command, "settings", str(error), None, envelope.NOT_CONFIGURED)
    except KeyboardInterrupt:
        return envelope.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return envelope.FAILED
    if isinstance(result, int):
        return result
    return _print(result, as_json)


def _print(result: Result, as_json: bool) -> int:
    try:
        if as_json:
            print(result.to_json())
        else:
            from tdai_supervisor.cli import render

            render.show(result)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return result.exit_code


def _run(command: str, a: argparse.Namespace) -> Result | int:
    root = _root(getattr(a, "root", None))
    if command in ("start", "stop", "restart", "daemon"):
        from tdai_supervisor.cli import lifecycle

        if command == "start":
            return lifecycle.start(root, a.name, wait=not a.no_wait, timeout=a.timeout, take_over=a.take_over)
        if command == "stop":
            return lifecycle.stop(root, a.name)
        if command == "restart":
            return lifecycle.restart(root, a.name, daemon=a.daemon, timeout=a.timeout)
        return lifecycle.daemon(root, a.keeper)
    from tdai_supervisor.cli import observe

    if command == "status":
        if a.watch and not getattr(a, "json", False):
            return _watch(root, a.name)
        return observe.status(root, a.name)
    if command in ("doctor", "diagnose") or (command == "health" and a.deep):
        from tdai_supervisor.cli import doctor

        if command == "health":
            return doctor.deep(root, a.name)
        return doctor.doctor(root) if command == "doctor" else doctor.diagnose(root, a.file, with_logs=a.with_logs)
    if command == "health":
        return observe.health(root, a.name)
    if command == "logs":
        result = observe.logs(root, a.name, a.stream, a.lines)
        if a.follow and not getattr(a, "json", False):
            return _follow(result, observe.follow(list(result.data)))
        return result
    if command in ("completion", "man"):
        from tdai_supervisor.cli import manners

        if command == "man":
            return Result("man", {"page": manners.man(parser())})
        return manners.completion(parser(), a.shell)
    if command in ("backup", "restore"):
        from tdai_supervisor.cli import data

        return (data.backup if command == "backup" else data.restore)(root, a.gateway, a.file)
    if command == "hermes":
        from tdai_supervisor.cli import hermes

        return hermes.run(root, a)
    if command == "config":
        from tdai_supervisor.cli import config

        return config.run(root, a)
    if command in ("events", "why", "metrics"):
        from tdai_supervisor.cli import history

        if command == "metrics":
            return history.metrics(root)
        if command == "why":
            return history.why(root, a.name)
        result = history.events(root, a.name, a.since, a.lines)
        if a.follow and result.exit_code == envelope.OK:
            return _follow(result, history.follow(root, a.name, as_json=getattr(a, "json", False)))
        return result
    return observe.version(root)


def _watch(root: str, name: str | None) -> int:
    """Print status again and again until Ctrl-C; the screen is cleared only on a terminal."""
    import time

    from tdai_supervisor.cli import observe

    try:
        while True:
            result = observe.status(root, name)
            if sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")
            _print(result, False)
            time.sleep(1)
    except KeyboardInterrupt:
        return envelope.OK


def _follow(result: Result, lines: Iterator[str]) -> int:
    """Print a Result and then lines as they come; Ctrl-C is how this ends, and is no failure."""
    try:
        _print(result, False)
        for line in lines:
            print(line, flush=True)
    except KeyboardInterrupt:
        pass
    return envelope.OK


def _root(given: str | None) -> str:
    """The root of this call, absolute: --root, else $MEMORY_TENCENTDB_ROOT, else ~/.memory-tencentdb."""
    if given:
        return os.path.abspath(os.path.expanduser(given))
    text = os.environ.get("MEMORY_TENCENTDB_ROOT", "").strip() or "~/.memory-tencentdb"
    return os.path.abspath(os.path.expanduser(text))
