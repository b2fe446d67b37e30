"""A rollout server without an SDK, in the form with callbacks and one sample. Not a test.

The last user message says what the workflow does; `die`, `block` and `hang` do it before its first model call, and
`die …` at another point.
"""

import asyncio
import os
import sys
import time
import traceback

import aiohttp
from aiohttp import web

NAME = "_OSMOSIS_ROLLOUT_INSTANCE_ID"


@web.middleware
async def authorize(request, handler):
    key = os.environ.get("OSMOSIS_ROLLOUT_API_KEY")
    if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
        return web.json_response({"detail": "unauthorized"}, status=401)
    return await handler(request)


async def health(request):
    return web.json_response({"status": "ok", "instance_id": os.environ[NAME]})


async def rollout(request):
    body = await request.json()
    if body["initial_messages"][-1]["content"] == "die when asked":
        os._exit(3)
    task = asyncio.create_task(run(request.app["session"], body))
    request.app["tasks"].add(task)
    return web.json_response({}, status=202)


async def run(session, body):
    headers = {"Authorization": f"Bearer {body['controller_api_key']}"}
    messages = list(body["initial_messages"])
    task = messages[-1]["content"]
    print("running", task, flush=True)

    async def report(kind, **fields):
        url = body[f"{kind}_callback_url"]
        async with session.post(url, json={"rollout_id": body["rollout_id"], **fields}, headers=headers) as answer:
            await answer.read()

    if task == "die":
        os._exit(3)
    if task == "block":
        time.sleep(3600)  # noqa: ASYNC251 - this is what it is for
    if task == "hang":
        await asyncio.sleep(3600)
    if task == "die in a call":
        asyncio.get_running_loop().call_later(0.05, os._exit, 3)
    try:
        for turn in range(2):
            if turn and task == "die between calls":
                os._exit(3)
            url = f"{body['chat_completions_url']}/chat/completions"
            async with session.post(url, json={"messages": messages}, headers=headers) as answer:
                answer.raise_for_status()
                messages.append((await answer.json())["choices"][0]["message"])
            if not turn:
                messages.append({"role": "user", "content": "Are you sure?"})
        if task == "raise":
            raise RuntimeError("the workflow broke")
    except Exception as error:
        traceback.print_exc()
        await report("completion", status="failure", err_message=str(error), err_category="agent_error")
        await report("grader", status="failure")
        return
    await report("completion", status="success")
    if task == "die while grading":
        os._exit(3)
    if task == "grader breaks":
        await report("grader", status="failure", err_message="no such key", sample={"messages": messages})
    elif task == "nan":
        await report("grader", status="success", sample={"reward": float("nan")})
    elif task == "remove":
        await report("grader", status="success", sample={"messages": messages, "remove_sample": True})
    else:
        reward = float(messages[-1]["content"] == body["label"])
        sample = {"messages": messages, "reward": reward, "metrics": {"turns": 2}}
        await report("grader", status="success", sample=sample)
    if task == "die when done":
        os._exit(3)


async def start(app):
    app["session"], app["tasks"] = aiohttp.ClientSession(), set()
    yield
    await app["session"].close()


if __name__ == "__main__":
    app = web.Application(middlewares=[authorize])
    app.router.add_get("/health", health)
    app.router.add_post("/rollout", rollout)
    app.cleanup_ctx.append(start)
    web.run_app(app, host="127.0.0.1", port=int(os.environ["_OSMOSIS_ROLLOUT_PORT"]), print=None)
    sys.exit(0)
