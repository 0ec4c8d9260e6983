"""What the daemon counts, as OpenMetrics text (https://prometheus.io/docs/specs/om/open_metrics_spec/)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tdai_supervisor.decide.model import State
from tdai_supervisor.engine.gateway import Gateway
from tdai_supervisor.engine.spools import Spool

Sample = tuple[Mapping[str, str], float]


def text(gateways: Iterable[Gateway], now: float, spools: Iterable[Spool], attached: Mapping[str, int]) -> str:
    """The whole exposition; now is loop time; attached: sessions by profile."""
    every, spools = list(gateways), list(spools)
    lines: list[str] = []

    def family(name: str, kind: str, help_: str, samples: Iterable[Sample]) -> None:
        lines.append(f"# TYPE {name} {kind}")
        lines.append(f"# HELP {name} {help_}")
        suffix = "_total" if kind == "counter" else ""
        lines.extend(f"{name}{suffix}{_labels(labels)} {value:g}" for labels, value in samples)

    def each(value: str) -> dict[str, str]:
        return {"gateway": value}

    family("tdai_gateway_up", "gauge", "1 while READY", [(each(g.name), g.state is State.READY) for g in every])
    states = [({"gateway": g.name, "state": str(s)}, g.state is s) for g in every for s in State]
    family("tdai_gateway_state", "gauge", "1 for the present state", states)
    starts = [({"gateway": g.name, "cause": cause}, n) for g in every for cause, n in g.starts.items()]
    family("tdai_gateway_starts", "counter", "Spawns by cause", starts)
    probes = [(each(g.name), g.health.latency) for g in every if g.health.latency is not None]
    family("tdai_gateway_probe_seconds", "gauge", "Latency of the last complete answer", probes)
    waits = [(each(g.name), max(0.0, g.next_try - now) if g.next_try is not None else 0.0) for g in every]
    family("tdai_gateway_backoff_seconds", "gauge", "Until the next try", waits)
    memory = [(each(g.name), g.life.memory) for g in every if g.life is not None and g.life.memory is not None]
    family("tdai_gateway_memory_bytes", "gauge", "Resident memory of the tree", memory)
    family("tdai_adoptions", "counter", "Gateways adopted by this daemon", [(each(g.name), g.adoptions) for g in every])
    lost = [(each(g.name), sum(log.lost for log in g.guards.logs.values())) for g in every]
    family("tdai_gateway_log_lost_bytes", "counter", "Log bytes that no backup holds", lost)
    waiting = [(_where(s), s.pending_bytes) for s in spools]
    family("tdai_spool_pending_bytes", "gauge", "Bytes of the segments that are not put away yet", waiting)
    counted = [({**_where(s), "state": state}, n) for s in spools for state, n in s.counts.items()]
    family("tdai_spool_records", "counter", "Records of a spool by what became of them", counted)
    letters = [(_where(s), s.letters) for s in spools]
    family("tdai_spool_dead_letters", "gauge", "Dead letters that are kept", letters)
    sessions = [({"profile": profile}, count) for profile, count in attached.items()]
    family("tdai_attached_sessions", "gauge", "Sessions that are attached", sessions)
    return "\n".join([*lines, "# EOF", ""])


def _where(spool: Spool) -> dict[str, str]:
    return {"profile": spool.profile, "path": spool.path}


def _labels(labels: Mapping[str, str]) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{key}="{quoted(value)}"' for key, value in labels.items()) + "}"
