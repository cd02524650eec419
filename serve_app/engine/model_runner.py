"""Weights and cache tensors: turns a `StepPlan` into one drawn token per due row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from serve_app.engine.attention.backend import AttentionBackend, LayerProbe
from serve_app.engine.attention.cpu import CpuAttention
from serve_app.engine.attention.cuda import CudaAttention
from serve_app.engine.attention.layout import LayerCache, Segment
from serve_app.engine.attention.native import NATIVE_DTYPES, NativeAttention
from serve_app.engine.decoder_layer import fuse_layers
from serve_app.engine.forward import PackedForward, Way, WholeModel, shortest_way
from serve_app.engine.fusion import fuse
from serve_app.engine.linear import pack_linears
from serve_app.engine.memory import return_freed_memory
from serve_app.engine.native.kernels import Arithmetic, Kernels, load_kernels
from serve_app.engine.proof import (
    EIGHT_BIT_TOLERANCE,
    LOW_PRECISION_TOLERANCE,
    PROOF_BLOCK_SIZE,
    PROOF_NUM_BLOCKS,
    Proof,
    probe_layers,
)
from serve_app.engine.request import TokenLogprobs
from serve_app.engine.runner import Draw, StepResult
from serve_app.engine.sampler import RowSampling, Sampler, token_logprobs
from serve_app.engine.scheduler import PlannedRow, StepPlan
from serve_app.errors import ConfigError, EngineUnavailableError, OutOfMemoryError, ServeAppError

DEFAULT_CACHE_TOKENS = 16_384
SCORED_AT_ONCE = 64
"""Prompt tokens whose log-probabilities are computed together: bounds the memory of their float32 copies."""
ROUNDING_TOLERANCE = {Arithmetic.BFLOAT16: LOW_PRECISION_TOLERANCE, Arithmetic.INT8: EIGHT_BIT_TOLERANCE}
CUDA_CACHE_FRACTION = 0.85
"""Share of the free GPU memory that the cache takes when no size is configured."""


class ModelRunner:
    """The real `Runner`. Made in the thread that is to call `run` (see `BatchInferenceEngine.launch`).

    Args:
        model: a causal LM in evaluation mode, on its device, loaded by `serve_app.models`.
        end_token_ids: the union of all end ids that the model declares.
        max_model_len: longest prompt + output in tokens.
        block_size: tokens of a cache block.
        kv_cache_tokens: size of the cache; None chooses one (see `EngineConfig`).
        num_threads: CPU threads of the forward pass; 0 leaves the process's setting.
        native_kernels: whether our own kernels may serve on CPU, where they can be compiled.
        precision: what those kernels multiply in: `float32`, `bfloat16`, or `auto`: bfloat16 where the CPU has
            instructions for it.
        quantization: `int8`: they multiply in 8 bits instead, with a scale per 32 values of a row.

    Raises:
        UnsupportedModelError: the proof found that packed rows do not give what the model gives alone.
        ConfigError: the cache cannot hold one context; or what `precision` or `quantization` ask for is not to be had.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_token_ids: frozenset[int],
        max_model_len: int,
        block_size: int = 16,
        kv_cache_tokens: int | None = None,
        num_threads: int = 0,
        native_kernels: bool = True,
        precision: str = "float32",
        quantization: str = "none",
    ) -> None:
        if num_threads:
            torch.set_num_threads(num_threads)
        self._device = model.device
        self._end_token_ids = end_token_ids
        self._max_model_len = max_model_len
        self._block_size = block_size
        kernels = load_kernels() if native_kernels and model.device.type == "cpu" else None
        arithmetic = _choose_arithmetic(model, kernels, precision, quantization)
        backend = _choose_attention(model, kernels)
        with torch.inference_mode():
            layers = probe_layers(model)
            proof = Proof(model)

            def forward(way: Way) -> PackedForward:
                scratch = _allocate(layers, PROOF_NUM_BLOCKS, PROOF_BLOCK_SIZE, model.device)
                return PackedForward(way, scratch, PROOF_BLOCK_SIZE, backend, model.device)

            if arithmetic != Arithmetic.FLOAT32:  # rounding would hide what the model does differently when packed
                proof.check(forward(WholeModel(model)))
                layers = {index: replace(layer, dtype=torch.bfloat16) for index, layer in layers.items()}
            if isinstance(backend, NativeAttention):
                fuse_layers(model, backend, layers, arithmetic)
            if model.device.type == "cpu":
                pack_linears(model, kernels, arithmetic)
            if kernels is not None:
                fuse(model, kernels)
            way = shortest_way(model, forward)
            proof.check(forward(way), ROUNDING_TOLERANCE.get(arithmetic))
            self._cache_bytes_per_token = sum(layer.bytes_per_token for layer in layers.values())
            self._num_blocks = self._choose_num_blocks(kv_cache_tokens, model.device)
            return_freed_memory(model)
            caches = _allocate(layers, self._num_blocks, block_size, model.device)
        self._forward = PackedForward(way, caches, block_size, backend, model.device)
        self._stop = self._forward.stop
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self._sampler = Sampler(self._vocab_size, model.device)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self._end_token_ids

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory that one cached token takes, in all layers."""
        return self._cache_bytes_per_token

    def _choose_num_blocks(self, num_tokens: int | None, device: torch.device) -> int:
        if num_tokens is not None:
            if num_tokens < self._max_model_len:
                raise ConfigError(
                    f"engine.kv_cache_tokens: {num_tokens} tokens cannot hold one context of {self._max_model_len}; "
                    "raise it, or lower model.max_model_len"
                )
        elif device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            num_tokens = max(int(free * CUDA_CACHE_FRACTION) // self._cache_bytes_per_token, self._max_model_len)
        else:
            num_tokens = max(self._max_model_len, min(2 * self._max_model_len, DEFAULT_CACHE_TOKENS))
        return -(-num_tokens // self._block_size)

    def interrupt(self) -> None:
        """See `Runner.interrupt`."""
        self._stop.set()

    def run(self, plan: StepPlan) -> StepResult:
        """See `Runner.run`."""
        self._stop.clear()
        try:
            return self._run(plan)
        except (RuntimeError, MemoryError) as error:
            if not _says_out_of_memory(error):
                self._check_device()
                raise
        # here, where the failed step's tensors are no longer held by the error
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemoryError("This request does not fit into the memory of the server.")

    def _check_device(self) -> None:
        """After some errors a CUDA context answers every further call with an error too."""
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                raise EngineUnavailableError("The device of this replica is lost.") from error

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        packed = sorted(plan.rows, key=lambda row: (row.num_tokens > 1, -row.end))
        starts = list(itertools.accumulate((row.num_tokens for row in packed), initial=0))
        drawing = [(start - 1, row) for row, start in zip(packed, starts[1:], strict=True) if row.draws]
        scoring = [
            (start + token - 1 - row.start, row, token)
            for row, start in zip(packed, starts, strict=False)
            for token in row.scored_tokens
        ]
        wanted = [index for index, _ in drawing] + [index for index, _, _ in scoring]
        logits = self._forward([_new_tokens(row) for row in packed], wanted)
        draws: list[Draw | ServeAppError] = []
        if drawing:
            draws = self._sampler.sample(logits[: len(drawing)], [_row_sampling(row) for _, row in drawing])
        by_row = {id(row): draw for (_, row), draw in zip(drawing, draws, strict=True)}
        return StepResult([by_row[id(row)] for row in plan.rows if row.draws], self._score(logits[len(drawing) :], scoring))

    def _score(
        self, logits: torch.Tensor, scoring: Sequence[tuple[int, PlannedRow, int]]
    ) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities of known tokens from the logits before them, by request id."""
        scored: dict[str, list[TokenLogprobs]] = {}
        for first in range(0, len(scoring), SCORED_AT_ONCE):
            rows = [(row.sequence, token) for _, row, token in scoring[first : first + SCORED_AT_ONCE]]
            tokens = torch.tensor([sequence.token_ids[token] for sequence, token in rows], device=logits.device)
            counts = [sequence.request.sampling.prompt_logprobs or 0 for sequence, _ in rows]
            found = token_logprobs(logits[first : first + SCORED_AT_ONCE], tokens, counts)
            for (sequence, _), logprobs in zip(rows, found, strict=True):
                scored.setdefault(sequence.request.request_id, []).append(logprobs)
        return scored


def _choose_arithmetic(model: PreTrainedModel, kernels: Kernels | None, precision: str, quantization: str) -> Arithmetic:
    """What our kernels multiply in. Raises `ConfigError` when more was asked for than there is."""
    if quantization == "int8":
        wanted, setting = Arithmetic.INT8, "engine.quantization: int8"
    elif precision == "bfloat16":
        wanted, setting = Arithmetic.BFLOAT16, "engine.precision: bfloat16"
    else:
        has_bfloat16 = kernels is not None and kernels.supports(Arithmetic.BFLOAT16)
        return Arithmetic.BFLOAT16 if precision == "auto" and has_bfloat16 else Arithmetic.FLOAT32
    if model.device.type != "cpu":
        raise ConfigError(f"{setting} is for CPU; on {model.device.type} choose model.dtype instead")
    if kernels is None:
        raise ConfigError(f"{setting} needs engine.native_kernels and a C++ compiler (g++)")
    if not kernels.supports(wanted):
        raise ConfigError(f"{setting} needs instructions that this processor does not have")
    if model.dtype not in NATIVE_DTYPES:
        raise ConfigError(f"{setting} needs model.dtype float32 or bfloat16, not {model.dtype}".replace("torch.", ""))
    return wanted


def _choose_attention(model: PreTrainedModel, kernels: Kernels | None) -> AttentionBackend:
    if model.device.type == "cuda":
        return CudaAttention()
    return NativeAttention(kernels) if kernels is not None and model.dtype in NATIVE_DTYPES else CpuAttention()


def _says_out_of_memory(error: Exception) -> bool:
    """On CPU torch has no class for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _new_tokens(row: PlannedRow) -> tuple[Sequence[int], Segment]:
    sequence = row.sequence
    return sequence.token_ids[row.start : row.end], Segment(row.num_tokens, row.end, sequence.block_ids)


def _row_sampling(row: PlannedRow) -> RowSampling:
    sequence = row.sequence
    forbidden = () if sequence.may_end else tuple(sequence.end_token_ids)
    params = sequence.request.sampling
    history = sequence.token_ids if params.looks_back else ()
    return RowSampling(params, sequence.seed, sequence.num_tokens, forbidden, history, sequence.num_prompt_tokens)


def _allocate(
    layers: dict[int, LayerProbe], num_blocks: int, block_size: int, device: torch.device
) -> dict[int, LayerCache]:
    return {index: layer.new_cache(num_blocks, block_size, device) for index, layer in layers.items()}
