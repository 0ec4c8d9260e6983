"""The provider as a host uses it: hooks, threads, a Gateway that comes and goes."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_tencentdb import TencentDBMemoryProvider, proof, register, spool, tools
from memory_tencentdb import host as hermes
from memory_tencentdb.aside import checkpoint
from memory_tencentdb.aside.ledger import Ledger

from tests.support.fake_gateway import FakeGateway, drip, http, late, silent


class Host:
    """A Hermes session: makes providers on a home, and ends them."""

    def __init__(self, home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.root, self.env = home, root, monkeypatch
        self.made: list[TencentDBMemoryProvider] = []
        self.warned: list[str] = []
        self.informed: list[str] = []
        self.env.setenv("HERMES_HOME", str(home))
        self.env.setenv("MEMORY_TENCENTDB_ROOT", str(root))

    def use(self, gateway: FakeGateway) -> None:
        self.env.setenv("MEMORY_TENCENTDB_GATEWAY_PORT", str(gateway.port))

    def session(self, session_id: str = "s1", **kwargs: Any) -> TencentDBMemoryProvider:
        one = TencentDBMemoryProvider()
        one.initialize(
            session_id=session_id,
            **{
                "hermes_home": str(self.home),
                "platform": "cli",
                "agent_context": "primary",
                "warning_callback": self.warned.append,
                "status_callback": self.informed.append,
                **kwargs,
            },
        )
        self.made.append(one)
        return one

    def pending(self) -> int:
        one = Ledger(str(self.home / "memory_tencentdb"))
        one.refresh()
        return one.turns


@pytest.fixture
def host(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A Hermes home with nothing in it."""
    one = Host(home, root, monkeypatch)
    yield one
    for made in one.made:
        made.shutdown()


@pytest.fixture
def gateway(host: Host) -> Iterator[FakeGateway]:
    """An embedded Gateway that the host's sessions use."""
    with FakeGateway() as one:
        host.use(one)
        yield one


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def drains() -> list[threading.Thread]:
    """The delivering threads of this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("memory_tencentdb")]


def test_a_session(host: Host, gateway: FakeGateway) -> None:
    """Recall before the turn, capture after it, one end after the last capture; the same key in all of them."""
    one = host.session()
    assert "ZORBLAX" in one.prefetch("what is my cat called?")
    one.sync_turn("what is my cat called?", "ZORBLAX", session_id="s1", messages=[])
    one.on_session_end([])
    one.sync_turn("thanks", "welcome")
    one.shutdown()
    assert gateway.users() == ["what is my cat called?", "thanks"]
    assert gateway.ended == ["s1"]
    assert gateway.requests[-1].path == "/session/end"
    keys = {request.body["session_key"] for request in gateway.requests if "session_key" in request.body}
    assert keys == {"s1"}
    assert len(gateway.asked("/recall")) == 1
    assert [request.body["query"] for request in gateway.asked("/recall")] == ["what is my cat called?"]
    one.shutdown()
    assert len(gateway.ended) == 1


def test_generation_a(host: Host) -> None:
    """No /session/end, no times, and the memories of /search/memories, which /recall does not return there."""
    with FakeGateway("A") as gateway:
        gateway.context = "<memory-tools-guide>tdai_memory_search</memory-tools-guide>"
        gateway.memories = "Found 1 matching memories:\n\n- **[persona]** (score: 0.5)\n  The cat is red\n"
        host.use(gateway)
        one = host.session()
        words = one.prefetch("cat")
        assert words.startswith("## memory-tencentdb Memory")
        assert "The cat is red" in words
        assert "tdai_memory_search" not in words
        one.sync_turn("hello", "hi")
        one.shutdown()
        assert gateway.users() == ["hello"]
        assert gateway.ended == []
        assert not any("timestamp" in json.dumps(request.body) for request in gateway.requests)


def test_generation_b(host: Host) -> None:
    """A /recall that answers 200 with a code is an error; memories come all the same, and that is no outage."""
    with FakeGateway("B") as gateway:
        gateway.memories = "Found 1 matching memories:\n\n- **[persona]** (score: 0.5)\n  The cat is red\n"
        host.use(gateway)
        one = host.session()
        for _ in range(2):
            assert "The cat is red" in one.prefetch("cat")
        one.sync_turn("hello", "hi")
        one.shutdown()
        assert gateway.users() == ["hello"]
        assert host.warned == []
        assert one.faults["recall"] == 2


def test_who_goes_with_every_record(host: Host, gateway: FakeGateway) -> None:
    """user_id, gateway_session_key and profile are sent with recall and capture; user_id falls back to the profile."""
    one = host.session(agent_identity="coder", gateway_session_key="telegram:7")
    one.prefetch("x")
    one.sync_turn("hello", "hi")
    one.shutdown()
    for path in ("/recall", "/capture"):
        body = gateway.asked(path)[0].body
        assert (body["user_id"], body["gateway_session_key"], body["agent_identity"]) == (
            "coder",
            "telegram:7",
            "coder",
        )
    assert gateway.asked("/capture")[0].headers["idempotency-key"]


def test_outage(host: Host, gateway: FakeGateway) -> None:
    """An outage is told once to the user and in every recalled text; back is told once, with what was kept."""
    one = host.session()
    one.prefetch("x")
    gateway.stop()
    for number in range(3):
        one.prefetch("x")
        one.sync_turn(f"turn {number}", "a")
    words = one.prefetch("x")
    assert "memory is away since" in words
    assert "3 turns are kept on disk and will be saved" in words
    assert "ECONNREFUSED" in words
    assert len(host.warned) == 1
    assert host.informed == []
    gateway.start()
    gateway.wait(lambda: len(gateway.stored) == 3)
    words = one.prefetch("x")
    assert "memory is back since" in words
    assert "Of 3 turns kept meanwhile" in words
    assert "ZORBLAX" in words
    assert "back since" not in one.prefetch("x")
    assert (len(host.warned), len(host.informed)) == (1, 1)
    assert gateway.users() == ["turn 0", "turn 1", "turn 2"]


def test_a_gateway_that_fails_is_an_outage(host: Host, gateway: FakeGateway) -> None:
    """500 for everything is told like an outage; as it is answered promptly, every turn tries again."""
    gateway.always("/recall", http(500))
    gateway.always("/search/memories", http(500))
    one = host.session()
    assert "the Gateway fails (HTTP 500" in one.prefetch("x")
    assert len(host.warned) == 1
    gateway.always("/recall", None)
    assert "ZORBLAX" in one.prefetch("x")
    assert len(host.informed) == 1


def test_one_line_says_which_gateway(host: Host, gateway: FakeGateway, caplog: pytest.LogCaptureFixture) -> None:
    """Each session logs once where it talks to and what said so, without its key."""
    host.env.setenv("MEMORY_TENCENTDB_GATEWAY_API_KEY", "secret-key")
    with caplog.at_level("INFO"):
        host.session()
    (line,) = [record.message for record in caplog.records if record.name.startswith("memory_tencentdb")]
    assert f"http://127.0.0.1:{gateway.port} (from MEMORY_TENCENTDB_GATEWAY_HOST/_PORT)" in line
    assert "secret-key" not in line


def test_memory_is_back_with_the_next_turn(host: Host, gateway: FakeGateway) -> None:
    """A second after the Gateway is back a turn has memory again, although nothing waited to be delivered."""
    gateway.stop()
    one = host.session()
    assert "away" in one.prefetch("x")
    gateway.start()
    time.sleep(1.0)
    assert "ZORBLAX" in one.prefetch("x")


def test_a_silent_gateway_costs_one_turn(host: Host, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn waits its deadline, the next ones nothing; a second after it answers again memory is back."""
    monkeypatch.setattr("memory_tencentdb.gateway.RECALL_DEADLINE", 0.5)
    monkeypatch.setattr("memory_tencentdb.aside.drainer.RECALL_DEADLINE", 0.5)
    one = host.session()
    gateway.always("*", silent())
    began = time.monotonic()
    assert "away" in one.prefetch("x")
    assert time.monotonic() - began < 0.8
    costs = []
    for _ in range(20):
        began = time.monotonic()
        assert "away" in one.prefetch("x")
        costs.append(time.monotonic() - began)
    assert sorted(costs)[10] < 0.005
    gateway.always("*", None)
    until(lambda: one._cooldown.trouble is None, 2.5)
    assert "ZORBLAX" in one.prefetch("x")
    until(lambda: not drains())


@pytest.mark.parametrize("step", [drip("head", 0.05), drip("body", 0.05), silent()])
def test_prefetch_budget(host: Host, gateway: FakeGateway, step: Any) -> None:
    """Whatever /recall does, prefetch takes 3 s at most, and what the search brought is used."""
    gateway.script("/recall", step)
    gateway.memories = "Found 1 matching memories:\n\n- **[persona]** (score: 0.5)\n  The cat is red\n"
    began = time.monotonic()
    words = host.session().prefetch("x")
    assert 2.5 < time.monotonic() - began < 3.3
    assert "The cat is red" in words


def test_nobody_home_from_the_start(host: Host, gateway: FakeGateway) -> None:
    """With the Gateway down the provider is available, offers its tools, starts at once and keeps every turn."""
    gateway.stop()
    fresh = TencentDBMemoryProvider()
    assert fresh.is_available()
    assert [schema["name"] for schema in fresh.get_tool_schemas()] == [
        "memory_tencentdb_memory_search",
        "memory_tencentdb_conversation_search",
    ]
    began = time.monotonic()
    one = host.session()
    assert time.monotonic() - began < 0.25  # 50 ms, and a loaded machine
    one.sync_turn("hello", "hi")
    began = time.monotonic()
    one.shutdown()
    assert time.monotonic() - began < 0.5
    assert host.pending() == 1


def test_the_next_session_delivers(host: Host, gateway: FakeGateway) -> None:
    """What a session left behind is delivered by the next one, before its own turns, by initialize alone."""
    gateway.stop()
    first = host.session("old")
    for number in range(3):
        first.sync_turn(f"left {number}", "a")
    first.shutdown()
    gateway.start()
    second = host.session("new")
    gateway.wait(lambda: len(gateway.stored) == 3)
    second.sync_turn("mine", "a")
    second.shutdown()
    assert gateway.users() == ["left 0", "left 1", "left 2", "mine"]
    assert gateway.ended == ["old", "new"]
    assert host.pending() == 0


def test_the_daemon_delivers(host: Host, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code run by itself on the spool delivers to where the session would have, without its environment."""
    gateway.stop()
    one = host.session(agent_identity="coder")
    one.sync_turn("left", "a")
    one.shutdown()
    gateway.start()
    for name in ("MEMORY_TENCENTDB_GATEWAY_PORT", "MEMORY_TENCENTDB_ROOT", "HERMES_HOME"):
        monkeypatch.delenv(name)
    (entry,) = (host.root / "spools").iterdir()
    known = json.loads(entry.read_text())
    assert known["profile"] == "coder"
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "memory_tencentdb.drain", "--spool", known["path"], "--deadline", "10"],
        capture_output=True,
        text=True,
        check=False,
        timeout=15,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["pending"] == 0
    assert gateway.users() == ["left"]


def test_sync_turn_does_not_wait(host: Host, gateway: FakeGateway) -> None:
    """With a Gateway that never answers a capture the host's call takes as long as the disk, and leaving is bounded."""
    gateway.always("/capture", silent())
    one = host.session()
    began = time.monotonic()
    for number in range(5):
        one.sync_turn(f"turn {number}", "a")
    assert time.monotonic() - began < 0.25
    gateway.wait(lambda: bool(gateway.asked("/capture")))
    began = time.monotonic()
    one.shutdown()
    assert time.monotonic() - began < 2.0
    assert host.pending() == 5


def test_switching_sessions(host: Host, gateway: FakeGateway) -> None:
    """A new id ends the old session once, in order; the same id ends nothing; recall and capture follow."""
    one = host.session("a")
    one.sync_turn("one", "x")
    one.on_session_switch("a", reason="compression")
    one.on_session_switch("a", rewound=True)
    one.on_session_switch("b", reset=True, reason="new_session", parent_session_id="a")
    one.prefetch("q")
    one.sync_turn("two", "x")
    one.on_session_switch("c", reason="resume")
    one.on_session_switch("d", reason="branch")
    one.sync_turn("late", "x", session_id="b")
    one.sync_turn("three", "x", session_id="d")
    one.shutdown()
    assert [(turn.session, turn.user) for turn in gateway.stored] == [
        ("a", "one"),
        ("b", "two"),
        ("b", "late"),
        ("d", "three"),
    ]
    assert gateway.ended == ["a", "b", "d"]
    assert gateway.asked("/recall")[0].body["session_key"] == "b"


@pytest.mark.parametrize(
    "kwargs",
    [{"agent_context": "cron"}, {"agent_context": "subagent"}, {"agent_context": "flush"}, {"platform": "cron"}],
)
def test_only_the_user_is_written(host: Host, gateway: FakeGateway, kwargs: dict[str, str]) -> None:
    """What cron jobs, subagents and flushes say is never stored as the user's."""
    one = host.session(**kwargs)
    one.sync_turn("prompt of a job", "x")
    one.on_memory_write("add", "user", "marker")
    one.on_delegation("task", "result")
    assert one.on_pre_compress([{"role": "user", "content": "x"}]) == ""
    one.shutdown()
    assert gateway.asked("/capture") == []
    assert host.pending() == 0


def test_memory_writes_and_delegations(host: Host, gateway: FakeGateway) -> None:
    """Writes of the built-in memory are mirrored, what other agents found out is kept; with odd arguments too."""
    one = host.session()
    one.on_memory_write("add", "user", "marker-1", metadata={"session_id": "s1", "old_text": "before"})
    one.on_memory_write("remove", "memory", "marker-2")
    one.on_delegation("find the cat", "it is red", child_session_id="c", extra=1)
    one.shutdown()
    users = gateway.users()
    assert "marker-1" in users[0]
    assert "before" in users[0]
    assert "marker-2" in users[1]
    assert users[2] == "Delegated task: find the cat"
    assert {turn.session for turn in gateway.stored} == {"s1"}


def test_tools(host: Host, gateway: FakeGateway) -> None:
    """Both tools answer with a JSON string, whatever they are given."""
    gateway.memories = "<memory-tools-guide>x</memory-tools-guide>found <memory-context>it</memory-context>"
    one = host.session()
    answer = json.loads(one.handle_tool_call("memory_tencentdb_memory_search", {"query": "cat", "limit": "99"}))
    assert answer == {"results": "found ‹memory-context›it‹/memory-context›", "total": 1}
    assert gateway.asked("/search/memories")[0].body == {"query": "cat", "limit": 20}
    one.handle_tool_call("memory_tencentdb_conversation_search", {"query": "cat"}, task_id="t")
    assert gateway.asked("/search/conversations")[0].body == {"query": "cat", "limit": 5}
    assert json.loads(one.handle_tool_call("other", {"query": "x"})) == {"error": "Unknown tool: other"}
    missing = {"error": "Missing required parameter: query"}
    assert json.loads(one.handle_tool_call("memory_tencentdb_memory_search", {})) == missing
    assert json.loads(one.handle_tool_call("memory_tencentdb_memory_search", None)) == missing
    gateway.script("/search/memories", http(400, {"error": "bad"}))
    assert "bad" in json.loads(one.handle_tool_call("memory_tencentdb_memory_search", {"query": "x"}))["error"]


def test_tools_while_the_gateway_is_away(host: Host, gateway: FakeGateway) -> None:
    """In an outage a tool answers at once, connects to nothing, and tells the model what to do instead."""
    gateway.stop()
    one = host.session()
    one.prefetch("x")
    gateway.start()
    before = gateway.connections
    for _ in range(5):
        began = time.monotonic()
        answer = json.loads(one.handle_tool_call("memory_tencentdb_memory_search", {"query": "x"}))
        assert time.monotonic() - began < 0.25  # 50 ms, and a loaded machine
        assert "built-in memory" in answer["instruction"]
    assert gateway.connections == before


def test_a_tool_has_its_own_deadline(host: Host, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that never comes back costs the model its deadline once."""
    monkeypatch.setattr("memory_tencentdb.gateway.Client.search.__defaults__", (0.3,))
    gateway.always("/search/conversations", silent())
    one = host.session()
    began = time.monotonic()
    one.handle_tool_call("memory_tencentdb_conversation_search", {"query": "x"})
    assert time.monotonic() - began < 0.6
    began = time.monotonic()
    one.handle_tool_call("memory_tencentdb_conversation_search", {"query": "x"})
    assert time.monotonic() - began < 0.25  # 50 ms, and a loaded machine


def test_a_hundred_initialisations(host: Host, gateway: FakeGateway) -> None:
    """Providers that are made and never shut down cost no thread and no descriptor, also while turns wait."""
    threads, fds = len(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        host.session()
    assert len(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds
    gateway.stop()
    host.session().sync_turn("left", "x")
    for _ in range(50):
        host.session()
    until(lambda: len(drains()) <= 1)
    for one in host.made:
        one.shutdown()
    until(lambda: not drains())


def test_threads_end_when_nothing_waits(host: Host, gateway: FakeGateway) -> None:
    """A session that is idle has no thread."""
    one = host.session()
    one.sync_turn("hello", "hi")
    gateway.wait(lambda: len(gateway.stored) == 1)
    until(lambda: not drains())
    one.sync_turn("again", "hi")
    gateway.wait(lambda: len(gateway.stored) == 2)
    until(lambda: not drains())


def test_two_sessions_of_one_process(host: Host, gateway: FakeGateway) -> None:
    """Sessions that share a process and a spool deliver everything once, each in its order."""
    gateway.delay = 0.01
    sessions = [host.session(f"s{number}") for number in range(4)]
    for turn in range(8):
        for number, one in enumerate(sessions):
            one.sync_turn(f"{number}-{turn}", "x")
    gateway.wait(lambda: len(gateway.stored) == 32)
    for number in range(4):
        mine = [turn.user for turn in gateway.stored if turn.session == f"s{number}"]
        assert mine == [f"{number}-{turn}" for turn in range(8)]


def test_profiles_stay_apart(host: Host, gateway: FakeGateway, tmp_path: Path) -> None:
    """What is bound in initialize() stays: another HERMES_HOME and port later change nothing."""
    one = host.session(agent_identity="first")
    with FakeGateway() as other:
        host.env.setenv("HERMES_HOME", str(tmp_path / "second"))
        host.use(other)
        one.sync_turn("mine", "x")
        two = host.session("s2", hermes_home=str(tmp_path / "second"), agent_identity="second")
        two.sync_turn("theirs", "x")
        one.shutdown()
        two.shutdown()
        assert other.users() == ["theirs"]
        assert other.asked("/capture")[0].body["agent_identity"] == "second"
    assert gateway.users() == ["mine"]


def test_multiplexed_profiles(host: Host, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host refuses unscoped secrets the profile's own .env counts, and worker threads need none."""
    (host.home / ".env").write_text(f"MEMORY_TENCENTDB_GATEWAY_PORT={gateway.port}\n")
    monkeypatch.setenv("MEMORY_TENCENTDB_GATEWAY_PORT", "9")
    module = types.ModuleType("agent.secret_scope")

    def get_secret(name: str, default: str | None = None) -> str | None:
        raise RuntimeError(f"get_secret({name!r}) called with no profile secret scope active")

    module.get_secret = get_secret  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "agent", types.ModuleType("agent"))
    monkeypatch.setitem(sys.modules, "agent.secret_scope", module)
    one = host.session()
    results: list[str] = []

    def work() -> None:
        results.append(one.prefetch("x"))
        one.sync_turn("hello", "hi")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    one.shutdown()
    assert "ZORBLAX" in results[0]
    assert gateway.users() == ["hello"]
    assert one.faults == {}


def test_checkpoint(host: Host, gateway: FakeGateway) -> None:
    """Before a compression the words are on disk, once; the summary learns where they are; nothing is sent twice."""
    one = host.session()
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    words = one.on_pre_compress(messages)
    assert "checkpoint" in words
    assert one.on_pre_compress(messages) == words
    assert one.on_pre_compress(messages, require_checkpoint=True) == words
    (file,) = (host.home / "memory_tencentdb" / "checkpoints").iterdir()
    assert len([1 for _, payload in spool.unframe(file.read_bytes()) if payload]) == 2
    one.shutdown()
    assert gateway.asked("/capture") == []


def test_a_checkpoint_that_fails(host: Host, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that asks for it is told by an exception; any other goes on, and the failure is counted."""

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "keep", refuse)
    one = host.session()
    assert one.on_pre_compress([{"role": "user", "content": "x"}]) == ""
    with pytest.raises(RuntimeError, match="cannot keep a checkpoint"):
        one.on_pre_compress([{"role": "user", "content": "x"}], require_checkpoint=True)
    monkeypatch.setattr(hermes, "checkpoint_api", lambda: 2)
    with pytest.raises(RuntimeError, match="No space left"):
        one.on_pre_compress([{"role": "user", "content": "x"}])
    assert one.faults["on_pre_compress"] == 3


def test_a_full_disk_is_told(host: Host, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that the disk refuses is delivered from memory, within 50 ms for the host, and the user is told once."""
    one = host.session()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("memory_tencentdb.spool.append_frame", full)
        for number in range(3):
            began = time.monotonic()
            one.sync_turn(f"turn {number}", "a")
            assert time.monotonic() - began < 0.25  # 50 ms, and a loaded machine
        gateway.wait(lambda: len(gateway.stored) == 3)
        assert one.faults["not_durable"] == 3
        assert len([words for words in host.warned if "No space left" in words]) == 1
    assert gateway.users() == ["turn 0", "turn 1", "turn 2"]


@pytest.mark.parametrize("hook", ["prefetch", "sync_turn", "on_memory_write", "on_session_switch", "handle_tool_call"])
def test_no_exception_reaches_the_host(
    host: Host, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    """A mistake of ours costs one hook call: counted, logged once, never raised."""
    one = host.session()

    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("ours")

    for name in ("session_key", "_recall", "_keep", "_end"):
        monkeypatch.setattr(one, name, broken, raising=False)
    monkeypatch.setattr(tools, "answer", broken)
    one._open["s1"] = None
    calls: dict[str, Callable[[], object]] = {
        "prefetch": lambda: one.prefetch("x"),
        "sync_turn": lambda: one.sync_turn("x", "y"),
        "on_memory_write": lambda: one.on_memory_write("add", "user", "x"),
        "on_session_switch": lambda: one.on_session_switch("b", reset=True),
        "handle_tool_call": lambda: json.loads(
            str(one.handle_tool_call("memory_tencentdb_memory_search", {"query": "x"}))
        ),
    }
    for _ in range(2):
        calls[hook]()
        one._session = "s1"
        one._ending.clear()
    assert one.faults[hook] == 2
    assert len([record for record in caplog.records if f"{hook} failed" in record.message]) == 1
    monkeypatch.undo()


def test_before_initialize(host: Host) -> None:
    """A host may call in any order; nothing raises and nothing is sent."""
    one = TencentDBMemoryProvider()
    assert one.prefetch("x") == ""
    one.sync_turn("x", "y")
    one.on_session_switch("b")
    one.on_session_end([])
    one.on_pre_compress([])
    assert "error" in json.loads(one.handle_tool_call("memory_tencentdb_memory_search", {"query": "x"}))
    one.shutdown()
    assert one.faults == {}


def test_unknown_arguments_everywhere(host: Host, gateway: FakeGateway) -> None:
    """A newer host may say more than we know."""
    one = host.session(cwd="/x", session_title_source="auto", something_new=object())
    one.prefetch("x", session_id="s1", new=1)
    one.queue_prefetch("x", session_id="s1", new=1)
    one.on_turn_start(1, "x", remaining_tokens=5, new=1)
    one.sync_turn("x", "y", session_id="s1", messages=[{"role": "user"}], new=1)
    one.on_session_end([], new=1)
    one.on_session_switch("s2", parent_session_id="s1", reset=False, new=1)
    one.on_delegation("t", "r", child_session_id="c", new=1)
    one.on_memory_write("add", "user", "x", metadata=None, new=1)
    one.on_pre_compress([], new=1)
    one.handle_tool_call("memory_tencentdb_memory_search", {"query": "x"}, new=1)
    one.shutdown()
    assert one.faults == {}


def test_prompt_is_byte_stable(host: Host, gateway: FakeGateway) -> None:
    """The prompt block is the same before initialize, with the Gateway up, and with it down."""
    one = host.session()
    up = one.system_prompt_block()
    gateway.stop()
    one.prefetch("x")
    assert one.system_prompt_block() == up == TencentDBMemoryProvider().system_prompt_block()
    assert "memory_tencentdb_memory_search" in up


def record(host: Host, gateway: FakeGateway, **changes: Any) -> None:
    """Write the endpoint record of that Gateway, as the daemon would."""
    me = {"pid": os.getpid(), "start_ticks": proof.start_ticks(os.getpid())}
    value: dict[str, Any] = {
        "schema": 1,
        "name": "default",
        "host": "127.0.0.1",
        "port": gateway.port,
        "state": "READY",
    }
    value |= {
        "boot_id": proof.boot_id(),
        "pid_ns": proof.pid_namespace(),
        "cause": "",
        "hold": None,
        "daemon": me,
        **me,
    }
    path = host.root / "run" / "default.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({**value, **changes}))
    temporary.replace(path)


def test_a_stopped_gateway_is_not_connected_to(host: Host, gateway: FakeGateway) -> None:
    """Where the daemon says STOPPED, a turn costs no network; the turn after READY has memory."""
    record(host, gateway, state="STOPPED", cause="stopped by the user")
    one = host.session()
    one.sync_turn("hello", "hi")
    words = one.prefetch("x")
    assert "STOPPED: stopped by the user" in words
    assert gateway.connections == 0
    record(host, gateway)
    assert "ZORBLAX" in one.prefetch("x")
    gateway.wait(lambda: gateway.users() == ["hello"])


def test_hold_in_the_record(host: Host, gateway: FakeGateway) -> None:
    """That nothing is delivered now is told, also by a session with nothing to deliver; reading goes on."""
    record(host, gateway, hold="disk full")
    one = host.session()
    words = one.prefetch("x")
    assert "ZORBLAX" in words
    assert "on hold: disk full" in words
    one.sync_turn("hello", "hi")
    one.prefetch("x")
    record(host, gateway)
    gateway.wait(lambda: gateway.users() == ["hello"])
    until(lambda: not drains())
    assert "back since" in one.prefetch("x")
    assert "hold" not in one.prefetch("x")
    assert (len(host.warned), len(host.informed)) == (1, 1)


def test_hold_is_told(host: Host, gateway: FakeGateway) -> None:
    """A degraded Gateway is read from but not written to, and that is said."""
    gateway.degraded = True
    one = host.session()
    one.sync_turn("hello", "hi")
    until(
        lambda: one._worker is not None and one._worker.drainer is not None and one._worker.drainer.trouble is not None
    )
    words = one.prefetch("x")
    assert "ZORBLAX" in words
    assert "not taking anything in" in words
    assert "degraded" in host.warned[0]
    gateway.degraded = False
    gateway.wait(lambda: gateway.users() == ["hello"])
    assert gateway.asked("/capture")[0].at > gateway.asked("/health")[0].at


def test_slow_gateway(host: Host, gateway: FakeGateway) -> None:
    """Two slow requests are made at the same time: a turn waits for the slower one only."""
    gateway.always("/recall", late(0.5))
    gateway.always("/search/memories", late(0.5))
    one = host.session()
    began = time.monotonic()
    assert "ZORBLAX" in one.prefetch("x")
    assert time.monotonic() - began < 0.9
    assert host.warned == []


def test_registering() -> None:
    """The provider goes to the host first; a host that takes skills gets the maintenance skill, an old one is fine."""
    given: list[Any] = []

    class Old:
        def register_memory_provider(self, one: object) -> None:
            given.append(one)

    class New(Old):
        def register_skill(self, name: str, path: str, description: str) -> None:
            given.append((name, path))

    register(Old())
    register(New())
    assert [type(each) for each in given] == [TencentDBMemoryProvider, TencentDBMemoryProvider, tuple]
    name, path = given[2]
    assert name == "maintenance"
    assert Path(path).read_text().startswith("---\nname: maintenance")


def test_host_contexts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer host makes our threads itself; on an older one they keep the caller's context."""
    from contextvars import ContextVar

    from memory_tencentdb.aside import worker

    profile: ContextVar[str] = ContextVar("profile", default="none")
    profile.set("work")
    seen: list[str] = []
    thread = worker.spawn(lambda: seen.append(profile.get()), "x")
    thread.start()
    thread.join()
    assert seen == ["work"]
    module = types.ModuleType("agent.memory_provider")
    made: list[str] = []

    def spawn_context_thread(target: Callable[[], None], *, name: str) -> threading.Thread:
        made.append(name)
        return threading.Thread(target=target)

    module.spawn_context_thread = spawn_context_thread  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "agent", types.ModuleType("agent"))
    monkeypatch.setitem(sys.modules, "agent.memory_provider", module)
    worker.spawn(lambda: None, "y")
    assert made == ["y"]


@pytest.mark.parametrize("abstract", [("name",), ("name", "is_available", "initialize", "get_tool_schemas")])
def test_hosts_with_a_base_class(monkeypatch: pytest.MonkeyPatch, abstract: tuple[str, ...]) -> None:
    """Loaded in a host the provider is one of its memory providers, whatever that leaves abstract."""
    from abc import ABC, abstractmethod

    body = {name: abstractmethod(lambda self: None) for name in abstract}
    base = type("MemoryProvider", (ABC,), body)
    module = types.ModuleType("agent.memory_provider")
    module.MemoryProvider = base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "agent", types.ModuleType("agent"))
    monkeypatch.setitem(sys.modules, "agent.memory_provider", module)
    spec = importlib.util.find_spec("memory_tencentdb.provider")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    one = loaded.TencentDBMemoryProvider()
    assert isinstance(one, base)
    assert getattr(one, "name", "") == "memory_tencentdb"
