"""`osmosis auth login|logout|whoami`, also without `auth`; and `osmosis doctor`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osmosis_ai.cli.help import HelpCommand, HelpGroup
from osmosis_ai.cli.options import Json
from osmosis_ai.cli.platform_session import Plain, PlatformUrl, Session, Yes, platform_session

if TYPE_CHECKING:
    from osmosis_ai.platform.client import Client

__all__ = ["auth_app", "doctor", "login", "logout", "whoami"]

auth_app = typer.Typer(cls=HelpGroup, no_args_is_help=True, help="Log in to a platform on another machine.")


@auth_app.command(cls=HelpCommand)
def login(
    context: typer.Context,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="TOKEN", help="A token; - reads it from stdin. Default: wait for approval."),
    ] = None,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Log in to a platform on another machine. The platform on this machine needs no login.

    Without --token, it shows a code that someone must approve on the platform's machine.
    """
    with platform_session(context, json=json, plain=plain, platform=platform, scoped=False) as session:
        from osmosis_ai.platform.client import Client, ClientError, Server

        server = session.server
        from_stdin, source = "-", "token"
        # So that the token needn't be an argument, which every user of the machine can see.
        if token == from_stdin:
            token = sys.stdin.readline().strip()
        elif token is None:
            token, source = _approved(session, Client(server, {})), "device"
        if not token:
            raise ClientError("the token is empty: write it to stdin, or leave out --token", "INTERACTIVE_REQUIRED")
        # Masked before the first request, whose error could repeat it.
        session.session.use(session.cwd, keys=[token])
        found = Client(Server(server.url, token, "token"), {}).get("/api/cli/verify")
        # Only now: a token that the platform refuses isn't stored.
        session.credentials.set(server.url, token)
        user = found["user"]
        data = {
            "email": user["email"],
            "name": user["name"],
            "expires_at": found["expires_at"],
            "platform_url": server.url,
            "workspace": None,
            "source": source,
            "verified": True,
            "saved": True,
        }
        session.operation("auth.login", f"logged in to {server.url} as {user['name']}", resource=data)


def _approved(session: Session, client: Client) -> str:
    """Show a code, and return the token once it is approved; raise ClientError."""
    import platform as machine

    from osmosis_ai.platform.client import ClientError

    login = client.post("/api/cli/device/authorize", {"deviceName": machine.node()}, anonymous=True)
    command = f"osmosis platform token approve {login['user_code']} USER"
    session.warn(f"the login waits until someone runs `{command}` on the platform's machine", "LOGIN")
    deadline = time.monotonic() + login["expires_in"]
    while time.monotonic() < deadline:
        try:
            done = client.post("/api/cli/device/token", {"device_code": login["device_code"]}, anonymous=True)
        except ClientError as error:
            # The device flow's own word for "ask again".
            if str(error) != "authorization_pending":
                raise
            time.sleep(login["interval"])
        else:
            return str(done["token"])
    raise ClientError("the login wasn't approved in time; start again", "AUTH_REQUIRED")


@auth_app.command(cls=HelpCommand)
def logout(
    context: typer.Context, yes: Yes = False, json: Json = False, plain: Plain = False, platform: PlatformUrl = None
) -> None:
    """Revoke and delete the stored token of a platform."""
    with platform_session(context, json=json, plain=plain, platform=platform, scoped=False) as session:
        from osmosis_ai.platform.client import Client, ClientError, Server, quoted

        url = session.server.url
        token = session.credentials.read().get(url)
        if token is None:
            session.operation("auth.logout", f"there is no login for {url}", status="noop")
            return
        if not session.confirm("auth.logout", f"Log out of {url}?", yes=yes):
            return
        client = Client(Server(url, token, "login"), {})
        try:
            client.delete(f"/api/cli/tokens/{quoted(client.get('/api/cli/verify')['token_id'])}")
        except ClientError as error:
            # A token that is no longer valid needs no revoking.
            if error.code != "AUTH_REQUIRED":
                session.warn(f"the token couldn't be revoked: {error}")
        # Even if the platform can't be reached: the token must be gone from this machine.
        session.credentials.set(url, None)
        session.operation("auth.logout", f"logged out of {url}")


@auth_app.command(cls=HelpCommand)
def whoami(context: typer.Context, json: Json = False, plain: Plain = False, platform: PlatformUrl = None) -> None:
    """Show which platform commands use, and as which user."""
    with platform_session(context, json=json, plain=plain, platform=platform, scoped=False) as session:
        server = session.server
        found = session.client.get("/api/cli/verify")
        user = found["user"]
        # The members that scripts for the hosted platform read, even where two of them say the same.
        data = {
            "email": user["email"],
            "name": user["name"],
            "expires_at": found["expires_at"],
            "platform_url": server.url,
            "workspace": found["workspace"],
            "source": server.source,
            "account": {**user, "token_id": found["token_id"]},
            "effective_source": server.source,
            "persistent_login": server.source == "login",
        }
        lines = [("Platform", server.url), ("User", user["name"]), ("Token from", server.source)]
        session.detail(data, lines)


def doctor(
    context: typer.Context,
    path: Annotated[
        str | None, typer.Argument(metavar="DIR", help="The workspace. Default: that of the working directory.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Create what is missing.")] = False,
    yes: Yes = False,
    json: Json = False,
    plain: Plain = False,
) -> None:
    """Check that the repository has the folders of a workspace, and create them."""
    with platform_session(context, json=json, plain=plain, scoped=False) as session:
        from osmosis_ai.folders import given_path
        from osmosis_ai.platform.client import ClientError
        from osmosis_ai.platform.workspace import REQUIRED, top_of

        root = top_of(session.cwd if path is None else given_path(path, session.cwd))
        missing = [name for name in REQUIRED if not (root / name).is_dir()]
        place = {"workspace_directory": str(root), "missing": missing}
        if not missing:
            session.operation("doctor", f"{root} has the folders of a workspace", status="noop", resource=place)
        elif not fix:
            folders = ", ".join(f"{name}/" for name in missing)
            raise ClientError(f"{root} has no {folders}; create them with `osmosis doctor --fix`", "VALIDATION", place)
        elif session.confirm("doctor", f"Create {len(missing)} folders in {root}?", yes=yes):
            _create(session, root, missing)


def _create(session: Session, root: Path, missing: list[str]) -> None:
    from osmosis_ai.platform.client import ClientError

    try:
        for name in missing:
            (root / name).mkdir(parents=True, exist_ok=True)
            # Git doesn't track empty folders.
            (root / name / ".gitkeep").touch()
    except OSError as error:
        raise ClientError(f"{root} can't be written: {error.strerror}") from None
    created = {"workspace_directory": str(root), "created": missing}
    session.operation("doctor", f"created {', '.join(missing)} in {root}", resource=created)
