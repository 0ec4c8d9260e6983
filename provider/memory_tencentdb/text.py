"""Words that pass between the host, the model and the Gateway. Pure functions only.

Invariants:
* Nothing recalled can open or close a fence of the host: the host deletes whatever stands inside its own fence tags.
* What is cut says so; what is removed names nothing the model could call.
* The same input gives the same bytes: the host caches and replays what it is given.
"""

from __future__ import annotations

import calendar
import json
import re
import time

RECALL_HEADING = "## memory-tencentdb Memory"
RECALL_LIMIT = 8_000
"""Characters of recalled text per turn: Hermes 0.19.0 puts 50,000 into the prompt; newer hosts spill at 10,000."""

CONTENT_LIMIT = 120_000
"""Bytes of UTF-8 per side of a turn that one capture carries: two of them stay below the 256 KB that a Gateway takes
without blocking its event loop noticeably, and below the 1 MiB body limit of generation B also when escaped."""

# Patterns are compiled at first use: the host executes this file at every session start.
_TOOL_GUIDE = r"(?is)<memory-tools-guide\b[^>]*>.*?(?:</memory-tools-guide\s*>|\Z)"
_FENCE = r"(?i)<\s*(/?)\s*memory-context\b([^<>]{0,80})>"
_FENCED = r"(?is)<\s*memory-context\s*>.*?<\s*/\s*memory-context\s*>"
_STAMP = r"\[(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?)Z\]"
_CUT_MARK = "\n[… cut here: {kept} of {total} characters]"


def strip_tool_guide(text: str) -> str:
    """Text without the Gateway's guide to tools that this host does not have."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(_TOOL_GUIDE, "", text)).strip()


def neutralise(text: str) -> str:
    """Text whose fence tags are only letters: the host neither removes nor believes them."""
    return re.sub(_FENCE, lambda tag: f"‹{tag[1]}memory-context{tag[2]}›", text)


def without_fenced(text: str) -> str:
    """What the user or the model said, without recalled text that came along inside the host's fence."""
    return re.sub(_FENCE, "", re.sub(_FENCED, "", text)).strip() if "memory-context" in text.lower() else text


def memory_write(action: str, target: str, content: str, old: str) -> tuple[str, str]:
    """(user's side, assistant's side) of a write of the host's built-in memory, as a turn that a Gateway can store.

    No bracket at its beginning: a Gateway takes that for a time stamp and drops it.
    """
    user = f"Built-in memory, {action} ({target}): {content}" + (f" (was: {old})" if old else "")
    return user, f"Built-in memory updated: {action} in {target}."


def cut(text: str, limit: int = RECALL_LIMIT) -> str:
    """Text of at most ``limit`` characters, ended at a paragraph, line, sentence or word, with a mark of the cut."""
    if len(text) <= limit:
        return text
    room = limit - len(_CUT_MARK.format(kept=len(text), total=len(text)))
    head = text[: max(room, 0)]
    for boundary in ("\n\n", "\n", "。", ". ", " "):
        at = head.rfind(boundary)
        if at > len(head) * 0.6:
            head = head[: at + len(boundary)].rstrip()
            break
    return head + _CUT_MARK.format(kept=len(head), total=len(text))


def cut_content(text: str, limit: int = CONTENT_LIMIT) -> str:
    """Text of at most ``limit`` bytes of UTF-8 *as JSON*, with a mark where it was cut. Never raises: what UTF-8 cannot
    carry (a lone surrogate) becomes a question mark, because a Gateway answers it with an error for ever."""
    clean = text.encode("utf-8", "replace").decode("utf-8")
    if _json_size(clean) <= limit:
        return clean
    low, high = 0, len(clean)
    room = limit - 80
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _json_size(clean[:middle]) <= room else (low, middle - 1)
    return clean[:low] + _CUT_MARK.format(kept=low, total=len(clean))


def _json_size(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace"))


def plain(content: object) -> str:
    """The words of a message content, whatever shape the host gives it in (a string, or a list of parts)."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [
            part if isinstance(part, str) else str(part.get("text") or f"({part.get('type', 'part')})")
            for part in content
            if isinstance(part, (str, dict))
        ]
        return "\n".join(parts)
    return "" if content is None else str(content)


def explained(user: str, assistant: str) -> bool:
    """Whether a Gateway rightly records nothing of a turn: blank, NO_REPLY or a slash command (facts: Gateway, 3)."""
    u, a = user.strip(), assistant.strip()
    return not u or not a or a == "NO_REPLY" or u == "NO_REPLY" or u.startswith("/")


def needle(text: str, limit: int = 80) -> str:
    """The piece of a stored text by which it is found again: its longest line, white space made single.

    A Gateway trims white space, drops bracketed line starts and code blocks of the assistant; the longest prose line is
    what survives that.
    """
    prose = re.sub(r"```.*?(```|\Z)", "\n", text, flags=re.DOTALL)
    lines = [squeeze(line) for line in (prose if prose.strip() else text).splitlines()]
    return max(lines, key=len, default="")[:limit].strip()


def squeeze(text: str) -> str:
    """Text with every run of white space made one space."""
    return " ".join(text.split())


def found(results: str, wanted: str, since: float) -> bool:
    """Whether search results hold ``wanted`` as something stored at or after ``since`` (seconds of wall time).

    Results without a time count by their text alone. Five seconds of slack cover a clock read before the request.
    """
    if not wanted:
        return False
    for block in re.split(r"^---$", results, flags=re.MULTILINE):
        if wanted not in squeeze(block):
            continue
        stamp = re.search(_STAMP, block)
        if stamp is None or _epoch(stamp[1]) >= since - 5.0:
            return True
    return False


def _epoch(stamp: str) -> float:
    whole, _, fraction = stamp.partition(".")
    return calendar.timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{fraction or 0}")


def compose(context: str, memories: str, notice: str = "") -> str:
    """The recalled text of one turn: heading, notice, the Gateway's context, then memories it does not repeat.

    Empty when there is nothing to say. The notice is never cut: it stands first.
    """
    context = strip_tool_guide(context)
    parts = [context, _new_to(context, strip_tool_guide(memories))]
    body = neutralise("\n\n".join(part for part in parts if part))
    if not body and not notice:
        return ""
    head = "\n\n".join(part for part in (RECALL_HEADING, notice) if part)
    return head if not body else f"{head}\n\n{cut(body, RECALL_LIMIT - len(head) - 2)}"


def _new_to(context: str, memories: str) -> str:
    """The memory list without entries whose text the context already holds (the embedded Gateway gives both)."""
    if not context or not memories:
        return memories
    known = squeeze(context)
    entries = re.split(r"\n(?=- \*\*\[|\d+\. )", memories)
    kept = [entry for entry in entries if not _repeats(entry, known)]
    return "\n".join(kept).strip() if len(kept) > 1 or len(entries) == 1 else ""


def _repeats(entry: str, known: str) -> bool:
    text = squeeze(entry.partition("\n")[2])
    return bool(text) and text in known


def clock(wall: float) -> str:
    """A moment for people: local time of day, with the date unless it is today."""
    moment = time.localtime(wall)
    today = time.localtime()
    same_day = (moment.tm_year, moment.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", moment)
