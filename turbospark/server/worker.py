"""One generation after another, for many clients: a bounded queue and the thread that works it off.

Knows jobs, order and cancellation. Does not know HTTP, nor what the events mean.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

Start = Callable[[Callable[[], bool]], Iterator[Any]]


class QueueFull(Exception):
    """As many requests wait as may."""


class Job:
    """One generation: its events, as they come, and a way to give it up."""

    def __init__(self, start: Start, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._gone = threading.Event()
        # Refusals are raised here, before anything waits in the queue.
        self._iterator = start(self._gone.is_set)

    @property
    def cancelled(self) -> bool:
        """Whether nobody listens any more."""
        return self._gone.is_set()

    def cancel(self) -> None:
        """Nobody listens any more; the generation ends before its next token."""
        self._gone.set()

    async def next(self) -> Any:
        """The next event, None after the last; raises what the generation raised."""
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def run(self) -> None:
        """Generate, in the worker's thread."""
        try:
            if not self._gone.is_set():
                with closing(self._iterator) as events:  # type: ignore[type-var]
                    for event in events:
                        self._put(event)
            self._put(None)
        except Exception as error:  # one request's failure is its client's, not the server's
            self._put(error)

    def _put(self, event: Any) -> None:
        with suppress(RuntimeError):  # the loop was closed: the server has stopped
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Worker:
    """A thread that runs jobs in the order in which they came; at most `limit` wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="turbospark-worker", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._running is not None

    @property
    def full(self) -> bool:
        """Whether another job would be refused."""
        return self.busy and self.waiting >= self._limit

    def submit(self, job: Job) -> None:
        """Queue a job. Raises QueueFull."""
        with self._lock:
            self._waiting = [j for j in self._waiting if not j.cancelled]
            if self._stopped or (self.waiting >= self._limit + (not self.busy)):
                raise QueueFull
            self._waiting.append(job)
        self._jobs.put(job)

    def stop(self) -> None:
        """Cancel what runs and waits, and end the thread."""
        with self._lock:
            self._stopped = True
            for job in (*self._waiting, *([self._running] if self._running else [])):
                job.cancel()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job in self._waiting:  # given up ones have left already
                    self._waiting.remove(job)
                self._running = job
            job.run()
            self._running = None
