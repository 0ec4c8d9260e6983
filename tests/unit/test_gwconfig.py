"""The Gateway's config file: what is not changed stays, byte for byte; what is wrong is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdai_supervisor import gwconfig
from tdai_supervisor.decide.checks import SettingsError

ODD = """{ "unknown" : [1,  2,{"x":null}],
   "llm":{"model" :"old",
     "extra": "kept" },

 "server": {"port": 8421 } }
"""


def test_a_patch_changes_only_what_it_sets() -> None:
    """Spacing, order and unknown keys stay."""
    assert gwconfig.patch("f.json", ODD, {"llm.model": "new"}) == ODD.replace('"old"', '"new"')


def test_new_keys_go_to_the_end_of_their_object() -> None:
    """An insertion leaves every other byte."""
    after = gwconfig.patch("f.json", ODD, {"llm.apiKey": "k", "memory.bm25.enabled": False})
    config = json.loads(after)
    assert (config["llm"], config["memory"]["bm25"]) == (
        {"model": "old", "extra": "kept", "apiKey": "k"},
        {"enabled": False},
    )
    assert ODD[: ODD.index('"kept"')] in after


def test_removal_leaves_valid_json_at_any_place() -> None:
    """First, middle, last and only members."""
    for key in ("unknown", "llm.model", "llm.extra", "server", "server.port", "nothing.there"):
        after = json.loads(gwconfig.patch("f.json", ODD, {key: None}))
        assert gwconfig.get(after, key) is None
        assert len(list(gwconfig.flatten(after))) <= len(list(gwconfig.flatten(json.loads(ODD))))


keys = st.sampled_from(sorted(gwconfig.KEYS))
leaves = st.one_of(st.booleans(), st.integers(), st.text(max_size=20), st.none())
trees = st.recursive(leaves, lambda t: st.dictionaries(st.text(max_size=6), t, max_size=4), max_leaves=12)


@given(
    st.dictionaries(st.text(max_size=6), trees, max_size=5), st.lists(st.tuples(keys, st.text() | st.none())), st.data()
)
def test_any_patch_of_any_json_means_what_it_says(config: dict, changes: list, data: st.DataObject) -> None:
    """The result parses, holds the changes, and every other leaf is what it was."""
    indent = data.draw(st.sampled_from([None, 1, 2, "\t"]))
    text = json.dumps(config, indent=indent, ensure_ascii=data.draw(st.booleans()))
    wanted = dict(changes)
    after = json.loads(gwconfig.patch("f.json", text, wanted))
    for key, value in wanted.items():
        assert gwconfig.get(after, key) == value
    before = {
        k: v for k, v in gwconfig.flatten(config) if not k.startswith(("llm", "server", "memory", "data", "timezone"))
    }
    assert before.items() <= dict(gwconfig.flatten(after)).items()


def test_yaml_keeps_comments_and_quotes() -> None:
    """An existing .yaml is edited as YAML."""
    text = "# mine\nllm:\n  model: 'old'   # the model\n  other: \"x\"\n"
    after = gwconfig.patch("f.yaml", text, {"llm.model": "new", "memory.bm25.enabled": False})
    assert after.startswith(text.replace("'old'", "'new'"))
    assert gwconfig.parse("f.yaml", after)["memory"] == {"bm25": {"enabled": False}}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("f.json", '{"a": 1,}', "line 1 column 9"),
        ("f.json", "[1]", "must hold an object"),
        ("f.yaml", "a: [1\nb: 2", "line 2"),
        ("f.json", "nul", "line 1 column 1"),
    ],
)
def test_what_does_not_parse_names_its_place(name: str, text: str, says: str) -> None:
    """Line and column; and nothing is patched."""
    with pytest.raises(SettingsError, match=says):
        gwconfig.patch(name, text, {"llm.model": "x"})


@pytest.mark.parametrize(
    ("key", "value", "good"),
    [
        ("llm.baseUrl", "https://x.example/v1", True),
        ("llm.baseUrl", "ftp://x", False),
        ("llm.baseUrl", "https://", False),
        ("llm.apiKey", "sk-abc123", True),
        ("llm.apiKey", "****abcd", False),
        ("llm.apiKey", "sk-••••", False),
        ("llm.apiKey", "<your key>", False),
        ("llm.apiKey", "YOUR_API_KEY", False),
        ("llm.apiKey", "${KEY}", False),
        ("llm.apiKey", "", False),
        ("memory.embedding.dimensions", 0, False),
        ("memory.embedding.dimensions", 1024, True),
        ("memory.embedding.dimensions", "1024", False),
        ("server.port", 70000, False),
        ("server.port", "8420", False),
        ("memory.storeBackend", "mysql", False),
        ("memory.tcvdb.caPemPath", "/nonexistent/ca.pem", False),
        ("memory.bm25.enabled", "false", False),
        ("memory.pipeline.everyNConversations", 1, True),
        ("memory.bm25.enable", True, False),
    ],
)
def test_checks(key: str, value: object, good: bool) -> None:
    """Types as the Gateway's schema has them; masked and placeholder keys are refused."""
    assert (gwconfig.check(key, value) is None) is good


def test_unknown_keys_get_a_suggestion_and_qclaw_needs_a_proxy() -> None:
    """Whole-file validation."""
    faults = gwconfig.validate(
        {"llm": {"modle": "x"}, "memory": {"embedding": {"provider": "qclaw"}, "storeBackend": "tcvdb"}}
    )
    assert any("did you mean llm.model?" in f for f in faults)
    assert any("proxyUrl" in f for f in faults)
    assert sum("memory.tcvdb." in f for f in faults) == 3


@given(st.text(min_size=1, max_size=4096).filter(lambda s: s.strip() and not gwconfig.PLACEHOLDER.fullmatch(s.strip())))
def test_keys_round_trip_and_never_show(secret: str) -> None:
    """Quotes, percent signs, Unicode and 4 KB: exact in the file, at most four characters anywhere else."""
    after = gwconfig.patch("f.json", "", {"llm.apiKey": secret})
    assert json.loads(after)["llm"]["apiKey"] == secret
    shown = json.dumps(gwconfig.redact(json.loads(after))) + "".join(gwconfig.diff({}, json.loads(after)))
    assert len(secret) < 12 or secret not in shown
