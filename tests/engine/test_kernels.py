"""Our CPU kernels against torch's operations; what they replace in a model, and what they leave alone."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from serve_app.engine.attention.layout import AttentionCall, LayerCache, PackedLayout, Segment
from serve_app.engine.attention.native import NativeAttention
from serve_app.engine.attention.reference import ReferenceAttention
from serve_app.engine.decoder_layer import NativeDecoderLayers
from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.fusion import NativeGatedMlp, NativeRMSNorm, fuse
from serve_app.engine.linear import NativeLinear, OneDnnLinear, PackedLinear, pack_linears
from serve_app.engine.model_runner import ModelRunner
from serve_app.engine.native import kernels as native
from serve_app.engine.native.kernels import Arithmetic, load_kernels
from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.errors import ConfigError
from serve_app.models.loader import load_model
from tests.engine.test_attention import BLOCK_SIZE, CALLS, MIXES, NUM_BLOCKS, segments_of
from tests.families import FAMILIES, tiny_model

KERNELS = load_kernels()
CALL = AttentionCall(0.25)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 40, 130])
@pytest.mark.parametrize(("columns", "depth"), [(33, 48), (64, 300), (1, 7), (200, 576)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["native", "oneDNN"])
def test_packed_linear_is_the_same_product(rows, columns, depth, bias, kind, threads):
    torch.manual_seed(0)
    plain = nn.Linear(depth, columns, bias=bias).requires_grad_(False)
    inputs = torch.randn(1, rows, depth)
    is_native = kind == "native"
    packed = NativeLinear(KERNELS, plain.weight, plain.bias) if is_native else OneDnnLinear(plain.weight, plain.bias)
    torch.testing.assert_close(packed(inputs), plain(inputs), rtol=1e-4, atol=1e-5)
    assert f"in_features={depth}" in repr(packed)


def quantised(bits, columns, depth):
    """A weight as a quantised file gives it: blocks of 32, a scale (and a minimum) in half precision."""
    generator = torch.Generator().manual_seed(bits)
    scale = (torch.rand(columns, depth // 32, 1, generator=generator) * 0.01).half().float()
    scale[0, 0] = 0.0
    low = (torch.randn(columns, depth // 32, 1, generator=generator) * 0.1).half().float()
    if bits == 4:
        q = torch.randint(0, 16, (columns, depth // 32, 32), generator=generator)
        q[..., 3], q[..., 20] = 0, 15  # what sets a block's scale and minimum is in it
        return (q * scale + low).reshape(columns, depth)
    q = torch.randint(-127, 128, (columns, depth // 32, 32), generator=generator)
    q[..., 7] = 127
    return (q * scale).reshape(columns, depth)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "depth"), [(2, 32), (33, 320), (96, 64)])
def test_quantised_weights_are_kept_small_and_give_the_same_bits(bits, columns, depth, threads):
    weight = quantised(bits, columns, depth)
    small, large = KERNELS.pack(weight), KERNELS.pack(weight, bits=())
    assert (small.bits, large.bits) == (bits, 32)
    assert small.num_bytes < large.num_bytes / 3
    for rows in (1, 7, 30):
        inputs = torch.randn(rows, depth)
        assert torch.equal(KERNELS.linear(inputs, small, None, columns), KERNELS.linear(inputs, large, None, columns))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_that_is_almost_quantised_is_not_compressed(bits):
    weight = quantised(bits, 40, 64)
    weight[39, 63] += 1e-6
    assert KERNELS.pack(weight).bits == 32
    assert KERNELS.pack(torch.full((4, 32), float("nan"))).bits == 32
    assert KERNELS.pack(torch.full((4, 32), float("inf"))).bits == 32
    assert KERNELS.pack(torch.randn(4, 33)).bits == 32


def arithmetics():
    """Those of this processor; the others are skipped by name."""
    return [
        pytest.param(kind, id=kind.name, marks=() if KERNELS.supports(kind) else pytest.mark.skip("no such instructions"))
        for kind in Arithmetic
    ]


@pytest.mark.parametrize("arithmetic", arithmetics())
@pytest.mark.parametrize("bits", [0, 4, 8], ids=["random", "4 bits", "8 bits"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(arithmetic, bits, threads):
    torch.manual_seed(0)
    weight = quantised(bits, 100, 608) if bits else torch.randn(100, 608)
    linear = NativeLinear(KERNELS, weight, torch.randn(100), arithmetic)
    inputs = torch.randn(70, 608)
    alone = torch.cat([linear(row[None]) for row in inputs])
    for rows in (2, 5, 12, 31, 33, 70):
        assert torch.equal(linear(inputs[:rows]), alone[:rows])


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 33, 70])
@pytest.mark.parametrize(("columns", "depth"), [(33, 48), (64, 300), (1, 7), (200, 576)])
@pytest.mark.skipif(not KERNELS.supports(Arithmetic.BFLOAT16), reason="no such instructions")
def test_bfloat16_rounds_rows_and_weights_and_nothing_else(rows, columns, depth, threads):
    torch.manual_seed(0)
    weight, bias, inputs = torch.randn(columns, depth), torch.randn(columns), torch.randn(rows, depth)
    packed = KERNELS.pack(weight, Arithmetic.BFLOAT16)
    assert packed.bits == 16
    expected = inputs.bfloat16().double() @ weight.bfloat16().double().T + bias
    torch.testing.assert_close(KERNELS.linear(inputs, packed, bias, columns), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.skipif(not KERNELS.supports(Arithmetic.BFLOAT16), reason="no such instructions")
def test_bfloat16_leaves_quantised_weights_as_they_are(bits, rows, threads):
    weight, inputs = quantised(bits, 70, 352), torch.randn(rows, 352)
    packed = KERNELS.pack(weight, Arithmetic.BFLOAT16)
    assert packed.bits == bits
    expected = inputs.bfloat16().double() @ weight.double().T
    torch.testing.assert_close(KERNELS.linear(inputs, packed, None, 70), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [0, 4, 8], ids=["random", "4 bits", "8 bits"])
@pytest.mark.parametrize("rows", [1, 6, 7, 40])
@pytest.mark.skipif(not KERNELS.supports(Arithmetic.INT8), reason="no such instructions")
def test_int8_rounds_blocks_of_rows(bits, rows, threads):
    torch.manual_seed(0)
    weight = quantised(bits, 70, 352) if bits else torch.randn(70, 352)
    if not bits:
        weight[:, 64:96] *= 1e-6  # their scales are below the smallest normal half
    inputs = torch.randn(rows, 352)
    inputs[:, 40] = 1000.0  # of one block only
    packed = KERNELS.pack(weight, Arithmetic.INT8)
    assert packed.bits == (bits or 8)

    def rounded(values, scales=lambda exact: exact):
        blocks = values.double().unflatten(-1, (-1, 32))
        scale = scales(blocks.abs().amax(-1, keepdim=True) / 127)
        return ((blocks / scale).round() * scale).flatten(-2)

    def halves(exact):
        nearest = exact.half()
        return torch.where(nearest < exact, nearest.nextafter(torch.tensor(torch.inf).half()), nearest).double()

    expected = rounded(inputs) @ (weight.double() if bits else rounded(weight, halves)).T
    torch.testing.assert_close(KERNELS.linear(inputs, packed, None, 70).double(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.skipif(not KERNELS.supports(Arithmetic.INT8), reason="no such instructions")
def test_int8_multiplies_what_it_cannot_hold_in_float32():
    for weight in (torch.randn(4, 33), torch.full((4, 32), float("inf"))):
        assert KERNELS.pack(weight, Arithmetic.INT8).arithmetic == Arithmetic.FLOAT32


def test_a_decoding_row_has_the_same_bits_alone_and_in_any_batch(threads):
    torch.manual_seed(0)
    cache = LayerCache(torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 16), torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 16))
    query, key, value = torch.randn(6, 4, 16), torch.randn(2, 4, 16), torch.randn(2, 4, 16)
    segments = segments_of((1, 60), (1, 40), (1, 9), (1, 1))

    def attend(rows):
        here = slice(rows[0], rows[-1] + 1)
        layout = PackedLayout([segments[i] for i in rows], BLOCK_SIZE, torch.device("cpu"))
        new = LayerCache(key[:, here], value[:, here])
        return NativeAttention(KERNELS).attend(query[:, here], new, copy.deepcopy(cache), layout, CALL)

    together = attend(range(4))
    for row in range(4):
        assert torch.equal(attend([row]), together[row : row + 1])


@pytest.mark.parametrize("call", [*CALLS.values(), {"sliding_window": 1200}], ids=[*CALLS, "window of spans"])
def test_long_contexts_are_cut_into_spans(call, threads):
    torch.manual_seed(0)
    asked = AttentionCall(0.25, call.get("sliding_window"), call.get("softcap"), call.get("s_aux"))
    lengths, block_size = (1700, 1025, 512, 9), 16
    blocks = iter(torch.randperm(300).tolist())
    segments = [Segment(1, n, [next(blocks) for _ in range(-(-n // block_size))]) for n in lengths]
    segments.append(Segment(5, 700, [next(blocks) for _ in range(44)]))
    cache = LayerCache(torch.randn(2, 300, block_size, 32), torch.randn(2, 300, block_size, 32))
    query, key, value = torch.randn(6, 9, 32), torch.randn(2, 9, 32), torch.randn(2, 9, 32)

    def attend(backend, chosen, tokens):
        layout = PackedLayout(chosen, block_size, torch.device("cpu"))
        new = LayerCache(key[:, tokens], value[:, tokens])
        return backend.attend(query[:, tokens], new, copy.deepcopy(cache), layout, asked)

    together = attend(NativeAttention(KERNELS), segments, slice(0, 9))
    torch.testing.assert_close(together, attend(ReferenceAttention(), segments, slice(0, 9)), rtol=1e-4, atol=1e-5)
    for row in range(4):
        alone = attend(NativeAttention(KERNELS), [segments[row]], slice(row, row + 1))
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("call", ["plain", "everything"])
def test_attention_over_a_bfloat16_cache(mix, call, threads):
    torch.manual_seed(0)
    call = {"scaling": 0.25, **CALLS[call]}
    asked = AttentionCall(call["scaling"], call.get("sliding_window"), call.get("softcap"), call.get("s_aux"))
    segments = segments_of(*mix)
    total = sum(segment.num_tokens for segment in segments)

    def random(*shape):
        return torch.randn(*shape).bfloat16()

    query, new = random(6, total, 64), LayerCache(random(2, total, 64), random(2, total, 64))
    cache = LayerCache(random(2, NUM_BLOCKS, BLOCK_SIZE, 64), random(2, NUM_BLOCKS, BLOCK_SIZE, 64))
    layout = PackedLayout(segments, BLOCK_SIZE, torch.device("cpu"))
    given, expected = (
        backend.attend(query, new, copy.deepcopy(cache), layout, asked)
        for backend in (NativeAttention(KERNELS), ReferenceAttention())
    )
    assert given.dtype == torch.bfloat16
    torch.testing.assert_close(given, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("size", [4, 64, 100])
def test_silu_mul(size, threads):
    gate, up = 20 * torch.randn(3, size), torch.randn(3, size)
    gate[0, 0], gate[0, 1] = -1000.0, 1000.0
    expected = nn.functional.silu(gate) * up
    torch.testing.assert_close(KERNELS.silu_mul_(gate.clone(), up), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arithmetic", arithmetics())
def test_nan_stays_with_its_row(arithmetic):
    linear = NativeLinear(KERNELS, quantised(4, 40, 64), None, arithmetic)
    inputs = torch.randn(3, 64)
    inputs[1, 5] = float("nan")
    assert linear(inputs).isnan().all(-1).tolist() == [False, True, False]


def test_nan_stays_nan():
    inputs = torch.full((1, 1, 16), float("nan"))
    assert KERNELS.rms_norm(inputs, torch.ones(16), 1e-6, 0.0).isnan().all()
    assert KERNELS.silu_mul_(inputs.clone(), torch.ones(1, 1, 16)).isnan().all()


class Norm(nn.Module):
    """Any module with this name's ending, and its own idea of what to do."""

    def __init__(self, offset, power):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24))
        self.eps, self.offset, self.power = 1e-5, offset, power

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) ** self.power * (self.weight + self.offset)


class OddRMSNorm(Norm):
    pass


def test_norms_are_recognised_by_what_they_give():
    model = nn.Sequential(OddRMSNorm(0, 1), OddRMSNorm(1, 1), OddRMSNorm(0, 0.5), Norm(0, 1))
    inputs = torch.randn(5, 24)
    expected = model(inputs)
    assert fuse(model, KERNELS) == 2
    assert [isinstance(module, NativeRMSNorm) for module in model] == [True, True, False, False]
    torch.testing.assert_close(model(inputs), expected, rtol=1e-4, atol=1e-5)


def test_pack_linears_replaces_plain_ones_only():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Special(4, 4), nn.Sequential(nn.Linear(4, 2))).requires_grad_(False)
    assert pack_linears(model, KERNELS) == 2
    assert isinstance(model[0], PackedLinear)
    assert type(model[1]) is Special


WHOLE_LAYERS = {"llama", "mistral_sliding", "qwen2", "qwen3"}
GATED = {"olmo2", "mixtral", "qwen3_moe", "deepseek_v3"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_replaced(family):
    model = tiny_model(FAMILIES[family]())
    num_layers = model.config.num_hidden_layers
    ModelRunner(model, end_token_ids=frozenset(), max_model_len=64, block_size=4, kv_cache_tokens=64)
    kinds = [type(module) for module in model.modules()]
    replaced = [module for module in model.modules() if isinstance(module, NativeDecoderLayers)]
    assert len(replaced) == (family in WHOLE_LAYERS)  # all in one
    assert sum(len(module.parts) for module in replaced) == (num_layers if family in WHOLE_LAYERS else 0)
    assert kinds.count(nn.Linear) == 0
    if family in GATED:
        assert kinds.count(NativeRMSNorm) > 0


@pytest.mark.parametrize("arithmetic", arithmetics())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(WHOLE_LAYERS))
def test_whole_layers_in_every_arithmetic(family, dtype, arithmetic):
    model = tiny_model(FAMILIES[family]()).to(dtype)
    settings = {"precision": "bfloat16"} if arithmetic == Arithmetic.BFLOAT16 else {}
    if arithmetic == Arithmetic.INT8:
        settings = {"quantization": "int8"}
    ModelRunner(model, end_token_ids=frozenset(), max_model_len=64, block_size=4, kv_cache_tokens=64, **settings)
    assert any(isinstance(module, NativeDecoderLayers) for module in model.modules())


def test_who_else_wants_a_core_changes_nothing():
    """With two threads the second stays out while other processes run: the same numbers, whoever computes them."""

    def outputs(threads):
        model = tiny_model(FAMILIES["llama"]())
        runner = ModelRunner(
            model, end_token_ids=frozenset(), max_model_len=64, block_size=4, kv_cache_tokens=128, num_threads=threads
        )
        engine = BatchInferenceEngine(runner)
        params = SamplingParams(max_tokens=40, temperature=0.0, logprobs=2)
        streams = engine.add_to_queue(UserRequest(str(n), tuple(range(1, n + 5)), params) for n in range(3))
        while engine.step():
            pass
        return [[(output.token, output.logprobs) for output in stream] for stream in streams]

    before = torch.get_num_threads()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        beside_others = outputs(2)
        for process in busy:
            process.kill()
        assert beside_others == outputs(2) == outputs(1)
    finally:
        torch.set_num_threads(before)
        for process in busy:
            process.kill()
            process.wait()


def test_what_cannot_be_had_is_refused_by_name(monkeypatch):
    def runner(**settings):
        model = tiny_model(FAMILIES["llama"]())
        return ModelRunner(model, end_token_ids=frozenset(), max_model_len=64, kv_cache_tokens=64, **settings)

    with pytest.raises(ConfigError, match=r"engine\.quantization: int8 needs engine\.native_kernels"):
        runner(quantization="int8", native_kernels=False)
    monkeypatch.setattr(native.Kernels, "supports", lambda self, arithmetic: arithmetic == Arithmetic.FLOAT32)
    with pytest.raises(ConfigError, match=r"engine\.precision: bfloat16 needs instructions"):
        runner(precision="bfloat16")
    assert runner(precision="auto").vocab_size


def test_gated_feed_forward_outside_a_known_layer():
    model = tiny_model(FAMILIES["olmo2"]())
    ModelRunner(model, end_token_ids=frozenset(), max_model_len=64, block_size=4, kv_cache_tokens=64)
    assert any(isinstance(module, NativeGatedMlp) for module in model.modules())


def test_the_built_in_models_weights_are_kept_as_in_its_file(builtin_checkpoint):
    model = load_model(builtin_checkpoint, dtype="float32", device="cpu")
    embedding = model.get_input_embeddings().weight
    assert KERNELS.pack(embedding[:4096]).bits == 8
    for linear in [module for module in model.modules() if isinstance(module, nn.Linear)][:14]:
        assert KERNELS.pack(linear.weight).bits == 4


def test_without_a_compiler_torch_serves(monkeypatch, caplog):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    load_kernels.cache_clear()
    try:
        assert load_kernels() is None
        assert "no C++ compiler" in caplog.text
    finally:
        load_kernels.cache_clear()


def test_a_compiler_that_fails_is_reported_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ("--no-such-flag",))
    load_kernels.cache_clear()
    try:
        assert load_kernels() is None
        assert "cannot be built" in caplog.text
        assert not list(tmp_path.glob("*.so"))
    finally:
        load_kernels.cache_clear()
