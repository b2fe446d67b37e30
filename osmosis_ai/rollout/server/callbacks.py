"""Deliver results to controllers that are called back."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from osmosis_ai.errors import OsmosisRolloutError, OsmosisServerError, OsmosisTransportError, OsmosisValidationError
from osmosis_ai.masking import mask
from osmosis_ai.retry import RetryPolicy, with_retries

if TYPE_CHECKING:
    from osmosis_ai.http import Answer, HttpClient

__all__ = ["CallbackClient"]

logger = logging.getLogger(__name__)

TIMEOUT = 10.0
"""Seconds for one request; an answer holds at most a report on the model calls."""
POLICY = RetryPolicy(max_attempts=5, max_seconds=math.inf, base_delay=0.5, max_delay=8.0)
RETRIED = (429, 500, 502, 503, 504)
"""Statuses that may pass; with any other one the controller refuses the result for good."""


class CallbackClient:
    """Posts results to controllers, and retries if a controller can't accept one now."""

    def __init__(self) -> None:
        self._http: HttpClient | None = None

    async def post(self, url: str, body: bytes, key: str | None) -> Answer | None:
        """Post a body and return the answer; None, with a line in the log, if it isn't accepted."""
        # Imported late: aiohttp would take a third of a server's start, and most servers are polled.
        from osmosis_ai.http import HttpClient, HttpError

        client = self._http = self._http or HttpClient(TIMEOUT)

        async def attempt(_: int) -> Answer:
            try:
                answer = await client.post(url, body, key=key)
            except HttpError as error:
                text = mask(str(error), key)
                kind = OsmosisValidationError if error.problem in ("unsendable", "too_long") else OsmosisTransportError
                raise kind(text) from error
            if 200 <= answer.status < 300:
                return answer
            text, _code = answer.describe(key)
            refused = OsmosisServerError if answer.status in RETRIED else OsmosisValidationError
            raise refused(text, answer.status)

        def announce(error: OsmosisRolloutError, seconds: float) -> None:
            logger.warning("%s; trying again in %.1f s", error, seconds)

        try:
            return await with_retries(attempt, OsmosisRolloutError, POLICY, on_wait=announce)
        except OsmosisRolloutError as error:
            logger.error("a result isn't delivered: %s", error)
            return None

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()
