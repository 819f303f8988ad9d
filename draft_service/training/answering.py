"""Stage 1: the teacher answers the prompts through its chat template, in padded batches of transformers' generate.

Every batch draws from a seed of its own, so a run that goes on writes what it would have written without the stop. A
later turn of a conversation is asked with the teacher's own answers to the turns before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from draft_service.training.answers import TURN_MARK, Answer, read_answers
from draft_service.training.settings import OnProgress, TrainingError
from eagle_pangu.evaluation.prompts import PromptItem

GREEDY_SHARE = 0.6
"""Of conversations; the others are sampled. A draft serves both, and greedy answers alone repeat themselves."""
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
BATCH = 32


class Question(NamedTuple):
    """One turn to be answered: `Answer` without the response."""

    id: str
    greedy: bool
    prompt_ids: list[int]


class AnsweringTeacher:
    """The teacher in transformers' own generation loop.

    Args:
        directory: its checkpoint.
        dtype, device: of weights and activations.
        vocab_size: ids from here on are padding rows of the embedding, and never chosen.
        eos_token_ids: what ends an answer.
        context_limit: most tokens of prompt and response.

    Raises:
        TrainingError: no chat template, or a tokenizer that transformers reads only by running code of the checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        context_limit: int,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_limit = context_limit
        self._ends = list(eos_token_ids)
        disk_only = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, **disk_only)
        except (OSError, ValueError) as error:
            raise TrainingError(
                f"--teacher: {directory}: its tokenizer cannot ask prompts; use --answers: {error}"
            ) from error
        if not self._tokenizer.chat_template:
            raise TrainingError(f"--teacher: {directory} has no chat template to ask prompts through; use --answers")
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **disk_only)
        self._model = self._model.to(device).eval()
        # What a checkpoint suggests (a repetition penalty, say) would make answers that serving does not give.
        self._model.generation_config = GenerationConfig()

    def prompt(self, messages: Sequence[str]) -> list[int]:
        """Ids of a conversation, the user's and the assistant's messages in turn, that ask for the next answer."""
        chat = [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(messages)]
        text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def text(self, token_ids: Sequence[int]) -> str:
        """A response as the next prompt quotes it."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def answer(self, prompts: Sequence[Sequence[int]], *, greedy: bool, max_new_tokens: int, seed: int) -> list[Any]:
        """The responses to a batch, the ending id kept where it was reached: a list of int32 arrays.

        Args:
            prompts: token ids, each shorter than the context.
            greedy: greedily, else by `SAMPLING`.
            max_new_tokens: of each.
            seed: of the sampling.
        """
        longest = max(map(len, prompts))
        filler = self._ends[0] if self._ends else 0
        ids = torch.full((len(prompts), longest), filler)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        torch.manual_seed(seed)
        with torch.inference_mode():
            sequences = self._model.generate(
                ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                max_new_tokens=min(max_new_tokens, self.context_limit - longest),
                eos_token_id=self._ends or None,
                pad_token_id=filler,
                suppress_tokens=list(range(self.vocab_size, self._model.config.vocab_size)) or None,
                **({"do_sample": False} if greedy else SAMPLING),
            )
        return [self._ended(row) for row in sequences[:, longest:].cpu().numpy().astype(np.int32)]

    def _ended(self, response: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Without the filling after the first ending id."""
        ends = np.flatnonzero(np.isin(response, self._ends))
        return response[: ends[0] + 1] if len(ends) else response


def answer_prompts(
    path: Path,
    items: Sequence[PromptItem],
    teacher: AnsweringTeacher,
    *,
    max_new_tokens: int,
    seed: int,
    on_progress: OnProgress,
) -> list[Answer]:
    """Answer every turn and append the answers to the file, which may hold some already.

    Turns whose prompt leaves no room in the teacher's context are left out, and with them the turns after.
    """
    _drop_torn_line(path)
    limits = {"vocab_size": teacher.vocab_size, "context_limit": teacher.context_limit}
    answers = {answer.id: answer for answer in read_answers(path, **limits)} if path.stat().st_size else {}
    greedy = np.random.default_rng(seed).random(len(items)) < GREEDY_SHARE
    total = sum(len(item.turns) for item in items)
    with path.open("a", encoding="utf-8") as file:
        for turn in range(max(len(item.turns) for item in items)):
            questions = list(_questions(items, greedy.tolist(), turn, answers, teacher))
            for number, batch in enumerate(_batches(questions)):
                on_progress(len(answers), total, "the teacher answers")
                missing = [question for question in batch if question.id not in answers]
                if not missing:
                    continue
                responses = teacher.answer(
                    [question.prompt_ids for question in batch],
                    greedy=batch[0].greedy,
                    max_new_tokens=max_new_tokens,
                    seed=int(np.random.SeedSequence([seed, turn, number]).generate_state(1)[0]),
                )
                for question, response in zip(batch, responses, strict=True):
                    if question in missing:
                        prompt_ids = np.array(question.prompt_ids, dtype=np.int32)
                        answers[question.id] = Answer(question.id, question.greedy, prompt_ids, response)
                        file.write(answers[question.id].to_line())
                file.flush()
                os.fsync(file.fileno())
    on_progress(total, total, "the teacher answers")
    if not answers:
        raise TrainingError(f"--prompts: no prompt leaves room in the teacher's context of {teacher.context_limit}")
    return list(answers.values())


def _questions(
    items: Sequence[PromptItem],
    greedy: Sequence[bool],
    turn: int,
    answers: dict[str, Answer],
    teacher: AnsweringTeacher,
) -> Iterator[Question]:
    """One turn of every conversation that has it."""
    for item, item_greedy in zip(items, greedy, strict=True):
        ids = [f"{item.id}{TURN_MARK}{place}" if place else item.id for place in range(turn + 1)]
        if turn >= len(item.turns) or any(id_ not in answers for id_ in ids[:-1]):
            continue
        messages = [item.turns[0]]
        for place, id_ in enumerate(ids[:-1]):
            messages += [teacher.text(answers[id_].response_ids.tolist()), item.turns[place + 1]]
        prompt_ids = teacher.prompt(messages)
        if len(prompt_ids) < teacher.context_limit:
            yield Question(ids[-1], item_greedy, prompt_ids)


def _batches(questions: Sequence[Question]) -> Iterator[list[Question]]:
    """Of one kind and of like length, so that little is padded."""
    for greedy in (True, False):
        kind = sorted((one for one in questions if one.greedy == greedy), key=lambda one: len(one.prompt_ids))
        for start in range(0, len(kind), BATCH):
            yield kind[start : start + BATCH]


def _drop_torn_line(path: Path) -> None:
    """What a kill left of a line that was being written."""
    path.touch()
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
