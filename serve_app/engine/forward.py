"""The forward pass on packed tokens: the model's own code, or the short way through a model whose layers are one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from serve_app.engine.attention.backend import AttentionBackend, AttentionStep
from serve_app.engine.attention.layout import LayerCache, PackedLayout, Segment
from serve_app.engine.decoder_layer import NativeDecoderLayers
from serve_app.engine.stop_flag import StopFlag

TRIAL_TOKENS = 5


class Way(Protocol):
    """A way from token ids to logits."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Logits [wanted, vocabulary] after some tokens; token_ids and positions int64 [1, T], wanted int64."""


class WholeModel:
    """The model's own code."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, wanted: torch.Tensor
    ) -> torch.Tensor:
        """See `Way`."""
        keep = {"logits_to_keep": wanted} if self._keeps_logits else {}
        output = self._model(input_ids=token_ids, position_ids=positions, use_cache=False, attention_step=step, **keep)
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[wanted]


class ShortWay:
    """Embedding, positions, layers, norm and head, one after the other.

    What the model's own code does between them (masks that nobody reads, outputs that nobody asked for) takes half a
    millisecond a step, as much as a quarter of the layers of a small model.
    """

    def __init__(
        self, embed: nn.Module, rotary: nn.Module, layers: NativeDecoderLayers, norm: nn.Module, head: nn.Module
    ) -> None:
        self._embed, self._rotary, self._layers, self._norm, self._head = embed, rotary, layers, norm, head

    @classmethod
    def through(cls, model: PreTrainedModel) -> Self | None:
        """The short way through a model that has these parts and no others, and all layers in one."""
        base, *others = model.children()
        parts = dict(base.named_children())
        if set(parts) != {"embed_tokens", "rotary_emb", "layers", "norm"} or len(others) != 1:
            return None
        layers = list(parts["layers"].children())
        if len(layers) != 1 or not isinstance(layers[0], NativeDecoderLayers):
            return None
        return cls(parts["embed_tokens"], parts["rotary_emb"], layers[0], parts["norm"], others[0])

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, wanted: torch.Tensor
    ) -> torch.Tensor:
        """See `Way`."""
        hidden = self._embed(token_ids)
        hidden = self._layers(hidden, position_embeddings=self._rotary(hidden, positions), attention_step=step)
        logits: torch.Tensor = self._head(self._norm(hidden[0][wanted]))
        return logits


class PackedForward:
    """A model run on packed tokens, with our attention and our cache.

    Args:
        way: through the model, whose attention implementation is ours.
        caches: one per layer.
        block_size: tokens of a cache block.
        backend: attention for the model's device.
        device: the model's.
    """

    def __init__(
        self,
        way: Way,
        caches: dict[int, LayerCache],
        block_size: int,
        backend: AttentionBackend,
        device: torch.device,
    ) -> None:
        self.way = way
        self.caches = caches
        self.block_size = block_size
        self.backend = backend
        self.device = device
        self.stop = StopFlag()

    def __call__(self, rows: Sequence[tuple[Sequence[int], Segment]], wanted: Sequence[int]) -> torch.Tensor:
        """Logits [len(wanted), vocabulary] after some of the packed tokens.

        Args:
            rows: each row's new token ids and its segment; single tokens first, longest context first among them.
            wanted: indices of packed tokens.

        Raises:
            StepInterruptedError: `stop` was raised before the last layer.
        """
        layout = PackedLayout([segment for _, segment in rows], self.block_size, self.device)
        token_ids = [token for tokens, _ in rows for token in tokens]
        positions = [p for _, s in rows for p in range(s.context_len - s.num_tokens, s.context_len)]
        return self.way(
            torch.tensor([token_ids], device=self.device),
            torch.tensor([positions], device=self.device),
            AttentionStep(layout, self.caches, self.backend, self.stop),
            torch.tensor(wanted, dtype=torch.int64, device=self.device),
        )


def shortest_way(model: PreTrainedModel, forward: Callable[[Way], PackedForward]) -> Way:
    """The short way, where there is one and it gives the same bits as the model; else the model itself.

    Args:
        model: after everything in it is replaced.
        forward: makes a forward pass over scratch caches of TRIAL_TOKENS tokens and more.
    """
    whole, short = WholeModel(model), ShortWay.through(model)
    if short is None:
        return whole
    scratch = forward(whole)
    blocks = list(range(-(-TRIAL_TOKENS // scratch.block_size)))
    trial = ([(range(TRIAL_TOKENS), Segment(TRIAL_TOKENS, TRIAL_TOKENS, blocks))], range(TRIAL_TOKENS))
    return short if torch.equal(scratch(*trial), forward(short)(*trial)) else whole
