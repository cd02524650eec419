"""The step channel: from an engine replica to an ingress replica one message per step, instead of one per token and call.

A Serve stream costs both processes a fraction of a millisecond per message, on cores that the engine needs. So the call
stays open for routing, accounting, cancellation and the final word, and the tokens of all calls of an ingress replica go
together over a Unix socket, which only the user that owns both processes can open. Where there is no way (the replicas are
on different machines) the tokens go in band, through the call.

Every portion says with which of the request's deliveries it begins. So a reader can be told things twice, by both ways, and
a channel that breaks loses nothing: the replica then tells everything again in band.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import shutil
import tempfile
import weakref
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from serve_app.engine.request import Delivery, as_call
from serve_app.errors import GenerationError, ServeAppError

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4
LATE_S = 10.0
"""How long what was sent through the channel may arrive after the call's final word."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Some of a request's deliveries, in order; `start` is the index of the first, or how many there are in all."""

    start: int
    deliveries: list[Delivery]

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return as_call(self)


class Inbox:
    """What has come for one request, by whichever way, each delivery once."""

    def __init__(self) -> None:
        self.has_ended = False
        self._arrived: list[Delivery] = []
        self._count = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: ServeAppError | None = None
        self._is_closed = False

    def add(self, portion: Portion) -> None:
        """Takes what is new of a portion."""
        new = portion.deliveries[self._count - portion.start :] if portion.start <= self._count else []
        self._count += len(new)
        self._arrived += new
        if new:
            self._wake()

    def close(self, error: ServeAppError | None = None) -> None:
        """The call is over, well or with an error: what is still to come is on its way through the channel."""
        self._error, self._is_closed = error, True
        self._wake()

    async def batches(self) -> AsyncGenerator[list[Delivery], None]:
        """Everything that has come since the last look, until the request's last delivery.

        Raises:
            ServeAppError: the call failed.
            GenerationError: the call ended without the request's last delivery.
        """
        while not self.has_ended:
            if not self._arrived:
                if self._error is not None:
                    raise self._error
                await self._wait()
                continue
            batch, self._arrived = self._arrived, []
            self.has_ended = batch[-1].is_last
            yield batch

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        if not self._is_closed:
            await self._waiter
            return
        try:
            async with asyncio.timeout(LATE_S):
                await self._waiter
        except TimeoutError:
            raise GenerationError("The model replica ended this request without an ending.") from None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StepReceiver:
    """An ingress replica's end: a Unix socket on which engine replicas call."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="serve-app-")  # only its owner may enter
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.address = str(Path(folder) / "steps")
        self._inboxes: dict[str, Inbox] = {}
        self._server: asyncio.Task[asyncio.Server] | None = None
        self._connections: set[asyncio.BaseTransport] = set()

    async def start(self) -> None:
        """Listens; returns at once when it does already."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            listening = loop.create_unix_server(lambda: _Frames(self._take, self._connections), self.address)
            self._server = asyncio.ensure_future(listening)
        await asyncio.shield(self._server)

    def open(self, request_id: str) -> Inbox:
        """The inbox of a request that is about to be sent."""
        inbox = self._inboxes[request_id] = Inbox()
        return inbox

    def close(self, request_id: str) -> None:
        """Nobody reads that inbox any more."""
        self._inboxes.pop(request_id, None)

    async def stop(self) -> None:
        """Listens no longer, and drops its connections."""
        if self._server is not None:
            (await self._server).close()
        for connection in list(self._connections):
            connection.close()

    def _take(self, frame: bytes) -> None:
        for request_id, portion in pickle.loads(frame):
            inbox = self._inboxes.get(request_id)
            if inbox is not None:  # else its caller has left
                inbox.add(portion)


class _Frames(asyncio.Protocol):
    """Cuts a connection's bytes into frames: a length, and so many bytes."""

    def __init__(self, take: Callable[[bytes], None], connections: set[asyncio.BaseTransport]) -> None:
        self._take = take
        self._connections = connections
        self._transport: asyncio.BaseTransport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport
        self._connections.add(transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        if self._transport is not None:
            self._connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if len(self._buffer) < end:
                break
            frame = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            self._take(frame)


class StepSender:
    """An engine replica's end of the way to one ingress replica. What is sent in a turn of the event loop goes together."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._step: list[tuple[str, Portion]] = []

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def send(self, request_id: str, index: int, delivery: Delivery) -> bool:
        """Sends a request's delivery; False when the way is closed. It may close later, with the delivery underway."""
        if not self.is_open:
            return False
        if not self._step:
            asyncio.get_running_loop().call_soon(self._flush)
        self._step.append((request_id, Portion(index, [delivery])))
        return True

    def close(self) -> None:
        """Closes the way, once what was sent is through."""
        self._transport.close()

    def _flush(self) -> None:
        step, self._step = self._step, []
        frame = pickle.dumps(step, pickle.HIGHEST_PROTOCOL)
        self._transport.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)


class StepSenders:
    """An engine replica's ways to all ingress replicas that have called."""

    def __init__(self) -> None:
        self._senders: dict[str, asyncio.Task[StepSender | None]] = {}

    async def to(self, address: str | None) -> StepSender | None:
        """The way to an ingress replica, or None where there is none and its tokens go in band."""
        if address is None:
            return None
        for known, task in list(self._senders.items()):
            if task.done() and ((sender := task.result()) is None or not sender.is_open):
                del self._senders[known]
        if address not in self._senders:
            self._senders[address] = asyncio.ensure_future(_connect(address))
        return await asyncio.shield(self._senders[address])

    async def close(self) -> None:
        """Closes all ways."""
        for sender in await asyncio.gather(*self._senders.values()):
            if sender is not None:
                sender.close()


async def _connect(address: str) -> StepSender | None:
    try:
        transport, _ = await asyncio.get_running_loop().create_unix_connection(asyncio.Protocol, address)
    except OSError:
        logger.info("no step channel to %s: its tokens go in band", address)
        return None
    return StepSender(transport)
