"""The step channel: the same deliveries by socket and in band, each once, whatever breaks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve_app import channel
from serve_app.channel import Inbox, Portion, StepReceiver, StepSenders
from serve_app.engine.request import FinishReason, RequestFailure, TokenOutput
from serve_app.engine.stream import TokenStream
from serve_app.errors import EngineUnavailableError, GenerationError


def output(index, count=3):
    return TokenOutput("a", 100 + index, FinishReason.LENGTH if index == count - 1 else None)


OUTPUTS = [output(index) for index in range(3)]


@pytest.fixture
async def ends():
    """A receiver that listens, and the senders of a replica."""
    receiver, senders = StepReceiver(), StepSenders()
    await receiver.start()
    yield receiver, senders
    await senders.close()
    await receiver.stop()
    await asyncio.sleep(0.01)


async def read(inbox):
    return [delivery async for batch in inbox.batches() for delivery in batch]


async def test_one_step_is_one_message_for_all_its_requests(ends):
    receiver, senders = ends
    inboxes = {name: receiver.open(name) for name in "abc"}
    frames = []
    take = receiver._take
    receiver._take = lambda frame: (frames.append(frame), take(frame))
    sender = await senders.to(receiver.address)
    for index, delivery in enumerate(OUTPUTS):
        for name in inboxes:
            assert sender.send(name, index, delivery)
        await asyncio.sleep(0.01)
    assert await asyncio.gather(*map(read, inboxes.values())) == [OUTPUTS] * 3
    assert len(frames) == len(OUTPUTS)
    assert await senders.to(receiver.address) is sender


async def test_a_frame_may_come_in_pieces():
    frames = []
    cutter = channel._Frames(frames.append, set())
    raw = b"".join(len(part).to_bytes(4, "big") + part for part in (b"one", b"", b"three" * 1000))
    for at in range(0, len(raw), 7):
        cutter.data_received(raw[at : at + 7])
    assert frames == [b"one", b"", b"three" * 1000]


async def test_what_comes_twice_counts_once():
    inbox = Inbox()
    inbox.add(Portion(0, OUTPUTS[:2]))
    inbox.add(Portion(0, OUTPUTS))
    inbox.add(Portion(3, []))
    inbox.close()
    assert await read(inbox) == OUTPUTS


async def test_the_final_word_may_come_first():
    inbox = Inbox()
    inbox.add(Portion(3, []))
    inbox.close()
    reading = asyncio.create_task(read(inbox))
    await asyncio.sleep(0.01)
    inbox.add(Portion(0, OUTPUTS))
    assert await reading == OUTPUTS


async def test_a_request_without_an_ending_fails(monkeypatch):
    monkeypatch.setattr(channel, "LATE_S", 0.05)
    inbox = Inbox()
    inbox.add(Portion(0, OUTPUTS[:1]))
    inbox.close()
    with pytest.raises(GenerationError):
        await read(inbox)


async def test_a_call_that_fails_ends_what_waits_after_what_has_come():
    inbox = Inbox()
    inbox.add(Portion(0, OUTPUTS[:2]))
    inbox.close(EngineUnavailableError("gone"))
    batches = inbox.batches()
    assert await anext(batches) == OUTPUTS[:2]
    with pytest.raises(EngineUnavailableError, match="gone"):
        await anext(batches)


async def test_an_address_that_cannot_be_reached_is_no_way():
    senders = StepSenders()
    assert await senders.to(None) is None
    assert await senders.to("/nowhere/steps") is None
    assert await senders.to("/nowhere/steps") is None


async def test_a_closed_way_is_opened_again(ends):
    receiver, senders = ends
    sender = await senders.to(receiver.address)
    sender.close()
    assert not sender.send("a", 0, OUTPUTS[0])
    again = await senders.to(receiver.address)
    assert again is not sender
    assert again.is_open


async def test_the_socket_is_its_owners_alone(ends):
    address = Path(ends[0].address)

    def look():
        return address.is_socket(), address.parent.stat().st_mode & 0o077

    assert await asyncio.to_thread(look) == (True, 0)


async def test_a_stream_is_forwarded_until_its_way_closes():
    stream = TokenStream("a", lambda _: None, asyncio.get_running_loop())
    stream.put(OUTPUTS[0])
    taken = []

    def send(delivery):
        if len(taken) == 2:
            return False
        taken.append(delivery)
        return True

    forwarding = asyncio.create_task(stream.forward(send))
    await asyncio.sleep(0)
    stream.put(OUTPUTS[1])
    stream.put(OUTPUTS[2])
    await forwarding
    assert taken == OUTPUTS[:2]
    assert not stream.has_ended
    assert [batch async for batch in stream.batches()] == [OUTPUTS[2:]]


@pytest.mark.parametrize("last", [OUTPUTS[2], RequestFailure("a", GenerationError("no"))], ids=["token", "failure"])
async def test_a_forwarded_stream_ends_with_its_last_delivery(last):
    cancelled = []
    stream = TokenStream("a", cancelled.append, asyncio.get_running_loop())
    taken = []
    forwarding = asyncio.create_task(stream.forward(lambda delivery: taken.append(delivery) is None))
    await asyncio.sleep(0)
    stream.put(OUTPUTS[0])
    stream.put(last)
    await forwarding
    stream.close()
    assert taken == [OUTPUTS[0], last]
    assert cancelled == []
