"""Build command lines for `bwrap` (bubblewrap), which runs a process that can only see and use what it is given.

In a sandbox there are the system's programs and libraries, this Python, and the repository, all read-only; `/tmp`, in
memory, is the only folder to write to. There are no other processes, no network unless it is shared, no capabilities,
and no home folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from osmosis_ai.errors import UsageError
from osmosis_ai.folders import OWN_FOLDER
from osmosis_ai.records import Record

__all__ = ["SandboxSpec", "environment", "find_bwrap", "hidden_paths", "sandbox_command"]

OLDEST = (0, 8, 0)
HOW_TO_INSTALL = "install it (Debian and Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap)"
CHECK_SECONDS = 10
SCRATCH = "/tmp"  # noqa: S108  the sandbox's own
SHARED_MEMORY = 64 << 20
ENTRIES = 1000
"""Entries of a folder that can be shown one by one: bwrap takes at most 9,000 words."""

# The names of users, the certificates and the resolver's files are needed by ordinary libraries; the rest is not.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/hosts", "/etc/resolv.conf", "/etc/services"),
    *("/etc/protocols", "/etc/mime.types", "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/crypto-policies"),
)
KEPT_VARIABLES = re.compile(r"PATH|LD_LIBRARY_PATH|LANG|LANGUAGE|LC_\w+|TZ|PYTHONHASHSEED|PYTHONUTF8")
HIDDEN_NAMES = (".env*", ".git", OWN_FOLDER, "test_data.*")
PACKAGE = Path(__file__).parents[1]
# A device can't be opened in a sandbox's folders, and reading an empty file harms no program.
EMPTY = PACKAGE / "py.typed"


class SandboxSpec(Record, frozen=True):
    """A sandbox for a repository's code.

    `bwrap` is the program's path. With `network`, the code may use the machine's network. The files and folders in
    `hidden` are missing or empty. `memory` bounds the bytes that all processes of one sandbox hold together.
    """

    bwrap: str
    network: bool = False
    hidden: list[str] = []
    memory: int = 0


def find_bwrap() -> str:
    """Return the path of a usable `bwrap`; raise UsageError, with what to do, if there is none."""
    why = "--isolation sandbox needs bubblewrap"
    if sys.platform != "linux":
        raise UsageError(f"{why}, which exists for Linux only; use --isolation rollout, or run in a Linux container")
    found = shutil.which("bwrap")
    if found is None:
        raise UsageError(f"{why}, and there is no program bwrap; {HOW_TO_INSTALL}")
    said = _output([found, "--version"])
    version = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    if version is None or tuple(map(int, version.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(f"{why} {oldest} or later, and {found} is {said or 'of an unknown version'}; {HOW_TO_INSTALL}")
    refused = _output([found, *_namespaces(network=False), "--ro-bind", "/", "/", "--proc", "/proc", "true"])
    if refused:
        raise UsageError(
            f"{why}, and {found} can't make a sandbox here: {refused}\n"
            "Unprivileged user namespaces are usually switched off: by kernel.unprivileged_userns_clone=0 or "
            "user.max_user_namespaces=0, by AppArmor (kernel.apparmor_restrict_unprivileged_userns=1), or by the "
            "container's own seccomp profile. Ask whoever runs the machine to allow them for bwrap."
        )
    return found


def _output(command: list[str]) -> str:
    """Return what a command prints, which for the test of a sandbox is its error."""
    try:
        done = subprocess.run(  # noqa: S603  the path is that of bwrap
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=CHECK_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stdout.decode("utf-8", "replace").strip()
    return said or (f"exit code {done.returncode}" if done.returncode else "")


def hidden_paths(root: Path, more: Iterable[Path]) -> list[str]:
    """Return what code in a sandbox must not see of a folder: keys, history, stored runs and ground truths.

    `more` are further files and folders, such as the run's dataset and store; those elsewhere can't be seen anyway.
    """
    root = Path(os.path.realpath(root))
    found = {
        Path(os.path.realpath(path)) for path in [*(path for name in HIDDEN_NAMES for path in root.glob(name)), *more]
    }
    return sorted(str(path) for path in found if path != root and path.is_relative_to(root))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a sandbox: those of the language and the time zone, and its own folders."""
    kept = {name: value for name, value in environ.items() if KEPT_VARIABLES.fullmatch(name)}
    # Without the working directory, which may be the repository's, whose files would shadow libraries.
    here = ("", str(Path.cwd()))
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in here]
    if folders:
        kept["PYTHONPATH"] = os.pathsep.join(folders)
    return {"PATH": "/usr/bin:/bin", **kept, "HOME": SCRATCH, "TMPDIR": SCRATCH}


def sandbox_command(sandbox: SandboxSpec, root: Path, command: list[str]) -> list[str]:
    """Return a command that runs another one in a sandbox with a repository, this Python and its packages.

    Call it in a process that has imported no code of the repository, which may have changed the path of modules.
    """
    # The last mount at a path wins, so hidden paths come after visible ones.
    return [sandbox.bwrap, *_namespaces(network=sandbox.network), *_folders(sandbox, root), "--", *command]


def _namespaces(*, network: bool) -> list[str]:
    return [
        *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
        *("--die-with-parent", "--new-session"),
        *(["--share-net"] if network else []),
    ]


def _folders(sandbox: SandboxSpec, root: Path) -> Iterator[str]:
    root = Path(os.path.realpath(root))
    # Read-only, because files in /proc/sys ask for the user root and not for a capability.
    yield from ("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev")
    yield from ("--size", str(SHARED_MEMORY), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")  # noqa: S108
    yield from ("--size", str(sandbox.memory or SHARED_MEMORY), "--tmpfs", SCRATCH)
    for path in SYSTEM:
        yield from ("--ro-bind-try", path, path)
    for folder in _python_paths(root):
        yield from _without(folder, hidden_paths(folder, []))
    # Looked for again: the first run has made its store by now.
    yield from _without(root, [*sandbox.hidden, *hidden_paths(root, []), str(root / OWN_FOLDER)])
    yield from ("--remount-ro", "/", "--chdir", str(root))


def _without(folder: Path, hidden: list[str]) -> Iterator[str]:
    """Show a folder without some of its files and folders."""
    inside = set(map(Path, hidden))
    above = {path for path in inside if path.parent == folder}
    entries = sorted(folder.iterdir()) if above else []
    if 0 < len(entries) <= ENTRIES:
        # Entry by entry: a mount over a hidden file would vanish when another file replaces that one.
        yield from ("--tmpfs", str(folder))
        for entry in entries:
            if entry.is_symlink():
                yield from ("--symlink", str(entry.readlink()), str(entry))
            elif entry not in above:
                yield from ("--ro-bind-try", str(entry), str(entry))
        yield from ("--remount-ro", str(folder))
        inside -= above
    else:
        yield from ("--ro-bind", str(folder), str(folder))
    for path in sorted(inside):
        if path.is_dir():
            yield from ("--tmpfs", str(path), "--remount-ro", str(path))
        elif path.exists():
            yield from ("--ro-bind", str(EMPTY), str(path))


def _python_paths(root: Path) -> list[Path]:
    """Return the folders of this Python and its packages, except those that contain the repository or a home folder."""
    executable = Path(os.path.realpath(sys.executable))
    named = [*map(Path, (sys.prefix, sys.base_prefix, *filter(None, sys.path))), executable.parents[1], PACKAGE]
    homes = [Path(os.path.realpath(home)) for home in (Path("~").expanduser(), "/root", "/home")]
    private = {root, *root.parents, *homes, *(parent for home in homes for parent in home.parents)}
    if PACKAGE.parent.name not in ("site-packages", "dist-packages"):
        # A checkout of this package, which holds more than the package.
        private.add(PACKAGE.parent)
    # A link's own path too, because other links lead through it.
    both = dict.fromkeys(path for name in named for path in (name.absolute(), Path(os.path.realpath(name))))
    return [path for path in both if path not in private and path.exists()]
