"""Policy: facts in, a value out. Every function here is walked by tables and by Hypothesis.

Invariants: no clock (ages and `now` are passed in, monotonic seconds); no randomness (the jitter is passed in); an
unknown fact never leads to harm.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tdai_supervisor.decide.model import Event, Exit
from tdai_supervisor.decide.settings import GatewaySettings, Policy

STORM_DEATHS, STORM_WINDOW = 5, 1800.0  # a loop too slow to fill the budget is still named


@dataclass(frozen=True, slots=True)
class Deaths:
    """Counted deaths of one Gateway: their times and how many in a row since it last stayed READY for backoff_reset."""

    times: tuple[float, ...] = ()
    streak: int = 0


def count_death(deaths: Deaths, now: float, ready_for: float, policy: Policy) -> Deaths:
    """deaths and one more, of a life that was READY for ready_for seconds; older than both windows are dropped."""
    keep = max(policy.death_window, STORM_WINDOW)
    times = (*(t for t in deaths.times if now - t < keep), now)
    return Deaths(times, 1 if ready_for >= policy.backoff_reset else deaths.streak + 1)


@dataclass(frozen=True, slots=True)
class Next:
    """What follows a death: AGAIN, LATER (after delay seconds) or GIVE_UP (one trial after delay seconds)."""

    event: Event
    delay: float = 0.0


def after_death(deaths: Deaths, now: float, jitter: float, policy: Policy, hopeless: bool = False) -> Next:
    """The first death of a row starts again at once, each further one waits 1, 2, 4 … backoff_max seconds.

    jitter is 0..1 and lengthens the wait by up to 10 %. death_budget deaths in death_window, or a cause that no retry
    can help (hopeless), give up.
    """
    recent = sum(now - t < policy.death_window for t in deaths.times)
    if hopeless or recent >= policy.death_budget:
        return Next(Event.GIVE_UP, policy.trial_interval)
    if deaths.streak <= 1:
        return Next(Event.AGAIN)
    wait = min(policy.backoff_initial * 2.0 ** min(deaths.streak - 2, 32), policy.backoff_max)
    return Next(Event.LATER, wait * (1 + 0.1 * jitter))


def is_storm(deaths: Deaths, now: float) -> bool:
    """Whether it dies often enough to be named although the budget never fills: 5 deaths in 30 minutes."""
    return sum(now - t < STORM_WINDOW for t in deaths.times) >= STORM_DEATHS


@dataclass(frozen=True, slots=True)
class Silence:
    """What is known about a live Gateway that has not answered. All in seconds.

    answer_age: since the last complete answer (or since it was READY to be asked). probe_age: since the oldest probe
    that still has no answer began, None where none is open. cpu_share: share of one core its tree used since then, None
    where unknown. blocked: a thread of it waits for the disk (state D). traced: a debugger holds it (state t).
    """

    answer_age: float
    probe_age: float | None
    cpu_share: float | None = None
    blocked: bool = False
    traced: bool = False


BUSY_SHARE = 0.10  # of one core
PROBE_SHARE = 0.72  # of hang_after: the design's two thirds, and 5 % so that a block of just that length is no race
LATE_LOOP = 1.0  # s our own loop may be late before a silence may have been ours


def is_busy(silence: Silence) -> bool:
    """Whether the silence has an excuse that busy_limit bounds; unknown CPU is no excuse, only no proof."""
    return silence.blocked or (silence.cpu_share is not None and silence.cpu_share >= BUSY_SHARE)


def judge_silence(silence: Silence, settings: GatewaySettings) -> Event | None:
    """UNFIT (hung: end it), SILENT (alive, not answering: UNREADY) or None (no verdict yet)."""
    if silence.probe_age is None or silence.answer_age < settings.hang_after:
        return None
    if silence.probe_age < settings.hang_after * PROBE_SHARE:
        return None
    if silence.traced:
        return Event.SILENT
    if is_busy(silence) and silence.answer_age < settings.busy_limit:
        return Event.SILENT
    return Event.UNFIT


def next_probe_in(settings: GatewaySettings) -> float:
    """Seconds between the end of a probe and the next one."""
    return min(settings.probe_interval, settings.hang_after / 3)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a process ended, in words, and whether trying again is hopeless."""

    text: str
    hopeless: bool = False


_TAIL_CAUSES: tuple[tuple[re.Pattern[str], str, bool], ...] = (
    (re.compile(r"EADDRINUSE|Address already in use", re.I), "the port is in use (EADDRINUSE)", False),
    (re.compile(r"EADDRNOTAVAIL|ENOTFOUND|Cannot assign requested address", re.I), "the host cannot be bound", False),
    (re.compile(r"reading 'bind'|Unsupported engine|requires? Node", re.I), "this Node is too old", True),
    (re.compile(r"NODE_MODULE_VERSION|ERR_DLOPEN_FAILED", re.I), "a native module was built for another Node", True),
    (re.compile(r"heap out of memory|Cannot allocate memory|MemoryError|bad_alloc", re.I), "out of memory", False),
    (re.compile(r"ENOSPC|No space left on device", re.I), "the disk is full", False),
    (re.compile(r"ENOTDIR|data directory", re.I), "the data directory cannot be used", False),
    (re.compile(r"EACCES|EROFS|Read-only file system|Permission denied", re.I), "permission denied", False),
    (re.compile(r"ERR_MODULE_NOT_FOUND|Cannot find module|ModuleNotFoundError", re.I), "a module is missing", False),
)
CANNOT_EXEC = (126, 127)  # the shell's words for "not executable" and "not found"


def name_exit(exit_: Exit, tail: str = "", oom_killed: bool = False, asked: str | None = None) -> Cause:
    """The cause of an exit from its status and the last log lines. asked: why we ended it ourselves, if we did.

    An unknown status stays unknown: nothing is invented from the log alone, the log only explains.
    """
    if asked:
        return Cause(asked)
    why, hopeless = next(((text, fatal) for pattern, text, fatal in _TAIL_CAUSES if pattern.search(tail)), ("", False))
    said = f": {why}" if why else ""
    if exit_.signal is not None:
        name = signal.Signals(exit_.signal).name if exit_.signal in set(signal.Signals) else str(exit_.signal)
        guess = ": out of memory" if oom_killed else (" (out of memory?)" if exit_.signal == signal.SIGKILL else said)
        return Cause(f"killed by signal {exit_.signal} ({name}){guess}")
    if exit_.code is None:
        return Cause("exit status unknown (adopted)" + said)
    if exit_.code in CANNOT_EXEC:
        return Cause(f"exited with code {exit_.code}: cannot exec", hopeless=True)
    return Cause(f"exited with code {exit_.code}{said}", hopeless=hopeless and exit_.code != 0)


@dataclass(frozen=True, slots=True)
class Resident:
    """A live process of our uid seen near a Gateway's data directory or port."""

    pid: int
    number: int | None = None  # spawn number in its cookie, where the cookie is of this root and name
    cookie: str | None = None  # its cookie, whoever's it is
    holds_lease: bool = False
    listens_on: int | None = None  # a TCP port it listens on, the asked one first
    on_data: bool = False  # a server whose environment or open files name the data directory
    leader: bool = False  # of its session


@dataclass(frozen=True, slots=True)
class Holder:
    """Who listens on a port: pid, command and uid are None where /proc hides them."""

    pid: int | None
    command: str | None
    uid: int | None


@dataclass(frozen=True, slots=True)
class Scene:
    """What is true before a spawn. lease_free: nobody holds the flock. residents: only live processes of our uid."""

    lease_free: bool
    residents: Sequence[Resident] = ()
    port_holder: Holder | None = None
    port_asked: bool = True


@dataclass(frozen=True, slots=True)
class Claim:
    """The verdict on a scene: CLEAR (move: to another port; sweep: end these leftovers first), FOUND pid, or TAKEN."""

    event: Event
    cause: str = ""
    pid: int | None = None
    port: int | None = None  # where the external one listens
    external: bool = False
    sweep: tuple[int, ...] = ()
    move: bool = False


def judge_claim(scene: Scene, data_dir: str, port: int) -> Claim:
    """Adopt what is proven ours, leave alone what is not, spawn only where nobody lives.

    A held lease means a living Gateway: ours by cookie and by the descriptor it holds, or somebody's whom we name.
    A free lease means no Gateway of any supervisor lives there: leftovers with our cookie are swept.
    """
    ours = [r for r in scene.residents if r.number is not None]
    if not scene.lease_free:
        keepers = sorted((r for r in ours if r.holds_lease), key=lambda r: (r.leader, r.number or 0))
        if keepers:
            return Claim(Event.FOUND, f"adopted pid {keepers[-1].pid} by lease and cookie", keepers[-1].pid)
        others = [r for r in scene.residents if r.holds_lease]
        who = f"Gateway {_describe_owner(others[0])}" if others else "a process that cannot be seen"
        return Claim(Event.TAKEN, f"data directory {data_dir} is in use by the {who}")
    leftovers = tuple(r.pid for r in ours)
    strangers = [r for r in scene.residents if r.number is None and r.on_data]
    if strangers:
        first = max(strangers, key=lambda r: (r.listens_on == port, r.listens_on is not None))
        text = f"data directory {data_dir} is in use by pid {first.pid}{_at_port(first)}, which no supervisor started"
        external = first.listens_on is not None
        return Claim(Event.FOUND if external else Event.TAKEN, text, first.pid, first.listens_on, external)
    holder = scene.port_holder
    if holder is None or holder.pid in leftovers:
        return Claim(Event.CLEAR, sweep=leftovers)
    if not scene.port_asked:
        return Claim(Event.CLEAR, sweep=leftovers, move=True)
    return Claim(Event.TAKEN, f"port {port} is taken by {describe_holder(holder)}")


def _describe_owner(resident: Resident) -> str:
    """ "work of /root, pid 7, port 8421", as far as it shows."""
    root, _, rest = (resident.cookie or "").rpartition(":")[0].rpartition(":")
    who = f"{rest} of {root}, " if root else ""
    return f"{who}pid {resident.pid}{_at_port(resident)}"


def _at_port(resident: Resident) -> str:
    return f", port {resident.listens_on}" if resident.listens_on is not None else ""


def describe_holder(holder: Holder) -> str:
    """ "pid 7 (nc -l), uid 1000", with "unknown" for what /proc hides."""
    pid = "an unknown process" if holder.pid is None else f"pid {holder.pid} ({holder.command or 'unknown command'})"
    return f"{pid}, uid {'unknown' if holder.uid is None else holder.uid}"


LOG_LOOK = 5.0  # s between looks at a quiet log
STORM_RATE = 1024 * 1024  # bytes a second over a whole look: somebody writes as fast as he can


@dataclass(frozen=True, slots=True)
class LogLook:
    """What to do about a log: cut it now, come back after `again` seconds, name a storm."""

    cut: bool
    again: float
    storm: bool


def judge_log(size: int, before: int, elapsed: float | None, cap: int) -> LogLook:
    """size bytes now, `before` at the last look elapsed seconds ago (None: never looked), cap bytes allowed.

    A look every 5 s would let 50 MB/s add 250 MB: the next one comes when the room is filled at the present rate.
    """
    rate = max(0, size - before) / elapsed if elapsed else 0.0
    room = max(0, cap - size)
    again = min(LOG_LOOK, max(0.05, room / rate)) if rate > 0 else LOG_LOOK
    return LogLook(size > cap, again, rate >= STORM_RATE)


def low_space(free: int, total: int) -> bool:
    """Whether a disk is too full to promise a write: less than 64 MiB, or than 5 % of a small one."""
    return free < min(64 * 1024 * 1024, total // 20)


NIGHT = range(2, 5)  # local hours


def snapshot_due(newest: float | None, now: float, hour: int) -> bool:
    """Whether a snapshot is to be made: in the night if the newest is older than 20 hours, else if older than 30.

    newest and now: seconds since the epoch; a newest in the future (the clock was set back) counts as old.
    """
    if newest is None or newest > now:
        return True
    return now - newest > (20 if hour in NIGHT else 30) * 3600.0
