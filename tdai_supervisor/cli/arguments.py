"""The command line: every verb and option, and nothing of what they do.

Invariants: this is the one source of help, completion and the man page.
"""

from __future__ import annotations

import argparse
import os

TYPE_CHECKING = False  # typing itself costs 3 of the 50 ms that `status` may take
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    Verb = Callable[..., argparse.ArgumentParser]

EXAMPLE = "example: memory-tencentdb-ctl start && memory-tencentdb-ctl status\n\n"


class UsageError(Exception):
    """argparse is not satisfied."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """For this terminal; argparse makes one per argument, and asks shutil, which imports three compressors."""

    def __init__(self, prog: str) -> None:
        try:
            width = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size(1).columns
        except (OSError, ValueError):
            width = 80
        super().__init__(prog, width=width - 2)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; try `{self.prog} --help`")


class _Unused:
    """Stands for a verb that is not asked for: takes every option and keeps none."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: self


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole command line, or what is needed for one verb (12 ms less, of the 50 that `status` may take)."""
    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--json", action="store_true", help="print one JSON object")
    common.add_argument("--root", metavar="DIR", help="supervisor root (default: $MEMORY_TENCENTDB_ROOT)")
    common.add_argument("--dry-run", action="store_true", help="say what would change, change nothing")
    common.add_argument("--hermes", action="store_const", const="hermes", dest="mode", help=argparse.SUPPRESS)
    common.add_argument("--standalone", action="store_const", const="standalone", dest="mode", help=argparse.SUPPRESS)
    top = _Parser(
        prog="memory-tencentdb-ctl",
        description=EXAMPLE + "Run the memory Gateway and look after it.",
        parents=[common],
    )
    top.add_argument("--version", action="store_true", dest="show_version", help="print the versions")
    unused: Any = _Unused()
    verbs = top.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)

    def verb(name: str, help_: str, named: bool = True) -> argparse.ArgumentParser:
        if only not in (None, name):
            return unused  # type: ignore[no-any-return]
        sub = verbs.add_parser(name, help=help_, description=help_, parents=[common])
        if named:
            sub.add_argument("name", nargs="?", metavar="NAME", help="one Gateway (default: all)")
        return sub

    _lifecycle_verbs(verb)
    _looking_verbs(verb)
    if only is None:
        _config_verbs(verbs, common)
        _hermes_verbs(verbs, common)
        _service_verbs(verbs, common)
        _gateway_verbs(verbs, common)
        _profile_verbs(verbs, common)
        _spool_verbs(verbs, common)
    bring = verb("import", "bring past Hermes sessions into the memory; again continues", named=False)
    bring.add_argument("source", choices=("hermes",), metavar="hermes")
    which = bring.add_mutually_exclusive_group()
    which.add_argument("--profile", metavar="NAME", help="one profile (default: the default one)")
    which.add_argument("--all", action="store_true", help="every profile")
    bring.add_argument("--gateway", default="default", metavar="NAME", help="into which (default: default)")
    bring.set_defaults(action="import")
    verb("migrate", "move the directories of earlier installations into the root", named=False)
    daemon = verb("daemon", "run the daemon in the foreground", named=False)
    keepers = ("none", "supervisord", "systemd-user", "systemd-system")
    daemon.add_argument("--keeper", choices=keepers, default="none", help=argparse.SUPPRESS)
    daemon.add_argument("--sweep", action="store_true", help=argparse.SUPPRESS)  # of the units' ExecStopPost
    verb("enable-hermes-memory", "the same as `hermes enable`", named=False)
    completion = verb("completion", "print a completion script for bash, zsh or fish", named=False)
    completion.add_argument("shell", metavar="SHELL")
    verb("man", "print the man page", named=False)
    verb("version", "print the versions of this command and of the daemon", named=False)
    return top


def _lifecycle_verbs(verb: Verb) -> None:
    """What changes what runs."""
    start = verb("start", "have the Gateway run, and return when it is READY")
    start.add_argument("--no-wait", action="store_true", help="return at once")
    start.add_argument("--timeout", type=_seconds, metavar="S", help="wait at most S seconds")
    start.add_argument("--take-over", action="store_true", help="end a Gateway somebody else started, and run ours")
    verb("stop", "end the Gateway; without NAME also daemon and keeper")
    again = verb("restart", "end the Gateway and start it again")
    again.add_argument("--daemon", action="store_true", help="re-exec the daemon instead; Gateways run on")
    again.add_argument("--timeout", type=_seconds, metavar="S", help="wait at most S seconds")


def _looking_verbs(verb: Verb) -> None:
    """What only looks, and what keeps data."""
    status = verb("status", "show what runs and why")
    status.add_argument("--watch", action="store_true", help="show it again every second")
    health = verb("health", "whether the Gateway may receive: exit 0 ok, 1 not ok, 7 not running")
    health.add_argument("--deep", action="store_true", help="capture and find a canary, look at LLM, disk, extraction")
    verb("doctor", "examine everything; each finding with the command that mends it", named=False)
    diagnose = verb("diagnose", "write one redacted archive for a bug report", named=False)
    diagnose.add_argument("file", nargs="?", metavar="FILE", help="where to (default: in this directory)")
    diagnose.add_argument("--with-logs", action="store_true", help="include the Gateways' logs, which hold user text")
    logs = verb("logs", "show the Gateway's logs", named=False)
    logs.add_argument("words", nargs="*", metavar="WORD", help="NAME, which log (out, err, all), how many lines")
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


def _actions(
    verbs: Any, common: argparse.ArgumentParser, verb: str, help_: str
) -> Callable[[str, str], argparse.ArgumentParser]:
    """A verb that has actions, and how to add one to it: by name and help."""
    top = verbs.add_parser(verb, help=help_, parents=[common])
    actions = top.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=_Parser)

    def action(name: str, help_: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=help_, description=help_, parents=[common])  # type: ignore[no-any-return]

    return action


def _config_verbs(verbs: Any, common: argparse.ArgumentParser) -> None:
    """config ACTION …"""
    plain = _actions(verbs, common, "config", "read and change the Gateway's configuration")

    def action(name: str, help_: str, *, changes: bool, checked: bool = False) -> argparse.ArgumentParser:
        sub = plain(name, help_)
        sub.add_argument("--gateway", default="default", metavar="NAME", help="whose file (default: default)")
        if changes:
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
    one = action("set", "set one key", changes=True)
    one.add_argument("key", metavar="KEY")
    one.add_argument("value", metavar="VALUE")
    action("unset", "remove one key", changes=True).add_argument("key", metavar="KEY")
    action("get", "show one key, secrets redacted", changes=False).add_argument("key", metavar="KEY")
    action("show", "show all of it, secrets redacted", changes=False).add_argument("--origin", action="store_true")
    action("path", "where the file is", changes=False)
    action("validate", "say what is wrong with it", changes=False)
    action("import-env", "write this shell's LLM variables into it", changes=True)


def _hermes_verbs(verbs: Any, common: argparse.ArgumentParser) -> None:
    """hermes ACTION …"""
    action = _actions(verbs, common, "hermes", "bring the plugin to Hermes' profiles")
    helps = {
        "list": "show every profile and what is wrong with it",
        "install": "link the plugin into a profile",
        "enable": "link the plugin and make it the memory provider",
        "disable": "make it the memory provider no longer",
    }
    for name, help_ in helps.items():
        sub = action(name, help_)
        which = sub.add_mutually_exclusive_group()
        which.add_argument("--profile", metavar="NAME", help="one profile (default: the default one)")
        which.add_argument("--all", action="store_true", help="every profile")
        if name != "list":
            sub.set_defaults(copy=False, replace=False)
        if name in ("install", "enable"):
            sub.add_argument("--copy", action="store_true", help="copy the plugin instead of linking it")
            sub.add_argument("--replace", action="store_true", help="move another provider in its place aside")


def _service_verbs(verbs: Any, common: argparse.ArgumentParser) -> None:
    """service ACTION …"""
    action = _actions(verbs, common, "service", "have systemd keep the daemon")
    helps = {
        "install": "install the unit; a daemon that runs is moved to it",
        "uninstall": "remove the unit; a daemon that runs goes on under supervisord",
        "status": "show who keeps the daemon, and what is missing",
    }
    for name, help_ in helps.items():
        sub = action(name, help_)
        if name == "install":
            sub.add_argument("--now", action="store_true", help="start it too, where no daemon lives")
        which = sub.add_mutually_exclusive_group()
        which.add_argument("--user", action="store_true", help="the user's own systemd (default where it answers)")
        which.add_argument("--system", action="store_true", help="the system's systemd, as root")


def _gateway_verbs(verbs: Any, common: argparse.ArgumentParser) -> None:
    """gateway ACTION …"""
    action = _actions(verbs, common, "gateway", "which Gateways there are, and what runs as one")
    install = action("install", "install the npm package beside the one in use, try it, switch to it")
    install.add_argument("--package", metavar="WHAT", help="a name, a .tgz file or a directory (default: the real one)")
    install.add_argument("--version", metavar="V", help="exactly this version (default: the newest)")
    install.add_argument("--with-node", action="store_true", help="bring a Node into this venv where none fits")
    use = action("use", "run as another kind, with the conversations of the one before; again continues")
    use.add_argument("kind", choices=("node", "embedded"), metavar="KIND", help="node or embedded")
    use.add_argument("name", nargs="?", metavar="NAME", help="which Gateway (default: default)")
    action("list", "show them, and which profiles use each")
    add = action("add", "configure another one, and have it run where a daemon lives")
    add.add_argument("name", metavar="NAME", help="its name")
    add.add_argument("--port", type=_port, metavar="N", help="its port (default: a free one, kept from then on)")
    add.add_argument("--data-dir", metavar="DIR", help="where its data is (default: ROOT/gateways/NAME)")
    add.add_argument("--kind", choices=("auto", "node", "embedded"), help="what runs (default: auto)")
    remove = action("remove", "stop it and forget it; its data stays")
    remove.add_argument("name", metavar="NAME", help="its name")
    remove.add_argument("--purge", action="store_true", help="delete its data and its snapshots too")
    remove.add_argument("--force", action="store_true", help="also while a profile uses it")


def _profile_verbs(verbs: Any, common: argparse.ArgumentParser) -> None:
    """profile ACTION …"""
    action = _actions(verbs, common, "profile", "which Gateway each Hermes profile uses")
    action("list", "show every profile: plugin, Gateway, who shares it, what waits")
    use = action("use", "give a profile a Gateway: its own, a named one, or the shared one")
    use.add_argument("profile", metavar="PROFILE", help="a profile of Hermes")
    use.add_argument("gateway", metavar="GATEWAY", help="own, shared, or the NAME of a Gateway")


def _spool_verbs(verbs: Any, common: argparse.ArgumentParser) -> None:
    """spool ACTION …"""
    plain = _actions(verbs, common, "spool", "what waits to be delivered, and what could not be")
    plain("list", "show every spool with its counts")

    def action(name: str, help_: str) -> argparse.ArgumentParser:
        sub = plain(name, help_)
        sub.add_argument("spool", metavar="SPOOL", help="its path, or the profile it belongs to")
        return sub

    show = action("show", "show the records that wait")
    show.add_argument("--dead", action="store_true", help="the dead letters instead")
    show.add_argument("--text", action="store_true", help="with what was said")
    retry = action("retry", "deliver now")
    retry.add_argument("--timeout", type=_seconds, default=30.0, metavar="S", help="at most S seconds (default 30)")
    replay = action("replay", "put dead letters into the spool again, under their keys")
    replay.add_argument("ids", nargs="*", metavar="ID", help="which, as `show --dead` names them")
    replay.add_argument("--all", action="store_true", help="all of them")
    drop = action("drop", "remove records or dead letters, or a spool that is gone from the list")
    drop.add_argument("ids", nargs="*", metavar="ID", help="which, as `show` names them")


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError("must be 1..65535")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError("must be more than 0 and at most 86400 seconds")
    return value
