"""Our CPU kernels (kernels.cpp) from Python: compiled once per machine, called through ctypes on torch tensors.

Where there is no C++ compiler `load_kernels` gives None and everything runs on torch's own operations instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import torch

from serve_app.cache import cache_root, exclusively
from serve_app.engine.stop_flag import StopFlag

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
SOURCES = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")

QUANTISED_BLOCK = 32
"""Weights along the depth that share a scale in a quantised file."""


class Arithmetic(IntEnum):
    """What a product multiplies in (`enum Arithmetic` of weight.h). Sums are float32 in any case."""

    FLOAT32 = 0
    BFLOAT16 = 1
    """Rows and weights are rounded to bfloat16."""
    INT8 = 2
    """Rows and weights are rounded to 8 bits with a scale per block of 32 values; weights not, if a file had them in 4."""


_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


class AttentionArguments(ctypes.Structure):
    """`struct Attention` of attention.h, field by field."""

    _fields_ = (
        *(
            (name, _pointer)
            for name in ("query", "key", "value", "keys", "values", "out", "rows", "blocks", "slots", "sinks", "partials")
        ),
        *((f"{tensor}_{axis}_stride", _long) for tensor in ("query", "key", "value") for axis in ("head", "token")),
        *((name, _long) for name in ("num_rows", "num_tokens", "num_heads", "num_kv_heads", "key_dim", "value_dim")),
        *((name, _long) for name in ("block_size", "num_slots", "window")),
        *((name, _float) for name in ("scaling", "softcap")),
        *((name, _int) for name in ("num_threads", "is_bf16", "cache_is_bf16")),
    )


class WeightArguments(ctypes.Structure):
    """`struct Weight` of weight.h, field by field."""

    _fields_ = (("data", _pointer), ("scales", _pointer), ("bits", _long), ("arithmetic", _long))


class LayerArguments(ctypes.Structure):
    """`struct Layer` of layer.h, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("input_norm", "query_norm", "key_norm", "middle_norm")),
        *((name, WeightArguments) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_bias", _pointer) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _long) for name in ("dim", "inner", "rotary")),
        *((name, _float) for name in ("norm_epsilon", "norm_offset", "head_norm_epsilon", "head_norm_offset")),
    )


class PackedWeight:
    """A weight as the kernels want it.

    Attributes:
        arithmetic: what it is multiplied in.
        bits: of a value: 32 or 16, or 8 or 4 with a scale per block of QUANTISED_BLOCK values.
        arguments: for the kernels; valid as long as this object lives.
    """

    def __init__(self, arithmetic: Arithmetic, bits: int, data: torch.Tensor, scales: torch.Tensor | None) -> None:
        self.arithmetic = arithmetic
        self.bits = bits
        self._tensors = (data, scales)
        self.arguments = WeightArguments(data.data_ptr(), None if scales is None else scales.data_ptr(), bits, arithmetic)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self._tensors if tensor is not None)


class Kernels:
    """The compiled library. All tensors are on the CPU; float32 unless said otherwise; results are new tensors.

    Args:
        path: the shared library.
    """

    def __init__(self, path: Path) -> None:
        torch.zeros(1)  # torch's OpenMP is loaded before ours is looked up, so that both are one and share their threads
        library = ctypes.CDLL(str(path))
        library.panel_width.restype = _long
        self._panel_width = int(library.panel_width())
        self._supports = _declare(library, "supports_arithmetic", _long)
        self._supports.restype = _int
        self._pack = _declare(library, "pack_weight", _pointer, _long, _long, _long, _pointer, _int)
        self._compress = _declare(
            library, "compress_weight", _pointer, _long, _long, _long, _long, _int, _pointer, _pointer, _int
        )
        self._compress.restype = _int
        weight = ctypes.POINTER(WeightArguments)
        self._linear = _declare(library, "linear", _pointer, weight, _pointer, _pointer, _long, _long, _long, _int)
        self._rms_norm = _declare(library, "rms_norm", _pointer, _pointer, _pointer, _long, _long, _float, _float, _int)
        self._silu_mul = _declare(library, "silu_mul", _pointer, _pointer, _long, _long, _int)
        attention, layer = ctypes.POINTER(AttentionArguments), ctypes.POINTER(LayerArguments)
        self._attention = _declare(library, "paged_attention", attention)
        self._layers = _declare(library, "decoder_layers", layer, attention, _long, *[_pointer] * 5)
        self._layer_room = _declare(library, "decoder_layer_room", layer, attention)
        self._layer_room.restype = _long
        self._rooms = threading.local()  # the library is one for all engines of a process, and each computes in its thread

    def supports(self, arithmetic: Arithmetic) -> bool:
        """Whether this processor has the instructions."""
        return bool(self._supports(arithmetic))

    def pack(
        self, weight: torch.Tensor, arithmetic: Arithmetic = Arithmetic.FLOAT32, bits: Sequence[int] = (4, 8)
    ) -> PackedWeight:
        """Lays a weight [columns, depth] out for `linear`.

        It is kept in the first of `bits` that hold it exactly; else whole. INT8 then rounds it to 8 bits, unless its depth
        cannot be cut into blocks or it is not finite: such a weight is multiplied in FLOAT32.
        """
        weight = weight.float().contiguous()
        columns, depth = weight.shape
        panels = -(-columns // self._panel_width)
        ways = [(few, False) for few in bits] + ([(8, True)] if arithmetic == Arithmetic.INT8 else [])
        for few, rounds in ways if depth % QUANTISED_BLOCK == 0 else ():
            data = torch.zeros(panels * depth * self._panel_width * few // 8, dtype=torch.uint8)
            num_scales = panels * depth // QUANTISED_BLOCK * self._panel_width * (2 if few == 4 else 1)
            scales = torch.zeros(num_scales, dtype=torch.float16)
            shape = (weight.data_ptr(), columns, depth, arithmetic, few, rounds)
            if self._compress(*shape, data.data_ptr(), scales.data_ptr(), torch.get_num_threads()):
                return PackedWeight(arithmetic, few, data, scales)
        if arithmetic == Arithmetic.BFLOAT16:
            deep = -(-depth // QUANTISED_BLOCK) * QUANTISED_BLOCK
            packed = torch.empty(panels * deep * self._panel_width, dtype=torch.bfloat16)
        else:
            arithmetic = Arithmetic.FLOAT32
            packed = torch.empty(panels * depth * self._panel_width)
        whole = packed.itemsize * 8
        self._pack(weight.data_ptr(), columns, depth, whole, packed.data_ptr(), torch.get_num_threads())
        return PackedWeight(arithmetic, whole, packed, None)

    def linear(self, inputs: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, columns: int) -> torch.Tensor:
        """[..., depth] times a packed weight -> [..., columns]. A row's result does not depend on the other rows."""
        inputs = inputs.contiguous()
        depth = inputs.shape[-1]
        out = inputs.new_empty(*inputs.shape[:-1], columns)
        self._linear(
            inputs.data_ptr(),
            ctypes.byref(packed.arguments),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            inputs.numel() // depth,
            columns,
            depth,
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float) -> torch.Tensor:
        """inputs / rms(inputs) * (weight + offset) over the last dimension."""
        inputs = inputs.contiguous()
        dim = inputs.shape[-1]
        out = torch.empty_like(inputs)
        self._rms_norm(
            inputs.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            inputs.numel() // dim,
            dim,
            epsilon,
            offset,
            torch.get_num_threads(),
        )
        return out

    def silu_mul_(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, written into `gate`, which is returned. Both contiguous."""
        dim = gate.shape[-1]
        self._silu_mul(gate.data_ptr(), up.data_ptr(), gate.numel() // dim, dim, torch.get_num_threads())
        return gate

    def attention(self, arguments: AttentionArguments) -> None:
        """Writes a step's keys and values into the paged cache (float32 or bfloat16), and attends."""
        self._attention(ctypes.byref(arguments))

    def decoder_layers_(
        self,
        layers: ctypes.Array[LayerArguments],
        attentions: ctypes.Array[AttentionArguments],
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        stop: StopFlag,
    ) -> torch.Tensor:
        """Runs decoder layers of one shape on `hidden` [T, dim], in place; cos and sin [T, rotary]. All contiguous.

        Raises:
            StepInterruptedError: `stop` was raised meanwhile.
        """
        room = self._layer_room(layers, attentions)
        if getattr(self._rooms, "size", 0) < room:
            self._rooms.tensor, self._rooms.size = torch.empty(room), room
        self._layers(
            layers,
            attentions,
            len(layers),
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            self._rooms.tensor.data_ptr(),
            stop.address,
        )
        stop.check()
        return hidden


def _declare(library: ctypes.CDLL, name: str, *arguments: type) -> ctypes._FuncPointer:
    function = library[name]
    function.argtypes = arguments
    function.restype = None
    return function


@functools.cache
def load_kernels() -> Kernels | None:
    """The kernels for this machine, compiled by the first process that wants them; None where that cannot be done."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        logger.warning("no C++ compiler (g++): the CPU kernels are not built, torch's slower operations serve instead")
        return None
    path = cache_root() / f"kernels-{_identity(compiler)}.so"
    try:
        if not path.exists():
            with exclusively(path):
                if not path.exists():
                    _compile(compiler, path)
        return Kernels(path)
    except (OSError, subprocess.CalledProcessError) as error:
        details = getattr(error, "stderr", "") or str(error)
        logger.warning("the CPU kernels cannot be built, torch's slower operations serve instead: %s", details[-500:])
        return None


def _identity(compiler: str) -> str:
    """A digest of all that decides the result: source, flags, compiler, and the processor that -march=native means."""
    version = subprocess.run([compiler, "-march=native", "-Q", "--help=target"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES))
    digest.update(" ".join(FLAGS).encode())
    digest.update(version)
    return digest.hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    logger.info("compiling the CPU kernels")
    unfinished = path.with_suffix(f".{os.getpid()}")
    subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(unfinished)], check=True, capture_output=True, text=True)
    unfinished.rename(path)
