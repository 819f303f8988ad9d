"""Requests that mix what both faces of the API can ask, made from a number, in gRPC's words and in HTTP's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from protos.v1 import generation_pb2
from tests.models import byte_tokenizer

LETTERS = [byte_tokenizer().token_to_id(letter) for letter in "abcdefgh"]
PROMPTS = ("ab", "héllo 🙂", "a<|im_end|>b", "x" * 40)


@dataclass
class Mixed:
    """One request.

    options: for gRPC. body: for the official client, our extensions apart in `extra`. chat: which route.
    """

    options: generation_pb2.GenerationOptions
    body: dict[str, Any]
    extra: dict[str, Any]
    chat: bool


def mixed(number: int) -> Mixed:
    """Request `number`, always the same one."""
    chance = random.Random(number)
    shared: dict[str, Any] = {"max_tokens": chance.randint(1, 5), "n": chance.choice([1, 1, 1, 2, 3])}
    shared["temperature"] = chance.choice([0.0, 0.5, 1.5])
    if shared["temperature"]:
        shared["seed"] = chance.randrange(2**64)
    extra: dict[str, Any] = {"drafter": chance.choice(["none", "ngram", "standalone"])}
    wishes = [
        ("shared", {"top_p": 0.75}),
        ("shared", {"frequency_penalty": 1.0, "presence_penalty": 0.5}),
        ("shared", {"stop": ["b", "cd"]}),
        ("shared", {"logit_bias": {LETTERS[0]: 3.0, 257: 4.0}}),
        ("extra", {"top_k": 5, "min_p": 0.0625}),
        ("extra", {"repetition_penalty": 1.25, "min_tokens": 3}),
        ("extra", {"allowed_token_ids": LETTERS}),
        ("extra", {"allowed_token_ids": LETTERS[:4], "include_stop": True}),
        ("extra", {"stop_token_ids": LETTERS[1:], "ignore_eos": True}),
        ("extra", {"priority": 7}),
    ]
    for place, wish in chance.sample(wishes, 3):
        (shared if place == "shared" else extra).update(wish)
    if "include_stop" in extra:
        shared["stop"] = ["b", "cd"]
    options = generation_pb2.GenerationOptions(**shared, **extra)
    body = shared | {"logit_bias": {str(key): bias for key, bias in shared.get("logit_bias", {}).items()}}
    chat = bool(number % 2)
    (_ask_chat if chat else _ask_completion)(chance, options, body)
    return Mixed(options, body, extra, chat)


def _ask_chat(chance: random.Random, options: generation_pb2.GenerationOptions, body: dict[str, Any]) -> None:
    text, count = chance.choice(PROMPTS), chance.choice([None, 0, 2])
    options.chat.messages.add(role="user", content=text)
    body["messages"] = [{"role": "user", "content": text}]
    if count is not None:
        options.logprobs = count
        body |= {"logprobs": True, "top_logprobs": count}


def _ask_completion(chance: random.Random, options: generation_pb2.GenerationOptions, body: dict[str, Any]) -> None:
    text, count, echo = chance.choice(PROMPTS), chance.choice([None, 0, 2]), chance.random() < 0.5
    if chance.random() < 0.5 and not (echo and count is not None):
        options.prompt_token_ids.ids.extend(text.encode())
        body["prompt"] = list(text.encode())
    else:
        options.prompt = body["prompt"] = text
    options.echo = body["echo"] = echo
    if count is not None:
        options.logprobs = body["logprobs"] = count
        if echo:
            options.prompt_logprobs = count
