"""A Hermes that says one thing and leaves: python one_shot.py HOME — no shutdown, threads still at work."""

from __future__ import annotations

import sys
import threading

from memory_tencentdb import TencentDBMemoryProvider


def main() -> None:
    one = TencentDBMemoryProvider()
    one.initialize(session_id="s1", hermes_home=sys.argv[1], platform="cli")
    threading.Thread(target=one.prefetch, args=("what is my cat called?",), daemon=True).start()
    one.sync_turn("hello", "hi")


if __name__ == "__main__":
    main()
