"""The hooks that Hermes calls.

Invariants:
* No hook raises, none waits longer than its budget: prefetch 3 s in total and then nothing while the Gateway is away,
  a tool 4 s, sync_turn one append to disk, shutdown 2 s, everything else no network at all. (on_pre_compress raises on
  hosts whose contract asks for it.)
* Everything of a profile is bound in initialize(); there is no mutable state outside an instance.
* A turn goes to disk first. No answer of a Gateway decides whether it is kept.
* What a hook could not do is counted, logged once and shown by status.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import hooks, host, spool, text, tools
from .attachment import Attachment
from .endpoint import Away, Cooldown, Endpoint
from .gateway import Client
from .notice import Watch
from .settings import NAME, Settings, profile_environment, read_settings
from .spool import SIDE_LIMIT, Record, Spool

if TYPE_CHECKING:
    from .aside.drainer import Drainer
    from .aside.worker import Worker

EXIT_BUDGET = 1.5
"""Seconds that shutdown waits for deliveries under way; the whole of it stays below 2 s."""
LOOK_OUT = 60.0
"""Seconds after the last recall for which the background looks out for a silent Gateway's return."""
_NOT_THE_USER = ("cron", "subagent", "flush")
logger = logging.getLogger(__name__)
_Base: Any = host.base_class()


class TencentDBMemoryProvider(hooks.Faults, hooks.SetupHooks, _Base):  # type: ignore[misc]
    """TencentDB Agent Memory as the host's memory provider. It needs no running Gateway to be available."""

    pre_compress_checkpoint_api_version = 2

    def __init__(self) -> None:
        super().__init__()
        self._settings: Settings | None = None
        self._endpoint: Endpoint
        self._client: Client
        self._spool: Spool
        self._worker: Worker | None = None
        self._making = threading.Lock()
        self._closing = threading.Event()
        self._cooldown = Cooldown()
        self._watch = Watch()
        self._session = ""
        self._who: dict[str, str] = {}
        self._profile = ""
        self._writes = False
        self._registered = False
        self._closed = False
        self._recalled = float("-inf")
        self._attachment: Attachment | None = None
        self._open: dict[str, None] = {}
        self._ending: list[str] = []
        self._undelivered: set[str] = set()
        self._warn: Any = None
        self._inform: Any = None

    @property
    def name(self) -> str:
        """The name of the provider and of its directory."""
        return NAME

    def is_available(self) -> bool:
        """True by configuration alone: a Gateway that is away now is no reason to lose the turns of a session."""
        return True

    def initialize(self, session_id: str = "", **kwargs: Any) -> None:
        """Bind profile, session and user. No network; at most a thread where an earlier session left turns behind."""
        with self._guard("initialize"):
            home = os.path.expanduser(str(kwargs.get("hermes_home") or host.hermes_home()))
            self._session = str(session_id or "default")
            identity = str(kwargs.get("agent_identity") or "")
            who = {
                "user_id": str(kwargs.get("user_id") or identity or "default"),
                "gateway_session_key": str(kwargs.get("gateway_session_key") or ""),
                "agent_identity": identity,
            }
            self._who = {key: value for key, value in who.items() if value}
            self._profile = identity or os.path.basename(home)
            context, platform = (str(kwargs.get(key) or "").lower() for key in ("agent_context", "platform"))
            self._writes = context in ("", "primary") and platform not in _NOT_THE_USER
            self._warn, self._inform = kwargs.get("warning_callback"), kwargs.get("status_callback")
            if self._settings is None or self._settings.home != home or self._closed:
                self._bind(read_settings(home, profile_environment(home)))
            self._attach()
            if self._writes and not self._spool.idle():
                self._deliver()

    def _attach(self) -> None:
        """Show which session this is, and which have turns: where that fails, only the daemon knows less."""
        if self._attachment is not None and not self._attachment.show(self._session, list(self._open)):
            self._count("attachment")

    def _bind(self, settings: Settings) -> None:
        self._closing.set()
        self._settings, self._endpoint, self._spool = settings, Endpoint(settings), Spool(settings.spool)
        self._closing, self._worker = threading.Event(), None
        self._client = Client(self._endpoint, self._closing.is_set)
        self._cooldown, self._watch = Cooldown(), Watch()
        self._closed = self._registered = False
        if self._attachment is not None:
            self._attachment.end()
        self._attachment = Attachment(self, settings, self._profile)
        if settings.autostart:
            hooks.aside("autostart").start_once(settings.root, settings.home)
        logger.info("memory_tencentdb: %s", self._endpoint.describe())
        for warning in settings.warnings:
            logger.warning("memory_tencentdb: %s", warning)

    def _deliver(self) -> None:
        """Wake the background thread. Its code is loaded with the first thing there is to deliver."""
        if self._closed:
            return
        with self._making:
            if self._worker is None:
                self._worker = hooks.aside("worker").Worker(self._drainer, self._spool.idle, self._closing)
        self._worker.kick()

    def _drainer(self, sleep: Callable[[float], bool]) -> Drainer:
        make = hooks.aside("drainer").Drainer
        news = {"told": self._heard, "settled": self._undelivered.discard, "awaited": self._awaited}
        drainer: Drainer = make(self._spool, self._client, sleep, **news)
        return drainer

    # -- recall ------------------------------------------------------------------------------------------------------

    def system_prompt_block(self) -> str:
        """Static words: the host caches the prompt, and it must not change with a Gateway."""
        return tools.PROMPT

    def prefetch(self, query: str, *, session_id: str = "", **kwargs: Any) -> str:
        """What is known of the query, within 3 s in total; while the Gateway is away at once, and saying so."""
        with self._guard("prefetch"):
            words = text.plain(query).strip()
            if self._settings is None or not words:
                return ""
            self._recalled = time.monotonic()
            trouble = self._cooldown.refuses(self._endpoint, self._recalled)
            context = memories = ""
            if trouble is None:
                try:
                    context, memories, partly = self._client.recall(words, self._who, self.session_key(session_id))
                    self._answered(partly)
                except Away as away:
                    if away.kind == "closing":
                        return ""
                    trouble = away
                    self._failed(away)
                    if self._awaited():
                        self._deliver()
            return text.compose(context, memories, self._notice(trouble))
        return ""

    def queue_prefetch(self, query: str, *, session_id: str = "", **kwargs: Any) -> None:
        """Nothing: the recall of a turn needs its own words."""

    def session_key(self, session_id: str = "") -> str:
        """The key of a session in every request and record, made here alone."""
        return str(session_id or self._session or "default")

    def _answered(self, partly: str = "") -> None:
        was = self._cooldown.trouble
        self._cooldown.succeeded()
        if partly and not self.faults.get("recall"):
            logger.warning("memory_tencentdb: recall is incomplete: %s", partly)
        if partly:
            self._count("recall")
        if was is not None and self._worker is not None:
            self._worker.drainer.resume()
            self._worker.kick()

    def _failed(self, trouble: Away) -> None:
        if trouble.kind not in ("closing", "hold"):
            self._cooldown.failed(trouble, self._endpoint.changes(), time.monotonic(), time.time())

    def _awaited(self) -> bool:
        """Whether to look out for the Gateway's return: after silence, and for a minute after the last recall."""
        trouble = self._cooldown.trouble
        recent = time.monotonic() - self._recalled < LOOK_OUT
        return trouble is not None and trouble.kind in ("silent", "cut") and recent

    def _heard(self, trouble: Away | None) -> None:
        """The drainer's news of the Gateway: what it has seen a turn need not find out again."""
        if trouble is None:
            self._cooldown.succeeded()
        else:
            self._failed(trouble)

    def _notice(self, trouble: Away | None) -> str:
        """Words for the recalled text; a change is also told to the user and logged, once."""
        drainer = self._worker.drainer if self._worker is not None else None
        if trouble is None:
            seen = drainer.trouble if drainer is not None else None
            trouble = seen if seen is not None and seen.kind == "hold" else self._endpoint.held()
        told = self._watch.look(trouble, self._waiting(drainer), time.time(), len(self._spool.volatile))
        if told.user:
            logger.log(logging.WARNING if told.bad else logging.INFO, "%s", told.user)
            host.tell(self._warn if told.bad else self._inform, told.user)
        return told.model

    def _waiting(self, drainer: Drainer | None) -> int:
        if self._undelivered and self._spool.idle():
            self._undelivered.clear()  # another process has delivered them
        mine = len(self._undelivered)
        return max(mine, drainer.ledger.turns) if drainer is not None and drainer.lock.held else mine

    # -- capture -----------------------------------------------------------------------------------------------------

    def sync_turn(
        self,
        user_content: str,
        assistant_content: str,
        *,
        session_id: str = "",
        messages: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a finished turn. It is on disk when this returns, or counted as not durable."""
        with self._guard("sync_turn"):
            user, assistant = (text.without_fenced(text.plain(side)) for side in (user_content, assistant_content))
            if user.strip() or assistant.strip():
                self._keep("turn", user, assistant, self.session_key(session_id))

    def on_memory_write(
        self, action: str, target: str, content: str, metadata: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Mirror a write of the built-in memory, as something the user would have said."""
        with self._guard("on_memory_write"):
            more = metadata or {}
            user, assistant = text.memory_write(action, target, content, str(more.get("old_text") or ""))
            self._keep("memory", user, assistant, self.session_key(str(more.get("session_id") or "")))

    def on_delegation(self, task: str, result: str, *, child_session_id: str = "", **kwargs: Any) -> None:
        """Keep what another agent was asked and what it answered, in the session that asked."""
        with self._guard("on_delegation"):
            if str(task).strip() and str(result).strip():
                self._keep("delegation", f"Delegated task: {text.plain(task)}", text.plain(result), self.session_key())

    def _keep(self, kind: str, user: str, assistant: str, session: str) -> None:
        if self._settings is None or not self._writes:
            return
        for ended in [key for key in self._ending if key != session]:
            self._end(ended)
        self._open[session] = None
        self._append(
            Record(
                id=spool.new_id(),
                session_key=session,
                user=text.cut(user, SIDE_LIMIT),
                assistant=text.cut(assistant, SIDE_LIMIT),
                kind=kind,
                at=time.time(),
                session_id=session,
                who=self._who,
            )
        )
        self._attach()

    def _append(self, record: Record) -> None:
        """Disk first, then the thread that delivers: a kill between the two leaves the turn for the next session."""
        if record.kind != "end":
            self._undelivered.add(record.id)
        if not self._spool.append(record) and self._count("not_durable") == 1:
            said = f"memory_tencentdb: turns are not on disk, only in memory ({self._spool.last_error}); free the disk"
            logger.error("%s", said)
            host.tell(self._warn, said)
        if not self._registered:
            self._register()
        self._deliver()

    def _register(self) -> None:
        assert self._settings is not None
        self._registered = True
        try:
            spool.register(self._settings, self._profile)
        except OSError as error:
            self._count("register")
            logger.info("memory_tencentdb: the daemon does not know of this spool: %s", error)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def on_session_switch(
        self,
        new_session_id: str,
        *,
        parent_session_id: str = "",
        reset: bool = False,
        rewound: bool = False,
        **kwargs: Any,
    ) -> None:
        """A new id ends the old session once.

        /new comes in order with the captures; on other paths a capture of the old session may still be under way, so
        its end waits for the next record of another session.
        """
        with self._guard("on_session_switch"):
            old, self._session = self._session, str(new_session_id or self._session)
            self._attach()
            if old == self._session or old not in self._open or old in self._ending:
                return
            self._ending.append(old)
            if reset:
                self._end(old)

    def on_session_end(self, messages: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> None:
        """Nothing yet: with ``hermes -z`` the last turn comes after this. shutdown and a switch end sessions."""

    def _end(self, session: str) -> None:
        if session in self._ending:
            self._ending.remove(session)
        if self._open.pop(session, self) is None:
            self._append(Record(spool.new_id(), session, kind="end", at=time.time(), session_id=session))
            self._attach()

    def shutdown(self) -> None:
        """End the sessions, deliver what can be delivered at once, leave the rest on disk; below 2 s in every state."""
        with self._guard("shutdown"):
            if self._closed or self._settings is None:
                return
            for session in [*self._ending, *self._open]:
                self._end(session)
            self._closed = True
            if self._attachment is not None:
                self._attachment.end()
            if self._worker is not None:
                self._worker.wait_idle(EXIT_BUDGET)
                self._worker.stop(0.3)
            if self._spool.volatile and not self._spool.settle():
                logger.error(
                    "memory_tencentdb: %d turns are lost with this process: %s",
                    len(self._spool.volatile),
                    self._spool.last_error,
                )

    def on_turn_start(self, turn_number: int, message: str, **kwargs: Any) -> None:
        """Nothing: prefetch and sync_turn see every turn."""

    def on_pre_compress(
        self, messages: Sequence[Mapping[str, Any]], *, require_checkpoint: bool = False, **kwargs: Any
    ) -> str:
        """Keep the exact words before they are compressed. Returns a line for the summary.

        On hosts with contract version 2 a return means that they are durable, and a failure is raised.
        """
        strict = require_checkpoint or host.checkpoint_api() >= 2
        try:
            if self._settings is None or not self._writes:
                return ""
            kept = hooks.aside("checkpoint").keep(self._settings.spool, self.session_key(), list(messages), time.time())
            if not self._spool.settle():
                raise OSError(f"turns wait in memory: {self._spool.last_error}")
            return kept.words() if kept is not None else ""
        except Exception as error:
            self._count("on_pre_compress")
            if strict:
                raise RuntimeError(f"cannot keep a checkpoint: {error}; try hermes {NAME} doctor") from error
            logger.warning("memory_tencentdb: cannot keep a checkpoint: %s", error)
            return ""

    # -- tools -------------------------------------------------------------------------------------------------------

    def get_tool_schemas(self) -> list[dict[str, Any]]:
        """Both tools, always."""
        return tools.schemas()

    def handle_tool_call(self, tool_name: str, args: Mapping[str, Any] | None = None, **kwargs: Any) -> str:
        """The answer as a JSON string, within 4 s; at once and without network while the Gateway is away."""
        with self._guard("handle_tool_call"):
            try:
                path, body = tools.request(tool_name, args if isinstance(args, Mapping) else {})
            except ValueError as error:
                return tools.failure(str(error))
            if self._settings is None:
                return tools.unavailable(Away("config", "the memory provider is not initialised"))
            trouble = self._cooldown.refuses(self._endpoint, time.monotonic(), quiet=True)
            if trouble is not None:
                return tools.unavailable(trouble)
            try:
                answer = tools.answer(self._client, path, body)
            except Away as away:
                self._failed(away)
                return tools.unavailable(away)
            self._answered()
            return answer
        return tools.failure("The memory provider failed; use the built-in memory.")
