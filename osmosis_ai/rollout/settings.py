"""Read the settings of the rollout server and of its trainer connections from the environment."""

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

# Far below the longest timer that an event loop accepts.
_YEAR = 365 * 24 * 3600.0
_Seconds = Annotated[float, Meta(gt=0, le=_YEAR)]
_SecondsOrNone = Annotated[float, Meta(ge=0, le=_YEAR)]
_Count = Annotated[int, Meta(ge=0)]


class ClientSettings(Record, frozen=True):
    """Settings of trainer connections, each read from the variable `OSMOSIS_ROLLOUT_CLIENT_<NAME>`.

    Attributes:
        timeout_seconds: Time limit for the trainer's next byte.
        max_retries: Number of retries of a model call.
        complete_rollout_retries: Number of retries for delivering a result.
        retry_base_delay: Upper bound of the first wait, in seconds; it doubles with each retry.
        retry_max_delay: Upper bound of any wait, in seconds.
        max_connections: Maximum number of concurrent connections, 0 for no limit.
    """

    timeout_seconds: _Seconds = 300.0
    max_retries: _Count = 5
    complete_rollout_retries: _Count = 10
    retry_base_delay: _SecondsOrNone = 0.5
    retry_max_delay: _SecondsOrNone = 30.0
    max_connections: _Count = 0


class ServerSettings(Record, frozen=True):
    """Settings of the rollout server, each read from the variable `OSMOSIS_ROLLOUT_SERVER_<NAME>`.

    Attributes:
        max_concurrent_rollouts: Maximum number of running rollouts; further ones wait.
        max_open_rollouts: Maximum number of rollouts running, waiting or being delivered; further ones are refused.
        record_ttl_seconds: Time for which a finished rollout is remembered, so that a repeated request starts nothing.
        request_timeout_seconds: Time limit for one rollout.
        shutdown_grace_seconds: Time that running rollouts have to finish when the server stops.
        delivery_grace_seconds: Time that the last results then have to reach their trainers.
        allowed_hosts: Names by which clients reach the server, such as a proxy's, separated by commas.
    """

    max_concurrent_rollouts: Annotated[int, Meta(ge=1)] = 100
    max_open_rollouts: Annotated[int, Meta(ge=1)] = 10_000
    record_ttl_seconds: _SecondsOrNone = 3600.0
    request_timeout_seconds: _Seconds = 1800.0
    shutdown_grace_seconds: _SecondsOrNone = 30.0
    delivery_grace_seconds: _SecondsOrNone = 10.0
    allowed_hosts: str = ""


def client_settings(environ: Mapping[str, str] = os.environ) -> ClientSettings:
    """Return the client's settings: the defaults, overridden by the environment.

    Raises:
        UsageError: A variable has an invalid value.
    """
    return _read(ClientSettings, CLIENT_PREFIX, environ)


def server_settings(environ: Mapping[str, str] = os.environ, **given: object) -> ServerSettings:
    """Return the server's settings: the defaults, overridden by the environment, then by each `given` that isn't None.

    Raises:
        UsageError: A value is invalid.
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
