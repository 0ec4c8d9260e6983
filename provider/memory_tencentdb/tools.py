"""The two tools: what the model is offered, what it may ask, what it is answered. Pure but for Client.search.

Invariants:
* The schemas never change with the state of a Gateway: Hermes routes only what it saw before initialize().
* Every answer is a JSON string, whatever happened.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from .endpoint import Away
from .gateway import Client
from .text import RECALL_LIMIT, cut, neutralise, strip_tool_guide

MEMORY_SEARCH = "memory_tencentdb_memory_search"
CONVERSATION_SEARCH = "memory_tencentdb_conversation_search"
_PATHS = {MEMORY_SEARCH: "/search/memories", CONVERSATION_SEARCH: "/search/conversations"}
_TYPES = ("persona", "episodic", "instruction")
DEFAULT_LIMIT, MOST = 5, 20
PROMPT = (
    "# Long-term memory (memory_tencentdb)\n"
    "What is known from earlier conversations is recalled before each turn and stands in the memory context. "
    f"To look further use {MEMORY_SEARCH} (facts, events, instructions) and {CONVERSATION_SEARCH} "
    "(exact wording). This conversation is saved by itself; nothing has to be stored by hand."
)
"""Words for the system prompt. The host caches and stores them: they never change with the state of a Gateway."""

logger = logging.getLogger(__name__)


def schemas() -> list[dict[str, Any]]:
    """The schemas of both tools, made anew on each call (hosts write into them)."""
    query = {"type": "string", "description": "What to look for, in a few words"}
    limit = {
        "type": "integer",
        "description": f"How many results at most (1-{MOST})",
        "default": DEFAULT_LIMIT,
        "maximum": MOST,
    }
    kind = {"type": "string", "enum": list(_TYPES), "description": "Only memories of this kind"}
    return [
        {
            "name": MEMORY_SEARCH,
            "description": "Search long-term memory: facts about the user, past events and standing instructions "
            "that were extracted from earlier conversations.",
            "parameters": {
                "type": "object",
                "properties": {"query": dict(query), "limit": dict(limit), "type": kind},
                "required": ["query"],
            },
        },
        {
            "name": CONVERSATION_SEARCH,
            "description": "Search the exact wording of earlier conversations, when a memory is not precise enough.",
            "parameters": {
                "type": "object",
                "properties": {"query": dict(query), "limit": dict(limit)},
                "required": ["query"],
            },
        },
    ]


def read_limit(value: object) -> int:
    """The limit that a model meant: None and "" are 5, numbers and numeric strings are truncated and clamped to 1..20,
    anything else is 5 with a warning."""
    if value is None or value == "":
        return DEFAULT_LIMIT
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        logger.warning("limit %r is no number; using %d", value, DEFAULT_LIMIT)
        return DEFAULT_LIMIT
    try:
        return max(1, min(MOST, int(float(value))))
    except (ValueError, OverflowError):
        logger.warning("limit %r is no number; using %d", value, DEFAULT_LIMIT)
        return DEFAULT_LIMIT


def request(name: str, args: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, body) of a tool call. Raises ValueError with the words for the model."""
    if name not in _PATHS:
        raise ValueError(f"Unknown tool: {name}")
    query = args.get("query")
    query = query.strip() if isinstance(query, str) else str(query) if isinstance(query, (int, float)) else ""
    if not query:
        raise ValueError("Missing required parameter: query")
    body: dict[str, Any] = {"query": query[:RECALL_LIMIT], "limit": read_limit(args.get("limit"))}
    if name == MEMORY_SEARCH and args.get("type") in _TYPES:
        body["type"] = args["type"]
    return _PATHS[name], body


def answer(client: Client, path: str, body: Mapping[str, Any]) -> str:
    """The JSON string for the model. Raises Away."""
    reply = client.search(path, body)
    if reply.error:
        return failure(f"The memory Gateway could not search: {reply.error}")
    results = reply.json.get("results")
    found = results if isinstance(results, str) else json.dumps(results, ensure_ascii=False) if results else ""
    words = cut(neutralise(strip_tool_guide(found)))
    return json.dumps({"results": words, "total": reply.json.get("total", 0)}, ensure_ascii=False)


def unavailable(trouble: Away) -> str:
    """The answer that ends the matter: no retry helps, and there is something else to use."""
    return json.dumps(
        {
            "error": f"Long-term memory is not available now: {trouble.reason}.",
            "instruction": "Do not call this tool again in this turn; trying again will not help. Use the built-in "
            "memory and what is in this conversation, and say so if the answer depends on older conversations.",
            "retry": False,
        },
        ensure_ascii=False,
    )


def failure(words: str) -> str:
    """An error for the model as a JSON string."""
    return json.dumps({"error": words}, ensure_ascii=False)
