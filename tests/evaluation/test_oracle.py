"""transformers' own generate as an oracle, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eagle_pangu.evaluation.oracle import loaded_oracle
from eagle_pangu.evaluation.records import Message
from tests.models import EOS, byte_tokenizer, tiny_llama


async def test_the_oracle_answers_with_the_greedy_tokens_of_plain_forwards(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    async with loaded_oracle(directory, "float32", threads=1, max_tokens=12) as oracle:
        answer = await oracle.ask([Message("user", "hello")])
        looked_up = await oracle.ask([Message("user", "hello")], prompt_lookup=True)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = byte_tokenizer().encode(text).ids
    assert answer.prompt_tokens == len(ids)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected: list[int] = []
    while len(expected) < 12 and EOS not in expected:
        with torch.inference_mode():
            logits = model(torch.tensor([ids + expected])).logits[0, -1]
        expected.append(int(logits.argmax()))
    assert list(answer.token_ids) == expected
    assert answer.finish_reason == ("stop" if expected[-1] == EOS else "length")
    assert answer.seconds > 0
    assert looked_up.token_ids == answer.token_ids
