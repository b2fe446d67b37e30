"""The repository's tools for workflows: the rollout's driver calls them in the rollout's own session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from osmosis_ai.errors import OsmosisRolloutError
from osmosis_ai.masking import mask
from osmosis_ai.wire_json import encode_json

if TYPE_CHECKING:
    from osmosis_ai.http import HttpClient
    from osmosis_ai.records import JsonObject, Tool

__all__ = ["HostedTools", "ToolClient"]

SECONDS = 24 * 3600.0
"""Seconds after which a hanging call fails; the driver's limit and the workflow's deadline normally come first."""


class ToolClient:
    """Calls tools over HTTP. The connections of all rollouts are one pool."""

    def __init__(self) -> None:
        self._http: HttpClient | None = None

    async def call(self, url: str, key: str | None, name: str, arguments: JsonObject) -> str:
        """Call a tool, and return its result for the model; raises OsmosisRolloutError if the call fails."""
        # Imported late, as for callbacks, because most workflows call no tools.
        from osmosis_ai.http import HttpClient, HttpError

        client = self._http = self._http or HttpClient(SECONDS)
        try:
            body = encode_json({"name": name, "arguments": arguments})
        except ValueError as error:
            raise OsmosisRolloutError(f"{name} can't be called: JSON can't hold its arguments: {error}") from error
        try:
            answer = await client.post(f"{url}/call", body, key=key)
            if answer.status != 200:
                raise OsmosisRolloutError(f"{name} can't be called: {answer.describe(key)[0]}")
            reply = answer.json()
        except HttpError as error:
            raise OsmosisRolloutError(f"{name} can't be called: {mask(str(error), key)}") from error
        content = reply.get("content") if isinstance(reply, dict) else None
        if not isinstance(content, str):
            raise OsmosisRolloutError(f"{name} can't be called: {url} answered without its result")
        return content

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()


@dataclass(frozen=True)
class HostedTools:
    """One rollout's tools, as `RolloutContext.tools`.

    Attributes:
        tools: The tools, in OpenAI's form.
        url: The URL for calling them.
        key: The bearer key.
        client: Makes the calls.
    """

    tools: list[Tool]
    url: str
    key: str | None = field(repr=False)
    client: ToolClient = field(repr=False)

    async def call_tool(self, name: str, arguments: JsonObject) -> str:
        """Call a tool, and return its output as text for the model, even if the tool fails."""
        return await self.client.call(self.url, self.key, name, arguments)
