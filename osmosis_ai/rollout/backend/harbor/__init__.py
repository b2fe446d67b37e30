"""Harbor runs agents in containers. It isn't supported; the names say so when they are used."""

from __future__ import annotations

__all__ = ["HarborBackend", "TaskMode"]

HARBOR_MESSAGE = (
    "HarborBackend, which runs agents in Docker containers, isn't part of this package: use LocalBackend, or run the "
    "rollout with the SDK that its own pyproject.toml declares"
)


class HarborBackend:
    """Stands for the vendor's backend, and refuses to be created."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(HARBOR_MESSAGE)


class TaskMode:
    """Stands for the vendor's type, and refuses to be created."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(HARBOR_MESSAGE)
