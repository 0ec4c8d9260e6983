"""A spool under random writers, two drainers and kills: nothing lost, nothing doubled uncounted, order kept."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_tencentdb.aside import letters
from memory_tencentdb.aside.drainer import Drainer
from memory_tencentdb.aside.ledger import Ledger, read_counts
from memory_tencentdb.endpoint import Away
from memory_tencentdb.gateway import Health, Reply
from memory_tencentdb.spool import Record, Spool

OK = Reply(200, {}, {"l0_recorded": 2})


class KilledError(BaseException):
    """kill -9 at this point."""


class Store:
    """A Gateway: keyed or not, dying or killing its drainer when it is told to."""

    def __init__(self, keyed: bool) -> None:
        generation = "embedded" if keyed else "A"
        self.looks = Health(generation, False, frozenset({"idempotency-key"} if keyed else ()))
        self.keyed, self.endpoint = keyed, self
        self.stored: list[tuple[str, str]] = []  # (session, user), as it was captured
        self.keys: set[str] = set()
        self.next = ""
        self.unsure = False

    def changes(self) -> object:
        return None

    def target(self) -> Any:
        return self

    def held(self) -> None:
        return None

    def health(self, seconds: float = 0.0) -> Health:
        return self.looks

    def search(self, path: str, body: Mapping[str, Any], deadline: float = 0.0) -> Reply:
        return Reply(200, {}, {"results": "", "total": 0})

    def holds(self, user: str, assistant: str, session: str, since: float) -> bool | None:
        return None if self.unsure else (session, user) in self.stored

    def capture(self, body: Mapping[str, Any], key: str) -> Reply:
        what, self.next = self.next, ""
        if what == "killed before":
            raise KilledError
        if what == "away":
            raise Away("down", "told to")
        if not (self.keyed and key in self.keys):
            self.stored.append((body["session_key"], body["user_content"]))
        self.keys.add(key)
        if what == "killed after":
            raise KilledError
        if what == "lost":
            raise Away("cut", "told to", sent=True)
        return OK


class World:
    """One spool, its writers, and two drainers of different processes."""

    def __init__(self, path: Path, keyed: bool) -> None:
        self.path, self.now, self.gateway = path, 1000.0, Store(keyed)
        self.drainers = [self.fresh(), self.fresh()]
        self.said: dict[str, list[str]] = defaultdict(list)

    def fresh(self) -> Drainer:
        client: Any = self.gateway
        clock = lambda: self.now  # noqa: E731
        return Drainer(Spool(str(self.path)), client, lambda s: False, clock=clock, wall=clock, chance=lambda: 0.5)

    def append(self, session: str) -> None:
        number = sum(map(len, self.said.values()))
        user = f"{session} says {number}"
        self.said[session].append(user)
        # A writer of its own each time: sessions are processes.
        assert Spool(str(self.path)).append(Record(f"id{number}", session, user, "a", at=float(number)))

    def drain(self, which: int, steps: int) -> None:
        drainer = self.drainers[which]
        try:
            if drainer.acquire():
                for _ in range(steps):
                    wait = drainer.step()
                    self.now += max(wait or 0.0, 0.01)
                    if wait is None:
                        break
        except KilledError:
            self.kill(which)

    def kill(self, which: int) -> None:
        """What a process leaves that was killed: its lock is free, and nothing of it is written any more."""
        self.drainers[which].lock.release()
        self.drainers[which] = self.fresh()

    def release(self, which: int) -> None:
        self.drainers[which].release()

    def finish(self) -> None:
        for drainer in self.drainers:
            drainer.lock.release()
        self.gateway.next = ""
        last = self.fresh()
        assert last.acquire()
        for _ in range(2000):
            if (wait := last.step()) is None:
                break
            self.now += max(wait, 0.01)
        else:
            pytest.fail("it does not come to an end")
        last.release()


ROUNDS = st.lists(
    st.tuples(
        st.text("abc", max_size=4),  # sessions that say something
        st.sampled_from(["", "killed before", "killed after", "away", "lost"]),  # what befalls the next capture
        st.booleans(),  # whether the Gateway can say what it holds
        st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), max_size=3),  # who drains, for how many steps
        st.sampled_from(["kill", "release", ""]),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("keyed", [True, False])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rounds=ROUNDS)
def test_two_drainers_and_kills(keyed: bool, rounds: list[Any]) -> None:
    """Every turn is stored, in the order of its session; twice only where that is counted as possible."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "m", keyed)
        for sessions, world.gateway.next, world.gateway.unsure, drains, after, which in rounds:
            for session in sessions:
                world.append(session)
            for drain in drains:
                world.drain(*drain)
            if after:
                getattr(world, after)(which)
        world.finish()
        stored: dict[str, list[str]] = defaultdict(list)
        for session, user in world.gateway.stored:
            stored[session].append(user)
        firsts = {session: list(dict.fromkeys(users)) for session, users in stored.items()}
        assert firsts == world.said, "lost, or out of order"
        doubled = len(world.gateway.stored) - sum(map(len, world.said.values()))
        counts = read_counts(str(world.path))
        assert doubled <= (0 if keyed else counts.possible_duplicates)
        assert (counts.waiting, counts.letters) == (0, 0)


def test_a_possible_duplicate_is_counted_before_it_is_made(tmp_path: Path) -> None:
    """Killed right after each of two sends that could not be asked after: stored three times, and counted twice."""
    world = World(tmp_path / "m", keyed=False)
    world.append("a")
    world.gateway.unsure = True
    for _ in range(2):
        world.gateway.next = "killed after"
        world.drain(0, 3)
    world.finish()
    assert len(world.gateway.stored) == 3
    assert read_counts(str(world.path)).possible_duplicates == 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=st.integers(1, 6), dead=st.sets(st.integers(0, 5)), chosen=st.sets(st.integers(0, 5)), data=st.data())
def test_letters_and_records_by_hand(turns: int, dead: set[int], chosen: set[int], data: st.DataObject) -> None:
    """Revived and dropped in any order: each record waits, is a letter, or was dropped by name; never two of these."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "m")
        one = Spool(path)
        for n in range(turns):
            one.append(Record(f"id{n}", "s", f"u{n}", "a", at=float(n)))
        drainer = World(Path(path), True).drainers[0]
        assert drainer.acquire()
        drainer.ledger.refresh()
        for entry in list(drainer.ledger.sessions["s"]):
            if int(entry.id[2:]) in dead:
                drainer._bury(entry, drainer.ledger.load(entry), "told to")
        drainer.release()
        dropped: set[str] = set()
        for _ in range(data.draw(st.integers(0, 3))):
            if data.draw(st.booleans()):
                letters.revive(one, {f"id{n}" for n in chosen} if data.draw(st.booleans()) else None)
            else:
                dropped |= set(letters.drop(path, {f"id{n}" for n in chosen}, 9.0))
        ledger = Ledger(path)
        ledger.refresh()
        waiting = [entry.id for queue in ledger.sessions.values() for entry in queue]
        kept = [letter["record"]["id"] for letter in letters.dead_letters(path)]
        assert sorted([*waiting, *kept, *dropped]) == [f"id{n}" for n in range(turns)]
        counts = read_counts(path)
        assert (counts.letters, counts.removed) == (len(kept), len(dropped))
