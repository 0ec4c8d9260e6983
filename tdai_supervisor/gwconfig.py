"""The Gateway's config file (tdai-gateway.json, or an existing .yaml): read, validate, patch, diff.

Invariants: a file that does not parse is never written, and the error names line and column (the real Gateway ignores
such a file silently and then runs without auth); a patch changes only what it sets: unknown keys, order, comments and
formatting stay; the file is replaced whole, 0600; a secret never leaves through `redact` or `diff`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]  # where a key ends
from typing import Any

from tdai_supervisor.decide.checks import SettingsError

URL, TEXT, COUNT, FLAG, PORT, FILE, SECRET, LIST = "url", "text", "count", "flag", "port", "file", "secret", "list"
KEYS: dict[str, str] = {
    "llm.baseUrl": URL,
    "llm.apiKey": SECRET,
    "llm.model": TEXT,
    "llm.maxTokens": COUNT,
    "llm.timeoutMs": COUNT,
    "server.port": PORT,
    "server.host": TEXT,
    "server.apiKey": SECRET,
    "server.corsOrigins": LIST,
    "data.baseDir": TEXT,
    "memory.storeBackend": "sqlite|tcvdb",
    "memory.bm25.enabled": FLAG,
    "memory.embedding.enabled": FLAG,
    "memory.embedding.provider": TEXT,
    "memory.embedding.baseUrl": URL,
    "memory.embedding.apiKey": SECRET,
    "memory.embedding.model": TEXT,
    "memory.embedding.dimensions": COUNT,
    "memory.embedding.sendDimensions": FLAG,
    "memory.embedding.proxyUrl": URL,
    "memory.tcvdb.url": URL,
    "memory.tcvdb.username": TEXT,
    "memory.tcvdb.apiKey": SECRET,
    "memory.tcvdb.database": TEXT,
    "memory.tcvdb.alias": TEXT,
    "memory.tcvdb.embeddingModel": TEXT,
    "memory.tcvdb.caPemPath": FILE,
    "memory.recall.strategy": "hybrid|keyword|vector|embedding",
    "memory.recall.timeoutMs": COUNT,
    "memory.recall.maxCharsPerMemory": COUNT,
    "memory.recall.maxTotalRecallChars": COUNT,
    "timezone": TEXT,
}
"""What both generations of the Gateway read, and the kind of each value (facts: src/gateway/config.ts)."""
FREE = ("memory.pipeline.",)  # numbers of the pipeline: any key, any value
PLACEHOLDER = re.compile(
    r"(.*[*•…]{3,}.*|sk-x+|x{4,}|<.*>|\$\{.*\}|your[-_ ].*|"
    r".*\b(placeholder|changeme|change-me|replace[-_ ]me|todo)\b.*)",
    re.IGNORECASE,
)


def find(configured: str) -> str:
    """The config file in use: the configured one, else an existing .yaml or .yml beside it, else the .json to be."""
    base = os.path.splitext(configured)[0]
    return next((p for p in (configured, base + ".yaml", base + ".yml") if os.path.exists(p)), configured)


LLM_KEYS = {"TDAI_LLM_API_KEY": "llm.apiKey", "TDAI_LLM_BASE_URL": "llm.baseUrl", "TDAI_LLM_MODEL": "llm.model"}


def llm(own: Mapping[str, str], values: Mapping[str, Any], profile: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What is in force for the language model: name -> (value, "environment", "file" or "profile").

    own and profile hold TDAI_LLM_* names: of the daemon's environment, and of a Hermes profile, which is asked last.
    """
    found = {name: (value, "environment") for name, value in own.items()}
    for name, key in LLM_KEYS.items():
        value = get(values, key)
        if isinstance(value, str) and value.strip():
            found.setdefault(name, (value.strip(), "file"))
        elif name in profile:
            found.setdefault(name, (profile[name], "profile"))
    return found


def is_yaml(path: str) -> bool:
    """Whether a file is edited as YAML."""
    return path.endswith((".yaml", ".yml"))


def parse(path: str, text: str) -> dict[str, Any]:
    """The settings in a config file's text; empty text is no settings. Raises SettingsError with line and column."""
    if not text.strip():
        return {}
    if is_yaml(path):
        value = _load_yaml(path, text)
    else:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            where = f"line {error.lineno} column {error.colno}"
            raise SettingsError(f"cannot read {path}: {where}: {error.msg}; it was left as it is") from None
    if not isinstance(value, dict):
        raise SettingsError(f"cannot use {path}: it must hold an object, not {type(value).__name__}")
    return value


def _yaml() -> Any:
    from ruamel.yaml import YAML  # noqa: PLC0415  (only where a file is YAML)

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1_000_000
    return yaml


def _load_yaml(path: str, text: str) -> Any:
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415

    try:
        return _yaml().load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise SettingsError(f"cannot read {path}: {where}{error.problem}; it was left as it is") from None
    except YAMLError as error:
        raise SettingsError(f"cannot read {path}: {error}; it was left as it is") from None


def get(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, or None."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def patch(path: str, text: str, changes: Mapping[str, Any]) -> str:
    """text with these dotted keys set, or removed where the value is None. Raises SettingsError as `parse` does."""
    config = parse(path, text)
    for key in changes:
        _refuse_clash(path, config, key)
    if is_yaml(path):
        return _patch_yaml(text, changes)
    if not text.strip():
        text = "{}\n"
    for key, value in changes.items():
        text = _patch_json(text, key.split("."), value)
    return text


def _refuse_clash(path: str, config: Mapping[str, Any], key: str) -> None:
    parts = key.split(".")
    for n in range(1, len(parts)):
        above = get(config, ".".join(parts[:n]))
        if above is not None and not isinstance(above, Mapping):
            raise SettingsError(f"cannot set {key} in {path}: {'.'.join(parts[:n])} is not an object there")


def _patch_yaml(text: str, changes: Mapping[str, Any]) -> str:
    import io  # noqa: PLC0415

    yaml = _yaml()
    document = yaml.load(text) or {}
    for key, value in changes.items():
        *above, last = key.split(".")
        node = document
        for part in above:
            if not isinstance(node.get(part), dict):
                if value is None:
                    break
                node[part] = {}
            node = node[part]
        else:
            if value is None:
                node.pop(last, None)
            else:
                node[last] = value
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


_SPACE = re.compile(r"[ \t\n\r]*")


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _members(text: str, at: int) -> tuple[list[tuple[str, int, int, int]], int]:
    """((key, start of key, start and end of value) of an object that opens at `at`, position of its closing brace)."""
    found, at = [], _skip(text, at + 1)
    while text[at] != "}":
        start = at
        key, at = scanstring(text, at + 1, True)
        value = _skip(text, _skip(text, at) + 1)
        _, end = json.JSONDecoder().raw_decode(text, value)
        found.append((key, start, value, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found, at


def _patch_json(text: str, parts: list[str], value: Any) -> str:
    """Valid JSON text with one value set or removed, everything else byte for byte."""
    at = _skip(text, 0)
    indent = _indent(text)
    for depth, part in enumerate(parts):
        members, close = _members(text, at)
        here = next((m for m in reversed(members) if m[0] == part), None)
        last = depth == len(parts) - 1
        if here is None:
            if value is None:
                return text
            for missing in reversed(parts[depth + 1 :]):
                value = {missing: value}
            return _insert(text, members, close, part, value, indent, depth + 1)
        if last:
            return _remove(text, members, here) if value is None else _replace(text, here, value, indent, depth + 1)
        at = here[2]
    return text


def _indent(text: str) -> str | None:
    """The indentation of the file's first nested line, or None where it is written in one line."""
    match = re.search(r"\{\s*\n([ \t]+)\S", text)
    return match[1] if match else ("  " if text.strip() in ("{}", "") else None)


def _dump(value: Any, indent: str | None, depth: int) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return text if indent is None else text.replace("\n", "\n" + indent * depth)


def _replace(text: str, member: tuple[str, int, int, int], value: Any, indent: str | None, depth: int) -> str:
    return text[: member[2]] + _dump(value, indent, depth) + text[member[3] :]


def _insert(
    text: str,
    members: list[tuple[str, int, int, int]],
    close: int,
    key: str,
    value: Any,
    indent: str | None,
    depth: int,
) -> str:
    entry = f"{json.dumps(key, ensure_ascii=False)}: {_dump(value, indent, depth)}"
    gap = " " if indent is None else "\n" + indent * depth
    if members:
        end = members[-1][3]
        return f"{text[:end]},{gap}{entry}{text[end:]}"
    tail = "" if indent is None else "\n" + indent * (depth - 1)
    head = text[:close].rstrip(" \t\n\r")
    return head + ("" if indent is None else gap) + entry + tail + text[close:]


def _remove(text: str, members: list[tuple[str, int, int, int]], member: tuple[str, int, int, int]) -> str:
    index = members.index(member)
    if index + 1 < len(members):
        return text[: member[1]] + text[members[index + 1][1] :]
    start = members[index - 1][3] if index else member[1]
    return text[:start] + text[member[3] :]


def check(key: str, value: Any) -> str | None:
    """What is wrong with a value at a key, or None."""
    kind = KEYS.get(key)
    if kind is None:
        if key.startswith(FREE):
            return None
        close = difflib.get_close_matches(key, KEYS, 1, 0.5)
        return f"unknown key {key}" + (f"; did you mean {close[0]}?" if close else "")
    need = _needs(kind, value)
    return None if need is None else f"{key} must be {need}, not {redact_value(key, value)!r}"


def _needs(kind: str, value: Any) -> str | None:
    number = isinstance(value, int) and not isinstance(value, bool)
    text = isinstance(value, str) and value.strip() != ""
    checks = {
        URL: (text and re.fullmatch(r"https?://[^\s/?#]+\S*", value) is not None, "an http or https URL"),
        COUNT: (number and value > 0, "a positive whole number"),
        PORT: (number and 1 <= value <= 65535, "a port, 1 to 65535"),
        FLAG: (isinstance(value, bool), "true or false"),
        TEXT: (text, "a text that is not empty"),
        FILE: (text and os.access(os.path.expanduser(value), os.R_OK), "a file that can be read"),
        SECRET: (text and not PLACEHOLDER.fullmatch(value.strip()), "a real key (this one is masked or a placeholder)"),
        LIST: (isinstance(value, list) and all(isinstance(x, str) for x in value), "a list of texts"),
    }
    if kind in checks:
        good, need = checks[kind]
        return None if good else need
    return None if value in kind.split("|") else "one of " + ", ".join(kind.split("|"))


def validate(config: Mapping[str, Any]) -> list[str]:
    """Everything that is wrong with a whole config, one sentence each."""
    faults = [fault for key, value in flatten(config) if value != {} and (fault := check(key, value)) is not None]
    embedding = get(config, "memory.embedding") or {}
    if isinstance(embedding, Mapping) and embedding.get("provider") == "qclaw" and not embedding.get("proxyUrl"):
        faults.append("memory.embedding.provider qclaw needs memory.embedding.proxyUrl")
    if get(config, "memory.storeBackend") == "tcvdb":
        needed = [k for k in ("url", "apiKey", "database") if not get(config, f"memory.tcvdb.{k}")]
        faults += [f"memory.storeBackend tcvdb needs memory.tcvdb.{k}" for k in needed]
    return faults


def from_text(key: str, text: str) -> Any:
    """A value typed on a command line, as the kind of its key. Raises SettingsError."""
    kind = KEYS.get(key, TEXT)
    value: Any = text
    if kind in (COUNT, PORT) and re.fullmatch(r"[+-]?\d+", text.strip()):
        value = int(text)
    elif kind == FLAG and text.strip().lower() in ("true", "false"):
        value = text.strip().lower() == "true"
    elif kind == LIST:
        value = [part.strip() for part in text.split(",") if part.strip()]
    elif key.startswith(FREE):
        try:
            value = json.loads(text)
        except ValueError:
            value = text
    fault = check(key, value)
    if fault is not None:
        raise SettingsError(f"cannot set {key}: {fault}")
    return value


def is_secret(key: str) -> bool:
    """Whether a value must not be shown."""
    return KEYS.get(key) == SECRET or re.search(r"(key|secret|token|password)$", key, re.IGNORECASE) is not None


def redact_value(key: str, value: Any) -> Any:
    """value, or for a secret its last four characters behind stars."""
    if not is_secret(key) or not isinstance(value, str):
        return value
    return "****" + (value[-4:] if len(value) >= 12 else "")


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every leaf by dotted key, secrets redacted."""
    return {key: redact_value(key, value) for key, value in flatten(config)}


def diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The redacted difference, a line each: "- key: old", "+ key: new"."""
    old, new = dict(flatten(before)), dict(flatten(after))
    lines = []
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            lines += [f"- {key}: {json.dumps(redact_value(key, old[key]), ensure_ascii=False)}"] if key in old else []
            lines += [f"+ {key}: {json.dumps(redact_value(key, new[key]), ensure_ascii=False)}"] if key in new else []
    return lines
