"""What is indexed, what a query matches, how results read. Pure: no clock, no I/O.

Invariants:
- `index_text` and `match_query` cut text with the same folding and the same pattern, so whatever stands in a message
  can be found by typing it again.
- One token per character of a script written without spaces (Han, kana, Hangul, Thai, Lao, Burmese, Khmer), one per
  emoji, one per word of anything else. Source: trigram finds no two-character word and no emoji, unicode61 finds no
  part of a CJK run; measured.
- Tokens hold letters, digits, marks and emoji only and always stand in double quotes in an expression: no query text
  can reach the FTS5 query syntax. The FTS5 tokenizer must be `ascii`, which cuts at ASCII separators and keeps every
  other character.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice, pairwise
from typing import NamedTuple

MAX_TERMS = 64
"""Terms of one query, OR-ed; the rest of a long query is not looked at. bm25 over 64 terms stays in milliseconds."""
MAX_QUERY = 20_000
"""Characters of a query that are looked at."""
MAX_WORD = 64
"""Characters of a word that count, in messages and in queries alike (keeps base64 out of the index)."""
RECALL_BUDGET = 4_000
"""Characters of a recalled context, heading included."""
RECALL_TURNS = 8
RECALL_MESSAGES = 4
"""Messages of one turn that are shown."""
RESULTS_BUDGET = 1 << 20
"""Characters of a search answer after which no further message is added; the first is always whole."""

_UNSPACED = (
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u1000-\u103f\u1780-\u17d3"  # Thai, Lao, Burmese, Khmer
    "\u1100-\u11ff\ua960-\ua97f\uac00-\ud7ff"  # Hangul
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\u3041-\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\U0001b000-\U0001b16f"  # kana
    "\u3105-\u312f\u31a0-\u31bf"  # Bopomofo
)
_MARKS = (
    "\u0300-\u036f\u0483-\u0487\u0591-\u05bd\u05bf-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
)
_PICTURE = (
    "[\u00a9\u00ae\u203c\u2049\u2190-\u21ff\u2300-\u23ff\u25a0-\u27bf\u2900-\u297f\u2b00-\u2bff\u3030\u303d"
    "\U0001f000-\U0001f1e5\U0001f200-\U0001faff]"
)
_SKIN = "[\U0001f3fb-\U0001f3ff]"
_ONE = f"{_PICTURE}\ufe0f?{_SKIN}?[\U000e0020-\U000e007f]*"
_EMOJI = f"[0-9#*]\ufe0f?\u20e3|[\U0001f1e6-\U0001f1ff]{{1,2}}|{_ONE}(?:\u200d{_ONE})*"
_TOKEN = re.compile(f"(?P<emoji>{_EMOJI})|(?P<run>[{_UNSPACED}]{{1,32}})|(?P<word>(?:[^\\W_{_UNSPACED}]|[{_MARKS}])+)")
_ASCII_WORD = re.compile("[a-z0-9]+")
_PARTS = re.compile(f"(?!{_SKIN}){_PICTURE}")
_ACCENTS = re.compile("[\u0300-\u036f]+")
_VARIANTS = re.compile("[\ufe0e\ufe0f]")
_UNPRINTED = re.compile("[\\s\x00-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069]+")
_TAG = re.compile(r"<(/?[A-Za-z][^<>]*)>")


def fold(text: str) -> str:
    """The text as it is compared: compatibility forms, case and accents gone, kana and Hangul composed."""
    if text.isascii():
        return text.lower()
    # Case first, then decompose, then case again: some capitals only appear when a compatibility form is taken apart.
    parts = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text.casefold()).casefold())
    return unicodedata.normalize("NFC", _ACCENTS.sub("", parts))


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """(kind, token) in order; kind is emoji, run (1 to 32 characters without spaces) or word."""
    for match in _TOKEN.finditer(fold(text)):
        kind, token = match.lastgroup or "", match.group()
        yield kind, _VARIANTS.sub("", token) if kind == "emoji" else token[:MAX_WORD]


def index_text(text: str) -> str:
    """The tokens of a message, separated by spaces, for an FTS5 column with the `ascii` tokenizer.

    A composed emoji stands there whole and again by its parts: a thumb is found in any skin tone, and exactly.
    """
    if text.isascii():  # the same tokens, eight times as fast
        return " ".join([word[:MAX_WORD] for word in _ASCII_WORD.findall(text.lower())])
    found: list[str] = []
    for kind, token in _tokens(text):
        if kind == "run":
            found.extend(token)
            continue
        found.append(token)
        if kind == "emoji" and len(token) > 1:
            found.extend(_PARTS.findall(token))
    return " ".join(found)


def _terms(text: str, loose: bool) -> Iterator[str]:
    for kind, token in _tokens(text[:MAX_QUERY]):
        if kind != "run":
            yield token
        elif loose and len(token) > 2:
            yield from (f"{a} {b}" for a, b in pairwise(token))
        else:
            yield " ".join(token)


def query_terms(text: str, *, loose: bool = False) -> list[str]:
    """What a user's words ask for, each once: words, emoji, and phrases of characters with a space between them.

    Each run of a script without spaces is a phrase or, when `loose`, each of its pairs of neighbours: a whole sentence
    in Chinese then finds what shares a word with it.
    """
    return list(islice(dict.fromkeys(_terms(text, loose)), MAX_TERMS))


def expression(terms: Iterable[str]) -> str | None:
    """The FTS5 expression for any of these terms, or None when there are none."""
    return " OR ".join(f'"{term}"' for term in terms) or None


def match_query(text: str, *, loose: bool = False) -> str | None:
    """The FTS5 expression for a user's words, or None when there is nothing to look for."""
    return expression(query_terms(text, loose=loose))


class Said(NamedTuple):
    """A stored message; `at` is in ms since the epoch, `score` 0..1, above 0 where it matched."""

    number: int
    role: str
    content: str
    at: int
    session: str
    score: float = 0.0


def _when(at: int) -> datetime:
    return datetime.fromtimestamp(at / 1000, UTC)


def _stamp(at: int) -> str:
    return _when(at).strftime("%Y-%m-%dT%H:%M:%S.") + f"{at % 1000:03d}Z"


def _within_budget(hits: Iterable[Said]) -> list[Said]:
    kept: list[Said] = []
    size = 0
    for hit in hits:
        size += len(hit.content)
        if kept and size > RESULTS_BUDGET:
            break
        kept.append(hit)
    return kept


def conversation_results(hits: Iterable[Said]) -> tuple[str, int]:
    """(text, count) of /search/conversations, in the shape of the real Gateway."""
    kept = _within_budget(hits)
    if not kept:
        return "No matching conversation messages found.", 0
    lines = [f"Found {len(kept)} matching message(s):", ""]
    for hit in kept:
        head = f"**[{hit.role}]** Session: {hit.session} [{_stamp(hit.at)}] (score: {hit.score:.3f})"
        lines += ["---", head, "", hit.content, ""]
    return "\n".join(lines), len(kept)


def memory_results(hits: Iterable[Said]) -> tuple[str, int]:
    """(text, count) of /search/memories; its first line says that these are messages, not extracted memories."""
    kept = _within_budget(hits)
    if not kept:
        return "No matching memories found.", 0
    lines = [f"No extracted memories yet. Found {len(kept)} matching conversation message(s) instead:", ""]
    for hit in kept:
        lines.append(f"- **[{hit.role}]** (session: {hit.session}) [{_stamp(hit.at)}] (score: {hit.score:.3f})")
        lines.append("  " + hit.content.replace("\n", "\n  "))
    return "\n".join([*lines, ""]), len(kept)


def flatten(text: str) -> str:
    """One line, safe inside a prompt: no line ends, control or direction characters, nothing that reads as a tag."""
    return _TAG.sub("‹\\1›", _UNPRINTED.sub(" ", text)).strip()


def excerpt(text: str, words: Iterable[str], width: int) -> str:
    """At most `width` characters of `text`, around the first of `words` that is in it, else its beginning."""
    if len(text) <= width:
        return text
    lowered = text.lower()
    hits = [at for at in (lowered.find(word) for word in words) if at >= 0]
    start = max(0, min(min(hits, default=0) - width // 3, len(text) - width + 1))
    return ("…" if start else "") + text[start : start + width - 2] + "…"


def _telling(turn: list[Said]) -> list[Said]:
    """The messages of a turn that are shown: all of a question and its answer, the best of a longer exchange."""
    best = sorted(turn, key=lambda said: -said.score)[:RECALL_MESSAGES]
    return sorted(best, key=lambda said: said.number)


def recall_context(turns: Iterable[list[Said]], query: str) -> tuple[str, int]:
    """(text, number of turns): a heading and one bullet per message, most relevant turn first, within RECALL_BUDGET.

    A turn stands there once even if it was said several times; what does not fit whole is left out.
    """
    words = [token for _, token in islice(_tokens(query[:MAX_QUERY]), MAX_TERMS)]
    lines = ["## Earlier conversations that may be relevant"]
    room = RECALL_BUDGET - len(lines[0])
    seen: set[tuple[str, ...]] = set()
    count = 0
    for turn in turns:
        wording = tuple(said.content for said in turn)
        bullets = [
            f"- {_when(said.at):%Y-%m-%d %H:%M} UTC, session {flatten(excerpt(said.session, (), 64))}, {said.role}: "
            + flatten(excerpt(said.content, words, 300 if said.role == "user" else 600))
            for said in _telling(turn)
        ]
        cost = sum(len(line) + 1 for line in bullets)
        if wording in seen or cost > room:
            continue
        seen.add(wording)
        lines += bullets
        room -= cost
        count += 1
        if count == RECALL_TURNS:
            break
    return ("\n".join(lines), count) if count else ("", 0)
