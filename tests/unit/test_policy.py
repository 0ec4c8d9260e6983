"""Policy by tables."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdai_supervisor.decide import policy
from tdai_supervisor.decide.model import Event, Exit
from tdai_supervisor.decide.policy import Claim, Deaths, Holder, Resident, Scene
from tdai_supervisor.decide.settings import Policy

RULES = Policy()


def deaths_every(life: float, until: float) -> tuple[int, Deaths, float]:
    """(starts, deaths, time) of a Gateway that always dies after `life` seconds, without jitter."""
    now, starts, deaths = 0.0, 1, Deaths()
    while True:
        now += life
        if now >= until:
            return starts, deaths, now
        deaths = policy.count_death(deaths, now, 0.0, RULES)
        after = policy.after_death(deaths, now, 0.0, RULES)
        if after.event is Event.GIVE_UP:
            return starts, deaths, now
        now += after.delay
        starts += now < until


def test_f03_a_child_that_dies_every_1500_ms_is_started_7_times_in_60_s() -> None:
    """The backoff table: at once, then 1, 2, 4, 8, 16 … s."""
    assert deaths_every(1.5, 60)[0] == 7


def test_f04_ten_deaths_in_ten_minutes_give_up_and_try_again_after_300_s() -> None:
    """The budget ends the backoff; one slow trial is left."""
    starts, deaths, _ = deaths_every(1.5, 3600)
    assert starts == 10
    assert policy.after_death(deaths, deaths.times[-1], 0.0, RULES) == policy.Next(Event.GIVE_UP, 300.0)


def test_a_long_ready_life_pardons_the_row() -> None:
    """After backoff_reset seconds READY the next death is a first death again."""
    deaths = Deaths((1.0, 2.0, 3.0), 3)
    assert policy.after_death(policy.count_death(deaths, 100.0, 60.0, RULES), 100.0, 0.0, RULES).event is Event.AGAIN
    assert policy.after_death(policy.count_death(deaths, 100.0, 59.9, RULES), 100.0, 0.0, RULES).event is Event.LATER


@given(st.integers(2, 200), st.floats(0, 1))
def test_waits_stay_between_initial_and_max_with_jitter(streak: int, jitter: float) -> None:
    """No row of deaths makes a wait shorter than 1 s or longer than 33 s."""
    after = policy.after_death(Deaths((0.0,), streak), 0.0, jitter, RULES)
    assert 1.0 <= after.delay <= 33.0


def test_a_slow_loop_is_a_storm_though_the_budget_never_fills() -> None:
    """Five deaths in thirty minutes, spread out, are named."""
    deaths = Deaths()
    for n in range(5):
        assert not policy.is_storm(deaths, n * 300.0)
        deaths = policy.count_death(deaths, n * 300.0, 100.0, RULES)
        assert policy.after_death(deaths, n * 300.0, 0.0, RULES).event is Event.AGAIN
    assert policy.is_storm(deaths, 1300.0)
    assert not policy.is_storm(deaths, 1900.0)


@pytest.mark.parametrize(
    ("exit_", "tail", "text", "hopeless"),
    [
        (Exit(0, None), "", "exited with code 0", False),
        (Exit(1, None), "Error: listen EADDRINUSE: address already in use", "EADDRINUSE", False),
        (Exit(1, None), "TypeError: Cannot read properties of undefined (reading 'bind')", "Node is too old", True),
        (Exit(1, None), "ENOTDIR: not a directory, mkdir '/x'", "data directory", False),
        (Exit(126, None), "", "cannot exec", True),
        (Exit(127, None), "", "cannot exec", True),
        (Exit(137, None), "", "exited with code 137", False),
        (Exit(None, signal.SIGKILL), "", "signal 9 (SIGKILL) (out of memory?)", False),
        (Exit(None, signal.SIGSEGV), "", "signal 11 (SIGSEGV)", False),
        (Exit(None, signal.SIGABRT), "FATAL ERROR: heap out of memory", "out of memory", False),
        (Exit(None, 200), "", "killed by signal 200", False),
        (Exit(None, None), "", "exit status unknown (adopted)", False),
        (Exit(None, None), "EADDRINUSE", "exit status unknown (adopted): the port is in use", False),
    ],
)
def test_f02_exit_causes(exit_: Exit, tail: str, text: str, hopeless: bool) -> None:
    """Each end has its cause in words, and only what no retry can help is hopeless."""
    cause = policy.name_exit(exit_, tail)
    assert text in cause.text
    assert cause.hopeless is hopeless


def test_an_end_that_we_asked_for_is_named_by_its_reason() -> None:
    """Our own KILL is not mistaken for the kernel's."""
    assert policy.name_exit(Exit(None, 9), asked="asked to stop").text == "asked to stop"


OURS = Resident(10, number=3, cookie="/r:default:3", holds_lease=True, listens_on=8420, on_data=True, leader=True)
OTHER = Resident(20, cookie="/other:default:1", holds_lease=True, on_data=True, leader=True)
STRAY = Resident(30, listens_on=9000, on_data=True)


@pytest.mark.parametrize(
    ("scene", "event", "pid", "external", "sweep", "move"),
    [
        (Scene(True), Event.CLEAR, None, False, (), False),
        (Scene(False, [OURS]), Event.FOUND, 10, False, (), False),
        (Scene(False, [OURS, Resident(9, number=2, holds_lease=True)]), Event.FOUND, 10, False, (), False),
        (Scene(False, [OTHER]), Event.TAKEN, None, False, (), False),
        (Scene(False, []), Event.TAKEN, None, False, (), False),
        (Scene(True, [Resident(11, number=2)]), Event.CLEAR, None, False, (11,), False),
        (Scene(True, [STRAY]), Event.FOUND, 30, True, (), False),
        (Scene(True, [Resident(31, on_data=True)]), Event.TAKEN, 31, False, (), False),
        (Scene(True, [], Holder(5, "nc -l", 0)), Event.TAKEN, None, False, (), False),
        (Scene(True, [], Holder(None, None, None)), Event.TAKEN, None, False, (), False),
        (Scene(True, [], Holder(5, "nc -l", 0), port_asked=False), Event.CLEAR, None, False, (), True),
        (Scene(True, [Resident(11, number=2)], Holder(11, "x", 0)), Event.CLEAR, None, False, (11,), False),
    ],
)
def test_claims(
    scene: Scene, event: Event, pid: int | None, external: bool, sweep: tuple[int, ...], move: bool
) -> None:
    """Adopt what is proven, sweep only what carries our cookie, leave everybody else alone."""
    claim = policy.judge_claim(scene, "/data", 8420)
    assert (claim.event, claim.pid, claim.external, claim.sweep, claim.move) == (event, pid, external, sweep, move)


residents = st.builds(
    Resident,
    pid=st.integers(1, 99),
    number=st.none() | st.integers(1, 5),
    holds_lease=st.booleans(),
    listens_on=st.none() | st.just(8420),
    on_data=st.booleans(),
    leader=st.booleans(),
)


@given(st.builds(Scene, st.booleans(), st.lists(residents, max_size=5, unique_by=lambda r: r.pid)))
def test_no_scene_harms_a_stranger(scene: Scene) -> None:
    """Whatever is seen: only cookies are swept, a held lease is never spawned over, adoption needs lease and cookie."""
    claim = policy.judge_claim(scene, "/data", 8420)
    by_pid = {r.pid: r for r in scene.residents}
    assert all(by_pid[pid].number is not None for pid in claim.sweep)
    if claim.event is Event.CLEAR:
        assert scene.lease_free
    if claim.event is Event.FOUND and not claim.external:
        found = by_pid[claim.pid or 0]
        assert found.holds_lease
        assert found.number is not None


def test_blocked_names_the_holder() -> None:
    """pid, command and uid of a foreign holder, and "unknown" where /proc hides it."""
    claim: Claim = policy.judge_claim(Scene(True, [], Holder(7, "nc -l 8420", 1000)), "/data", 8420)
    assert claim.cause == "port 8420 is taken by pid 7 (nc -l 8420), uid 1000"
    assert policy.describe_holder(Holder(None, None, None)) == "an unknown process, uid unknown"


@pytest.mark.parametrize(
    ("size", "before", "elapsed", "cut", "again", "storm"),
    [
        (0, 0, None, False, 5.0, False),
        (1000, 0, 5.0, False, 5.0, False),
        (6_000_000, 0, 5.0, True, 0.05, True),
        (4_000_000, 3_500_000, 0.1, False, 0.2, True),
    ],
)
def test_log_looks(size: int, before: int, elapsed: float | None, cut: bool, again: float, storm: bool) -> None:
    """The next look comes when the room is filled at the present rate, at most after 5 s."""
    look = policy.judge_log(size, before, elapsed, 5_000_000)
    assert (look.cut, look.storm) == (cut, storm)
    assert look.again == pytest.approx(again, rel=0.01)


@pytest.mark.parametrize(
    ("free", "total", "low"),
    [(1 << 30, 1 << 40, False), (1 << 20, 1 << 40, True), (2 << 20, 20 << 20, False), (1 << 19, 20 << 20, True)],
)
def test_low_space(free: int, total: int, low: bool) -> None:
    """64 MiB on a large disk, 5 % of a small one."""
    assert policy.low_space(free, total) is low


@pytest.mark.parametrize(
    ("age_hours", "hour", "due"),
    [(None, 12, True), (1, 3, False), (21, 3, True), (21, 12, False), (31, 12, True), (-5, 12, True)],
)
def test_snapshots_come_at_night_or_when_overdue(age_hours: float | None, hour: int, due: bool) -> None:
    """Once a night; a machine that sleeps at night gets one a day all the same; a clock set back does not stop them."""
    now = 1e9
    newest = None if age_hours is None else now - age_hours * 3600
    assert policy.snapshot_due(newest, now, hour) is due
