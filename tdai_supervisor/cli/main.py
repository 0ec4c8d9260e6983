"""memory-tencentdb-ctl: parse, call the verb, print its result.

Invariants: a verb's modules are imported when the verb runs; with --json exactly one object goes to stdout, on every
failure too; a user's mistake is a sentence and an exit code, never a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from tdai_supervisor.cli import envelope
from tdai_supervisor.cli.arguments import UsageError, parser
from tdai_supervisor.cli.envelope import Result, failure
from tdai_supervisor.decide.checks import SettingsError

TYPE_CHECKING = False  # typing itself costs 3 of the 50 ms that `status` may take
if TYPE_CHECKING:
    from collections.abc import Iterator


QUICK = ("status", "health", "version")  # verbs that stand alone on many a command line


def _only(words: list[str]) -> str | None:
    """The verb, where it is a quick one and certainly the verb: then no other is parsed for."""
    rest = [w for i, w in enumerate(words) if not w.startswith("-") and (i == 0 or words[i - 1] != "--root")]
    return rest[0] if rest and rest[0] in QUICK and "-h" not in words and "--help" not in words else None


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    words = sys.argv[1:] if argv is None else argv
    as_json = "--json" in words
    command = next((w for w in words if not w.startswith("-")), "")
    try:
        arguments = parser(_only(words)).parse_args(words)
        as_json = getattr(arguments, "json", False)
        command = "version" if arguments.show_version else arguments.verb or ""
        if not command:
            raise UsageError("no verb given; try `memory-tencentdb-ctl --help`")
        result = _with_progress(command, arguments) if command in _AT_WORK else _run(command, arguments)
    except UsageError as error:
        result = failure(command, "usage", str(error), None, envelope.USAGE)
    except SettingsError as error:
        result = failure(command, "settings", str(error), None, envelope.NOT_CONFIGURED)
    except TimeoutError as error:
        result = failure(command, "busy", f"cannot {command}: {error}", "end that command, then try again")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return envelope.FAILED
    except PermissionError as error:
        message = f"cannot {command}: no permission for {error.filename or error}"
        result = failure(command, "not-permitted", message, "try as the user who owns it", envelope.NOT_PERMITTED)
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        result = failure(command, "io", f"cannot {command}: {what}{error.strerror or error}")
    except KeyboardInterrupt:
        return envelope.INTERRUPTED
    if isinstance(result, int):
        return result
    return _print(result, as_json)


def _with_progress(command: str, arguments: argparse.Namespace) -> Result | int:
    from tdai_supervisor.cli.progress import Progress

    with Progress(f"{command}: at work"):
        return _run(command, arguments)


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
    if mode := getattr(a, "mode", None):
        os.environ["MEMORY_TENCENTDB_MODE"] = mode
    a.dry_run = getattr(a, "dry_run", False)
    root = _root(getattr(a, "root", None))
    if command in _CHANGING and (refused := _as_root_for_another(command, root)):
        return refused
    if command in ("start", "stop", "restart") and a.dry_run:
        return Result(command, {"plan": _PLANS[command].format(name=a.name or "every Gateway"), "root": root})
    if command in ("start", "stop", "restart", "daemon"):
        from tdai_supervisor.cli import lifecycle

        if command == "start":
            return lifecycle.start(root, a.name, wait=not a.no_wait, timeout=a.timeout, take_over=a.take_over)
        if command == "stop":
            return lifecycle.stop(root, a.name)
        if command == "restart":
            return lifecycle.restart(root, a.name, daemon=a.daemon, timeout=a.timeout)
        return lifecycle.sweep(root) if a.sweep else lifecycle.daemon(root, a.keeper)
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
        name, stream, lines = _log_words(a)
        result = observe.logs(root, name, stream, lines)
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
    if command == "enable-hermes-memory":
        from tdai_supervisor.cli import hermes

        enable = argparse.Namespace(action="enable", profile=None, all=False, copy=False, replace=False)
        enable.dry_run = a.dry_run
        return hermes.run(root, enable).but(command=command)
    if command in _WITH_ACTIONS:
        verb = importlib.import_module(f"tdai_supervisor.cli.{_WITH_ACTIONS[command]}")
        return verb.run(root, a)  # type: ignore[no-any-return]
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


# Verbs that have actions of their own, and the modules that run them.
_WITH_ACTIONS = {
    "config": "config",
    "gateway": "gateways",
    "hermes": "hermes",
    "import": "imports",
    "migrate": "legacy",
    "profile": "profiles",
    "service": "service",
    "spool": "spools",
}

# Verbs that make files in a root; `service` is root's own to do for a user.
_CHANGING = {"start", "stop", "restart", "restore", "enable-hermes-memory", *_WITH_ACTIONS} - {"service"}

# Verbs that may take longer than a second; `gateway` and `import` tell their steps themselves.
_AT_WORK = (_CHANGING | {"backup", "diagnose", "doctor", "service"}) - {"gateway", "import"}


def _as_root_for_another(command: str, root: str) -> Result | None:
    """Why root does not do this where a user's files are: what it makes there, that user can no longer use."""
    if os.geteuid() != 0:
        return None
    path = root
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    owner = os.stat(path, follow_symlinks=False).st_uid
    if owner == 0:
        return None
    import pwd

    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"#{owner}"
    message = f"cannot {command} as root: {path} belongs to {name}, who could not use what root makes there"
    hint = f"try `sudo -u {name} memory-tencentdb-ctl {command}`"
    return failure(command, "not-permitted", message, hint, envelope.NOT_PERMITTED)


_PLANS = {
    "start": "would bring up keeper and daemon if they are not there, and have {name} run until READY",
    "stop": "would end {name}, wait until its processes, lease and port are free; without NAME daemon and keeper too",
    "restart": "would end {name} and start it again",
}


def _log_words(a: argparse.Namespace) -> tuple[str, str, int]:
    """(Gateway, stream, lines) of `logs [NAME] [out|err|all] [N]`, in any order."""
    name, stream, lines = "default", a.stream, a.lines
    for word in a.words:
        if word in ("out", "stdout", "err", "stderr", "all"):
            stream = word
        elif word.isdecimal():
            lines = int(word)
        else:
            name = word
    return name, stream, lines


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
