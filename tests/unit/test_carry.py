"""Turns as both stores keep them, and what npm says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdai_supervisor.cli import carry
from tdai_supervisor.host import npm, sources, versions


def line(session: str, recorded: str, role: str, content: str, id_: str = "msg_1") -> str:
    """One line of the package's conversations."""
    about = {"sessionKey": session, "recordedAt": recorded, "id": id_, "role": role, "content": content, "timestamp": 7}
    return json.dumps(about)


def store(directory: Path, lines: list[str]) -> str:
    """A data directory with these lines."""
    (directory / "conversations").mkdir()
    (directory / "conversations" / "2026-01-02.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "conversations" / "notes.jsonl").write_text("never read")
    return str(directory)


def test_lines_of_one_capture_are_one_turn(tmp_path: Path) -> None:
    """By session and time of recording; cut and strange lines are passed over."""
    lines = [
        line("s", "1", "user", "a"),
        line("s", "1", "assistant", "b"),
        line("s", "2", "assistant", "alone"),
        line("t", "2", "user", "c", "carried-0123456789abcdef01234567-0"),
        line("t", "2", "assistant", "d", "carried-0123456789abcdef01234567-1"),
        '["no object"]',
        '{"sessionKey": "s"}',
        line("s", "3", "user", "cut")[:-9],
    ]
    found = list(carry.turns("node", store(tmp_path, lines)))
    assert [(t.session, [s.content for s in t.said]) for t in found] == [
        ("s", ["a", "b"]),
        ("s", ["alone"]),
        ("t", ["c", "d"]),
    ]
    assert [t.mark for t in found] == [None, None, "0123456789abcdef01234567"]


def test_no_store_is_no_turns(tmp_path: Path) -> None:
    """Neither kind has one before it has run."""
    assert list(carry.turns("node", str(tmp_path))) == list(carry.turns("embedded", str(tmp_path))) == []
    assert carry.waiting("node", str(tmp_path)) == carry.Count()


@given(st.text(), st.text(), st.integers())
def test_a_turn_is_itself_whatever_a_store_does_in_passing(user: str, assistant: str, at: int) -> None:
    """Times, blanks at the ends and halves of characters tell no turns apart; session, role and text do."""
    one = carry.Turn("s", (carry.Said("user", user, at), carry.Said("assistant", assistant, at)), None)
    same = carry.Turn("s", tuple(s._replace(content=f" {s.content}\ufffd\n", at=0) for s in one.said), "mark")
    assert one.digest == same.digest
    assert one.digest != one._replace(session="t").digest
    assert one.digest != one._replace(said=one.said[::-1]).digest
    assert one.digest != one._replace(said=(one.said[0]._replace(content=user + "x"), one.said[1])).digest


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("npm error code E404\nnpm error 404 Not Found - GET http://x/y\n", "E404: 404 Not Found - GET http://x/y"),
        ("npm ERR! code ECONNREFUSED\nnpm ERR! errno X\nnpm ERR! FetchError: no\n", "ECONNREFUSED: FetchError: no"),
        ("npm error code EX\n", "EX"),
        ("Traceback (most recent call last):\nKeyError: 'x'\n", "KeyError: 'x'"),
        (
            "npm error GET https://u:p@h/x?_auth=k&b //h/:_authToken=t\n",
            "GET https://***@h/x?_auth=*** //h/:_authToken=***",
        ),
        ("", ""),
    ],
)
def test_the_cause_in_what_npm_says(said: str, cause: str) -> None:
    """One line, without secrets."""
    assert npm.cause(said) == cause


def test_what_a_package_may_be_called(tmp_path: Path) -> None:
    """Files and directories by being there, names by their form."""
    (tmp_path / "x.tgz").write_text("")
    assert sources.kind_of(str(tmp_path)) == "directory"
    assert sources.kind_of(str(tmp_path / "x.tgz")) == "archive"
    assert sources.kind_of("@scope/name") == sources.kind_of("name") == "registry"
    for wrong in ("./x", "~/x", "y.tgz", "name@1", "--flag", "http://h/x", "Name", "a b", ""):
        with pytest.raises(sources.SourceError):
            sources.kind_of(wrong)


def test_a_switch_that_fails_puts_back_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was moved aside for the link is where it was."""
    place = tmp_path / "pkg"
    place.mkdir()
    (place / "mine").write_text("x")
    found = versions.Versions(str(place))

    def refuse(_: str) -> None:
        raise OSError("told to")

    with found.held():
        monkeypatch.setattr(found, "_point", refuse)
        with pytest.raises(OSError, match="told to"):
            found.switch("1.0.0-x")
    assert (place / "mine").read_text() == "x"


def test_a_link_of_somebody_else_is_moved_aside(tmp_path: Path) -> None:
    """Not followed, not removed."""
    (tmp_path / "theirs").mkdir()
    place = tmp_path / "pkg"
    place.symlink_to(tmp_path / "theirs")
    found = versions.Versions(str(place))
    with found.held():
        made = found.stage()
        found.complete(made, "1.0.0-x", {"integrity": "i", "node": {"abi": None}})
        before = found.switch("1.0.0-x")
        assert (found.current, found.find("i", None)) == ("1.0.0-x", None), "it is not whole"
        assert (found.free("1.0.0-x"), found.free("1.0.0-y")) == ("1.0.0-x.2", "1.0.0-y")
        assert before is not None and Path(found.path(before)).readlink() == tmp_path / "theirs"
        assert found.prune(None) == []
    assert (tmp_path / "theirs").is_dir()
