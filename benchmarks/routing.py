"""Conversations on four replicas: our router, by prefix and tokens, against Serve's own, by requests.

    .venv/bin/python -m benchmarks.routing

Forty callers talk to a small random model under one system prompt, each its own conversation of several turns with pauses,
all at the same time. Both runs make the same calls. Prints how much of the prompts came out of the prefix caches, and the
time to first token of the turns after the first; writes benchmarks/results/routing.json and docs/images/routing.png. Exits
with 1 when our router finds no more than Serve's or answers later.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.server import ROOT, deployment_of, free_port, our_config, ray_serve
from serve_app.loadgen import WORDS
from serve_app.models.checkpoint import find_checkpoint

MODEL = "conversations"
NUM_REPLICAS = 4
ANSWER_TOKENS = 24
SYSTEM_WORDS, QUESTION_WORDS = 100, (40, 160)
MAX_PAUSE_S = 4.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: which turn of its conversation, what the server said of its prompt, and the time to its first token."""

    number: int
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float


def save_small_model(folder: Path) -> None:
    """A random Llama of 8 layers of 256, with the tokenizer and the chat template of the built-in model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = Path(find_checkpoint("builtin").path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=json.loads((source / "config.json").read_text())["vocab_size"],
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in ("config.json", "generation_config.json"):
            shutil.copy(path, folder)


def config_of(port: int, folder: Path, *, ours: bool) -> dict[str, Any]:
    """serve_config.yaml with that model and four replicas, with its router or with Serve's."""
    config = our_config(port)
    [application] = config["applications"]
    application["args"]["model"] |= {"source": str(folder), "name": MODEL, "dtype": "float32"}
    application["args"]["engine"] |= {"num_threads": 1, "kv_cache_tokens": 16384}
    engine = deployment_of(config, "Engine")
    engine["autoscaling_config"] |= {"min_replicas": NUM_REPLICAS, "max_replicas": NUM_REPLICAS}
    engine["ray_actor_options"]["num_cpus"] = 0
    if not ours:
        del engine["request_router_config"]
    return config


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


async def talk(session: aiohttp.ClientSession, url: str, seed: int, num_turns: int, turns: list[Turn]) -> None:
    """One conversation, from its system prompt to its last answer."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": text(random.Random(0), SYSTEM_WORDS)}]
    for number in range(num_turns):
        await asyncio.sleep(rng.uniform(0, MAX_PAUSE_S))
        messages.append({"role": "user", "content": text(rng, rng.randint(*QUESTION_WORDS))})
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_at = time.perf_counter()
        ttft_s, answer = 0.0, ""
        usage: dict[str, Any] = {}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        answer += choice["delta"].get("content") or ""
                        if choice["delta"].get("content"):
                            ttft_s = ttft_s or time.perf_counter() - started_at
        messages.append({"role": "assistant", "content": answer})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append(Turn(number, usage["prompt_tokens"], cached, ttft_s))


async def converse(url: str, args: argparse.Namespace) -> dict[str, float]:
    """All conversations at once, and what they gave."""
    turns: list[Turn] = []
    started_at = time.perf_counter()
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(talk(session, url, seed, args.turns, turns) for seed in range(args.conversations)))
    elapsed_s = time.perf_counter() - started_at
    ttfts = sorted(turn.ttft_s for turn in turns if turn.number)
    return {
        "calls": len(turns),
        "seconds": elapsed_s,
        "prompt_tokens": sum(turn.num_prompt_tokens for turn in turns),
        "hit_rate": sum(turn.num_cached_tokens for turn in turns) / sum(turn.num_prompt_tokens for turn in turns),
        "ttft_p50_s": ttfts[len(ttfts) // 2],
        "ttft_p95_s": ttfts[int(0.95 * len(ttfts))],
    }


def draw(found: dict[str, dict[str, float]]) -> None:
    """Hit rate and time to first token of both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, (key, title, scale) in zip(
        axes,
        (
            ("hit_rate", "prompt tokens from the cache, %", 100),
            ("ttft_p50_s", "TTFT p50, ms", 1000),
            ("ttft_p95_s", "TTFT p95, ms", 1000),
        ),
        strict=True,
    ):
        bars = axis.bar(list(found), [one[key] * scale for one in found.values()], color=["tab:blue", "tab:grey"])
        axis.bar_label(bars, fmt="%.0f")
        axis.set_title(title, fontsize=10)
        axis.margins(y=0.15)
    figure.savefig(ROOT / "docs" / "images" / "routing.png", dpi=100)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=40, help="at the same time (default 40)")
    parser.add_argument("--turns", type=int, default=6, help="of each (default 6)")
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_small_model(folder)
        for router, ours in (("PrefixRouter", True), ("Serve's default", False)):
            port = free_port()
            with ray_serve(config_of(port, folder, ours=ours), port) as server:
                server.settle()
                one = found[router] = uvloop.run(converse(server.url, args))
            told = (
                f"{one['calls']:.0f} calls in {one['seconds']:.1f} s, {one['hit_rate']:.0%} of prompt tokens from the cache"
            )
            waits = f"TTFT p50 {one['ttft_p50_s'] * 1000:.0f} ms, p95 {one['ttft_p95_s'] * 1000:.0f} ms"
            print(f"{router:16} {told}, {waits}", flush=True)
    (ROOT / "benchmarks" / "results" / "routing.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found)
    by_prefix, by_requests = found.values()
    is_better = by_prefix["hit_rate"] > by_requests["hit_rate"] and by_prefix["ttft_p50_s"] < by_requests["ttft_p50_s"]
    return 0 if is_better else 1


if __name__ == "__main__":
    sys.exit(main())
