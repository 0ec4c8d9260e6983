"""The hang rule on a simulated clock: who is restarted, who is not, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdai_supervisor.decide.model import Event
from tdai_supervisor.decide.settings import GatewaySettings
from tdai_supervisor.decide.window import Excuse, Window

INF = float("inf")


def gateway(**changes: float) -> GatewaySettings:
    return GatewaySettings("default", "embedded", "127.0.0.1", None, "/d", "/d/c", "/d/l", **changes)  # type: ignore[arg-type]


def simulate(
    answer: Callable[[float], float],
    until: float = 300.0,
    excuse: Callable[[float, float], Excuse] = lambda now, since: Excuse(0.0),
    sleeps: Callable[[float], float] = lambda now: 0.0,
    **settings: float,
) -> list[tuple[float, Event]]:
    """Verdicts over time. answer(t): seconds until a probe of t is answered. sleeps(t): how late a wake at t is."""
    config = gateway(**settings)
    now, window, told = 0.0, Window(config, 0.0), []

    def wait(seconds: float) -> None:
        nonlocal now
        due = now + seconds
        now = due + sleeps(due)
        window.woke(now, due)

    while now < until:
        window.probe(now)
        arrives = now + answer(now)
        while now < arrives:
            look = window.next_look(now)
            if now + look >= arrives:
                wait(arrives - now)
                break
            wait(look)
            if now >= arrives:
                break
            verdict = window.verdict(now, lambda since: excuse(now, since))
            if verdict is not None:
                told.append((now, verdict[0]))
                if verdict[0] is Event.UNFIT:
                    return told
            if now > until:
                return told
        window.answered(now)
        wait(window.pause())
    return told


def test_answers_in_5_s_are_slow_and_never_acted_on() -> None:
    """A 5 s /health for an hour: no verdict at all."""
    assert simulate(lambda t: 5.0, 3600) == []


def test_a_block_of_10_6_s_is_survived() -> None:
    """The longest legitimate event-loop block that was measured."""
    assert simulate(lambda t: 10.6 if 60 < t < 70 else 0.01, 600) == []


@pytest.mark.parametrize("phase", [0.0, 1.0, 2.5, 4.9])
def test_f05_silence_is_hung_within_10_to_16_s(phase: float) -> None:
    """A Gateway that falls silent at any phase of the probe interval is ended 10 to 16 s later."""
    silent = 50.0 + phase
    told = simulate(lambda t: INF if t >= silent else 0.01)
    assert [e for _, e in told] == [Event.UNFIT]
    assert 10.0 <= told[0][0] - silent <= 16.0


def test_hang_after_2_is_seen_within_4_s() -> None:
    """A shorter hang_after shortens probes too."""
    told = simulate(lambda t: INF if t >= 50 else 0.01, hang_after=2.0)
    assert 1.0 <= told[0][0] - 50 <= 4.0


def test_blocks_of_10_s_one_after_the_other_are_survived() -> None:
    """An event loop that blocks for 10 s at every probe, for two minutes, is not restarted."""
    assert simulate(lambda t: 10.01 if 60 < t < 180 else 0.01, 600) == []


def test_a_dripping_answer_is_no_answer() -> None:
    """Bytes without an end are silence: what counts is a complete answer."""
    assert simulate(lambda t: INF)[-1][1] is Event.UNFIT


def test_cpu_burn_is_excused_until_busy_limit() -> None:
    """Busy is not dead: UNREADY first, and ended only after busy_limit."""
    told = simulate(lambda t: INF if t >= 50 else 0.01, 400, lambda now, since: Excuse(0.9))
    events = [e for _, e in told]
    assert events[0] is Event.SILENT
    assert events[-1] is Event.UNFIT
    assert 114.0 <= told[-1][0] - 50 <= 121.0


def test_a_thread_in_d_is_busy() -> None:
    """Waiting for a disk is not being dead."""
    told = simulate(lambda t: INF if t >= 50 else 0.01, 120, lambda now, since: Excuse(0.0, blocked=True))
    assert {e for _, e in told} == {Event.SILENT}


def test_a_debugger_is_never_hung() -> None:
    """A traced process is alive for as long as it is traced."""
    told = simulate(lambda t: INF if t >= 50 else 0.01, 3600, lambda now, since: Excuse(0.0, traced=True))
    assert {e for _, e in told} == {Event.SILENT}


def test_our_own_late_loop_is_not_their_silence() -> None:
    """If we slept 8 s at every second wake, nothing they did is proven."""
    assert (
        simulate(lambda t: 9.0 if 50 < t < 60 else 0.01, 300, sleeps=lambda due: 8.0 if 50 < due < 100 else 0.0) == []
    )


def test_f22_a_suspend_of_8_hours_restarts_nobody() -> None:
    """After a gap the window starts again."""
    assert simulate(lambda t: 0.5, 40_000, sleeps=lambda due: 28_800.0 if 100 < due < 105 else 0.0) == []


def test_f21_one_lost_probe_in_three_for_a_day_restarts_nobody() -> None:
    """Single losses of up to hang_after's two thirds are no hang; one real silence is exactly one."""
    assert simulate(lambda t: 9.0 if int(t / 5) % 3 == 0 else 0.01, 86_400) == []


def test_startup_has_its_own_limit() -> None:
    """A boot of 14 s on a loaded machine is fine; startup_timeout is what ends a silent one."""
    assert simulate(lambda t: 14.0 if t < 1 else 0.01, 100) == []
    told = simulate(lambda t: INF)
    assert told == [(pytest.approx(60.0, abs=0.1), Event.UNFIT)]


def test_starting_probes_come_fast_and_then_slower() -> None:
    """The first probes find a Gateway that boots in milliseconds; later ones do not spin."""
    window = Window(gateway(), 0.0)
    pauses = [window.pause() for _ in range(20)]
    assert pauses[0] <= 0.001
    assert pauses == sorted(pauses)
    assert pauses[-1] == 0.1


@given(st.lists(st.floats(0.001, 9.9), min_size=1, max_size=30))
def test_no_answer_below_10_s_is_ever_hung(latencies: list[float]) -> None:
    """Whatever the order of latencies under two thirds of hang_after: no verdict."""
    order = iter(latencies * 1000)
    assert simulate(lambda t: next(order), 500) == []
