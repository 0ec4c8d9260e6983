"""hermes memory_tencentdb status | doctor | flush | start | stop

Invariants:
* Cheap to import and without side effects: the host executes this file at every start, without the package's __init__.
* status, doctor and flush start nothing; start and stop hand over to memory-tencentdb-ctl, which owns every Gateway.
* Exit codes: 0 good, 1 not, 5 memory-tencentdb-ctl is not installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

from . import host
from .drain import deliver_until, drainer_until
from .hooks import aside
from .settings import profile_environment, read_settings
from .spool import Spool

if TYPE_CHECKING:
    import argparse

CTL = "memory-tencentdb-ctl"


def register_cli(parser: argparse.ArgumentParser) -> None:
    """Give the host's parser the verbs of this provider."""
    verbs = parser.add_subparsers(dest="memory_tencentdb_verb", metavar="VERB")
    for verb, words in (("status", "What is true now"), ("doctor", "What is wrong, and the command that mends it")):
        one = verbs.add_parser(verb, help=words)
        one.add_argument("--json", action="store_true", help="print one JSON object")
    flush = verbs.add_parser("flush", help="Deliver now what waits on disk")
    flush.add_argument("--timeout", type=float, default=30.0, help="seconds at most (default 30)")
    flush.add_argument("--dead", action="store_true", help="take the dead letters up again first")
    flush.add_argument(
        "--replay", action="store_true", help="also what was delivered in the last days, if it is not there"
    )
    for verb, words in (("start", "Start this profile's Gateway"), ("stop", "Stop this profile's Gateway")):
        verbs.add_parser(verb, help=f"{words} ({CTL} {verb})")
    parser.set_defaults(func=memory_tencentdb_command)


def memory_tencentdb_command(args: argparse.Namespace) -> None:
    """Run one verb; ends the process with its exit code when that is not 0."""
    verb = getattr(args, "memory_tencentdb_verb", None) or "status"
    code = {"status": _status, "doctor": _doctor, "flush": _flush, "start": _control, "stop": _control}[verb](args)
    if code:
        sys.exit(code)


def _status(args: argparse.Namespace) -> int:
    seen = aside("report").look(host.hermes_home())
    if getattr(args, "json", False):
        print(json.dumps(seen.as_json(), ensure_ascii=False))
    else:
        _print(aside("report").summary(seen))
    return 0 if seen.trouble is None else 1


def _doctor(args: argparse.Namespace) -> int:
    findings = aside("doctor").examine(host.hermes_home())
    if getattr(args, "json", False):
        print(json.dumps([finding.as_json() for finding in findings], ensure_ascii=False))
    else:
        for finding in findings:
            print(f"{finding.level:<4}  {finding.fact}" + (f"\n      {finding.fix}" if finding.fix else ""))
    return 1 if any(finding.level == "bad" for finding in findings) else 0


def _flush(args: argparse.Namespace) -> int:
    home = host.hermes_home()
    settings = read_settings(home, profile_environment(home))
    end = time.monotonic() + max(0.0, args.timeout)
    spool = Spool(settings.spool)
    letters = aside("letters")
    try:
        taken = letters.revive(spool) if args.dead else 0
    except letters.HeldError as error:
        print(f"cannot take up the dead letters: {error}; try again when it is done", file=sys.stderr)
        return 1
    taken += aside("doctor").replay(spool) if args.replay else 0
    if taken:
        print(f"{taken} records are taken up again")
    drainer = drainer_until(end, settings, spool)
    while (code := deliver_until(drainer, end)) == 75 and time.monotonic() < end:
        time.sleep(0.2)  # a session drains it; it may be killed before it is done
        if spool.idle():
            break
    seen = aside("report").look(home)
    _print(aside("report").summary(seen))
    return 0 if code != 1 and not seen.pending else 1


def _control(args: argparse.Namespace) -> int:
    home = host.hermes_home()
    settings = read_settings(home, profile_environment(home))
    path = aside("autostart").find(settings.root)
    verb = args.memory_tencentdb_verb
    if path is None:
        print(f"cannot {verb}: {CTL} is not installed; try pipx install tdai-supervisor", file=sys.stderr)
        return 5
    sys.stdout.flush()
    os.execv(path, [path, "--root", settings.root, verb, settings.gateway])  # noqa: S606  its exit code is ours
    return 1


def _print(lines: dict[str, str]) -> None:
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
