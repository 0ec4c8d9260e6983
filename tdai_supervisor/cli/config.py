"""Verbs about the Gateway's configuration.

Invariants: what is written was validated first; a dry run writes nothing and shows the redacted difference; no secret
is printed; a running Gateway is only touched with --restart.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from tdai_supervisor import client, gwconfig
from tdai_supervisor.cli import envelope
from tdai_supervisor.cli.envelope import Result, failure
from tdai_supervisor.decide import paths, settings
from tdai_supervisor.decide.checks import SettingsError
from tdai_supervisor.decide.settings import GatewaySettings

VDB_KEYS = ("url", "username", "apiKey", "database", "alias", "embeddingModel", "caPemPath")


def run(root: str, a: Namespace) -> Result:
    """The verb `config ACTION`."""
    try:
        gateway = _gateway(root, a.gateway)
        path = gwconfig.find(gateway.config_file)
        return _ACTIONS[a.action](root, gateway, path, a)
    except SettingsError as error:
        return failure("config", "config", str(error), None, envelope.FAILED)
    except PermissionError as error:
        message = f"cannot use {error.filename}: {error.strerror}"
        return failure("config", "not-permitted", message, "try as the user who owns it", envelope.NOT_PERMITTED)
    except OSError as error:
        return failure("config", "io", f"cannot use {error.filename}: {error.strerror}")


def _gateway(root: str, name: str) -> GatewaySettings:
    """The Gateway whose file is meant: as the daemon sees it, else as this shell would start it."""
    chosen = client.configured(root)
    if name not in chosen.gateways:
        raise SettingsError(f"cannot find a Gateway named {name!r}: configured are {', '.join(chosen.gateways)}")
    return chosen.gateways[name]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"cannot read {path}: it is not UTF-8 at byte {error.start}; it was left as it is"
        ) from None


def _apply(root: str, path: str, changes: Mapping[str, Any], a: Namespace) -> Result:
    """Validate, then write (or show) the changed file, then check and restart where asked."""
    before = _read(path)
    after = gwconfig.patch(path, before, changes)
    old, new = gwconfig.parse(path, before), gwconfig.parse(path, after)
    faults = [f for f in gwconfig.validate(new) if f not in gwconfig.validate(old)]
    if faults:
        raise SettingsError(f"cannot write {path}: {'; '.join(faults)}")
    data: dict[str, Any] = {"path": path, "diff": gwconfig.diff(old, new), "written": False, "warnings": []}
    if getattr(a, "check", False):
        trouble = _check(new, _kind(a))
        if trouble is not None:
            return Result("config", data, envelope.FAILED, [{"code": "check", "message": trouble, "hint": None}])
    if a.dry_run:
        return Result("config", data)
    if after != before:
        from tdai_supervisor.host import disk

        disk.private_dir(os.path.dirname(path))
        disk.write(path, after, durable=True)
        data["written"] = True
    if a.restart:
        from tdai_supervisor.cli import lifecycle

        done = lifecycle.restart(root, a.gateway, daemon=False, timeout=None)
        return Result("config", data, done.exit_code, done.errors)
    return Result("config", data)


def _kind(a: Namespace) -> str:
    return "embedding" if a.action == "embedding" else "llm"


def _check(config: Mapping[str, Any], what: str) -> str | None:
    """One cheap call to the LLM or embedding endpoint; what went wrong, with the HTTP code, or None."""
    from tdai_supervisor.host import outside

    node = gwconfig.get(config, "memory.embedding" if what == "embedding" else "llm") or {}
    if what == "embedding" and node.get("provider") == "none":
        return None
    call = outside.check_embedding if what == "embedding" else outside.check_llm
    return call(node.get("baseUrl") or "", node.get("apiKey") or "", node.get("model") or "", node.get("proxyUrl"))


def _secret(given: str | None, variable: str | None) -> str | None:
    """A key from the command line, from stdin ("-") or from an environment variable."""
    if variable is not None:
        value = os.environ.get(variable, "")
        if not value:
            raise SettingsError(f"cannot read the key: the variable {variable} is empty or not set")
        return value
    if given == "-":
        return sys.stdin.readline().rstrip("\n")
    return given


def _set_all(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Checked changes from option texts; what was not given is left alone."""
    return {f"{prefix}.{k}": gwconfig.from_text(f"{prefix}.{k}", v) for k, v in values.items() if v is not None}


def _llm(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    key = _secret(a.api_key, a.api_key_env)
    changes = _set_all("llm", {"apiKey": key, "baseUrl": a.base_url, "model": a.model})
    result = _apply(root, path, _something(changes, "--api-key, --base-url or --model"), a)
    hermes = os.environ.get("MEMORY_TENCENTDB_MODE", "").strip().lower() == "hermes"
    if result.data and result.data["written"] and hermes:
        result.data["env_file"] = _write_fragment(gwconfig.parse(path, _read(path)))
    return result


def _write_fragment(config: Mapping[str, Any]) -> str:
    """The env.d file that Hermes' own supervision reads: the LLM's values, quoted for a shell, 0600."""
    import shlex

    from tdai_supervisor.host import disk

    home = os.path.expanduser(os.environ.get("HERMES_HOME", "").strip() or "~/.hermes")
    path = os.path.join(home, "env.d", "memory-tencentdb-llm.sh")
    names = {"llm.apiKey": "API_KEY", "llm.baseUrl": "BASE_URL", "llm.model": "MODEL"}
    lines = ["# Written by memory-tencentdb-ctl config llm --hermes"]
    for key, name in names.items():
        if isinstance(value := gwconfig.get(config, key), str):
            lines += [f"export {prefix}_LLM_{name}={shlex.quote(value)}" for prefix in ("TDAI", "MEMORY_TENCENTDB")]
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    disk.write(path, "\n".join(lines) + "\n", durable=True)
    return path


def _something(changes: dict[str, Any], options: str) -> dict[str, Any]:
    if not changes:
        raise SettingsError(f"nothing to set: give {options}")
    return changes


def _embedding(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    key = _secret(a.api_key, a.api_key_env)
    values = {"provider": a.provider, "apiKey": key, "baseUrl": a.base_url, "model": a.model}
    values |= {"dimensions": a.dimensions, "proxyUrl": a.proxy_url}
    changes = _something(_set_all("memory.embedding", values), "--provider and what it needs")
    if a.provider is not None:
        changes["memory.embedding.enabled"] = a.provider != "none"
    return _apply(root, path, changes, a)


def _vdb(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    key = _secret(a.api_key, a.api_key_env)
    values = {"url": a.url, "username": a.username, "apiKey": key, "database": a.database, "alias": a.alias}
    values |= {"embeddingModel": a.embedding_model, "caPemPath": a.ca_pem and os.path.abspath(a.ca_pem)}
    changes = _something(_set_all("memory.tcvdb", values), "--url, --api-key and --database")
    if not a.no_set_backend:
        changes["memory.storeBackend"] = "tcvdb"
    return _apply(root, path, changes, a)


def _vdb_off(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    changes: dict[str, Any] = {"memory.storeBackend": "sqlite"}
    if a.purge_creds:
        changes |= {f"memory.tcvdb.{key}": None for key in VDB_KEYS}
    return _apply(root, path, changes, a)


def _vdb_on(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    return _apply(root, path, {"memory.storeBackend": "tcvdb"}, a)


def _set(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    value = _secret(a.value, None) if gwconfig.is_secret(a.key) else a.value
    return _apply(root, path, {a.key: gwconfig.from_text(a.key, str(value))}, a)


def _unset(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    return _apply(root, path, {a.key: None}, a)


def _get(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    value = gwconfig.get(gwconfig.parse(path, _read(path)), a.key)
    if value is None:
        return failure("config", "not-set", f"cannot show {a.key}: it is not set in {path}")
    leaves = gwconfig.redact({a.key: value}) if not isinstance(value, Mapping) else gwconfig.redact(value)
    return Result("config", {"path": path, "values": leaves})


def _show(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    """Every value in force, with its source: the environment of the daemon (else of this shell) beats the file."""
    file = gwconfig.parse(path, _read(path))
    values = {k: (v, path) for k, v in gwconfig.redact(file).items()}
    ours = client.read_object(paths.paying(root, gateway.name)) or {}
    for key in ours.keys() & values.keys():
        if ours[key] == gwconfig.get(file, key):
            values[key] = (values[key][0], "memory-tencentdb-ctl: it pays on sqlite without embeddings")
    env = client.running_environment(root)
    for name, (value, source) in language_model(root, env, file).items():
        variable = name if name in env else name.replace("TDAI_", "MEMORY_TENCENTDB_", 1)
        key = gwconfig.LLM_KEYS.get(name, name)
        if source != "file":
            profile = settings.load(root, "", env).profile_env
            values[key] = (gwconfig.redact_value(key, value), variable if source == "environment" else profile)
    shown = {k: {"value": v, "origin": o} if a.origin else v for k, (v, o) in sorted(values.items())}
    return Result("config", {"path": path, "values": shown})


def unknown_to_daemon(root: str) -> list[str]:
    """The names of ours that this shell sets and the living daemon does not run by, as it was started before."""
    env = client.running_environment(root)
    if env is os.environ:
        return []
    names = [name for name in os.environ if settings.ENVIRONMENT_NAMES.fullmatch(name)]
    return sorted(name for name in names if name != "MEMORY_TENCENTDB_ROOT" and os.environ[name] != env.get(name))


def language_model(root: str, env: Mapping[str, str], file: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """What is in force for the language model: name -> (value, source), see gwconfig.llm."""
    chosen = settings.load(root, "", env)
    profile = settings.shell_exports(client.read_text_whole(chosen.profile_env) or "")
    return gwconfig.llm(chosen.llm, file, settings.llm_names(profile))


def _path(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    return Result("config", {"path": path})


def _validate(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    text = _read(path)
    faults = gwconfig.validate(gwconfig.parse(path, text))
    if text and os.path.exists(path) and os.stat(path).st_mode & 0o077:
        faults.append(f"{path} can be read by others; try `chmod 600 {path}`")
    errors = [{"code": "invalid", "message": fault, "hint": None} for fault in faults]
    return Result("config", {"path": path, "valid": not faults}, envelope.FAILED if faults else envelope.OK, errors)


def _import_env(root: str, gateway: GatewaySettings, path: str, a: Namespace) -> Result:
    """Write what this shell's environment says about the LLM into the file, where the daemon reads it for ever."""
    found: dict[str, Any] = {}
    for key, variable in {"apiKey": "API_KEY", "baseUrl": "BASE_URL", "model": "MODEL"}.items():
        for name in (f"TDAI_LLM_{variable}", f"MEMORY_TENCENTDB_LLM_{variable}"):
            if os.environ.get(name, "").strip():
                found[key] = os.environ[name].strip()
                break
    options = "TDAI_LLM_API_KEY, _BASE_URL or _MODEL in the environment"
    return _apply(root, path, _something(_set_all("llm", found), options), a)


_ACTIONS = {
    "llm": _llm,
    "embedding": _embedding,
    "vdb": _vdb,
    "vdb-off": _vdb_off,
    "vdb-on": _vdb_on,
    "set": _set,
    "unset": _unset,
    "get": _get,
    "show": _show,
    "path": _path,
    "validate": _validate,
    "import-env": _import_env,
}
