"""Verbs about Hermes: which profiles there are, and whether each has the plugin and uses it.

Invariants: a running Hermes is never touched; of config.yaml and .env only the lines in question change, and what the
change means is checked before it is written; nothing that is not a link of ours is overwritten: it is moved aside, and
only when asked; with --dry-run nothing is written.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tdai_supervisor import client
from tdai_supervisor.cli import envelope
from tdai_supervisor.cli.envelope import Result, failure
from tdai_supervisor.decide import settings
from tdai_supervisor.decide.checks import SettingsError

NAME = "memory_tencentdb"
OLD_NAMES = ("tdai", "memory-tencentdb")  # values of memory.provider that today's installer wrote
OLD_LINES = re.compile(r"^(?:export\s+)?MEMORY_TENCENTDB_GATEWAY_CMD\s*=.*(?:\n|\Z)", re.MULTILINE)


@dataclass
class Profile:
    """One Hermes profile and what is wrong with it."""

    name: str
    home: str
    provider: str | None = None
    plugin: str = "missing"  # linked, copied, broken link, old copy, missing
    notes: list[str] = field(default_factory=list)

    @property
    def plugin_path(self) -> str:
        """Where its plugin belongs."""
        return os.path.join(self.home, "plugins", NAME)

    def as_json(self) -> dict[str, Any]:
        """For the envelope."""
        enabled = self.provider == NAME and self.plugin in ("linked", "copied")
        return {
            "name": self.name,
            "home": self.home,
            "provider": self.provider,
            "plugin": self.plugin,
            "enabled": enabled,
            "notes": self.notes,
        }


def run(root: str, a: Namespace) -> Result:
    """The verb `hermes ACTION`."""
    try:
        profiles = [inspect(p) for p in chosen(a)]
        if a.action == "list":
            return Result("hermes", {"profiles": [p.as_json() for p in profiles], "changes": [], "bundled": bundled()})
        changes = [line for p in profiles for line in _ACTIONS[a.action](p, a)]
        if a.action == "enable":
            changes += _unlink_bundled(a.dry_run)
        after = [inspect(Profile(p.name, p.home)).as_json() for p in profiles]
        return Result("hermes", {"profiles": after, "changes": changes, "bundled": bundled(), "dry_run": a.dry_run})
    except SettingsError as error:
        return failure("hermes", "hermes", str(error))
    except OSError as error:
        code = envelope.NOT_PERMITTED if isinstance(error, PermissionError) else envelope.FAILED
        return failure("hermes", "io", f"cannot use {error.filename}: {error.strerror}", None, code)


# -- what there is -----------------------------------------------------------------------------------------------------


def main_home() -> str:
    """The home of the default profile: $HERMES_HOME (or above it, if that is a profile's), else ~/.hermes."""
    return settings.hermes_home(os.environ, os.path.expanduser("~"))


def every() -> list[Profile]:
    """The default profile and every one below profiles/."""
    home = main_home()
    below = os.path.join(home, "profiles")
    names = sorted(os.listdir(below)) if os.path.isdir(below) else []
    found = [Profile(n, os.path.join(below, n)) for n in names if os.path.isdir(os.path.join(below, n))]
    return [Profile("default", home), *found]


def chosen(a: Namespace) -> list[Profile]:
    """The profiles a verb is about: --profile, --all, else the default one; `list` shows all. Raises SettingsError."""
    profiles = every()
    if not os.path.isdir(profiles[0].home):
        raise SettingsError(f"cannot find Hermes: there is no {profiles[0].home}; run hermes once, or set HERMES_HOME")
    if a.profile is not None:
        found = [p for p in profiles if p.name == a.profile]
        if not found:
            raise SettingsError(
                f"cannot find the profile {a.profile!r}: there are {', '.join(p.name for p in profiles)}"
            )
        return found
    return profiles if a.all or a.action == "list" else profiles[:1]


def source() -> str:
    """The plugin of this installation, by the path that survives upgrades."""
    spec = importlib.util.find_spec(NAME)
    if spec is None or not spec.origin:
        raise SettingsError(f"cannot find the package {NAME} in this installation; install it again")
    found = os.path.dirname(spec.origin)
    inside = os.path.relpath(found, os.path.realpath(sys.prefix))
    # sys.prefix is the link ROOT/venv where install.sh made one: an upgrade switches it, and links through it follow.
    return found if inside.startswith("..") else os.path.join(sys.prefix, inside)


def inspect(profile: Profile) -> Profile:
    """Fill in what is true of a profile."""
    config = os.path.join(profile.home, "config.yaml")
    try:
        profile.provider = provider_of(client.read_text_whole(config) or "")
    except SettingsError as error:
        profile.notes.append(f"{config}: {error}")
    path = profile.plugin_path
    if os.path.islink(path):
        profile.plugin = "linked" if _is_ours(path) else "broken link" if not os.path.exists(path) else "old copy"
    elif os.path.isdir(path):
        profile.plugin = "copied" if _is_ours(path) else "old copy"
    if profile.plugin == "old copy":
        profile.notes.append(f"{path} is another provider: its watchdog would start a Gateway of its own")
    if profile.plugin == "broken link":
        profile.notes.append(f"{path} points to {os.readlink(path)}, which is gone")
    if profile.provider in OLD_NAMES:
        profile.notes.append(f"memory.provider is {profile.provider}, which Hermes does not find")
    if profile.provider in (NAME, *OLD_NAMES) and profile.plugin == "missing":
        profile.notes.append("memory.provider is set but there is no plugin: Hermes has no memory, silently")
    env = client.read_text_whole(os.path.join(profile.home, ".env")) or ""
    if OLD_LINES.search(env):
        profile.notes.append(".env sets MEMORY_TENCENTDB_GATEWAY_CMD, of the old provider")
    return profile


def _is_ours(path: str) -> bool:
    """Whether a plugin directory holds our provider, which has a spool; the old one has a supervisor."""
    return os.path.isfile(os.path.join(path, "spool.py")) and os.path.isfile(os.path.join(path, "__init__.py"))


def bundled() -> list[str]:
    """Links that today's installer put into Hermes' own plugins/memory/: they would win over a profile's plugin."""
    found = []
    for base in _agent_dirs():
        path = os.path.join(base, "plugins", "memory", NAME)
        if os.path.islink(path) and path not in found:
            found.append(path)
    return found


def _agent_dirs() -> Iterator[str]:
    """Where a Hermes may be installed: by variable, in its home, in the FHS, and behind `hermes` on PATH."""
    given = os.environ.get("HERMES_AGENT_DIR", "").strip()
    if given:
        yield os.path.abspath(os.path.expanduser(given))
    yield os.path.join(main_home(), "hermes-agent")
    yield "/usr/local/lib/hermes-agent"
    yield "/opt/hermes-agent"
    program = shutil.which("hermes")
    if program is not None:
        prefix = os.path.dirname(os.path.dirname(os.path.realpath(program)))
        yield prefix
        lib = os.path.join(prefix, "lib")
        for name in sorted(os.listdir(lib)) if os.path.isdir(lib) else []:
            yield os.path.join(lib, name, "site-packages")


# -- what is changed ---------------------------------------------------------------------------------------------------


def _install(profile: Profile, a: Namespace) -> list[str]:
    path, origin = profile.plugin_path, source()
    if profile.plugin == "linked" and os.path.realpath(path) == os.path.realpath(origin) and not a.copy:
        return []
    if profile.plugin in ("old copy", "copied") and not a.replace and not os.path.islink(path):
        way = "try --replace, which moves it aside"
        raise SettingsError(f"cannot install into {profile.name}: {path} is a directory, not a link of ours; {way}")
    changes = []
    if os.path.lexists(path):
        if os.path.islink(path):
            changes.append(f"remove the link {path} -> {os.readlink(path)}")
            _unless(a.dry_run, lambda: os.unlink(path))
        else:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            aside = os.path.join(profile.home, NAME, f"replaced-{stamp}")
            changes.append(f"move {path} to {aside}")
            if not a.dry_run:
                os.makedirs(os.path.dirname(aside), mode=0o700, exist_ok=True)
                os.rename(path, aside)
    changes.append(f"{'copy' if a.copy else 'link'} {path} from {origin}")
    if not a.dry_run:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if a.copy:
            shutil.copytree(origin, path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            os.symlink(origin, path)
    return changes


def _enable(profile: Profile, a: Namespace) -> list[str]:
    return _install(profile, a) + _set_provider(profile, NAME, a.dry_run) + _clean_env(profile, a.dry_run)


def _disable(profile: Profile, a: Namespace) -> list[str]:
    changes = _set_provider(profile, "", a.dry_run) if profile.provider in (NAME, *OLD_NAMES) else []
    if profile.plugin == "linked":
        changes.append(f"remove the link {profile.plugin_path}")
        _unless(a.dry_run, lambda: os.unlink(profile.plugin_path))
    return changes


def _unless(dry_run: bool, act: Any) -> None:
    if not dry_run:
        act()


def _set_provider(profile: Profile, value: str, dry_run: bool) -> list[str]:
    path = os.path.join(profile.home, "config.yaml")
    before = client.read_text_whole(path) or ""
    after = with_provider(before, value)
    if after == before:
        return []
    if not dry_run:
        _write_like(path, after)
    return [f"set memory.provider to {value!r} in {path} (was {profile.provider!r})"]


def _clean_env(profile: Profile, dry_run: bool) -> list[str]:
    path = os.path.join(profile.home, ".env")
    before = client.read_text_whole(path) or ""
    after = OLD_LINES.sub("", before)
    if after == before:
        return []
    if not dry_run:
        _write_like(path, after)
    return [f"remove MEMORY_TENCENTDB_GATEWAY_CMD from {path}"]


def _unlink_bundled(dry_run: bool) -> list[str]:
    changes = []
    for path in bundled():
        changes.append(f"remove the link {path}, which would win over the profiles' plugins")
        _unless(dry_run, lambda path=path: os.unlink(path))
    return changes


def _write_like(path: str, text: str) -> None:
    """Replace a file of the user's, keeping its mode; a new one is 0600."""
    from tdai_supervisor.host import disk

    mode = os.stat(path).st_mode & 0o7777 if os.path.exists(path) else 0o600
    real = os.path.realpath(path)
    disk.write(real, text, durable=True)
    os.chmod(real, mode)


# -- config.yaml, by the byte ------------------------------------------------------------------------------------------


def _compose(text: str) -> Any:
    """The node tree of a YAML text, None for an empty one. Raises SettingsError with line and column."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1} column {mark.column + 1}" if mark else "it is not YAML"
        raise SettingsError(f"cannot read it: {where}; it was left as it is") from None


def _entry(node: Any, key: str) -> tuple[Any, Any] | None:
    """(key node, value node) of a mapping node, or None."""
    pairs = node.value if node is not None and node.id == "mapping" else []
    return next(((k, v) for k, v in pairs if k.value == key), None)


def provider_of(text: str) -> str | None:
    """memory.provider, or None. Raises SettingsError."""
    memory = _entry(_compose(text), "memory")
    found = _entry(memory[1], "provider") if memory else None
    return str(found[1].value) if found and found[1].id == "scalar" else None


def with_provider(text: str, value: str) -> str:
    """text with memory.provider set, every other byte as it was. Raises SettingsError where that is not possible."""
    root = _compose(text)
    if root is not None and root.id != "mapping":
        raise SettingsError("cannot set memory.provider: config.yaml holds no mapping")
    scalar = value or "''"
    memory = _entry(root, "memory")
    found = _entry(memory[1], "provider") if memory else None
    if found is not None:
        start, end = found[1].start_mark.index, found[1].end_mark.index
        colon = _after_colon(text, found[0])
        # An empty value has no place of its own: the parser puts it where the next token begins.
        after = text[:colon] + f" {scalar}" + text[colon:] if start == end else text[:start] + scalar + text[end:]
    elif memory is not None and memory[1].id == "mapping":
        after = _insert(text, memory[1], f"provider: {scalar}")
    elif memory is not None:
        colon = _after_colon(text, memory[0])
        after = text[:colon] + f"\n  provider: {scalar}" + text[colon:]
    elif root is not None and root.flow_style:
        after = _insert(text, root, f"memory: {{provider: {scalar}}}")
    else:
        after = text + ("" if not text or text.endswith("\n") else "\n") + f"memory:\n  provider: {scalar}\n"
    if provider_of(after) != value or _others(after) != _others(text):
        raise SettingsError("cannot set memory.provider without changing more; set it by hand")
    return after


def _after_colon(text: str, key: Any) -> int:
    """The place right after the colon of a key."""
    return text.index(":", key.end_mark.index) + 1


def _insert(text: str, mapping: Any, entry: str) -> str:
    """text with an entry put in front of a mapping's first one."""
    at: int = mapping.start_mark.index
    if mapping.flow_style:
        at += 1
        return text[:at] + entry + (", " if mapping.value else "") + text[at:]
    column: int = mapping.start_mark.column
    return text[:at] + entry + "\n" + " " * column + text[at:]


def _others(text: str) -> Any:
    """Everything a config means, but memory.provider."""
    from ruamel.yaml import YAML

    document = YAML(typ="safe", pure=True).load(text) or {}
    memory = document.get("memory")
    rest = {k: v for k, v in memory.items() if k != "provider"} if isinstance(memory, dict) else {}
    return {k: v for k, v in document.items() if k != "memory"}, rest


_ACTIONS = {"install": _install, "enable": _enable, "disable": _disable}
