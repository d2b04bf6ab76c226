"""A proxy on loopback in front of a real S3 server that injects faults, request by request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

SLOW_DOWN = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
ANSWERS = {"500": (500, ""), "503": (503, ""), "slow-down": (503, SLOW_DOWN), "denied": (403, DENIED)}
DROPPED = ("Transfer-Encoding", "Connection", "Content-Encoding", "Content-Length", "Date", "Server")


@dataclass
class FaultyProxy:
    """`fault(method, path)` names what happens to a request, None for nothing; `injected` lists what did.

    reset: the connection ends before an answer; reset-upload: in the middle of the request's body; timeout: no answer
    ever comes; short-read: half of the answer; 500, 503, slow-down, denied: what S3 says then.
    """

    url: str = ""
    fault: Callable[[str, str], str | None] = lambda _method, _path: None
    injected: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request, upstream: str, session: aiohttp.ClientSession) -> web.StreamResponse:
        fault = self.fault(request.method, request.path)
        if fault is not None:
            self.injected.append(fault)
        if fault in ANSWERS:
            status, text = ANSWERS[fault]
            return web.Response(status=status, text=text, content_type="application/xml")
        if fault == "timeout":
            await asyncio.sleep(3600)
        if fault == "reset-upload":
            await request.content.read(10)
        if fault in ("reset", "reset-upload"):
            request.transport.abort()
            return web.Response()
        body = await request.read()
        url = aiohttp.client.URL(upstream + request.raw_path, encoded=True)
        async with session.request(request.method, url, data=body, headers=request.headers) as answer:
            content = await answer.read()
            headers = {name: value for name, value in answer.headers.items() if name not in DROPPED}
            response = web.StreamResponse(status=answer.status, headers=headers)
            response.content_length = int(answer.headers.get("Content-Length", len(content)))
            await response.prepare(request)
            if fault == "short-read":
                await response.write(content[: len(content) // 2])
                request.transport.abort()
            elif request.method != "HEAD":
                await response.write(content)
            return response


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy in front of `upstream`, in a thread of its own."""
    proxy = FaultyProxy()
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            app = web.Application(client_max_size=2**30)

            async def handle(request: web.Request) -> web.StreamResponse:
                return await proxy.answer(request, upstream, session)

            app.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            ready.set()
            await stop.wait()
            await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    ready.wait()
    yield proxy
    loop.call_soon_threadsafe(stop.set)
    thread.join()
