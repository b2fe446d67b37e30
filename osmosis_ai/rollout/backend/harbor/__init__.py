"""Placeholders for Harbor, which runs agents in containers and isn't supported; using a name raises an error."""

from __future__ import annotations

__all__ = ["HarborBackend", "TaskMode"]

HARBOR_MESSAGE = (
    "HarborBackend, which runs agents in Docker containers, isn't part of this package: use LocalBackend, or run the "
    "rollout with the SDK that its own pyproject.toml declares"
)


class HarborBackend:
    """A placeholder for Harbor's backend; creating one raises an error."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(HARBOR_MESSAGE)


class TaskMode:
    """A placeholder for Harbor's type; creating one raises an error."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(HARBOR_MESSAGE)
