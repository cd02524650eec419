"""A runner whose tokens are written down beforehand, and a tokenizer of single bytes: for speed and determinism."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from serve_app.engine.request import TokenLogprobs, UserRequest
from serve_app.engine.runner import Draw, StepResult
from serve_app.engine.scheduler import StepPlan
from serve_app.engine.stop_flag import StepInterruptedError
from serve_app.errors import ServeAppError
from serve_app.text.detokenizer import BYTE_OF
from serve_app.text.tokenizer import Tokenizer

SPECIALS = ["<pad>", "<bos>", "<eos>", "<eot>"]
EOS, EOT = 2, 3
FIRST_BYTE = len(SPECIALS)
VOCAB_SIZE = FIRST_BYTE + 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

Script = Callable[[tuple[int, ...]], Sequence[int]]


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level, no merges: token id = byte + 4, behind four special tokens. Every character of several bytes is split."""
    vocab = {special: index for index, special in enumerate(SPECIALS)}
    vocab.update({character: FIRST_BYTE + byte for character, byte in BYTE_OF.items()})
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special, special=True) for special in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<eot>"],
        chat_template=chat_template,
    )


def text_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """The project's wrapper around `byte_tokenizer`."""
    return Tokenizer(byte_tokenizer(chat_template))


def ids(text: str | bytes) -> tuple[int, ...]:
    """The token ids of a text."""
    raw = text.encode() if isinstance(text, str) else text
    return tuple(FIRST_BYTE + byte for byte in raw)


def text_of(token_ids: Sequence[int]) -> str:
    """The text of token ids; special tokens give none."""
    return bytes(token - FIRST_BYTE for token in token_ids if token >= FIRST_BYTE).decode()


def counting(prompt: tuple[int, ...]) -> Sequence[int]:
    """A model one can compute by hand: next = last + 1, for ever."""
    return [(prompt[-1] + 1 + i - FIRST_BYTE) % 256 + FIRST_BYTE for i in range(8192)]


def echo(prompt: tuple[int, ...]) -> Sequence[int]:
    """Says the prompt again, then ends."""
    return [*prompt, EOS]


class ScriptedRunner:
    """A `Runner` that draws what `script(prompt)` says, and the end token after it.

    Attributes:
        plans: every plan it ran.
        before_step: called with each plan; may raise, block, or be None.
    """

    def __init__(
        self,
        script: Script = counting,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        max_model_len: int = 512,
        end_token_ids: frozenset[int] = frozenset({EOS}),
        step_s: float = 0.0,
    ) -> None:
        self.script = script
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.end_token_ids = end_token_ids
        self.vocab_size = VOCAB_SIZE
        self.step_s = step_s
        self.plans: list[StepPlan] = []
        self.before_step: Callable[[StepPlan], None] | None = None
        self.row_errors: dict[str, ServeAppError] = {}
        self._written: dict[UserRequest, Sequence[int]] = {}
        self._is_interrupted = threading.Event()

    def interrupt(self) -> None:
        """See `Runner.interrupt`."""
        self._is_interrupted.set()

    def run(self, plan: StepPlan) -> StepResult:
        """See `Runner.run`."""
        self.plans.append(plan)
        if self.before_step is not None:
            self.before_step(plan)
        self._is_interrupted.clear()
        if self.step_s and self._is_interrupted.wait(self.step_s):
            raise StepInterruptedError
        scored = {
            row.sequence.request.request_id: [
                self._logprobs(row.sequence.token_ids[i], row.sequence.request.sampling.prompt_logprobs)
                for i in row.scored_tokens
            ]
            for row in plan.rows
        }
        return StepResult([self._draw(row.sequence) for row in plan.drawing_rows], scored)

    def _draw(self, sequence) -> Draw | ServeAppError:
        request = sequence.request
        if request.request_id in self.row_errors:
            return self.row_errors[request.request_id]
        if request not in self._written:
            self._written[request] = self.script(request.prompt_token_ids)
        written = self._written[request]
        position = sequence.num_output_tokens
        token = written[position] if position < len(written) else EOS
        count = request.sampling.logprobs
        return Draw(token, None if count is None else self._logprobs(token, count))

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The token itself has -0.5, those that follow it in the vocabulary less and less."""
        return TokenLogprobs(-0.5, tuple(((token + i) % VOCAB_SIZE, -0.5 - i) for i in range(count)))
