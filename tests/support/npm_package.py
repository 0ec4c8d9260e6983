"""A stand-in for the Gateway's npm package, and for the Node that runs it: the suite needs neither.

The package has the layout of the real one; its src/gateway/server.ts is JSON that tells the stand-in server what to do:
{"boot": "ok" | "exit" | "never" | "strange", "refuse": user text that is answered 500, "ids": "own" to keep none}. The
"Node" is a shell script that runs this module, which keeps L0 like generation A: lines in conversations/DATE.jsonl, ids
kept, fenced code of assistants removed; the first capture of every third new session is dropped, and so is what is
stamped earlier than the server's clock.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAME = "@tencentdb-agent-memory/memory-tencentdb"


def make(folder: Path, version: str, boot: str = "ok", *, bundled: bool = True, **more: str) -> Path:
    """The package in a directory; bundled: with its dependencies."""
    (folder / "src" / "gateway").mkdir(parents=True)
    (folder / "src" / "gateway" / "server.ts").write_text(json.dumps({"boot": boot, **more}))
    about = {"name": NAME, "version": version, "dependencies": {"tsx": "^4", "zod": "^4"}}
    (folder / "package.json").write_text(json.dumps(about))
    if bundled:
        for name in ("tsx", "zod", "vitest"):
            (folder / "node_modules" / name).mkdir(parents=True)
            (folder / "node_modules" / name / "package.json").write_text(json.dumps({"name": name}))
        lock = {"packages": {"node_modules/tsx": {}, "node_modules/zod": {}, "node_modules/vitest": {"dev": True}}}
        (folder / "node_modules" / ".package-lock.json").write_text(json.dumps(lock))
    return folder


def archive(folder: Path, to: Path) -> Path:
    """The npm archive of a package directory."""
    with tarfile.open(to, "w:gz") as tar:
        tar.add(folder, arcname="package")
    return to


def node(folder: Path, version: str = "v24.0.0", abi: str = "137") -> Path:
    """The "Node", in a directory to put on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).resolve().parents[2]
    (folder / "node").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit 0\n[ "$1" = -p ] && echo {abi} && exit 0\n'
        f"exec /usr/bin/env PYTHONPATH={here} {sys.executable} -m tests.support.npm_package\n"
    )
    (folder / "node").chmod(0o755)
    return folder


def npm(folder: Path, script: str) -> None:
    """The "npm" beside it: a shell script, which writes its words to npm.calls first."""
    (folder / "npm").write_text(f'#!/bin/sh\necho "$*" >>{folder}/npm.calls\n{script}\n')
    (folder / "npm").chmod(0o755)


class Server(BaseHTTPRequestHandler):
    """Generation A, as far as it is needed."""

    told: dict[str, str]
    sessions: dict[str, int]

    def do_GET(self) -> None:
        stores = {"vectorStore": True, "embeddingService": False}
        self._answer(
            200, {} if self.told["boot"] == "strange" else {"status": "ok", "version": "0.1.0", "stores": stores}
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/capture":
            return self._answer(200, {"results": "", "total": 0})
        if self.told.get("refuse", "\0") in body["user_content"]:
            return self._answer(500, {"error": "told to"})
        if not self.sessions:
            time.sleep(0.07)  # the first capture of all takes long
        stamps = [m["timestamp"] for m in body.get("messages") or [] if "timestamp" in m]
        if stamps and min(stamps) <= time.time() * 1000:
            return self._answer(200, {"l0_recorded": 0})
        session = body["session_key"]
        self.sessions[session] = self.sessions.get(session, len(self.sessions) % 3 - 1)
        self.sessions[session] += 1
        if self.sessions[session] == 0:
            return self._answer(200, {"l0_recorded": 0, "scheduler_notified": True})
        plain = [{"role": r, "content": body[f"{r}_content"]} for r in ("user", "assistant")]
        said = body.get("messages") or plain
        if self.told.get("ids") == "own":
            said = [{k: v for k, v in message.items() if k != "id"} for message in said]
        return self._answer(200, {"l0_recorded": keep(session, said)})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def keep(session: str, messages: list[dict[str, Any]]) -> int:
    """Append what is worth keeping as lines of one recordedAt; how many."""
    folder = Path(os.environ["TDAI_DATA_DIR"], "conversations")
    folder.mkdir(exist_ok=True)
    now, lines = f"{time.time_ns()}", []
    for n, message in enumerate(messages):
        text = re.sub(r"```[^\n]*\n.*?```", "", message["content"], flags=re.DOTALL)
        line = {"sessionKey": session, "sessionId": "", "recordedAt": now, "id": message.get("id") or f"msg_{now}_{n}"}
        lines.append(
            json.dumps({**line, "role": message["role"], "content": text.strip(), "timestamp": int(now) // 10**6})
        )
    with open(folder / time.strftime("%Y-%m-%d.jsonl"), "a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return len(lines)


def main() -> None:
    """Serve as the server.ts of the working directory says."""
    told = json.loads(Path("src/gateway/server.ts").read_text())
    if told["boot"] == "exit":
        print("Error: Cannot find module 'tsx'", file=sys.stderr)
        sys.exit(1)
    if told["boot"] == "never":
        time.sleep(3600)
    Server.told, Server.sessions = told, {}
    address = (os.environ["TDAI_GATEWAY_HOST"], int(os.environ["TDAI_GATEWAY_PORT"]))
    ThreadingHTTPServer(address, Server).serve_forever()


if __name__ == "__main__":
    main()
