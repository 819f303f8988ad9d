"""A chat and a text with an openPangu teacher, over the real services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protos.v1 import generation_pb2, teacher_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.systems import SECONDS, System, draft_settings, system, teacher_settings, tiny_engine
from tests.openpangu import EOS, configuration, library, tensors, toy_openpangu

pytestmark = MODULE_LOOP

LIMIT = 24


def greedy(prompt: list[int], tied: bool) -> list[int]:
    """What transformers' own Llama says with the same weights."""
    document = configuration(tie_word_embeddings=tied)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    rope = {"rope_type": "default", "rope_theta": document["rope_theta"]}
    model: Any = LlamaForCausalLM(
        LlamaConfig(**{name: document[name] for name in names}, attention_bias=True, rope_parameters=rope)
    ).eval()
    weights = {name: tensor for name, tensor in tensors(document).items() if not name.endswith("inv_freq")}
    model.load_state_dict(weights, strict=not tied)
    pieces, ids = library(), list(prompt)
    while len(ids) < len(prompt) + LIMIT:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1, : pieces.get_piece_size()]
        ids.append(int(logits.argmax()))
        if ids[-1] == pieces.piece_to_id(EOS):
            break
    return ids[len(prompt) :]


def chat(*turns: str) -> generation_pb2.ChatMessages:
    roles = ("user", "assistant")
    messages = [generation_pb2.ChatMessage(role=roles[at % 2], content=text) for at, text in enumerate(turns)]
    return generation_pb2.ChatMessages(messages=messages)


def asked(each: System, **fields: Any) -> Any:
    return each.client.generate(generation_pb2.GenerationOptions(max_tokens=LIMIT, **fields), seconds=SECONDS)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_a_chat_is_answered_as_the_official_recipe_asks(tmp_path: Path, tied: bool) -> None:
    model, pieces = toy_openpangu(tmp_path / "pangu", tie_word_embeddings=tied), library()
    begin, end = pieces.piece_to_id("[unused9]"), pieces.piece_to_id(EOS)
    turns = ["系统：", "用户：请问北京?", "助手：Paris", "用户：hi /no_think"]
    prompt = [pieces.bos_id()]
    for turn in turns:
        prompt += [begin, *pieces.encode(turn), end]
    prompt += [begin, *pieces.encode("助手：")]
    async with system(tiny_engine(model), draft_settings(model, drafter="standalone"), teacher_settings(model)) as each:
        offered = await each.teacher_stub.GetTokenizer(teacher_pb2.GetTokenizerRequest())
        assert offered.adds_bos
        spoken = chat("请问北京?", "Paris", "hi /no_think")
        answers = [await asked(each, chat=spoken, drafter=name) for name in ("none", "standalone", "ngram")]
        for answer in answers:
            assert list(answer.token_ids) == greedy(prompt, tied)
            assert answer.usage.prompt_tokens == len(prompt)
        assert answers[1].speculation.accepted > 0
        streamed = each.client.generate_stream(
            generation_pb2.GenerationOptions(max_tokens=LIMIT, chat=spoken), seconds=SECONDS
        )
        assert "".join([delta.text async for delta in streamed]) == answers[0].text


async def test_a_text_begins_with_the_bos_and_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    model, pieces = toy_openpangu(tmp_path / "pangu"), library()
    plain = pieces.encode("The capital of France is")
    async with system(tiny_engine(model), None, teacher_settings(model)) as each:
        of_text = await asked(each, prompt="The capital of France is")
        assert list(of_text.token_ids) == greedy([pieces.bos_id(), *plain], tied=False)
        of_ids = await asked(each, prompt_token_ids=generation_pb2.TokenIds(ids=plain))
        assert list(of_ids.token_ids) == greedy(plain, tied=False)
        assert (of_text.usage.prompt_tokens, of_ids.usage.prompt_tokens) == (len(plain) + 1, len(plain))
