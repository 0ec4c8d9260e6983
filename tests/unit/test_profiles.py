"""Which Gateway is whose: names made from profiles, and who shares with whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdai_supervisor.cli import hermes, profiles
from tdai_supervisor.decide.settings import check_name


@pytest.mark.parametrize("name", ["work", "a-b_c", "Work2"])
def test_a_profile_that_is_a_name_keeps_it(name: str) -> None:
    """The own Gateway of "work" is "work"."""
    assert profiles.own_name(name) == name


@given(st.text(min_size=1, max_size=80), st.text(min_size=1, max_size=80))
def test_names_are_usable_and_apart(one: str, other: str) -> None:
    """Whatever a profile is called: a name of a Gateway, never the shared one's, and never that of another profile."""
    assert check_name(profiles.own_name(one)) != profiles.SHARED
    if one != other:
        assert profiles.own_name(one) != profiles.own_name(other)


def test_the_default_profile_and_reserved_names_get_another() -> None:
    """What a Gateway must not be called, or is shared."""
    for name in ("default", "all", "a.b", "日本"):
        assert profiles.own_name(name).startswith("profile-")


def seen(gateway: str | None, address: str | None = None, root: str = "/r") -> dict[str, object]:
    """What the provider says of a profile."""
    spool = {"waiting": 0, "delivered": 0, "dead_letters": 0, "last_delivered": None}
    about = {"gateway": gateway, "address": address, "origin": "default", "root": root}
    return {**about, "home": "/h", "trouble": None, "autostart": False, "spool": spool}


def test_shared_is_called_shared() -> None:
    """By name within a root, or by address; a profile without our plugin shares nothing."""
    made = [hermes.Profile(n, f"/h/{n}", hermes.NAME, "linked") for n in ("a", "b", "c", "d", "e")]
    made.append(hermes.Profile("off", "/h/off", None, "missing"))
    told = [seen("default"), seen("default"), seen("own"), seen(None, "http://x:1"), seen("default", root="/other")]
    found = {p["name"]: p for p in profiles.described(made, [*told, seen("default")])}
    assert {n: p["shared_with"] for n, p in found.items()} == {
        **{"a": ["b"], "b": ["a"], "c": [], "d": [], "e": [], "off": []}
    }
    assert found["a"]["shared"] and not found["c"]["shared"]
