"""What a worker does with the orders that it gets, wherever they come from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine

import anyio

from osmosis_ai.runtime.protocol import Cancel, Job, Order, Resume, Stop
from osmosis_ai.runtime.worker.worker import Worker, current_job, job_label, label_of

__all__ = ["follow_orders"]


async def follow_orders(
    worker: Worker, next_order: Callable[[], Awaitable[Order]], run: Callable[[Job], Coroutine[object, None, None]]
) -> None:
    """Run jobs concurrently until told to stop; jobs that still run then are cancelled."""
    async with anyio.create_task_group() as group:
        while not isinstance(order := await next_order(), Stop):
            if isinstance(order, Cancel):
                worker.cancel(order.id)
            elif isinstance(order, Resume):
                worker.resume(order)
            else:
                # Set before the task is made, so that the task and all it starts are known to be the job's.
                current_job.set(order.id)
                job_label.set(label_of(order))
                group.start_soon(run, order)
        group.cancel_scope.cancel()
