"""The bearer key of callbacks, `ControllerAuth`."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ControllerAuth"]


@dataclass
class ControllerAuth:
    """The key that authenticates a rollout server to its controller. It is never shown.

    Attributes:
        api_key: The key; None for a controller that asks for none.
    """

    api_key: str | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"ControllerAuth(api_key={'<redacted>' if self.api_key else None})"

    def as_bearer_headers(self) -> dict[str, str] | None:
        """Return the key as HTTP headers, None without a key."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else None
