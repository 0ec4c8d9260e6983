"""The conversations on disk: what is stored once, what is found again, what is done with a file that cannot be used."""

import asyncio
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tdai_supervisor.embedded import store as store_module
from tdai_supervisor.embedded import turns
from tdai_supervisor.embedded.store import Store, StoreDown, Unusable, Worker
from tdai_supervisor.embedded.text import recall_context
from tdai_supervisor.embedded.turns import Captured, Message, Turn, key_of

NOW = 1_795_971_939_042


def turn(user: str, assistant: str = "", session: str = "s1", key: str | None = None, at: int = NOW) -> Turn:
    said = [Message(role, text, at) for role, text in (("user", user), ("assistant", assistant)) if text]
    return Turn(session, at, tuple(said), key_of(key) if key else None)


@pytest.fixture
def lines() -> list[str]:
    """What the store logged."""
    return []


@pytest.fixture
def store(tmp_path: Path, lines: list[str]) -> Iterator[Store]:
    opened = Store(str(tmp_path / "data"), lines.append)
    opened.open()
    assert opened.cause is None
    yield opened
    dispose(opened)


def dispose(opened: Store) -> None:
    """Close what the process would only drop at its end."""
    for con in [*opened._abandoned, *([opened._con] if opened._con else [])]:
        con.close()


def capture(opened: Store, *captured: Turn) -> list[Captured]:
    return opened.write([partial(turns.capture, turn=one) for one in captured])


def found(opened: Store, query: str, session: str | None = None) -> list[str]:
    return [hit.content for hit in opened.read(lambda con: turns.search(con, query, 100, session))]


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    """Directories 0700, files 0600, also those SQLite makes."""
    before = os.umask(0)
    try:
        opened = Store(str(tmp_path / "a" / "b"), print)
        opened.open()
        capture(opened, turn("hello"))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a" / "b").iterdir()}
    assert modes == {"memory.db": 0o600, "memory.db-wal": 0o600, "memory.db-shm": 0o600}
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    dispose(opened)


def test_a_file_that_others_could_read_is_closed_to_them(store: Store) -> None:
    """A database that was copied there with other modes is private from the next start on."""
    os.chmod(store.path, 0o644)
    other = Store(store.directory, print)
    other.open()
    assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o600
    dispose(other)


def test_commits_are_synchronous(store: Store) -> None:
    """A commit is on disk when it returns: WAL with synchronous=FULL."""
    assert store.read(lambda con: con.execute("PRAGMA synchronous").fetchone()) == (2,)
    assert store.read(lambda con: con.execute("PRAGMA journal_mode").fetchone()) == ("wal",)


def test_a_turn_is_found_by_either_side_and_whole(store: Store) -> None:
    """Content comes back as it went in, NUL and line ends included."""
    text = "first line\n  東京\x00タワー  \r\n"
    assert capture(store, turn("where?", text)) == [Captured(2, False)]
    assert found(store, "東京") == [text]
    assert found(store, "WHERE") == ["where?"]


def test_a_key_counts_once_with_the_first_answer(store: Store) -> None:
    """The same key again stores nothing, also with another body, in one batch, and when nothing was worth keeping."""
    first = turn("alpha", "beta", key="k")
    assert capture(store, first, first) == [Captured(2, False), Captured(2, True)]
    assert capture(store, turn("gamma", key="k")) == [Captured(2, True)]
    assert capture(store, turn("", key="none"), turn("", key="none")) == [Captured(0, False), Captured(0, True)]
    assert found(store, "alpha beta gamma") == ["beta", "alpha"]


def test_turns_without_a_key_are_never_merged(store: Store) -> None:
    """Saying the same thing twice is two turns."""
    capture(store, turn("again"), turn("again"))
    assert found(store, "again") == ["again", "again"]


def test_search_can_be_kept_to_a_session(store: Store) -> None:
    """The filter applies before the limit, so a rare session is found behind a busy one."""
    capture(store, *[turn("needle", session="busy") for _ in range(60)], turn("needle in hay", session="rare"))
    assert found(store, "needle", "rare") == ["needle in hay"]
    assert found(store, "needle", "unknown") == []
    assert len(store.read(lambda con: turns.search(con, "needle", 7))) == 7


def test_of_equal_messages_the_newest_comes_first(store: Store) -> None:
    """Ties are broken by age."""
    capture(store, *[turn("note", session=f"s{n}") for n in range(3)])
    hits = store.read(lambda con: turns.search(con, "note", 2))
    assert [hit.session for hit in hits] == ["s2", "s1"]
    assert all(0 <= hit.score <= 1 for hit in hits)


def test_recall_returns_whole_turns_the_best_first(store: Store) -> None:
    """A match in either side brings both; a turn with an answer comes before a question without one."""
    capture(
        store,
        turn("my cat is called ZORBLAX", "nice name"),
        turn("the weather", "is fine"),
        turn("what is my cat called"),
    )
    recalled = store.read(lambda con: turns.recall(con, "what is my cat called", 8))
    assert [[said.content for said in one] for one in recalled] == [
        ["my cat is called ZORBLAX", "nice name"],
        ["the weather", "is fine"],
        ["what is my cat called"],
    ]
    assert store.read(lambda con: turns.recall(con, "?!", 8)) == []


def test_of_a_long_exchange_the_part_that_matches_is_recalled(store: Store) -> None:
    """A turn may hold many messages; which of them matched is known to whoever shows it."""
    said = tuple(Message("user", f"part {n}" + " ZORBLAX" * (n == 7), NOW) for n in range(10))
    capture(store, Turn("s1", NOW, said))
    recalled = store.read(lambda con: turns.recall(con, "zorblax", 8))
    assert [one.content for one in recalled[0] if one.score > 0] == ["part 7 ZORBLAX"]
    assert "part 7 ZORBLAX" in recall_context(recalled, "zorblax")[0]


def test_a_chinese_question_recalls_what_shares_a_word(store: Store) -> None:
    """A sentence without spaces need not have been said before as a whole."""
    capture(store, turn("我的猫叫橘子", "好名字"), turn("我住在北京"))
    recalled = store.read(lambda con: turns.recall(con, "你记得我的猫叫什么吗", 8))
    assert recalled[0][0].content == "我的猫叫橘子"


def test_common_words_are_left_out_beside_rare_ones(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large store a word that is everywhere costs much and tells nothing; alone it is still looked for."""
    monkeypatch.setattr(turns, "COMMON", 5)
    capture(store, *[turn(f"the needle{n} 的猫") for n in range(30)], turn("alone", session="other"))
    asked: list[str] = []
    matches = turns._matches
    monkeypatch.setattr(turns, "_matches", lambda con, match, *more: asked.append(match) or matches(con, match, *more))
    assert found(store, "the needle7") == ["the needle7 的猫"]
    assert len(found(store, "the")) == 30
    assert len(found(store, "的猫")) == 30
    assert found(store, "unknown 狗猫") == []
    assert found(store, "the alone", "other") == ["alone"]
    recalled = store.read(lambda con: turns.recall(con, "the needle3 的", 8))
    assert recalled[0][0].content == "the needle3 的猫"
    assert asked == ['"needle7"', '"the"', '"的 猫"', '"unknown" OR "狗 猫"', '"alone"', '"needle3"']
    asked.clear()
    assert len(found(store, "the alone", "s1")) == 30  # nothing rare in this session: all words again
    assert asked == ['"alone"', '"the" OR "alone"']


def test_one_bad_write_does_not_fail_the_others(store: Store) -> None:
    """All of a failed transaction is rolled back, its index entries included."""

    def bad(con: sqlite3.Connection) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        store.write([partial(turns.capture, turn=turn("lost")), bad])
    assert found(store, "lost") == []
    assert capture(store, turn("kept")) == [Captured(1, False)]
    assert store.cause is None


def test_what_was_committed_is_there_after_reopening_without_closing(store: Store, lines: list[str]) -> None:
    """Nothing depends on an orderly end."""
    capture(store, turn("alpha", key="k"))
    other = Store(store.directory, lines.append)
    other.open()
    assert found(other, "alpha") == ["alpha"]
    assert capture(other, turn("alpha", key="k")) == [Captured(1, True)]
    dispose(other)


def test_two_processes_may_share_a_file(store: Store) -> None:
    """A second Gateway on the directory (nobody should start one) damages nothing and doubles no key."""
    other = Store(store.directory, print)
    other.open()
    for n in range(20):
        capture((store, other)[n % 2], turn(f"word{n}", key=f"k{n}"))
        assert capture((other, store)[n % 2], turn(f"word{n}", key=f"k{n}")) == [Captured(1, True)]
    assert found(store, "word7") == ["word7"]
    assert store.read(lambda con: con.execute("PRAGMA integrity_check").fetchone()) == ("ok",)
    dispose(other)


@pytest.mark.parametrize(
    "damage", [b"this is no database, it only has its name\n" * 200, b"SQLite format 3\0" + b"\xff" * 9000]
)
def test_a_broken_file_is_kept_under_a_name_and_replaced(tmp_path: Path, lines: list[str], damage: bytes) -> None:
    """Quarantine keeps every byte, says so, and is seen by later starts too."""
    (tmp_path / "memory.db").write_bytes(damage)
    (tmp_path / "memory.db-wal").write_bytes(b"wal of the broken one")
    opened = Store(str(tmp_path), lines.append)
    opened.open()
    assert opened.cause is None
    (name,) = opened.quarantined
    assert name.startswith("memory.db.corrupt-20")
    assert (tmp_path / name).read_bytes() == damage
    assert (tmp_path / f"{name}-wal").read_bytes() == b"wal of the broken one"
    assert any(name in line for line in lines)
    assert capture(opened, turn("fresh")) == [Captured(1, False)]
    again = Store(str(tmp_path), lines.append)
    again.open()
    assert again.quarantined == [name]
    assert found(again, "fresh") == ["fresh"]
    dispose(opened)
    dispose(again)


def test_a_damaged_page_is_found_at_the_next_start(tmp_path: Path, lines: list[str]) -> None:
    """Up to CHECKED_SIZE the whole file is checked when it is opened."""
    opened = Store(str(tmp_path), lines.append)
    opened.open()
    capture(opened, *[turn(f"word{n} " * 50) for n in range(200)])
    opened.close()
    path = tmp_path / "memory.db"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 6000] = b"\xa5" * 6000
    path.write_bytes(raw)
    again = Store(str(tmp_path), lines.append)
    again.open()
    assert again.cause is None
    assert len(again.quarantined) == 1
    assert found(again, "word7") == []
    dispose(again)


def test_damage_that_shows_while_running_is_quarantined_too(store: Store, lines: list[str]) -> None:
    """A request that meets a broken page is answered from the fresh file, and the next ones work."""
    capture(store, turn("before"))

    def damaged(con: sqlite3.Connection) -> None:
        if not store.quarantined:
            error = sqlite3.DatabaseError("database disk image is malformed")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error

    store.read(damaged)
    assert len(store.quarantined) == 1
    assert capture(store, turn("after")) == [Captured(1, False)]
    assert found(store, "before after") == ["after"]


def test_two_quarantines_in_one_second_keep_both(tmp_path: Path) -> None:
    """No quarantined file replaces another."""
    for content in (b"first " * 999, b"second " * 999):
        for name in ("memory.db", "memory.db-wal", "memory.db-shm"):
            (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / "memory.db").write_bytes(content)
        opened = Store(str(tmp_path), print)
        opened.open()
        dispose(opened)
    assert sorted((tmp_path / name).read_bytes()[:5] for name in opened.quarantined) == [b"first", b"secon"]


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A downgrade reads nothing it does not know, and changes not one byte."""
    path = tmp_path / "memory.db"
    with sqlite3.connect(path) as con:
        con.execute("CREATE TABLE later(x)")
        con.execute(f"PRAGMA user_version = {turns.SCHEMA_VERSION + 1}")
    con.close()
    before = path.read_bytes()
    opened = Store(str(tmp_path), print)
    with pytest.raises(Unusable, match="newer release"):
        opened.open()
    assert path.read_bytes() == before
    dispose(opened)


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_data_directory_that_cannot_be_is_named(tmp_path: Path, where: str) -> None:
    """The path and the cause are in the error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Unusable, match=f"{tmp_path}/{where}: .*(exists|directory)"):
        Store(str(tmp_path / where), print).open()


def test_a_deleted_file_is_noticed_before_anything_is_acknowledged(store: Store, lines: list[str]) -> None:
    """A turn captured after the file was removed is in the new file, not in the one nobody can reach any more."""
    capture(store, turn("before", key="k"))
    for name in os.listdir(store.directory):
        os.unlink(os.path.join(store.directory, name))
    assert capture(store, turn("after", key="k")) == [Captured(1, False)]
    other = Store(store.directory, print)
    other.open()
    assert found(other, "before after") == ["after"]
    dispose(other)


def test_a_file_deleted_inside_a_transaction_is_noticed_too(store: Store) -> None:
    """The look comes after the commit: what went into an unlinked file is done again in the one at the path."""

    def capture_and_lose(con: sqlite3.Connection, times: list[int] = []) -> Captured:  # noqa: B006 - one call's memory
        result = turns.capture(con, turn("survivor"))
        if not times:
            os.unlink(store.path)
        times.append(1)
        return result

    assert store.write([capture_and_lose]) == [Captured(1, False)]
    assert found(store, "survivor") == ["survivor"]
    assert os.path.exists(store.path)


def test_a_deleted_data_directory_is_not_made_again(store: Store) -> None:
    """The lease is on the old directory, so the store waits for a restart and acknowledges nothing."""
    capture(store, turn("before"))
    os.rename(store.directory, store.directory + ".away")
    with pytest.raises(StoreDown):
        capture(store, turn("lost"))
    assert not os.path.exists(store.directory)
    os.mkdir(store.directory)
    with pytest.raises(StoreDown, match="replaced: restart"):
        capture(store, turn("lost"))
    assert os.listdir(store.directory) == []
    assert store.cause is not None


def test_a_lock_held_by_another_process_is_a_passing_failure(store: Store) -> None:
    """Nothing is stored or lost, the cause is shown, and the next write clears it."""
    store.read(lambda con: con.execute("PRAGMA busy_timeout = 10"))
    holder = sqlite3.connect(store.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreDown, match="locked"):
        capture(store, turn("one", key="k"))
    assert store.cause == "cannot store: database is locked"
    assert found(store, "one") == []  # reading goes on
    holder.close()
    store.check()
    assert store.cause is None
    assert capture(store, turn("one", key="k")) == [Captured(1, False)]


def test_a_check_leaves_nothing_behind(store: Store) -> None:
    """The space a check fills is given back, and a store that works is not written to."""
    store.cause = "made up"
    store.check()
    assert store.cause is None
    assert store.read(lambda con: con.execute("SELECT name FROM sqlite_master WHERE name = 'room'").fetchall()) == []
    size = os.path.getsize(store.path + "-wal")
    store.check()
    assert os.path.getsize(store.path + "-wal") == size


async def gathered(*futures: asyncio.Future[object]) -> list[object]:
    return await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 10)


def test_the_worker_commits_what_waits_together(store: Store) -> None:
    """While one transaction runs, others gather; they share the next commit, and a failing one fails alone."""
    batches: list[int] = []
    write = store.write
    held, entered = threading.Event(), threading.Event()

    def counted(works: list[store_module.Work[object]]) -> list[object]:
        batches.append(len(works))
        return write(works)

    def hold(con: sqlite3.Connection) -> None:
        entered.set()
        assert held.wait(10)

    def bad(con: sqlite3.Connection) -> None:
        raise KeyError("bug")

    store.write = counted  # type: ignore[method-assign]

    async def scenario() -> None:
        worker = Worker(store, asyncio.get_running_loop())
        first = worker.write(hold)
        assert await asyncio.to_thread(entered.wait, 10)
        good = [worker.write(partial(turns.capture, turn=turn(f"word{n}"))) for n in range(10)]
        failing = worker.write(bad)
        held.set()
        results = await gathered(first, *good, failing)
        assert results[1:11] == [Captured(1, False)] * 10
        assert isinstance(results[11], KeyError)
        worker.stop(10)

    asyncio.run(scenario())
    assert batches[:2] == [1, 11]
    other = Store(store.directory, print)
    other.open()
    assert len(found(other, " ".join(f"word{n}" for n in range(10)))) == 10
    dispose(other)


def test_the_worker_refuses_at_once_when_too_many_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs does not gather requests without bound, and is told apart from a busy one by its time."""
    monkeypatch.setattr(store_module, "MAX_WAITING", 3)
    held, entered = threading.Event(), threading.Event()

    def hold(con: sqlite3.Connection) -> None:
        entered.set()
        assert held.wait(10)

    async def scenario() -> None:
        worker = Worker(store, asyncio.get_running_loop())
        first = worker.write(hold)
        assert await asyncio.to_thread(entered.wait, 10)
        waiting = [worker.read(lambda con: None) for _ in range(3)]
        with pytest.raises(StoreDown, match="too many"):
            await worker.read(lambda con: None)
        assert worker.cause() is None
        monkeypatch.setattr(store_module, "STALLED_AFTER", 0.0)
        assert "has not answered" in (worker.cause() or "")
        held.set()
        await gathered(first, *waiting)
        worker.stop(10)

    asyncio.run(scenario())


def test_the_worker_finds_out_that_a_failed_store_works_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the cause has the store checked; it heals without a capture."""
    monkeypatch.setattr(store_module, "CHECK_INTERVAL", 0.0)
    store.cause = "made up"

    async def scenario() -> None:
        worker = Worker(store, asyncio.get_running_loop())
        assert worker.cause() == "made up"
        await asyncio.wait_for(worker.read(lambda con: None), 10)  # queued behind the check
        assert worker.cause() is None
        worker.stop(10)

    asyncio.run(scenario())


def test_the_worker_ends_on_time_beside_a_hanging_disk(store: Store) -> None:
    """stop() returns after its timeout, whatever the thread does."""
    held = threading.Event()

    async def scenario() -> None:
        worker = Worker(store, asyncio.get_running_loop())
        future = worker.write(lambda con: held.wait(10))
        worker.stop(0.05)
        held.set()
        assert await asyncio.wait_for(future, 10)
        worker.stop(10)

    asyncio.run(scenario())
