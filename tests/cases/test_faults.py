"""Faults, from a request's text to the engine's loop: who is harmed, and what the callers are told."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve_app.errors import GenerationError, OutOfMemoryError
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.tokenizer import Tokenizer
from tests.api.server import ask, serving
from tests.fakes import FIRST_BYTE, ScriptedRunner, byte_tokenizer, echo

POISON = "!"
POISON_ID = FIRST_BYTE + ord(POISON)
ANSWER = "abcdefgh" * 12


class FaultyDetokenizer:
    """Breaks on one token."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self.finish = detokenizer.finish

    def push(self, token_id: int) -> str:
        if token_id == POISON_ID:
            raise RuntimeError("secret details")
        return self._detokenizer.push(token_id)


class FaultyTokenizer(Tokenizer):
    """Breaks at the poison in the named place, in a way that nobody foresaw."""

    place = ""

    def _pass(self, place: str, text: str) -> None:
        if place == self.place and POISON in text:
            raise RuntimeError("secret details")

    def encode(self, text, **options):
        self._pass("tokenizing", text)
        return super().encode(text, **options)

    def render_chat(self, messages, **options):
        self._pass("template", str(messages))
        return super().render_chat(messages, **options)

    def token_bytes(self, token_id):
        self._pass("rendering", POISON if token_id == POISON_ID else "")
        return super().token_bytes(token_id)

    def new_detokenizer(self, **options):
        detokenizer = super().new_detokenizer(**options)
        return FaultyDetokenizer(detokenizer) if self.place == "detokenizing" else detokenizer


def fault_in_sampling(runner):
    """The poison's row gets an error instead of a token, as for logits that are not numbers."""
    draw = runner._draw

    def faulty_draw(sequence):
        drawn = draw(sequence)
        return GenerationError("no valid logits") if drawn.token == POISON_ID else drawn

    runner._draw = faulty_draw


def fault_in_the_step(runner):
    """The whole step breaks as long as the poison's row is in it."""

    def before_step(plan):
        for row in plan.rows:
            if row.sequence.num_output_tokens == 4 and POISON_ID in row.sequence.request.prompt_token_ids:
                raise RuntimeError("secret details")

    runner.before_step = before_step


BEFORE_THE_FIRST_TOKEN = ("tokenizing", "template")
PLACES = (*BEFORE_THE_FIRST_TOKEN, "rendering", "detokenizing", "sampling", "step")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_in_one_row_harms_no_other(place, stream):
    runner = ScriptedRunner(lambda prompt: echo(prompt), step_s=0.002)
    if place == "sampling":
        fault_in_sampling(runner)
    if place == "step":
        fault_in_the_step(runner)
    tokenizer = FaultyTokenizer(byte_tokenizer("{{ messages[0].content }}"))
    tokenizer.place = place
    with serving(runner, tokenizer=tokenizer) as server, ThreadPoolExecutor(8) as pool:
        begun = [threading.Event() for _ in range(3)]
        others = [
            pool.submit(ask, server.http, "/v1/completions", {"prompt": ANSWER, "stream": True, "max_tokens": 200}, event)
            for event in begun
        ]
        assert all(event.wait(10) for event in begun)
        chat = {"messages": [{"role": "user", "content": f"boom{POISON}{ANSWER}"}]}
        broken = server.ask(**chat, stream=stream, max_tokens=150, logprobs=True)
        assert [other.result().text for other in others] == [ANSWER] * 3
        server.wait_until_idle()
        assert "secret" not in broken.raw
        if stream and place not in BEFORE_THE_FIRST_TOKEN:
            assert broken.status == 200
            # what came in one portion with the broken token is lost with it
            assert "boom".startswith(broken.text)
            assert broken.events[-1]["error"]["type"] == "server_error"
        else:
            assert broken.status == 500
            assert broken.body["error"]["type"] == "server_error"
        endings = sorted(record.ending for record in server.wait_for_records(4))
        assert endings == sorted(["stop"] * 3 + ["server_error" if place in ("sampling", "step") else "internal_error"])
        assert server.ask("as before", max_tokens=20).text == "as before"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_br_115_a_dead_loop_is_told_at_once_and_makes_the_server_unready(stream):
    runner = ScriptedRunner(step_s=0.01)
    with serving(runner) as server, ThreadPoolExecutor(1) as pool:
        assert server.http.get("/ready").status_code == 200
        running = pool.submit(server.ask, "a", stream=stream, max_tokens=400)
        server.wait_until_running()
        scheduler, plan = server.engine._scheduler, server.engine._scheduler.plan
        scheduler.plan = None
        told = running.result(timeout=30)
        error = told.events[-1]["error"] if told.events else told.body["error"]
        assert error["code"] == "engine_unavailable"
        late = server.ask("b", stream=stream, max_tokens=4)
        assert (late.status, late.body["error"]["code"]) == (503, "engine_unavailable")
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200  # the ingress itself lives
        scheduler.plan = plan
        for sequence in list(scheduler.running):  # for the check at the end, that no block is lost
            server.engine._end(sequence, "cancelled")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_br_117_after_running_out_of_memory_the_next_request_is_served(stream):
    runner = ScriptedRunner(echo)

    def refuse_long_contexts(plan):
        if any(row.end > 100 for row in plan.rows):
            raise OutOfMemoryError("This request does not fit into the memory of the server.")

    runner.before_step = refuse_long_contexts
    with serving(runner) as server:
        for _ in range(3):
            broken = server.ask("x" * 200, stream=stream, max_tokens=4)
            assert (broken.status, broken.body["error"]["type"]) == (500, "server_error")
            assert server.ask("small", stream=stream, max_tokens=5).text == "small"
        server.wait_until_idle()
