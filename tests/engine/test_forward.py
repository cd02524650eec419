"""The short way through a model: taken where it gives the same bits, and only there."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM

from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.forward import ShortWay, WholeModel
from serve_app.engine.model_runner import ModelRunner
from serve_app.engine.native.kernels import load_kernels
from serve_app.engine.request import SamplingParams, UserRequest
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
