"""Streaming detokenizing equals the tokenizer's own decoding, for the kinds of tokenizers that models have."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from serve_app.text.detokenizer import REPLACEMENT, new_detokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "naïve cafés, 我很好 🌶️ 한국어 and Ελληνικά.",
    "def f(x):\n    return x ** 2  # squares",
    "It's the dogs' day, isn't it? don't stop",
] * 20
SPECIALS = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]


def bytes_bpe(model: models.BPE, pre_tokenizer: pre_tokenizers.PreTokenizer, vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE with this way of splitting."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    """GPT-2's."""
    return bytes_bpe(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), 400)


def tiktoken_like() -> Tokenizer:
    """Llama 3's: another split before the bytes."""
    pattern = Regex(r"'(?:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
    splits = [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return bytes_bpe(models.BPE(ignore_merges=True), pre_tokenizers.Sequence(splits), 500)


def byte_fallback() -> Tokenizer:
    """SentencePiece's BPE with byte fallback: Llama 2, Mistral, Gemma."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzTI.,'", "▁the", "▁quick", "fox", "é", "▁▁", "ing"]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def unigram() -> Tokenizer:
    """T5's and ALBERT's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIALS, AddedToken("<unk>")], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's: no spaces in the vocabulary, and a clean-up of punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=[*SPECIALS, AddedToken("[UNK]")], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


FAMILIES = {f.__name__: f for f in (byte_level, tiktoken_like, byte_fallback, unigram, word_piece)}


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request):
    return FAMILIES[request.param]()


def streamed(tokenizer, ids, cuts):
    """The pieces of a stream whose tokens arrive in groups."""
    detokenizer = new_detokenizer(tokenizer, frozenset({0, 1}))
    pieces, group = [], ""
    for index, token in enumerate(ids):
        group += detokenizer.push(token)
        if index in cuts:
            pieces.append(group)
            group = ""
    return [*pieces, group + detokenizer.finish()]


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_ids_stream_as_they_decode(tokenizer, data):
    ids = data.draw(st.lists(st.integers(2, tokenizer.get_vocab_size() - 1), max_size=40))
    cuts = data.draw(st.sets(st.integers(0, 40)))
    assert "".join(streamed(tokenizer, ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=False)


@given(text=st.text(st.sampled_from("The quick foxéñ 我好🌶한'.,\n"), max_size=30))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_texts_stream_as_they_decode(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = streamed(tokenizer, ids, set(range(len(ids))))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    if REPLACEMENT not in "".join(pieces):
        assert not any(REPLACEMENT in piece for piece in pieces)
