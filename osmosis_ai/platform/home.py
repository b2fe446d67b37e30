"""The platform's folder: its database, keys, datasets and runs, and how this user's commands find the server.

Only its owner can read it. A lock ensures that one server uses it at a time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from osmosis_ai.errors import UsageError
from osmosis_ai.folders import given_path, replaced_file
from osmosis_ai.records import Record

__all__ = ["DATA_VARIABLE", "Home", "ServerInfo", "find_home"]

DATA_VARIABLE = "OSMOSIS_PLATFORM_DATA"


class ServerInfo(Record, frozen=True):
    """The server that uses the folder, or the last one that did."""

    url: str
    pid: int


class Home:
    """Paths in the platform's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def database(self) -> Path:
        """The database."""
        return self.folder / "platform.db"

    @property
    def key(self) -> Path:
        """The key that encrypts secrets and signs URLs."""
        return self.folder / "key"

    @property
    def token(self) -> Path:
        """The token of this user, for commands on this machine."""
        return self.folder / "token"

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.folder / "server.log"

    @property
    def jobs_log(self) -> Path:
        """The stderr of jobs, in addition to their runs' logs."""
        return self.folder / "jobs.log"

    @property
    def datasets(self) -> Path:
        """Uploaded files, named by their content."""
        return self.folder / "datasets"

    def run(self, run_id: str) -> Path:
        """Return the folder of a run: its code, its log and its files for download."""
        return self.folder / "runs" / run_id

    def repository(self, workspace: str) -> Path:
        """Return the clone of a workspace, which its runs share."""
        return self.folder / "repositories" / f"{workspace}.git"

    def store(self, workspace: str) -> Path:
        """Return the folder of a workspace's run store."""
        return self.folder / "stores" / workspace

    def create(self) -> None:
        """Create the folder; raise UsageError."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # `mkdir` leaves the mode of an existing folder alone.
            self.folder.chmod(0o700)
            self.datasets.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--data {self.folder}: can't be used: {error.strerror}; name a folder of yours with --data DIR"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock during the block; raise UsageError if another server holds it."""
        with (self.folder / "lock").open("w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"a platform is already running in {self.folder}; see `osmosis platform status`"
                ) from None
            yield

    def is_served(self) -> bool:
        """Return True if a server uses the folder now."""
        try:
            with (self.folder / "lock").open("r", encoding="utf-8") as lock:
                # The lock ends with its process; the pid in server.json may be another process's by now.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def write_info(self, info: ServerInfo) -> None:
        """Publish the server's address to this user's commands."""
        with replaced_file(self.folder / "server.json", private=True) as file:
            file.write(msgspec.json.encode(info))

    def read_info(self) -> ServerInfo | None:
        """Return the folder's current or last server, or None if there has been none."""
        try:
            return msgspec.json.decode((self.folder / "server.json").read_bytes(), type=ServerInfo)
        except (OSError, msgspec.DecodeError):
            return None

    def read_token(self) -> str | None:
        """Return this user's token, None if there is none."""
        try:
            return self.token.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None

    def write_private(self, path: Path, text: str) -> None:
        """Write a file that only its owner can read."""
        with replaced_file(path, private=True) as file:
            file.write(text.encode("ascii"))


def find_home(given: str | None, environ: Mapping[str, str], cwd: Path) -> Home:
    """Return the platform's folder: `--data`, else `OSMOSIS_PLATFORM_DATA`, else one in the user's data folder."""
    named = given or environ.get(DATA_VARIABLE)
    if named:
        return Home(Path(os.path.abspath(given_path(named, cwd))))  # noqa: PTH100 - resolves no links
    from platformdirs import user_data_path

    return Home(user_data_path("osmosis", appauthor=False) / "platform")
