"""The words: what is recalled, what is cut, how a stored turn is found again."""

from __future__ import annotations

import calendar
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_tencentdb import text


@pytest.mark.parametrize(
    ("given_text", "left"),
    [
        ("<memory-tools-guide>call tdai_memory_search</memory-tools-guide>", ""),
        ("a\n\n<memory-tools-guide>x\ny</memory-tools-guide>\n\nb", "a\n\nb"),
        ("a <MEMORY-TOOLS-GUIDE lang='zh'>x</MEMORY-TOOLS-GUIDE >", "a"),
        ("a <memory-tools-guide>never closed", "a"),
        ("nothing to strip", "nothing to strip"),
    ],
)
def test_tool_guide_goes(given_text: str, left: str) -> None:
    """The guide that names tools which this host does not have never reaches the model."""
    assert text.strip_tool_guide(given_text) == left


@given(st.text(alphabet="<>/ memory-context‹›x\n", max_size=200))
def test_no_fence_survives(words: str) -> None:
    """Nothing recalled can open or close the host's fence: the host would delete what stands between."""
    host_fence = re.compile(r"</?\s*memory-context\s*>", re.IGNORECASE)
    assert not host_fence.search(text.neutralise(words))


def test_neutralised_words_stay() -> None:
    """The content of a fence is kept; only the tags become letters."""
    assert text.neutralise("<memory-context>cat</memory-context>") == "‹memory-context›cat‹/memory-context›"


def test_fenced_text_is_not_captured() -> None:
    """What the host injected into a turn is not the user's and does not go back to the Gateway."""
    assert text.without_fenced("hi <memory-context>\nold\n</memory-context>") == "hi"
    assert text.without_fenced("hi") == "hi"


@given(st.text(min_size=0, max_size=3000), st.integers(min_value=120, max_value=1000))
def test_cut_keeps_the_limit(words: str, limit: int) -> None:
    """A cut text is never longer than the limit, begins like the original, and says that it was cut."""
    short = text.cut(words, limit)
    assert len(short) <= limit
    if len(words) > limit:
        assert "[… cut here:" in short
        assert words.startswith(short.partition("\n[… cut here:")[0])
    else:
        assert short == words


def test_cut_ends_at_a_boundary() -> None:
    """A cut falls between sentences, not within a word, where there is a boundary near the end."""
    short = text.cut("One sentence. " * 100, 300)
    assert short.partition("\n[…")[0].endswith("One sentence.")


@given(st.text(max_size=4000), st.integers(min_value=200, max_value=2000))
def test_cut_content_fits_as_json(words: str, limit: int) -> None:
    """What one capture carries is bounded in bytes as JSON, whatever characters it holds."""
    assert len(json.dumps(text.cut_content(words, limit), ensure_ascii=False).encode()) <= limit


def test_lone_surrogates_are_replaced() -> None:
    """A character that UTF-8 cannot carry would be refused for ever; it becomes a question mark."""
    assert text.cut_content("a\ud800b") == "a?b"


@pytest.mark.parametrize(
    ("user", "assistant", "rightly"),
    [
        ("hello", "hi", False),
        ("", "hi", True),
        ("  \n", "hi", True),
        ("hello", "", True),
        ("hello", "NO_REPLY", True),
        ("hello", " NO_REPLY\n", True),
        ("/help", "text", True),
        ("a/b", "text", False),
    ],
)
def test_explained(user: str, assistant: str, rightly: bool) -> None:
    """A Gateway that records nothing is right only for blank, NO_REPLY and slash commands."""
    assert text.explained(user, assistant) is rightly


def test_needle_is_found_in_what_a_gateway_stores() -> None:
    """The piece asked for survives trimming, single spaces and removed code blocks."""
    stored = (
        "Found 1 matching message(s):\n\n---\n"
        "**[user]** Session: s [2026-11-29T17:05:39.042Z] (score: 0.4)\n\nmy cat  is red\n"
    )
    wanted = text.needle("short\n   my cat is red   \n```\ncode that is longer than any other line of it\n```")
    assert wanted == "my cat is red"
    assert text.found(stored, wanted, since=0.0)


def test_found_needs_the_right_time() -> None:
    """An equal turn of yesterday is no proof that today's was stored."""
    stored = "---\n**[user]** Session: s [2026-11-29T17:05:39.042Z] (score: 0.4)\n\nyes please\n"
    at = calendar.timegm((2026, 11, 29, 17, 5, 39))
    assert text.found(stored, "yes please", since=at)
    assert text.found(stored, "yes please", since=at + 4)
    assert not text.found(stored, "yes please", since=at + 60)
    assert not text.found(stored, "no thanks", since=at)
    assert not text.found(stored, "", since=at)


def test_compose_is_silent_when_there_is_nothing() -> None:
    """No heading without something under it: an empty string injects nothing."""
    assert text.compose("", "") == ""
    assert text.compose("<memory-tools-guide>x</memory-tools-guide>", "") == ""


def test_compose_begins_with_the_heading() -> None:
    """Recalled text starts with the heading that users know; a notice stands before memories."""
    words = text.compose("context", "memories", "[notice]")
    assert words == "## memory-tencentdb Memory\n\n[notice]\n\ncontext\n\nmemories"


def test_compose_keeps_8000_characters() -> None:
    """A huge recall is cut; the notice survives whole."""
    words = text.compose("x " * 30_000, "", "[notice]")
    assert len(words) <= text.RECALL_LIMIT
    assert "[notice]" in words


def test_compose_does_not_repeat() -> None:
    """A memory that the context already holds is not listed again; others are."""
    listed = (
        "Found 2 matching memories:\n\n- **[persona]** (priority: 80) (score: 0.5)\n  The cat is red\n"
        "- **[episodic]** (score: 0.4)\n  They moved in May\n"
    )
    words = text.compose("known: The cat is red", listed)
    assert words.count("The cat is red") == 1
    assert "They moved in May" in words
    assert text.compose("known: The cat is red", listed.partition("- **[episodic]")[0]).count("memories") == 0


def test_plain_takes_every_shape() -> None:
    """A host may hand over strings, lists of parts, or nothing."""
    assert text.plain("a") == "a"
    assert text.plain([{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]) == "a\n(image_url)\nb"
    assert text.plain(None) == ""
