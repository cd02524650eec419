"""The engine in a plain script, without Ray."""

import subprocess
import sys
from pathlib import Path

import pytest

from serve_app import BatchInferenceEngine, SamplingParams, UserRequest
from serve_app.errors import RequestError
from serve_app.local import LocalModel
from tests.fakes import EOS, ScriptedRunner, echo, ids, text_tokenizer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def model():
    engine = BatchInferenceEngine(ScriptedRunner(echo))
    engine.start()
    local = LocalModel(engine, text_tokenizer())
    yield local
    local.close()
    engine.check()


def test_texts_come_back_in_order(model):
    assert model.complete(["one", "three", "two"], max_tokens=20) == ["one", "three", "two"]


def test_pieces_of_all_prompts_come_as_they_are_drawn(model):
    model.engine.runner.step_s = 0.05
    pieces = [(piece.index, piece.delta.text) for piece in model.stream(["abcdef", "xy"], max_tokens=20)]
    assert [text for index, text in pieces if index == 0] == [*"abcdef", ""]
    assert [text for index, text in pieces if index == 1] == ["x", "y", ""]
    assert pieces.index((1, "y")) < pieces.index((0, "f"))


def test_a_stop_string_ends_one_text_and_no_other(model):
    assert model.complete(["one two three", "four five six"], stop=["two"], max_tokens=20) == ["one ", "four five six"]


def test_leaving_early_cancels(model):
    for _ in model.stream(["a" * 100], max_tokens=100):
        break
    assert model.complete(["next"], max_tokens=9) == ["next"]
    assert model.engine.num_unfinished == 0


def test_bad_parameters_are_refused_by_name(model):
    with pytest.raises(RequestError) as refusal:
        model.complete(["x"], max_tokens=5, temperature=-1)
    assert refusal.value.param == "temperature"


def test_the_public_names_make_an_engine():
    engine = BatchInferenceEngine(ScriptedRunner(echo))
    [stream] = engine.add_to_queue([UserRequest("a", ids("hi"), SamplingParams(max_tokens=9))])
    while engine.step():
        pass
    assert [output.token for output in stream] == [*ids("hi"), EOS]


def test_the_script_of_the_readme_prints_tokens_as_they_come():
    script = ROOT / "examples" / "without_ray.py"
    printed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    assert "Paris" in printed
    assert "ray" not in printed
    assert str(script.read_text()) in (ROOT / "README.md").read_text().replace("```python\n", "")
