"""The ASGI application: routes, keys, errors in OpenAI's shape, streams that notice a client leave.

Knows HTTP. Does not know how an answer is made: a `Runner` makes it, one at a time.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from turbospark.errors import ContextOverflowError, ModelNotFoundError, TurbosparkError
from turbospark.options import GenerationOptions
from turbospark.policies import short
from turbospark.runner import Runner
from turbospark.server.replies import Reply
from turbospark.server.requests import Asked, prompt_of
from turbospark.server.worker import Job, QueueFull, Start, Worker

MAX_BODY = 32 << 20
KEEP_ALIVE_SECONDS = 10.0
_LOCAL = ("localhost", "127.0.0.1", "[::1]", "testserver")


def refusal(
    status: int, message: str, code: str | None = None, kind: str = "invalid_request_error"
) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse({"error": error}, status, headers)


def make_app(
    runner: Runner,
    name: str,
    *,
    api_key: str | None = None,
    queue_limit: int = 32,
    defaults: GenerationOptions | None = None,
) -> Starlette:
    """An ASGI application that serves `runner` as the model `name`.

    `api_key`: clients must send it; without one only requests addressed to this machine by a local
    name are answered. `queue_limit`: requests that may wait while one runs; one more gets 429.
    `defaults`: options of requests that do not say otherwise.
    """
    server = _Server(runner, name, api_key, queue_limit, defaults or GenerationOptions())
    routes = [
        Route("/health", server.health),
        Route("/v1/models", server.guarded(server.models)),
        Route("/v1/models/{model:path}", server.guarded(server.model)),
        Route("/v1/chat/completions", server.guarded(server.chat), methods=["POST"]),
        Route("/v1/completions", server.guarded(server.completion), methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        lifespan=server.lifespan,
        exception_handlers={HTTPException: _http_error, Exception: _fault},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if detail == HTTPStatus(error.status_code).phrase:  # "Not Found"; ours are sentences already
        detail = detail.lower()
    return refusal(error.status_code, f"{request.method} {request.url.path}: {detail}")


async def _fault(request: Request, error: Exception) -> Response:
    return refusal(500, f"{type(error).__name__}: {error}", kind="server_error")


class _Server:
    def __init__(
        self,
        runner: Runner,
        name: str,
        api_key: str | None,
        queue_limit: int,
        defaults: GenerationOptions,
    ) -> None:
        self._runner = runner
        self._name = name
        self._key = api_key
        self._limit = queue_limit
        self._defaults = defaults
        self._worker: Worker | None = None
        self._created = int(time.time())

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._worker = Worker(self._limit)
        try:
            yield
        finally:
            await run_in_threadpool(self._worker.stop)

    # --- who may ask ------------------------------------------------------------------------------

    def guarded(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler behind the key, with refusals in OpenAI's shape."""

        async def guard(request: Request) -> Response:
            stop = self._stranger(request)
            if stop is not None:
                return stop
            try:
                return await handler(request)
            except ContextOverflowError as error:
                return refusal(400, str(error), "context_length_exceeded")
            except ModelNotFoundError as error:
                return refusal(404, str(error), "model_not_found")
            except TurbosparkError as error:
                return refusal(400, str(error))
            except QueueFull:
                text = f"{self._limit} requests are waiting already; try again later"
                return refusal(429, text, "queue_full", "rate_limit_error")
            except ClientDisconnect:
                return Response(status_code=499)

        return guard

    def _stranger(self, request: Request) -> Response | None:
        if self._key is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if hmac.compare_digest(given.encode(), self._key.encode()):
                return None
            return refusal(401, "the API key is missing or wrong", "invalid_api_key")
        # A web page whose name resolves to this machine would carry its own name here.
        host = request.headers.get("host", "").lower()
        bare = host if host.endswith("]") else host.rpartition(":")[0] or host
        if bare in _LOCAL:
            return None
        return refusal(403, f"host {host!r} is not a local name; start the server with an API key")

    async def _asked(self, request: Request, chat: bool) -> Asked:
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":  # a page of another site cannot send this unasked
            raise HTTPException(415, f"content-type {kind!r}, expected application/json")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"the body exceeds {MAX_BODY} bytes")
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is not JSON ({error})") from None
        asked = Asked(value, chat, self._defaults)
        if asked.field("model") != self._name:
            raise ModelNotFoundError(self._no_model(asked.field("model")))
        return asked

    def _no_model(self, name: Any) -> str:
        alike = isinstance(name, str) and name.lower() == self._name.lower()
        hint = " (names are case-sensitive)" if alike else ""
        return f"no model {short(name)}; works: {self._name!r}{hint}"

    # --- routes -----------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        worker = self._worker
        assert worker is not None
        return JSONResponse({"status": "ok", "running": worker.busy, "waiting": worker.waiting})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["model"] != self._name:
            raise ModelNotFoundError(self._no_model(request.path_params["model"]))
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "turbospark",
            "max_context": self._runner.max_context,
        }

    async def chat(self, request: Request) -> Response:
        asked = await self._asked(request, chat=True)
        tokenizer = self._runner.tokenizer
        template = tokenizer and tokenizer.template.chosen(asked.tools).text
        messages = asked.messages(template or "")
        how: dict[str, Any] = {"tools": asked.tools, "reasoning": asked.reasoning}
        if asked.tool_choice != "none":
            how["tool_choice"] = asked.tool_choice

        def start(cancel: Callable[[], bool]) -> Any:
            return self._runner.chat(messages, asked.options, cancel=cancel, **how)

        return await self._answer(request, asked, start, Reply(self._name, chat=True))

    async def completion(self, request: Request) -> Response:
        asked = await self._asked(request, chat=False)
        prompt = prompt_of(asked)

        def start(cancel: Callable[[], bool]) -> Any:
            return self._runner.stream(prompt, asked.options, cancel=cancel)

        return await self._answer(request, asked, start, Reply(self._name, chat=False))

    async def _answer(self, request: Request, asked: Asked, start: Start, reply: Reply) -> Response:
        worker = self._worker
        assert worker is not None
        if worker.full:  # before a long prompt is rendered in vain
            raise QueueFull
        job = await run_in_threadpool(Job, start, asyncio.get_running_loop())
        worker.submit(job)
        if asked.stream:
            body = _sent(job, reply, asked.include_usage)
            return StreamingResponse(body, media_type="text/event-stream")
        leaving = asyncio.create_task(_when_gone(request, job))
        try:
            while (event := await job.next()) is not None:
                reply.take(event)
        except TurbosparkError as error:
            return refusal(500, str(error), kind="server_error")
        finally:
            leaving.cancel()
            job.cancel()
        return JSONResponse(reply.whole())


async def _when_gone(request: Request, job: Job) -> None:
    """Cancel the job when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()


async def _sent(job: Job, reply: Reply, include_usage: bool) -> AsyncIterator[str]:
    """The stream as server-sent events, with a comment now and then while nothing happens."""
    try:
        if (opening := reply.first()) is not None:
            yield _data(opening)
        async for event in _patiently(job):
            if event is None:
                yield ": waiting\n\n"
            elif (delta := reply.take(event)) is not None:
                yield _data(reply.chunk(delta))
        for chunk in reply.last(include_usage):
            yield _data(chunk)
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status is out; what went wrong goes into the stream
        body = {"message": str(error), "type": "server_error", "param": None, "code": None}
        yield _data({"error": body})
    finally:
        job.cancel()


async def _patiently(job: Job) -> AsyncIterator[Any]:
    """The job's events, and None whenever there was none for a while."""
    while True:
        following = asyncio.ensure_future(job.next())
        try:
            while not (await asyncio.wait([following], timeout=KEEP_ALIVE_SECONDS))[0]:
                yield None
        finally:
            following.cancel()  # no effect on one that is done
        event = following.result()
        if event is None:
            return
        yield event


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
