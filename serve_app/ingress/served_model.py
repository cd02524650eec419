"""A model, as the ingress serves it: its name, its text side, and the way to its engine."""

from __future__ import annotations

import time
from collections.abc import Callable

from serve_app.ingress.admission import Admission
from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.prompts import Prompter
from serve_app.ingress.rendering import Json
from serve_app.models.facts import ModelFacts
from serve_app.text.tokenizer import Tokenizer


class ServedModel:
    """One of the models that an ingress serves.

    Args:
        name: what callers call it.
        tokenizer: the model's.
        facts: the model's context, vocabulary and recommended sampling.
        client: its engine.
        allows_templates: asked at each call: whether callers may bring their own chat template.
        cold_start_wait_s: asked at each call: how long calls may wait while there is no engine replica.
        reasoning_tags: what opens and closes the model's reasoning, when chat is to split it off.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        client: EngineClient,
        *,
        allows_templates: Callable[[], bool],
        cold_start_wait_s: Callable[[], float],
        reasoning_tags: tuple[str, str] | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.facts = facts
        self.client = client
        self.reasoning_tags = reasoning_tags
        self.admission = Admission(client, cold_start_wait_s)
        self.prompter = Prompter(tokenizer, facts, allows_templates)
        self._created = int(time.time())

    def card(self) -> Json:
        """Its entry in the list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "serve_app",
            "max_model_len": self.facts.max_model_len,
        }
