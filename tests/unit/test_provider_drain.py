"""Delivery step by step, with a clock and a Gateway that do what they are told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from memory_tencentdb.aside import doctor, pacing
from memory_tencentdb.aside.drainer import Drainer
from memory_tencentdb.endpoint import Away
from memory_tencentdb.gateway import Health, Reply
from memory_tencentdb.spool import Record, Spool

OK = Reply(200, {}, {"l0_recorded": 2})
DROPPED = Reply(200, {}, {"l0_recorded": 0})
BOOM = Reply(500, {}, {"error": "boom"})


def http(status: int, **headers: str) -> Reply:
    """An answer with that status."""
    return Reply(status, headers, {"error": "told to"})


class Told:
    """Endpoint and client in one: answers by a plan, and keeps what it was asked."""

    def __init__(self, generation: str = "embedded") -> None:
        capabilities = frozenset({"idempotency-key", "session-flush"} if generation == "embedded" else ())
        self.is_healthy: Health | Away = Health(generation, False, capabilities)
        self.plan: Callable[[Mapping[str, Any]], Reply] = lambda body: OK
        self.stored: bool | None = False
        self.hold = ""
        self.change = 0
        self.sent: list[str] = []
        self.keys: list[str] = []
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.looked = 0
        self.endpoint = self

    def changes(self) -> object:
        return self.change

    def target(self) -> Any:
        return self

    def held(self) -> Away | None:
        return Away("hold", self.hold) if self.hold else None

    def health(self, seconds: float = 0.0) -> Health:
        self.looked += 1
        if isinstance(self.is_healthy, Away):
            raise self.is_healthy
        return self.is_healthy

    def capture(self, body: Mapping[str, Any], idempotency_key: str) -> Reply:
        self.sent.append(body["user_content"])
        self.keys.append(idempotency_key)
        return self.plan(body)

    def holds(self, user: str, assistant: str, session: str, since: float) -> bool | None:
        self.asked.append(user)
        return self.stored

    def search(self, path: str, body: Mapping[str, Any], deadline: float = 0.0) -> Reply:
        return Reply(200, {}, {"results": "", "total": 0})

    def end_session(self, session: str) -> Reply:
        self.ended.append(session)
        return Reply(200, {}, {"flushed": True})


class Bench:
    """A spool, a drainer, a Gateway that is told what to do, and the time."""

    def __init__(self, path: Path, generation: str = "embedded") -> None:
        self.now = 1000.0
        self.path = path
        self.spool = Spool(str(path))
        self.gateway = Told(generation)
        self.slept: list[float] = []
        self.news: list[Away | None] = []
        self.drainer = self.another()
        assert self.drainer.acquire()

    def another(self) -> Drainer:
        client: Any = self.gateway
        return Drainer(
            self.spool,
            client,
            self.sleep,
            told=self.news.append,
            clock=lambda: self.now,
            wall=lambda: self.now,
            chance=lambda: 0.5,
        )

    def sleep(self, seconds: float) -> bool:
        self.slept.append(seconds)
        return False

    def add(self, *numbers: int, session: str = "s", kind: str = "turn") -> None:
        for number in numbers:
            user, assistant = f"user {number}", f"a {number}"
            self.spool.append(Record(f"{session}{number}", session, user, assistant, kind, float(number)))

    def run(self, seconds: float = 0.0) -> float | None:
        """Work until nothing more can be done now, then let ``seconds`` pass, in pieces, working after each."""
        end = self.now + seconds
        while True:
            while (wait := self.drainer.step()) == 0.0:
                pass
            if wait is None or self.now >= end:
                return wait
            self.now = min(end, self.now + max(wait, 0.01))

    def again(self) -> None:
        """The drainer's process dies; another one goes on."""
        self.drainer.lock.release()
        self.drainer = self.another()
        assert self.drainer.acquire()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """An embedded Gateway."""
    one = Bench(tmp_path / "m")
    yield one
    one.drainer.lock.release()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Bench]:
    """A Gateway of generation A."""
    one = Bench(tmp_path / "m", "A")
    yield one
    one.drainer.lock.release()


def test_delivers_in_order_and_once(bench: Bench) -> None:
    """Every record once, each session in its order, with its own idempotency key."""
    bench.add(1, 2, 3)
    bench.add(1, 2, session="t")
    assert bench.run() is None
    assert [key for key in bench.gateway.keys if key.startswith("s")] == ["s1", "s2", "s3"]
    assert [key for key in bench.gateway.keys if key.startswith("t")] == ["t1", "t2"]
    assert bench.drainer.counts.delivered == 5
    bench.again()
    assert bench.run() is None
    assert len(bench.gateway.sent) == 5


def test_one_drainer(bench: Bench) -> None:
    """Who does not get the lock delivers nothing; the lock is free when its holder lets go."""
    other = bench.another()
    assert not other.acquire()
    bench.drainer.release()
    assert other.acquire()
    other.release()


@pytest.mark.parametrize("kind", ["down", "silent", "foreign", "unproven", "state", "config"])
def test_an_absent_gateway_burns_nothing(bench: Bench, kind: str) -> None:
    """While the Gateway is away nothing is sent and no attempt counted; when it is back all goes in order."""
    bench.add(1, 2)
    healthy, bench.gateway.is_healthy = bench.gateway.is_healthy, Away(kind, "gone")
    assert bench.run(3600.0) is not None
    assert bench.gateway.sent == []
    assert bench.drainer.counts.holding == "gone"
    bench.gateway.is_healthy = healthy
    bench.run(31.0)
    assert bench.gateway.sent == ["user 1", "user 2"]
    assert bench.drainer.counts.holding == ""
    assert (bench.news[0] is not None, bench.news[-1]) == (True, None)
    assert bench.drainer.counts.dead == 0


def test_the_record_ends_a_pause(bench: Bench) -> None:
    """A change of the endpoint record is acted upon at once, not after the pause."""
    bench.add(1)
    healthy, bench.gateway.is_healthy = bench.gateway.is_healthy, Away("silent", "no answer")
    bench.run(200.0)
    bench.gateway.is_healthy, bench.gateway.change = healthy, 1
    assert bench.run() is None
    assert bench.gateway.sent == ["user 1"]


def test_a_gateway_on_hold_gets_nothing(bench: Bench) -> None:
    """Neither a record that says hold nor a degraded Gateway is delivered to; both are said."""
    bench.add(1)
    bench.gateway.hold = "disk full"
    bench.run(60.0)
    assert (bench.gateway.sent, bench.gateway.looked) == ([], 0)
    assert "disk full" in bench.drainer.counts.holding
    assert bench.drainer.trouble is not None
    assert bench.drainer.trouble.kind == "hold"
    bench.gateway.hold = ""
    bench.gateway.is_healthy = Health("embedded", True, frozenset())
    bench.run(60.0)
    assert bench.gateway.sent == []
    bench.gateway.is_healthy = Health("embedded", False, frozenset({"idempotency-key"}))
    bench.run(6.0)
    assert bench.gateway.sent == ["user 1"]


def test_silently_dropped_turns_are_sent_again(real: Bench) -> None:
    """The first turn of a session that generation A drops is sent until it is recorded, with jitter in between."""
    answers = iter([DROPPED] * 7 + [OK])
    real.gateway.plan = lambda body: next(answers)
    real.add(1)
    assert real.run() is None
    assert real.gateway.sent == ["user 1"] * 8
    assert len(set(real.gateway.keys)) == 1
    assert len(real.slept) == 7
    assert all(0 < seconds < 0.2 for seconds in real.slept)


def test_a_turn_that_is_always_dropped_is_a_dead_letter(real: Bench) -> None:
    """After 12 sends it is put aside with its reason, and the session goes on."""
    real.gateway.plan = lambda body: DROPPED if body["user_content"] == "user 1" else OK
    real.add(1, 2)
    assert real.run() is None
    assert real.gateway.sent == ["user 1"] * 12 + ["user 2"]
    (letter,) = doctor.dead_letters(str(real.path))
    assert "recorded nothing" in str(letter["reason"])
    assert real.drainer.counts.dead == 1


def test_what_is_rightly_left_out_is_done(real: Bench) -> None:
    """A slash command of which nothing is recorded is not sent again."""
    real.gateway.plan = lambda body: DROPPED
    real.spool.append(Record("x", "s", "/help", "text"))
    assert real.run() is None
    assert (len(real.gateway.sent), real.drainer.counts.skipped, real.drainer.counts.dead) == (1, 1, 0)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_poison(bench: Bench, status: int) -> None:
    """What the Gateway will never take is a dead letter at once, with its reason; the others flow."""
    bench.gateway.plan = lambda body: http(status) if body["user_content"] == "user 1" else OK
    bench.add(1, 2)
    bench.add(3, session="t")
    assert bench.run() is None
    (letter,) = doctor.dead_letters(str(bench.path))
    assert letter["reason"] == f"HTTP {status}: told to"
    assert bench.drainer.counts.delivered == 2


def test_a_dead_letter_that_cannot_be_kept_stays_pending(bench: Bench) -> None:
    """A turn leaves the spool only for a place on disk."""
    bench.gateway.plan = lambda body: http(400)
    bench.add(1)
    (bench.path / "dead.jsonl").mkdir()
    bench.run(10.0)
    assert bench.drainer.ledger.pending == 1
    assert "cannot keep a dead letter" in bench.drainer.counts.last_error


def test_a_refused_key_pauses(bench: Bench) -> None:
    """401 stops everything without burning attempts, is said, and is over once the key has changed."""
    bench.gateway.plan = lambda body: http(401)
    bench.add(*range(20))
    bench.run(3600.0)
    assert bench.drainer.counts.holding_kind == "auth"
    assert len(bench.gateway.sent) <= 361
    assert bench.drainer.ledger.sessions["s"][0].attempts == 0
    bench.gateway.plan = lambda body: OK
    bench.gateway.change += 1
    assert bench.run() is None
    assert bench.drainer.counts.delivered == 20


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(bench: Bench, status: int) -> None:
    """A Gateway that asks to wait is not asked again before."""
    bench.gateway.plan = lambda body: http(status, **{"retry-after": "120"})
    bench.add(1)
    bench.run(119.0)
    assert len(bench.gateway.sent) == 1
    bench.gateway.plan = lambda body: OK
    bench.run(2.0)
    assert len(bench.gateway.sent) == 2
    assert bench.drainer.counts.dead == 0


def test_server_errors_back_off(bench: Bench) -> None:
    """5xx is tried again after 1 s, doubling to 60; nothing is given up while the Gateway takes nothing at all."""
    times: list[float] = []

    def boom(body: Mapping[str, Any]) -> Reply:
        times.append(bench.now)
        return BOOM

    bench.gateway.plan = boom
    bench.add(1)
    bench.run(3600.0)
    gaps = [round(b - a) for a, b in itertools.pairwise(times)]
    assert gaps[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(gaps[7:]) == {60}
    assert bench.drainer.counts.dead == 0
    bench.gateway.plan = lambda body: OK
    bench.run(61.0)
    assert bench.drainer.counts.delivered == 1


def test_other_sessions_flow_meanwhile(bench: Bench) -> None:
    """A record that the Gateway cannot take holds up its own session only, and is given up after 12 failures."""
    bench.gateway.plan = lambda body: BOOM if body["user_content"] == "user 1" else OK
    bench.add(1)
    for number in range(100, 130):
        bench.add(number, session="t")
        bench.run(61.0)
    assert bench.drainer.counts.delivered == 30
    (letter,) = doctor.dead_letters(str(bench.path))
    assert bench.gateway.sent.count("user 1") == letter["attempts"]
    assert 12 <= bench.gateway.sent.count("user 1") < 20


def test_a_record_that_blocks_its_own_session(bench: Bench) -> None:
    """Where only its own successors wait, one of them bears witness: the Gateway takes that, so it is the record."""
    bench.gateway.plan = lambda body: BOOM if body["user_content"] == "user 1" else OK
    bench.add(1, 2, 3)
    bench.run(3600.0)
    assert bench.gateway.sent.count("user 1") == pacing.FAILURES
    assert [words for words in bench.gateway.sent if words != "user 1"] == ["user 2", "user 3"]
    assert bench.drainer.counts.dead == 1


def test_no_witness_when_the_gateway_takes_nothing(bench: Bench) -> None:
    """An hour of 500s for everything loses nothing and keeps the order."""
    bench.gateway.plan = lambda body: BOOM
    bench.add(1, 2, 3)
    bench.run(3600.0)
    assert bench.drainer.counts.dead == 0
    before = len(bench.gateway.sent)
    bench.gateway.plan = lambda body: OK
    bench.run(200.0)
    assert bench.drainer.counts.delivered == 3
    assert bench.gateway.sent[before:] == ["user 1", "user 2", "user 3"]


def lost(body: Mapping[str, Any]) -> Reply:
    """The request went out, the answer never came."""
    raise Away("cut", "connection cut", sent=True)


def test_a_lost_reply_with_keys_is_sent_again(bench: Bench) -> None:
    """A Gateway that honours keys gets the same record under the same key; it is not asked."""
    bench.gateway.plan = lost
    bench.add(1)
    bench.run()
    bench.gateway.plan = lambda body: OK
    bench.run(5.0)
    assert bench.gateway.keys == ["s1", "s1"]
    assert bench.gateway.asked == []
    assert bench.drainer.counts.possible_duplicates == 0


@pytest.mark.parametrize(("stored", "sends", "duplicates"), [(True, 1, 0), (False, 2, 0), (None, 2, 1)])
def test_a_lost_reply_without_keys_is_asked_for(real: Bench, stored: bool | None, sends: int, duplicates: int) -> None:
    """Stored: done. Not stored: sent again. Cannot be asked: sent again and counted as a possible duplicate."""
    real.gateway.plan = lost
    real.gateway.stored = stored
    real.add(1)
    real.run()
    real.gateway.plan = lambda body: OK
    assert real.run(5.0) is None
    assert len(real.gateway.sent) == sends
    assert real.gateway.asked == ["user 1"]
    assert real.drainer.counts.possible_duplicates == duplicates
    assert real.drainer.counts.delivered == 1


def test_a_drainer_killed_after_sending_is_asked_for_too(real: Bench) -> None:
    """The next process knows from the try that the record may be stored."""

    def die(body: Mapping[str, Any]) -> Reply:
        raise KeyboardInterrupt

    real.gateway.plan = die
    real.gateway.stored = True
    real.add(1)
    with pytest.raises(KeyboardInterrupt):
        real.run()
    real.again()
    assert real.run() is None
    assert real.gateway.sent == ["user 1"]
    assert real.gateway.asked == ["user 1"]


def test_what_was_never_sent_is_not_asked_for(real: Bench) -> None:
    """A connection that was refused cannot have stored anything."""

    def refused(body: Mapping[str, Any]) -> Reply:
        raise Away("down", "ECONNREFUSED")

    real.gateway.plan = refused
    real.add(1)
    real.run()
    real.again()
    real.gateway.plan = lambda body: OK
    assert real.run(5.0) is None
    assert real.gateway.asked == []


def test_cut_connections_count_like_errors(bench: Bench) -> None:
    """A record on which the Gateway drops the connection each time is given up after 12, others accepted meanwhile."""
    bench.gateway.plan = lambda body: lost(body) if body["user_content"] == "user 1" else OK
    bench.add(1)
    for number in range(100, 130):
        bench.add(number, session="t")
        bench.run(95.0)
    assert bench.drainer.counts.dead == 1
    assert bench.drainer.counts.delivered == 30


def test_bursts_are_spread_where_extraction_would_starve(real: Bench) -> None:
    """Generation A gets five turns of a session, then a pause of ten seconds; other sessions are not held up."""
    real.add(*range(12))
    real.add(50, session="t")
    real.run()
    assert len([key for key in real.gateway.keys if key.startswith("s")]) == 5
    assert "t50" in real.gateway.keys
    real.run(9.0)
    assert len(real.gateway.keys) == 6
    real.run(1.1)
    assert len(real.gateway.keys) == 11
    assert real.run(20.0) is None


def test_the_embedded_gateway_takes_bursts(bench: Bench) -> None:
    """Without extraction there is nothing to spare."""
    bench.add(*range(30))
    assert bench.run() is None
    assert bench.now == 1000.0


def test_session_end_only_where_it_helps(bench: Bench, tmp_path: Path) -> None:
    """/session/end comes after the last capture of its session where it is offered, and nowhere else."""
    bench.add(1)
    bench.add(2, kind="end")
    assert bench.run() is None
    assert (bench.gateway.sent, bench.gateway.ended) == (["user 1"], ["s"])
    other = Bench(tmp_path / "other", "A")
    other.add(1)
    other.add(2, kind="end")
    assert other.run() is None
    assert other.gateway.ended == []
    other.drainer.lock.release()


def test_session_end_that_fails_holds_nothing_up(bench: Bench) -> None:
    """An end is a courtesy: after three tries the session goes on."""
    bench.gateway.end_session = lambda session: BOOM  # type: ignore[method-assign]
    bench.add(1, kind="end")
    bench.add(2)
    assert bench.run(60.0) is None
    assert bench.gateway.sent == ["user 2"]


def test_content_over_the_limit_is_cut_not_dropped(bench: Bench) -> None:
    """A huge turn arrives with a mark where it was cut; the spool keeps more of it."""
    seen: list[Mapping[str, Any]] = []

    def plan(body: Mapping[str, Any]) -> Reply:
        seen.append(body)
        return OK

    bench.gateway.plan = plan
    bench.spool.append(Record("x", "s", "u" * 900_000, "a\0" * 300_000))
    assert bench.run() is None
    assert len(seen[0]["user_content"]) <= 120_000
    assert "cut here" in seen[0]["user_content"]
    assert "cut here" in seen[0]["assistant_content"]


def test_bodies_carry_who_but_no_time(real: Bench) -> None:
    """user, session and profile go with every record; a time of its own would be dropped by generation A."""
    seen: list[Mapping[str, Any]] = []

    def plan(body: Mapping[str, Any]) -> Reply:
        seen.append(body)
        return OK

    real.gateway.plan = plan
    who = {"user_id": "u", "gateway_session_key": "g", "agent_identity": "coder"}
    real.spool.append(Record("x", "s", "hello", "", at=5.0, session_id="sid", who=who))
    assert real.run() is None
    expected = {"user_content": "hello", "assistant_content": "(no text)", "session_key": "s", "session_id": "sid"}
    assert seen == [{**expected, **who}]


def test_turns_in_memory_are_delivered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk refuses goes to the Gateway from memory, after what is on disk, and only once."""
    bench.add(1)

    with monkeypatch.context() as broken:
        broken.setattr("memory_tencentdb.spool.append_frame", _refuse)
        bench.add(2, 3)
        assert len(bench.spool.volatile) == 2
        bench.run()
    assert bench.gateway.sent == ["user 1", "user 2", "user 3"]
    assert not bench.spool.volatile
    assert bench.run() is None
    assert len(bench.gateway.sent) == 3


def _refuse(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device")


def test_without_a_lock_file_only_memory_is_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only disk the turns of this process still reach the Gateway."""
    one = Bench(tmp_path / "m")
    one.add(1)
    one.drainer.lock.release()
    one.drainer = one.another()
    with monkeypatch.context() as readonly:
        readonly.setattr("memory_tencentdb.spool.append_frame", _refuse)
        readonly.setattr(one.drainer.lock, "acquire", _refuse)
        one.add(2, session="t")
        assert one.drainer.acquire()
        one.drainer.step()
        assert one.gateway.sent == ["user 2"]
        assert one.drainer.step() is None
        one.drainer.release()
    assert one.drainer.acquire()
    assert one.run() is None
    assert one.gateway.sent == ["user 2", "user 1"]
    one.drainer.release()


def test_a_removed_lock_file_is_noticed(bench: Bench) -> None:
    """With its lock file gone a drainer stops: somebody else may hold a new one."""
    (bench.path / "drain.lock").unlink()
    with pytest.raises(OSError, match="lock file was removed"):
        bench.drainer.step()


def test_awaited_return_is_seen_without_a_turn(tmp_path: Path) -> None:
    """After silence the Gateway is looked at although nothing waits, until it answers a POST."""
    one = Bench(tmp_path / "m")
    one.drainer._awaited = lambda: True
    healthy, one.gateway.is_healthy = one.gateway.is_healthy, Away("silent", "no answer")
    assert one.run(10.0) is not None
    one.gateway.is_healthy = healthy
    assert one.run(1.1) is None
    assert one.news[-1] is None
    assert one.gateway.sent == []
    one.drainer.release()
