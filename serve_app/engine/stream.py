"""One request's tokens on their way from the engine's thread to whoever reads them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from serve_app.engine.request import Delivery, RequestFailure, TokenOutput


class TokenStream:
    """The tokens of one request, as they are drawn.

    A stream opened inside a running event loop is read with `async for` (or `batches`); one opened elsewhere with `for`.
    Either raises the request's error if it ends in one. `close` cancels a request that has not ended.

    Args:
        request_id: whose tokens these are.
        cancel: called with the request id when the reader leaves early.
        loop: the event loop that reads, or None for a reading thread.
        arrival: notified at each delivery; the streams of one call share it, so that one thread can wait for all.
    """

    def __init__(
        self,
        request_id: str,
        cancel: Callable[[str], None],
        loop: asyncio.AbstractEventLoop | None = None,
        arrival: threading.Condition | None = None,
    ) -> None:
        self.request_id = request_id
        self.loop = loop
        self.arrival = arrival or threading.Condition()
        self.has_ended = False
        self._cancel = cancel
        self._arrived: deque[Delivery] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._send: Callable[[Delivery], bool] | None = None

    def put(self, delivery: Delivery) -> None:
        """Adds what a step told. Called in the loop's thread when there is a loop, else in the engine's."""
        if self._send is not None and self._send(delivery):
            self.has_ended = delivery.is_last
            if self.has_ended:
                self._wake()
            return
        self._send = None
        with self.arrival:
            self._arrived.append(delivery)
            self.arrival.notify_all()
        self._wake()

    def close(self) -> None:
        """Leaves: an unfinished request is cancelled and its blocks are freed within one step."""
        if not self.has_ended:
            self.has_ended = True
            self._cancel(self.request_id)

    async def forward(self, send: Callable[[Delivery], bool]) -> None:
        """Hands deliveries, a failure too, to `send` in the moment they come, until the last, or until it says False: what
        it did not take is then read like any other."""
        self._send = send
        arrived, self._arrived = self._arrived, deque()
        for delivery in arrived:
            self.put(delivery)
        if self._send is not None and not self.has_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def batches(self) -> AsyncIterator[list[TokenOutput]]:
        """Everything that has arrived since the last look: one token for a reader who keeps up, more for one who lags."""
        while not self.has_ended:
            if not self._arrived:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            yield self._take(len(self._arrived))

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        async for batch in self.batches():
            for output in batch:
                yield output

    def __iter__(self) -> Iterator[TokenOutput]:
        while not self.has_ended:
            with self.arrival:
                self.arrival.wait_for(lambda: self._arrived)
            yield from self._take(1)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self, count: int) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for _ in range(count):
            delivery = self._arrived[0]
            if isinstance(delivery, RequestFailure):
                if not outputs:  # tokens that came before the failure are read first
                    self.has_ended = True
                    raise delivery.error
                break
            outputs.append(delivery)
            self._arrived.popleft()
            self.has_ended = delivery.is_last
        return outputs


def as_they_come(streams: Iterable[TokenStream]) -> Iterator[TokenOutput]:
    """The tokens of streams that one call of `add_to_queue` opened in a thread; what came meanwhile, stream by stream."""
    unfinished = list(streams)
    while unfinished := [stream for stream in unfinished if not stream.has_ended]:
        _wait_for_any(unfinished)
        for stream in unfinished:
            if not stream.has_ended:  # its reader may have closed it since
                yield from stream._take(len(stream._arrived))


def _wait_for_any(streams: list[TokenStream]) -> None:
    arrival = streams[0].arrival
    with arrival:
        arrival.wait_for(lambda: any(stream._arrived for stream in streams))


def deliver(parcels: Iterable[tuple[TokenStream, Delivery]]) -> list[str]:
    """Hands a step's deliveries to their streams: one crossing per event loop, however many streams it reads.

    Returns the ids of requests whose event loop is closed: nobody reads them any more.
    """
    crossings: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, Delivery]]] = {}
    for stream, delivery in parcels:
        if stream.loop is None:
            stream.put(delivery)
        else:
            crossings.setdefault(stream.loop, []).append((stream, delivery))
    orphans: list[str] = []
    for loop, crossing in crossings.items():
        try:
            loop.call_soon_threadsafe(_put_all, crossing)
        except RuntimeError:  # the loop is closed
            orphans += [stream.request_id for stream, _ in crossing]
    return orphans


def _put_all(crossing: list[tuple[TokenStream, Delivery]]) -> None:
    for stream, delivery in crossing:
        stream.put(delivery)
