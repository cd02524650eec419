"""The usual way to batch a model on Ray Serve, as a baseline: `@serve.batch` around `model.generate`, static batches.

Same model, same weights, same data type as ours. A batch is padded on the left, runs until its longest member is done,
and nobody sees a token before that.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import StreamingResponse
from transformers import AutoTokenizer

from serve_app.models.checkpoint import find_checkpoint
from serve_app.models.loader import load_model


@serve.deployment(max_ongoing_requests=512, ray_actor_options={"num_cpus": 1})
class Naive:
    """One replica with the whole model behind a batched method."""

    def __init__(self, source: str, max_batch_size: int, batch_wait_timeout_s: float) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        checkpoint = find_checkpoint(source)
        self._model: Any = load_model(checkpoint)
        self._model.set_attn_implementation("sdpa")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.path, padding_side="left")
        batched: Any = self._generate  # the decorator adds the two setters
        batched.set_max_batch_size(max_batch_size)
        batched.set_batch_wait_timeout_s(batch_wait_timeout_s)

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.05)
    async def _generate(self, bodies: list[dict[str, Any]]) -> list[str]:
        inputs = self._tokenizer([body["prompt"] for body in bodies], return_tensors="pt", padding=True)
        longest = max(body["max_tokens"] for body in bodies)
        with torch.inference_mode():
            output = self._model.generate(
                **inputs, min_new_tokens=longest, max_new_tokens=longest, do_sample=False, temperature=None, top_p=None
            )
        new_tokens = output[:, inputs["input_ids"].shape[1] :]
        return [
            self._tokenizer.decode(row[: body["max_tokens"]], skip_special_tokens=True)
            for row, body in zip(new_tokens, bodies, strict=True)
        ]

    async def __call__(self, request: Request) -> StreamingResponse:
        """POST /v1/completions, as far as the load needs it."""
        body = await request.json()
        text = await self._generate(body)
        usage = {"completion_tokens": body["max_tokens"]}
        events = [
            {"choices": [{"index": 0, "text": text or " "}], "created": int(time.time())},
            {"choices": [], "usage": usage},
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return StreamingResponse(iter([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")


def build_app(args: dict[str, Any]) -> Application:
    """args: source, max_batch_size, batch_wait_timeout_s."""
    deployment: Any = Naive  # the decorator makes one of the class
    application: Application = deployment.bind(
        args.get("source", "builtin"),
        int(args.get("max_batch_size", 32)),
        float(args.get("batch_wait_timeout_s", 0.05)),
    )
    return application
