"""Prompts of real text, and the requests that carry them."""

import asyncio
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from benchmarks.server import MODEL_NAME

REQUEST_LIMIT_S = 900


def make_prompts(model: Path, count: int, num_tokens: int, skip: int = 0) -> list[list[int]]:
    """``count`` distinct prompts of exactly ``num_tokens`` token ids: the beginnings of modules of Python's standard library.

    ``skip`` leaves out that many modules first. Raises ValueError if the library has too few long ones.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    prompts: list[list[int]] = []
    for module in modules:
        text = module.read_text(encoding="utf-8", errors="replace")
        if len(text) < 2 * num_tokens:
            continue
        ids = tokenizer.encode(text[: 8 * num_tokens], add_special_tokens=False).ids
        if len(ids) >= num_tokens:
            prompts.append(ids[:num_tokens])
        if len(prompts) == skip + count:
            return prompts[skip:]
    raise ValueError(
        f"the standard library has {len(prompts)} modules of {num_tokens} tokens, and {skip + count} are needed"
    )


def ask(url: str, question: str, max_tokens: int) -> str:
    """The greedy answer to one chat request. Raises httpx.HTTPError."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=REQUEST_LIMIT_S)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"]


@dataclass(frozen=True)
class Stream:
    """When each piece of one request's text came, in seconds of time.perf_counter()."""

    times_s: tuple[float, ...]


async def stream(client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int) -> Stream:
    """Send one completion request and read its stream to the end; one event per token. Raises httpx.HTTPError."""
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        # One event per token even where its text is empty (a part of a character).
        "return_token_ids": True,
    }
    times = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return Stream(tuple(times))


async def send_all(url: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Stream]:
    """All prompts at once; returns when the last is answered."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_LIMIT_S, limits=limits) as client:
        return await asyncio.gather(*(stream(client, prompt, max_tokens) for prompt in prompts))


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens per second while all streams were decoding: from the latest first token to the earliest last one."""
    begin = max(one.times_s[0] for one in streams)
    end = min(one.times_s[-1] for one in streams)
    tokens = sum(begin < moment <= end for one in streams for moment in one.times_s)
    return tokens / (end - begin)
