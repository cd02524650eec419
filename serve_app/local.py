"""`LocalModel`: text in, text out, in this process, without Ray."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from serve_app.config import EngineConfig, EngineLimits, ModelConfig
from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.engine.stream import as_they_come
from serve_app.loading import load_engine
from serve_app.models.checkpoint import find_checkpoint
from serve_app.text.assembler import TextAssembler, TextDelta
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """New text for the prompt with this index."""

    index: int
    delta: TextDelta


class LocalModel:
    """A started engine with its tokenizer; all prompts of a call are batched continuously.

    Example:
        >>> model = LocalModel.load("builtin")
        >>> model.complete(["The capital of France is"], max_tokens=8, temperature=0)
        [' Paris. It is a beautiful city']
    """

    def __init__(self, engine: BatchInferenceEngine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._calls = itertools.count()

    @classmethod
    def load(
        cls, source: str = "builtin", *, engine: EngineConfig | None = None, limits: EngineLimits | None = None
    ) -> Self:
        """Loads `builtin`, a local folder or a hub id. Raises `ModelError` when it cannot be served."""
        checkpoint = find_checkpoint(source)
        started = load_engine(model=ModelConfig(source=source), engine=engine, limits=limits)
        return cls(started, Tokenizer.load(checkpoint.path, checkpoint.revision))

    def stream(self, prompts: Sequence[str], *, stop: Sequence[str] = (), **sampling: Any) -> Iterator[PromptDelta]:
        """Text of all prompts as it comes.

        Args:
            prompts: texts to be continued.
            stop: strings that end a text, and are not part of it.
            sampling: `SamplingParams` for all of them.

        Raises:
            RequestError: a prompt is empty or too long, or a parameter out of range.
        """
        call = next(self._calls)
        requests = [
            UserRequest(f"local-{call}-{index}", tuple(self.tokenizer.encode(prompt)), SamplingParams(**sampling))
            for index, prompt in enumerate(prompts)
        ]
        streams = self.engine.add_to_queue(requests)
        index_of = {request.request_id: index for index, request in enumerate(requests)}
        assemblers = [TextAssembler(self.tokenizer.new_detokenizer(), stop) for _ in requests]
        ended: set[int] = set()
        try:
            for output in as_they_come(streams):
                index = index_of[output.request_id]
                if index not in ended:
                    delta = assemblers[index].push([output])
                    yield PromptDelta(index, delta)
                    if delta.finish_reason is not None:
                        ended.add(index)
                        streams[index].close()
        finally:
            for stream in streams:
                stream.close()

    def complete(self, prompts: Sequence[str], *, stop: Sequence[str] = (), **sampling: Any) -> list[str]:
        """The continuation of each prompt. Arguments and errors as `stream`."""
        texts = [""] * len(prompts)
        for piece in self.stream(prompts, stop=stop, **sampling):
            texts[piece.index] += piece.delta.text
        return texts

    def close(self) -> None:
        """Stops the engine."""
        self.engine.shutdown()
