"""A Gateway that does what a test tells it, by STUB_* variables and by POST /__do.

STUB_EXIT=N exit at once with N · STUB_SAY=text on stderr first · STUB_LIFE=S end after S seconds · STUB_BOOT=S sleep
before listening · STUB_NEVER=1 never listen · STUB_IGNORE_TERM=1 · STUB_FORK=setsid leave a grandchild in a session of
its own that ignores TERM · STUB_LINES=1 one log line per request · STUB_TERMS=FILE append a line per TERM ·
STUB_HEALTH=json body of /health · STUB_MODE=first mode.
POST /__do {"mode": "ok|slow:S|drip|silent|degraded|http:CODE|block:S|burn:S|storm:MB|die:CODE|close"}.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time

BODY = {"status": "ok", "version": "0.1.0", "uptime": 1, "stores": {"vectorStore": True, "embeddingService": False}}


def answer(status: int, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    return head.encode() + data


class Stub:
    def __init__(self) -> None:
        self.mode = os.environ.get("STUB_MODE", "ok")
        self.health = json.loads(os.environ.get("STUB_HEALTH") or json.dumps(BODY))
        self.count = 0

    def serve(self, connection: socket.socket) -> None:
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                more = connection.recv(65536)
                if not more:
                    return
                data += more
            line = data.split(b"\r\n", 1)[0].decode()
            head, _, body = data.partition(b"\r\n\r\n")
            length = next(
                (int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")), 0
            )
            while len(body) < length:
                body += connection.recv(65536)
            self.count += 1
            if os.environ.get("STUB_LINES"):
                print(f"request {self.count} {line}", flush=True)
            if line.startswith("POST /__do"):
                self.do(json.loads(body)["mode"])
                connection.sendall(answer(200, {"done": True}))
                return
            self.reply(connection)

    def do(self, mode: str) -> None:
        verb, _, value = mode.partition(":")
        if verb == "die":
            threading.Timer(0.01, lambda: os._exit(int(value))).start()
        elif verb == "storm":
            threading.Thread(target=storm, args=(float(value),), daemon=True).start()
        else:
            self.mode = mode

    def reply(self, connection: socket.socket) -> None:
        verb, _, value = self.mode.partition(":")
        if verb == "slow":
            time.sleep(float(value))
        if verb == "silent":
            time.sleep(3600)
        if verb == "drip":
            for byte in answer(200, self.health):
                connection.sendall(bytes([byte]))
                time.sleep(1)
            return
        if verb == "degraded":
            connection.sendall(answer(200, {**self.health, "status": "degraded"}))
        elif verb == "http":
            connection.sendall(answer(int(value), {"error": "told so"}))
        elif verb != "close":
            connection.sendall(answer(200, self.health))


def storm(megabytes: float) -> None:
    line = b"x" * 1023 + b"\n"
    for _ in range(int(megabytes * 1024)):
        os.write(1, line)


def main() -> None:
    env = os.environ
    if env.get("STUB_SAY"):
        print(env["STUB_SAY"], file=sys.stderr, flush=True)
    if env.get("STUB_FORK") == "setsid" and os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(3600)
    if env.get("STUB_EXIT"):
        os._exit(int(env["STUB_EXIT"]))
    if env.get("STUB_LIFE"):
        threading.Timer(float(env["STUB_LIFE"]), lambda: os._exit(3)).start()

    def terminated(*_: object) -> None:
        if env.get("STUB_TERMS"):
            with open(env["STUB_TERMS"], "a", encoding="ascii") as file:
                file.write(f"{os.getpid()}\n")
        if not env.get("STUB_IGNORE_TERM"):
            os._exit(0)

    signal.signal(signal.SIGTERM, terminated)
    if env.get("STUB_NEVER"):
        while True:
            time.sleep(3600)
    time.sleep(float(env.get("STUB_BOOT") or 0))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((env["TDAI_GATEWAY_HOST"], int(env["TDAI_GATEWAY_PORT"])))
    except OSError:
        print(f"listen EADDRINUSE: address already in use {env['TDAI_GATEWAY_PORT']}", file=sys.stderr)
        sys.exit(1)
    listener.listen(128)
    stub = Stub()
    while True:
        verb, _, value = stub.mode.partition(":")
        if verb == "block":
            stub.mode = "ok"
            time.sleep(float(value))
        if verb == "burn":
            stub.mode = "ok"
            until = time.monotonic() + float(value)
            while time.monotonic() < until:
                pass
        if select.select([listener], [], [], 0.05)[0]:
            connection, _ = listener.accept()
            threading.Thread(target=stub.serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
