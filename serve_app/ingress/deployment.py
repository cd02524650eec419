"""The ingress deployment: an ASGI application that knows text and HTTP, and hands token ids to the engine deployment."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from serve_app.config import IngressLimits, ModelConfig, TracingConfig, parse_section
from serve_app.ingress.call_log import CallRecord, open_log, write
from serve_app.ingress.continuation import ContinuingClient
from serve_app.ingress.engine_client import ServeEngineClient
from serve_app.ingress.routes import Api
from serve_app.ingress.served_model import ServedModel
from serve_app.ingress.tracing import TracedClient
from serve_app.metrics import IngressMetrics
from serve_app.models.checkpoint import find_checkpoint
from serve_app.models.facts import read_facts
from serve_app.text.tokenizer import Tokenizer
from serve_app.tracing import open_provider


@serve.ingress()
class IngressReplica:
    """One ingress replica. Holds the models' tokenizers, never weights.

    Args:
        models: what is served, and the engine deployment of each.
        tracing: where spans go.
    """

    def __init__(self, models: list[tuple[ModelConfig, DeploymentHandle[Any]]], tracing: TracingConfig) -> None:
        open_log()
        self._metrics = IngressMetrics()
        self._tracer = None if tracing.endpoint is None else open_provider(tracing, "ingress").get_tracer("serve_app")
        self._api = Api(
            models=[self._served(model, engine) for model, engine in models],
            limits=IngressLimits(),
            report=self._report,
            tracer=self._tracer,
        )

    def _served(self, model: ModelConfig, engine: DeploymentHandle[Any]) -> ServedModel:
        checkpoint = find_checkpoint(model.source, model.revision)
        way = ServeEngineClient(engine, lambda: self._api.limits.step_channel)
        return ServedModel(
            model.name or checkpoint.name,
            Tokenizer.load(checkpoint.path, checkpoint.revision),
            read_facts(checkpoint, model.max_model_len),
            ContinuingClient(way if self._tracer is None else TracedClient(way, self._tracer)),
            allows_templates=lambda: self._api.limits.allow_chat_template,
            cold_start_wait_s=lambda: self._api.limits.cold_start_wait_s,
            reasoning_tags=None if model.reasoning_tags is None else (model.reasoning_tags[0], model.reasoning_tags[1]),
        )

    def _report(self, record: CallRecord) -> None:
        write(record)
        self._metrics.call_ended(record.ending or "", record.key or "", record.prompt_tokens, record.completion_tokens)
        if record.first_token_at is not None:
            first_token_s, total_s = record.first_token_at - record.started_at, record.ended_at - record.started_at
            self._metrics.call_took(first_token_s, record.gaps_s, total_s)

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._api.asgi()

    def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Applies changed limits; running requests keep theirs."""
        self._api.limits = parse_section(IngressLimits, user_config, "Ingress.user_config")
