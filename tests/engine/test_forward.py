"""The short way through a model: taken where it gives the same bits, and only there."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM

from serve_app.engine.attention.layout import Segment
from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.forward import ShortWay, WholeModel
from serve_app.engine.model_runner import ModelRunner
from serve_app.engine.native.kernels import load_kernels
from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.engine.stop_flag import StepInterruptedError
from tests.families import FAMILIES, tiny_model

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler")


def way_of(model):
    runner = ModelRunner(model, end_token_ids=frozenset(), max_model_len=64, block_size=4, kv_cache_tokens=64)
    return runner._forward.way


class ScaledLogits(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.001
        return output


class ScaledEmbeddings(LlamaForCausalLM):
    def forward(self, input_ids, **kwargs):
        return super().forward(inputs_embeds=self.model.embed_tokens(input_ids) * 1.001, **kwargs)


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "qwen2", "qwen3"])
def test_models_whose_layers_are_one_call_take_it(family):
    assert isinstance(way_of(tiny_model(FAMILIES[family]())), ShortWay)


@pytest.mark.parametrize("kind", [ScaledLogits, ScaledEmbeddings])
def test_models_that_compute_something_between_do_not(kind):
    model = tiny_model(FAMILIES["llama"]())
    model.__class__ = kind
    assert isinstance(way_of(model), WholeModel)


def test_models_that_have_more_parts_do_not():
    model = tiny_model(FAMILIES["llama"]())
    model.adapter = torch.nn.Identity()
    assert isinstance(way_of(model), WholeModel)


def test_layers_that_are_not_one_call_do_not():
    assert isinstance(way_of(tiny_model(FAMILIES["gemma2"]())), WholeModel)


def test_engines_of_one_process_do_not_disturb_each_other():
    def new_engine():
        runner = ModelRunner(tiny_model(FAMILIES["llama"]()), end_token_ids=frozenset(), max_model_len=128)
        return BatchInferenceEngine(runner)

    def tokens_of(engine, name):
        params = SamplingParams(max_tokens=40, temperature=0)
        return [output.token for output in engine.add_to_queue([UserRequest(name, (5, 6, 7, 8), params)])[0]]

    engines = [new_engine(), new_engine()]
    for engine in engines:
        engine.start()
    try:
        alone = tokens_of(engines[0], "alone")
        with ThreadPoolExecutor(2) as pool:
            for index in range(30):
                assert list(pool.map(tokens_of, engines, [str(index)] * 2)) == [alone, alone]
    finally:
        for engine in engines:
            engine.shutdown()


def packed_prompt(runner, num_tokens=48):
    """The arguments of a forward pass over a prompt in the runner's first blocks."""
    segment = Segment(num_tokens, num_tokens, list(range(-(-num_tokens // runner.block_size))))
    return [(list(range(1, num_tokens + 1)), segment)], [num_tokens - 1]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("native_kernels", [False, True])
def test_a_step_that_is_interrupted_says_so_and_can_be_computed_again(family, native_kernels):
    runner = ModelRunner(
        tiny_model(FAMILIES[family]()), end_token_ids=frozenset(), max_model_len=64, native_kernels=native_kernels
    )
    forward, arguments = runner._forward, packed_prompt(runner)
    with torch.inference_mode():
        expected = forward(*arguments)
        runner.interrupt()
        with pytest.raises(StepInterruptedError):
            forward(*arguments)
        forward.stop.clear()
        assert torch.equal(forward(*arguments), expected)


def test_all_threads_of_a_step_stop_at_the_same_layer():
    """Interrupted at any moment: it ends, and what is not given up is right."""
    threads = torch.get_num_threads()
    config = FAMILIES["llama"]()
    config.num_hidden_layers = 12
    try:
        runner = ModelRunner(tiny_model(config), end_token_ids=frozenset(), max_model_len=64, num_threads=2)
        forward, arguments = runner._forward, packed_prompt(runner)
        interrupted = 0
        with torch.inference_mode():
            expected = forward(*arguments)
            for attempt in range(300):
                forward.stop.clear()
                timer = threading.Timer(attempt * 1e-5, runner.interrupt)
                timer.start()
                try:
                    assert torch.equal(forward(*arguments), expected)
                except StepInterruptedError:
                    interrupted += 1
                timer.join()
        assert interrupted
    finally:
        torch.set_num_threads(threads)
