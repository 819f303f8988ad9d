"""The real model, in real processes, over real sockets. `make test` pulls the model before it runs these."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from eagle_pangu.client.client import GenerationClient
from eagle_pangu.evaluation.prompts import default_prompts, spread
from eagle_pangu.serving.configuration import load_settings
from eagle_pangu.serving.trio import Trio, running_trio
from eagle_pangu.speculation.models import ModelError, resolve_model
from protos.v1 import generation_pb2, tree_pb2

MODEL = "smollm2-135m-instruct"
TOKENS = 32


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The default model, pulled."""
    try:
        return resolve_model(MODEL)
    except ModelError as error:
        pytest.fail(f"{error} (make test does it)")


@pytest.fixture(scope="session")
def noisy_draft(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A standalone draft with the teacher's tokenizer that is right often and wrong often: the teacher with noise."""
    directory = tmp_path_factory.mktemp("draft")
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.1 * parameter.std() * noise
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model_directory).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """A few first turns, spread over the project's own set."""
    return [item.turns[0] for item in spread(default_prompts(), 4)]


@pytest.fixture(scope="session")
def oracle(model_directory: Path) -> PreTrainedModel:
    """transformers' own model in float32: shares no code with ours."""
    return AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)


def oracle_ids(oracle: PreTrainedModel, model_directory: Path, prompt: str, max_tokens: int) -> list[int]:
    """transformers' own greedy answer."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = oracle.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return [int(token) for token in output[0, inputs["input_ids"].shape[1] :]]


def chat(
    prompt: str, drafter: str = "", rows: int = 8, depth: int = 6, **options: Any
) -> generation_pb2.GenerationOptions:
    """A request: one user message and a budget."""
    return generation_pb2.GenerationOptions(
        chat=generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content=prompt)]),
        drafter=drafter,
        budget=tree_pb2.TreeBudget(rows=rows, depth=depth),
        **{"max_tokens": TOKENS, **options},
    )


@asynccontextmanager
async def serving(**sections: dict[str, Any]) -> AsyncIterator[tuple[Trio, GenerationClient]]:
    """The three processes with these settings over the defaults, and a client.

    The draft has a minute for a proposal: a slow machine shall not turn a test of ids into one of speed.
    """
    orchestrator = {"port": 0, "draft_deadline_seconds": 60.0, **sections.pop("orchestrator", {})}
    settings = load_settings(overrides={"orchestrator": orchestrator, **sections})
    async with running_trio(settings) as trio, GenerationClient(trio.target) as client:
        yield trio, client


def rounds_of(trace: Path, request_id: str) -> list[dict[str, Any]]:
    """Round lines of one request in a trace."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    return [line for line in lines if line.get("request_id") == request_id and line.get("event") == "round"]
