"""Cases of the kinds utf8-stream, leading-space, stop-strings, eos-leak, finish-reason, usage and chunk-shape."""

import json
import threading

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from serve_app.engine.model_runner import ModelRunner
from serve_app.models.checkpoint import find_checkpoint
from serve_app.models.facts import read_facts
from serve_app.models.loader import load_model
from serve_app.text.tokenizer import Tokenizer
from tests.api.server import serving
from tests.cases.tiny_server import serving_tiny_model
from tests.fakes import EOS, EOT, FIRST_BYTE, ScriptedRunner, echo, ids, text_of
from tests.families import FAMILIES, tiny_model

FOREIGN = "我很好 🌶️ 한국어"


def says(*token_ids):
    """A runner that says the same to everybody."""
    return ScriptedRunner(lambda prompt: list(token_ids))


def texts_of(answer):
    return [choice["text"] for event in answer.events for choice in event["choices"]]


def test_br_001_characters_of_several_tokens_stream_whole():
    with serving(says(*ids(FOREIGN), EOS)) as server:
        answer = server.both("x")
        assert answer.text == FOREIGN
        assert not any("\ufffd" in text for text in texts_of(answer))


def test_br_003_a_character_cut_by_the_limit_is_the_same_in_both_modes():
    with serving(says(*ids("ab🌶️한"), EOS)) as server:
        raw = "ab🌶️한".encode()
        for limit in range(1, len(raw) + 1):
            answer = server.both("x", max_tokens=limit)
            assert answer.finish_reason == "length"
            assert answer.usage["completion_tokens"] == limit
            assert answer.text == raw[:limit].decode(errors="replace")  # the documented rule: one U+FFFD for the tail


@pytest.mark.parametrize("between", ["", " "])
def test_br_005_no_premature_replacement_before_a_space(between):
    raw = "好".encode()
    script = [*ids(raw[:2]), *ids(between), *ids(raw[2:]), *ids(" next"), EOS]
    with serving(says(*script)) as server:
        expected = (raw[:2] + between.encode() + raw[2:] + b" next").decode(errors="replace")
        assert server.both("x").text == expected
        assert server.ask("x", stream=True).raw.endswith("data: [DONE]\n\n")


def sentencepiece_tokenizer():
    """Strips the first space of whatever it decodes, as Llama 2's does."""
    words = ["<unk>", "</s>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁The", "▁quick", "▁brown", "▁fox", "▁"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")), words


def test_br_007_no_space_is_lost_at_the_start_of_a_piece():
    tokenizer, words = sentencepiece_tokenizer()
    script = [words.index(word) for word in ("▁The", "▁quick", "▁brown", "▁fox")] + [1]
    runner = ScriptedRunner(lambda prompt: script, end_token_ids=frozenset({1}))
    runner.vocab_size = len(words)
    with serving(runner, tokenizer=tokenizer) as server:
        assert server.both("fox").text == "The quick brown fox" == tokenizer.decode(script)


def test_br_009_no_part_of_a_stop_string_is_shown():
    with serving(says(*ids("DEFGHIJKLM"))) as server:
        answer = server.both("Here is the English alphabet: ABC", stop=["DEFGHIJ"], max_tokens=10)
        assert (answer.text, answer.finish_reason) == ("", "stop")
        assert not any(texts_of(answer))
        server.wait_until_idle()


def test_br_009_in_the_middle_of_a_text():
    with serving(says(*ids("one two three four"))) as server:
        answer = server.both("x", stop=["three", "zzz"], max_tokens=18)
        assert (answer.text, answer.finish_reason) == ("one two ", "stop")


@pytest.mark.parametrize(("script", "limit", "reason"), [(b"...done\n\nUs", 99, "stop"), (b"...done\n\nUs", 11, "length")])
def test_br_011_what_was_held_back_is_given_at_the_end(script, limit, reason):
    with serving(says(*ids(script), EOS)) as server:
        answer = server.both("x", stop=["\n\nUser:"], max_tokens=limit)
        assert (answer.text, answer.finish_reason) == ("...done\n\nUs", reason)


@pytest.mark.parametrize("stop", [None, [], "END"])
def test_br_013_no_stop_strings_in_all_their_forms(stop):
    with serving(ScriptedRunner(echo)) as server:
        assert server.both("hello", stop=stop).text == "hello"


@pytest.mark.parametrize("stop", [[""], "", ["", "END"], [5]])
def test_br_013_empty_and_mistyped_stop_strings_are_refused(stop):
    with serving(ScriptedRunner(echo)) as server:
        answer = server.both("hello", stop=stop)
        assert answer.status == 400
        assert answer.body["error"]["param"].startswith("stop")
        assert server.both("hello").text == "hello"


def test_br_015_one_rows_stop_string_ends_no_other_row():
    with serving_tiny_model() as server:
        prompts = ["first", "second", "third", "fourth"]
        fields = {"max_tokens": 32, "ignore_eos": True}
        alone = [server.ask(prompt, **fields) for prompt in prompts]
        stop = alone[1].text[2:4]
        answers = [None] * 4

        def send(i):
            answers[i] = server.ask(prompts[i], stream=True, **fields, **({"stop": [stop]} if i == 1 else {}))

        threads = [threading.Thread(target=send, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers[1].finish_reason == "stop"
        assert answers[1].text == alone[1].text[: alone[1].text.index(stop)]
        for i in (0, 2, 3):
            assert answers[i].same == alone[i].same
            assert (answers[i].finish_reason, answers[i].usage["completion_tokens"]) == ("length", 32)


def test_br_017_every_declared_end_token_ends(tmp_path):
    model = tiny_model(FAMILIES["llama"]())
    model.config.eos_token_id = EOS
    model.generation_config.eos_token_id = [EOS, 7]
    model.generation_config.pad_token_id = 0
    model.save_pretrained(tmp_path)
    checkpoint = find_checkpoint(str(tmp_path))
    facts = read_facts(checkpoint)
    assert facts.end_token_ids == {EOS, 7}
    with serving(
        ScriptedRunner(lambda prompt: [*ids("ab"), EOT, *ids("more")], end_token_ids=frozenset({EOS, EOT}))
    ) as server:
        answer = server.both("x")
        assert (answer.text, answer.finish_reason, answer.usage["completion_tokens"]) == ("ab", "stop", 3)
    runner = ModelRunner(load_model(checkpoint), end_token_ids=facts.end_token_ids, max_model_len=64, kv_cache_tokens=64)
    assert runner.end_token_ids == {EOS, 7}
    assert torch.get_default_dtype() == torch.float32


def test_br_019_finish_reason_is_null_until_it_is_final():
    with serving(ScriptedRunner(echo)) as server:
        for answer in (
            server.ask("hello", stream=True),
            server.ask(messages=[{"role": "user", "content": "hi"}], stream=True),
        ):
            choices = [choice for event in answer.events for choice in event["choices"]]
            assert all("finish_reason" in choice for choice in choices)
            assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_br_021_the_last_tokens_text_is_delivered(limit):
    with serving(ScriptedRunner(echo)) as server:
        assert server.both("hello", max_tokens=limit).text == "hello"[:limit]
        chat = server.both(messages=[{"role": "user", "content": "hello"}], max_tokens=limit)
        assert chat.text == "user: hello"[:limit]


def test_br_023_usage_comes_once_and_last():
    with serving(ScriptedRunner(echo)) as server:
        events = server.ask("hello", stream=True).events
        assert all(event["usage"] is None for event in events[:-1])
        assert events[-1]["choices"] == []
        counts = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
        assert events[-1]["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
        response = server.http.post("/v1/completions", json={"prompt": "hello", "stream": True})
        assert "usage" not in response.text


def test_br_025_usage_counts_tokens_not_chunks():
    with serving(says(*ids(FOREIGN + "STOP"), EOS)) as server:
        whole = server.both(FOREIGN)
        assert whole.usage["prompt_tokens"] == len(FOREIGN.encode())
        assert whole.usage["completion_tokens"] == len((FOREIGN + "STOP").encode()) + 1
        cut = server.both("x", stop=["STOP"])
        assert cut.usage["completion_tokens"] == len((FOREIGN + "STOP").encode())
        chat = server.both(messages=[{"role": "user", "content": "hi"}])
        assert chat.usage["prompt_tokens"] == len("user: hi\nassistant: ")


def test_br_027_streams_are_server_sent_events():
    with serving(ScriptedRunner(echo)) as server:
        response = server.http.post("/v1/completions", json={"prompt": "hello", "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in response.headers
        assert response.headers["cache-control"] == "no-cache"
        frames = response.text.split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        assert all(json.loads(frame.removeprefix("data: ")) for frame in frames[:-2])


def test_br_029_the_openai_client_survives_a_long_prefill():
    with serving(ScriptedRunner(echo, step_s=0.02), max_batched_tokens=8) as server:
        stream = server.openai.completions.create(model="scripted", prompt="a" * 200, max_tokens=3, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "aaa"


def test_the_scripted_tokenizer_is_what_it_says():
    assert text_of(ids(FOREIGN)) == FOREIGN
    assert FIRST_BYTE == 4
