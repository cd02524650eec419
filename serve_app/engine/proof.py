"""The loader's proof: does this model, run packed over our cache, give what it gives alone?

A list of supported names would be out of date the day it is written. Instead every model shows it, in a second, when it
is loaded: a few short prompts run through the model's own attention alone, then packed together, in chunks and as decode
steps over scratch blocks. What differs is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from serve_app.engine.attention.backend import ATTENTION_NAME, AttentionProbe, LayerProbe
from serve_app.engine.attention.layout import Segment
from serve_app.errors import UnsupportedModelError

Forward = Callable[[Sequence[tuple[Sequence[int], Segment]], Sequence[int]], torch.Tensor]

TOLERANCE = {torch.float32: 1e-3}
"""Mean absolute difference of logits over their standard deviation. Wrong attention differs by 0.01 and far more."""
LOW_PRECISION_TOLERANCE = 0.1
EIGHT_BIT_TOLERANCE = 0.4
PROOF_NUM_BLOCKS = 4
PROOF_BLOCK_SIZE = 4
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def _refuse(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__} cannot be served: {reason}.")


def probe_layers(model: PreTrainedModel) -> dict[int, LayerProbe]:
    """Runs two tokens to learn the shapes of each layer's keys and values.

    Raises:
        UnsupportedModelError: layers that do not call our attention, or that need more than a cache of keys and values.
    """
    config = model.config.get_text_config()
    probe = AttentionProbe()
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        model(
            input_ids=torch.tensor([[0, 1]], device=model.device),
            position_ids=torch.tensor([[0, 1]], device=model.device),
            use_cache=False,
            attention_step=probe,
        )
    except UnsupportedModelError as error:
        raise _refuse(model, error.message) from None
    except Exception as error:
        raise _refuse(model, f"its forward pass does not take packed inputs ({type(error).__name__}: {error})") from error
    num_layers = int(config.num_hidden_layers)
    if set(probe.layers) != set(range(num_layers)):
        raise _refuse(
            model,
            f"only {len(probe.layers)} of its {num_layers} layers do attention through transformers' AttentionInterface",
        )
    _check_layer_types(model, probe)
    return probe.layers


def _check_layer_types(model: PreTrainedModel, probe: AttentionProbe) -> None:
    """Short prompts cannot show what a layer does with long ones, so what it declares must be something we know."""
    for index, layer_type in enumerate(getattr(model.config.get_text_config(), "layer_types", None) or ()):
        if layer_type not in SERVED_LAYER_TYPES:
            raise _refuse(model, f"layer {index} is of type {layer_type}, which this engine does not serve")
        if layer_type == "sliding_attention" and probe.layers[index].call.sliding_window is None:
            raise _refuse(model, f"layer {index} is a sliding-window layer, but does not tell its attention the window")


class Proof:
    """Compares packed with alone on short pseudo-random prompts.

    Made before anything in the model is replaced: what it gives alone, through its own modules, is noted then.

    Args:
        model: with our attention selected; it is selected again on return.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        vocab_size = int(model.config.get_text_config().vocab_size)
        generator = torch.Generator().manual_seed(0)
        self._prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in (7, 5)]
        model.set_attn_implementation("eager")
        try:
            self._alone = [_logits_alone(model, tokens) for tokens in self._prompts]
        finally:
            model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def check(self, forward: Forward, tolerance: float | None = None) -> None:
        """Runs the packed forward over scratch caches of PROOF_NUM_BLOCKS blocks of PROOF_BLOCK_SIZE tokens.

        Args:
            forward: what is to be proved.
            tolerance: see TOLERANCE; by default what the model's own type allows.

        Raises:
            UnsupportedModelError: the logits differ by more than rounding.
        """
        (first, second), (alone_first, alone_second) = self._prompts, self._alone
        blocks = ([0, 3], [2, 1])  # scattered on purpose
        try:
            chunks = forward([(first[:4], Segment(4, 4, blocks[0])), (second[:4], Segment(4, 4, blocks[1]))], [3, 7])
            mixed = forward([(second[4:], Segment(1, 5, blocks[1])), (first[4:], Segment(3, 7, blocks[0]))], [0, 3])
        except Exception as error:
            raise _refuse(self._model, f"packed inputs fail ({type(error).__name__}: {error})") from error
        allowed = TOLERANCE.get(self._model.dtype, LOW_PRECISION_TOLERANCE) if tolerance is None else tolerance
        for packed, alone, what in (
            (chunks[0], alone_first[3], "a packed prompt"),
            (chunks[1], alone_second[3], "a packed prompt"),
            (mixed[1], alone_first[6], "a prompt in chunks"),
            (mixed[0], alone_second[4], "a decode step"),
        ):
            _compare(self._model, packed, alone, what, allowed)


def _logits_alone(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits[0]
    return logits


def _compare(model: PreTrainedModel, packed: torch.Tensor, alone: torch.Tensor, what: str, tolerance: float) -> None:
    packed, alone = packed.float(), alone.float()
    difference = float((packed - alone).abs().mean() / alone.std().clamp_min(1e-6))
    if not difference <= tolerance:
        raise _refuse(
            model,
            f"the logits of {what} differ from those of the model's own attention alone by {difference:.2g} standard "
            "deviations; its attention does not follow transformers' AttentionInterface",
        )
