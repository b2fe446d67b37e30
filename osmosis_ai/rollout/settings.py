"""Settings of the rollout server and of its connections to the trainer, read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from osmosis_ai.errors import UsageError
from osmosis_ai.records import Record

__all__ = ["ClientSettings", "ServerSettings", "client_settings", "server_settings"]

CLIENT_PREFIX = "OSMOSIS_ROLLOUT_CLIENT_"
SERVER_PREFIX = "OSMOSIS_ROLLOUT_SERVER_"

# A timer of the event loop doesn't take more.
_YEAR = 365 * 24 * 3600.0
_Seconds = Annotated[float, Meta(gt=0, le=_YEAR)]
_SecondsOrNone = Annotated[float, Meta(ge=0, le=_YEAR)]
_Count = Annotated[int, Meta(ge=0)]


class ClientSettings(Record, frozen=True):
    """How the trainer is talked to; each is the variable `OSMOSIS_ROLLOUT_CLIENT_<NAME>`.

    Attributes:
        timeout_seconds: How long a request waits for the trainer's next byte.
        max_retries: How often a model call is tried again.
        complete_rollout_retries: How often the delivery of a result is tried again.
        retry_base_delay: Upper bound of the first wait, in seconds; it doubles with each retry.
        retry_max_delay: Upper bound of any wait, in seconds.
        max_connections: The most connections at a time, 0 for no bound.
    """

    timeout_seconds: _Seconds = 300.0
    max_retries: _Count = 5
    complete_rollout_retries: _Count = 10
    retry_base_delay: _SecondsOrNone = 0.5
    retry_max_delay: _SecondsOrNone = 30.0
    max_connections: _Count = 0


class ServerSettings(Record, frozen=True):
    """How rollouts are served; each is the variable `OSMOSIS_ROLLOUT_SERVER_<NAME>`.

    Attributes:
        max_concurrent_rollouts: How many rollouts run at a time; more wait.
        max_open_rollouts: How many rollouts run, wait or are being delivered at most; more are refused.
        record_ttl_seconds: How long a finished rollout is remembered, so that a repeated request starts nothing.
        request_timeout_seconds: How long one rollout may run.
        shutdown_grace_seconds: How long running rollouts may go on when the server is stopped.
        delivery_grace_seconds: How long the last results then have to reach their trainers.
    """

    max_concurrent_rollouts: Annotated[int, Meta(ge=1)] = 100
    max_open_rollouts: Annotated[int, Meta(ge=1)] = 10_000
    record_ttl_seconds: _SecondsOrNone = 3600.0
    request_timeout_seconds: _Seconds = 1800.0
    shutdown_grace_seconds: _SecondsOrNone = 30.0
    delivery_grace_seconds: _SecondsOrNone = 10.0


def client_settings(environ: Mapping[str, str] = os.environ) -> ClientSettings:
    """The client's settings: the defaults, and what the environment says.

    Raises:
        UsageError: A variable's value can't be used.
    """
    return _read(ClientSettings, CLIENT_PREFIX, environ)


def server_settings(environ: Mapping[str, str] = os.environ, **given: object) -> ServerSettings:
    """The server's settings: the defaults, what the environment says, and over both what is given and not None.

    Raises:
        UsageError: A value can't be used.
    """
    settings = _read(ServerSettings, SERVER_PREFIX, environ)
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert({**msgspec.structs.asdict(settings), **chosen}, ServerSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"the rollout server's settings can't be used: {error}") from error


_Settings = TypeVar("_Settings", ClientSettings, ServerSettings)


def _read(kind: type[_Settings], prefix: str, environ: Mapping[str, str]) -> _Settings:
    found = {}
    for field in msgspec.structs.fields(kind):
        variable = prefix + field.name.upper()
        text = environ.get(variable, "").strip()
        if not text:
            continue
        try:
            found[field.name] = msgspec.convert(text, field.type, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"the environment variable {variable} is {text!r}: {error}") from error
    return kind(**found)
