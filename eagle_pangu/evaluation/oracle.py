"""transformers' own greedy `generate`, plain or with its prompt lookup: answers that share no code with this project,
down to the chat template.

It loads the teacher's directory in this process and knows nothing of services, trees or caches. torch and transformers
are imported when an oracle is made.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from eagle_pangu.evaluation.records import Answer, Message

LOOKED_UP_TOKENS = 10
"""Most tokens that transformers' prompt lookup drafts at once: the default of its candidate generator."""


class TransformersOracle:
    """A model of transformers on the CPU. Blocking, and bound to the thread that made it.

    Args:
        directory: the teacher's checkpoint.
        dtype: of weights and activations: "float32", "bfloat16" or "float16".
        threads: CPU threads; 0: all cores.
    """

    def __init__(self, directory: Path, dtype: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads or os.cpu_count() or 1)
        self._torch = torch
        disk_only = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory, **disk_only)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), **disk_only
        )
        self._model.eval()
        ends = self._model.generation_config.eos_token_id
        self._ends: tuple[int, ...] = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)

    def answer(self, messages: Sequence[Message], max_tokens: int, *, prompt_lookup: bool = False) -> Answer:
        """The greedy answer; its time spans tokenising, generating and decoding, as a server's does.

        Args:
            messages: the conversation.
            max_tokens: most tokens of the answer.
            prompt_lookup: draft by transformers' own n-gram lookup (its `prompt_lookup_num_tokens`).
        """
        started = time.perf_counter()
        prompt = self._tokenizer.apply_chat_template(
            [message._asdict() for message in messages],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        prompt_tokens = prompt["input_ids"].shape[1]
        with self._torch.inference_mode():
            sequences = self._model.generate(
                prompt["input_ids"],
                attention_mask=prompt["attention_mask"],
                max_new_tokens=max_tokens,
                do_sample=False,
                repetition_penalty=1.0,
                prompt_lookup_num_tokens=LOOKED_UP_TOKENS if prompt_lookup else None,
                pad_token_id=next(iter(self._ends), 0),
            )
        token_ids = tuple(sequences[0, prompt_tokens:].tolist())
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        seconds = time.perf_counter() - started
        finish = "stop" if token_ids[-1] in self._ends else "length"
        return Answer(token_ids, text, finish, seconds, prompt_tokens)


class OracleThread:
    """An oracle on a thread of its own, so that the event loop stays free."""

    def __init__(self, thread: ThreadPoolExecutor, oracle: TransformersOracle, max_tokens: int) -> None:
        self._thread = thread
        self._oracle = oracle
        self._max_tokens = max_tokens

    async def ask(self, messages: Sequence[Message], *, prompt_lookup: bool = False) -> Answer:
        """The greedy answer to a conversation; see `TransformersOracle.answer`."""
        answer = partial(self._oracle.answer, messages, self._max_tokens, prompt_lookup=prompt_lookup)
        return await asyncio.get_running_loop().run_in_executor(self._thread, answer)


@asynccontextmanager
async def loaded_oracle(directory: Path, dtype: str, threads: int, max_tokens: int) -> AsyncIterator[OracleThread]:
    """An oracle while the block runs; see `TransformersOracle` for the arguments."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="oracle") as thread:
        loop = asyncio.get_running_loop()
        oracle = await loop.run_in_executor(thread, TransformersOracle, directory, dtype, threads)
        yield OracleThread(thread, oracle, max_tokens)
