"""What a Gateway looks like from outside: status data and the endpoint record. No decisions, no waiting."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tdai_supervisor.decide import paths
from tdai_supervisor.decide.model import Origin, State
from tdai_supervisor.engine.gateway import Gateway
from tdai_supervisor.host import process
from tdai_supervisor.host.probe import client_host


def rfc3339(wall: float) -> str:
    """Seconds since the epoch as RFC 3339 UTC with milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(wall)) + f".{int(wall % 1 * 1000):03d}Z"


def url(gateway: Gateway) -> str:
    """Where clients reach it."""
    host = client_host(gateway.settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{gateway.port}"


def status(gateway: Gateway, drift: list[str], installed: str | None) -> dict[str, Any]:
    """One element of status data `gateways`, by the frozen contract."""
    answer, now = gateway.health.answer, asyncio.get_running_loop().time()
    waiting = gateway.state is State.BACKOFF and gateway.next_try is not None
    last = gateway.last_exit
    latency = gateway.health.latency
    return {
        "name": gateway.name,
        "want": str(gateway.want),
        "state": str(gateway.state),
        "origin": str(gateway.origin) if gateway.origin else None,
        "kind": gateway.kind,
        "kind_cause": gateway.kind_cause,
        "version": {"running": gateway.version if gateway.life else None, "installed": installed},
        "pid": gateway.shown.pid if gateway.shown else None,
        "host": gateway.settings.host,
        "port": gateway.port,
        "url": url(gateway),
        "data_dir": gateway.settings.data_dir,
        "config_file": gateway.settings.config_file,
        "since": rfc3339(gateway.since),
        "cause": gateway.cause,
        "restarts": gateway.restarts,
        "last_exit": last
        and {"code": last.exit.code, "signal": last.exit.signal, "cause": last.cause, "at": rfc3339(last.at)},
        "backoff_s": round(max(0.0, (gateway.next_try or now) - now), 1) if waiting else None,
        "health": {
            "status": str(answer.body.get("status", answer.status)) if answer else None,
            "latency_ms": round(latency * 1000, 1) if latency is not None else None,
            "generation": answer.generation if answer else None,
            "slow": gateway.health.slow,
            "failure": gateway.health.failure if gateway.state is not State.STOPPED else None,
        },
        "hold": gateway.hold,
        "drift": drift,
        "memory_bytes": gateway.life.memory if gateway.life else None,
        "guards": gateway.guards.describe(),
        "logs": dict(zip(("stdout", "stderr"), gateway.log_paths, strict=True)),
    }


def record(gateway: Gateway, daemon: dict[str, Any]) -> dict[str, Any]:
    """The endpoint record; seq must have been raised by the caller for this change."""
    shown, answer = gateway.shown, gateway.health.answer
    keyed = gateway.settings.auth == "auto" and gateway.origin is not Origin.EXTERNAL
    return {
        "schema": 1,
        "seq": gateway.seq,
        "name": gateway.name,
        "state": str(gateway.state),
        "host": gateway.settings.host,
        "port": gateway.port,
        "url": url(gateway),
        "pid": shown.pid if shown else None,
        "start_ticks": shown.ticks if shown else None,
        "boot_id": process.boot_id(),
        "pid_ns": process.pid_namespace(),
        "uid": shown.uid if shown else None,
        "kind": gateway.kind,
        "generation": answer.generation if answer else None,
        "data_dir": gateway.settings.data_dir,
        "since": rfc3339(gateway.since),
        "cause": gateway.cause,
        "hold": gateway.hold,
        "api_key_file": paths.key(gateway.root, gateway.name) if keyed else None,
        "daemon": {"pid": daemon["pid"], "start_ticks": daemon["start_ticks"]},
        "origin": str(gateway.origin) if gateway.origin else None,
        "spawn_number": gateway.spawn_number,
        "restarts": gateway.restarts,
        "kind_cause": gateway.kind_cause,
        "launched": gateway.launched,
        "version": gateway.version,
    }
