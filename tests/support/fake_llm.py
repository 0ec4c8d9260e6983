"""A language model on loopback that speaks the chat.completions protocol and only does what a prompt tells it.

A prompt `CALL name {"json": "arguments"}` makes it call that tool once; any other prompt gets a fixed sentence. Every
request is kept, so that a test sees what the model was shown.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

MODEL = "fake-model"
ANSWER = "Understood."
_CALL = re.compile(r"\bCALL (\w+) (\{.*\})", re.DOTALL)


class FakeLLM:
    """Serves on a port of its own while entered. requests holds the body of every completion asked for."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.gate = threading.Event()  # while it is cleared, completions wait: sessions can be held in mid-turn
        self.gate.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.model = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> FakeLLM:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def base_url(self) -> str:
        """What a client is configured with."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def shown(self, role: str) -> str:
        """All text of one role in every request so far, one message a line."""
        messages = [m for request in self.requests for m in request.get("messages", []) if m.get("role") == role]
        return "\n".join(text_of(m) for m in messages)

    def tools(self) -> set[str]:
        """The names of all tools that were offered."""
        return {tool["function"]["name"] for request in self.requests for tool in request.get("tools") or []}

    def reply(self, messages: list[dict[str, Any]]) -> tuple[str, dict[str, Any] | None]:
        """(text, None) or ("", tool call) for a conversation."""
        asked = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=-1)
        wanted = _CALL.search(text_of(messages[asked])) if asked >= 0 else None
        if wanted is None or any(m.get("role") == "tool" for m in messages[asked:]):
            return ANSWER, None
        return "", {"name": wanted[1], "arguments": wanted[2]}


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _deltas(text: str, call: dict[str, Any] | None) -> Iterator[tuple[dict[str, Any], str | None]]:
    yield {"role": "assistant", "content": ""}, None
    if call is None:
        for word in text.split(" "):
            yield {"content": word + " "}, None
        yield {}, "stop"
    else:
        yield {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": call}]}, None
        yield {}, "tool_calls"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """The list of models, and 404 for whatever else a client tries."""
        if self.path != "/v1/models":
            return self._send(404, {"error": {"message": "no such path"}})
        self._send(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "context_length": 200000}]})

    def do_POST(self) -> None:
        """A completion, streamed where that is asked for."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path != "/v1/chat/completions":
            return self._send(404, {"error": {"message": "no such path"}})
        model = cast(FakeLLM, self.server.model)  # type: ignore[attr-defined]
        model.requests.append(body)
        model.gate.wait(60)
        text, call = model.reply(body.get("messages", []))
        base = {"id": "chatcmpl-1", "created": 1, "model": MODEL}
        if body.get("stream"):
            return self._stream(base, text, call)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if call is not None:
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": call}]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self._send(200, {**base, "object": "chat.completion", "choices": [choice], "usage": usage})

    def _stream(self, base: dict[str, Any], text: str, call: dict[str, Any] | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for delta, reason in _deltas(text, call):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = {**base, "object": "chat.completion.chunk", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _send(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
