"""Several models in one application: each an engine deployment of its own."""

import copy

import pytest
from ray import serve

from tests.serve.conftest import application_of, deployment_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, while it runs in this process
PAIR = "pair"


def with_pair(config):
    """The tiny model twice, under two names and two limits, as an application beside the others."""
    pair = copy.deepcopy(application_of(config)) | {"name": PAIR, "route_prefix": f"/{PAIR}"}
    config["applications"].append(pair)
    model, engine = pair["args"].pop("model"), deployment_of(config, "Engine", PAIR)
    small = {**model, "name": "small", "engine": {**pair["args"]["engine"], "max_batched_tokens": 32}}
    pair["args"]["models"] = [small, {**model, "name": "large"}]
    pair["deployments"].remove(engine)
    pair["deployments"] += [{**copy.deepcopy(engine), "name": f"Engine-{name}"} for name in ("small", "large")]
    deployment_of(config, "Engine-large", PAIR)["user_config"] |= {"max_waiting_tokens": 100}


def test_each_model_has_its_own_engines_and_limits(deployed):
    def of_engine(name, method):
        async def call():
            return await getattr(serve.get_deployment_handle(f"Engine-{name}", PAIR), method).remote()

        return deployed.run(call(), 30)

    def ask(model, max_tokens):
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return deployed.http.post(f"/{PAIR}/v1/completions", json=body)

    try:
        deployed.deploy(with_pair)
        listed = deployed.http.get(f"/{PAIR}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["small", "large"]

        small, large = ask("small", 8), ask("large", 20)
        assert (small.status_code, large.status_code) == (200, 200)
        assert large.json()["choices"][0]["text"].startswith(small.json()["choices"][0]["text"])  # the same weights
        assert (small.json()["model"], large.json()["model"]) == ("small", "large")
        assert [of_engine(name, "stats").num_drawn_tokens for name in ("small", "large")] == [8, 20]
        limits = [of_engine(name, "load").max_waiting_tokens for name in ("small", "large")]
        assert limits == [deployment_of(deployed.config, "Engine")["user_config"]["max_waiting_tokens"], 100]

        assert ask("tiny-llama", 8).status_code == 404
        assert deployed.http.get(f"/{PAIR}/ready").status_code == 200
    finally:
        deployed.deploy()
