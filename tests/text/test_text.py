"""Detokenizing, stop strings, and the two together."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from serve_app.engine.request import FinishReason, TokenOutput
from serve_app.errors import RequestError
from serve_app.text.assembler import TextAssembler
from serve_app.text.detokenizer import ByteLevelDetokenizer, WindowDetokenizer, new_detokenizer
from serve_app.text.stop_strings import StopStrings
from tests.fakes import EOS, ids, text_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12345",
    "我很好 🌶️ 한국어 naïve café",
    "Ünïcödé — “quotes” … 👩‍👩‍👧 ok",
] * 4


def byte_level():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece_with_byte_fallback():
    """As Llama 2's: spaces are ▁, unknown characters are byte tokens, the decoder strips one leading space."""
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=40,
        show_progress=False,
    )
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.train_from_iterator([CORPUS[0]] * 3, trainer)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def wordpiece():
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    )
    return backend


def unigram():
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    )
    return backend


TOKENIZERS = [byte_level, sentencepiece_with_byte_fallback, wordpiece, unigram]


@pytest.fixture(scope="module", params=TOKENIZERS, ids=lambda make: make.__name__)
def backend(request):
    return request.param()


def stream(backend, token_ids):
    detokenizer = new_detokenizer(backend, frozenset())
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("text", CORPUS[:3])
def test_pieces_join_to_the_tokenizers_own_decoding(backend, text):
    token_ids = backend.encode(text).ids
    pieces = stream(backend, token_ids)
    assert "".join(pieces) == backend.decode(token_ids, skip_special_tokens=False)
    assert "\ufffd" not in "".join(pieces)


def test_so_they_do_for_random_tokens(backend):
    """But for one thing: where byte-fallback tokens are no valid UTF-8, the tokenizer replaces each byte of their whole
    run, also those of good characters, which a stream has long given out."""
    rng = random.Random(0)
    compared = 0
    for _ in range(300):
        token_ids = [rng.randrange(backend.get_vocab_size()) for _ in range(rng.randint(1, 12))]
        whole = backend.decode(token_ids, skip_special_tokens=False)
        if not (is_byte_fallback(backend) and "\ufffd" in whole):
            compared += 1
            assert "".join(stream(backend, token_ids)) == whole
    assert compared > 30


def is_byte_fallback(backend):
    return getattr(backend.model, "byte_fallback", False)


def test_byte_level_tokenizers_take_the_exact_road():
    assert isinstance(new_detokenizer(byte_level(), frozenset()), ByteLevelDetokenizer)
    assert isinstance(new_detokenizer(unigram(), frozenset()), WindowDetokenizer)


def test_skipped_tokens_give_no_text_and_break_nothing():
    backend = sentencepiece_with_byte_fallback()
    token_ids = backend.encode("The quick fox").ids
    detokenizer = new_detokenizer(backend, frozenset({0}))
    pieces = [detokenizer.push(token) for token in [0, token_ids[0], 0, *token_ids[1:], 0]]
    assert "".join(pieces) + detokenizer.finish() == "The quick fox"


@given(st.binary(max_size=30))
def test_any_bytes_decode_as_utf8_with_replacement(raw):
    tokenizer = text_tokenizer()
    detokenizer = tokenizer.new_detokenizer()
    text = "".join(detokenizer.push(token) for token in ids(raw)) + detokenizer.finish()
    assert text == raw.decode(errors="replace")
    assert text == tokenizer.decode(ids(raw))


def cut(text, rng):
    while text:
        size = rng.randint(1, 4)
        yield text[:size]
        text = text[size:]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.randoms())
def test_stop_strings_do_not_depend_on_the_cut_and_leak_nothing(text, stops, rng):
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    watcher, shown = StopStrings(stops), ""
    for piece in cut(text, rng):
        shown += watcher.push(piece)
        assert expected.startswith(shown)
        if watcher.matched is not None:
            break
    else:
        shown += watcher.finish()
    assert shown == expected
    assert (watcher.matched is not None) == bool(ends)


def test_no_more_is_held_back_than_may_become_a_stop_string():
    watcher = StopStrings(["\n\nUser:", "END"])
    assert [watcher.push(piece) for piece in ("abc", "E", "N", "X", "\n", "y")] == ["abc", "", "", "ENX", "", "\ny"]


def outputs(token_ids, reason=FinishReason.LENGTH):
    last = len(token_ids) - 1
    return [TokenOutput("r", token, reason if i == last else None) for i, token in enumerate(token_ids)]


def assemble(token_ids, reason, stops=(), batch=1):
    assembler = TextAssembler(text_tokenizer().new_detokenizer(), stops)
    told = outputs(token_ids, reason)
    deltas = []
    for start in range(0, len(told), batch):
        deltas.append(assembler.push(told[start : start + batch]))
        if deltas[-1].finish_reason is not None:
            break
    return "".join(delta.text for delta in deltas), sum(delta.num_tokens for delta in deltas), deltas[-1].finish_reason


@pytest.mark.parametrize("batch", [1, 2, 5, 100])
def test_the_ending_does_not_depend_on_how_tokens_arrive(batch):
    assert assemble(ids("hello END more"), FinishReason.LENGTH, ["END"], batch) == ("hello ", 9, FinishReason.STOP)
    assert assemble(ids("hello EN"), FinishReason.LENGTH, ["END"], batch) == ("hello EN", 8, FinishReason.LENGTH)
    assert assemble([*ids("hi"), EOS], FinishReason.STOP, ["END"], batch) == ("hi", 3, FinishReason.STOP)
    assert assemble(ids("🌶"[:1].encode()[:3]), FinishReason.LENGTH, (), batch) == ("\ufffd", 3, FinishReason.LENGTH)


def test_a_stop_token_is_not_text():
    assert assemble(ids("abc!"), FinishReason.STOP)[0] == "abc"


def test_chat_template_and_its_refusals():
    tokenizer = text_tokenizer()
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "user: hi\nassistant: "
    with pytest.raises(RequestError, match="no chat template"):
        text_tokenizer(None).render_chat([{"role": "user", "content": "hi"}])
    refusing = text_tokenizer("{{ raise_exception('System role not supported') }}")
    with pytest.raises(RequestError, match="System role not supported"):
        refusing.render_chat([{"role": "system", "content": "hi"}])


def test_fewest_tokens_is_a_lower_bound():
    tokenizer = text_tokenizer()
    for text in ("", "abc", "我很好"):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
