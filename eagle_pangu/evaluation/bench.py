"""The benchmark: every turn answered teacher-only and with a drafter, alternately in the same processes.

Who goes first changes from turn to turn, so that a machine that warms up or slows down favours neither. The second turn
of a conversation follows the teacher-only answer of the first, so all read the same prompt. Nothing here starts a
process or prints: it gets someone to ask, writes turns.jsonl as it goes, and calls back after every turn.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TextIO

from eagle_pangu.evaluation.asking import TEACHER_ONLY, Asker
from eagle_pangu.evaluation.machine import machine
from eagle_pangu.evaluation.oracle import OracleThread
from eagle_pangu.evaluation.prompts import PromptItem
from eagle_pangu.evaluation.records import Answer, Message, TurnRecord

TURNS_FILE = "turns.jsonl"
SUMMARY_FILE = "summary.json"

# Ways to answer a turn; also the ends of their request ids.
ALONE, SPECULATIVE = "teacher-only", "speculative"
TRANSFORMERS, PROMPT_LOOKUP = "transformers", "prompt-lookup"

Way = Callable[[Sequence[Message], str], Awaitable[Answer]]


class Bench:
    """Runs prompt items through one orchestrator.

    Args:
        asker: of the orchestrator under test.
        drafter: name of the drafter; "none": teacher-only alone.
        oracle: transformers' generate, when it is to answer every turn too.
        prompt_lookup: it answers once more, with its own prompt lookup; needs `oracle`.
    """

    def __init__(
        self, asker: Asker, drafter: str, oracle: OracleThread | None = None, *, prompt_lookup: bool = False
    ) -> None:
        self._ways: dict[str, Way] = {ALONE: lambda messages, id_: asker.ask(messages, TEACHER_ONLY, id_)}
        if drafter != TEACHER_ONLY:
            self._ways[SPECULATIVE] = lambda messages, id_: asker.ask(messages, drafter, id_)
        if oracle is not None:
            self._ways[TRANSFORMERS] = lambda messages, id_: oracle.ask(messages)
            if prompt_lookup:
                self._ways[PROMPT_LOOKUP] = lambda messages, id_: oracle.ask(messages, prompt_lookup=True)

    async def run(
        self,
        items: Sequence[PromptItem],
        turns_file: TextIO,
        *,
        warmup: int = 1,
        on_turn: Callable[[TurnRecord], None] = lambda record: None,
    ) -> list[TurnRecord]:
        """Every turn of every item, in order; one line of `turns_file` a turn, flushed at once.

        Args:
            items: what to ask.
            turns_file: opened for writing text.
            warmup: first turns of items that are asked in every way before, and thrown away.
            on_turn: called after each turn.

        Raises:
            AskError: a turn got no answer; the turns before it are written.
        """
        for count in range(warmup):
            await self._ask_all([Message("user", items[count % len(items)].turns[0])], f"warmup-{count}", count)
        records: list[TurnRecord] = []
        for item in items:
            history: list[Message] = []
            for number, text in enumerate(item.turns, start=1):
                history.append(Message("user", text))
                answers = await self._ask_all(history, f"bench-{len(records)}", len(records))
                others = (answers.get(way) for way in (SPECULATIVE, TRANSFORMERS, PROMPT_LOOKUP))
                record = TurnRecord(item.id, number, answers[ALONE], *others)
                history.append(Message("assistant", record.teacher_only.text))
                turns_file.write(json.dumps(record.line()) + "\n")
                turns_file.flush()
                records.append(record)
                on_turn(record)
        return records

    async def _ask_all(self, messages: Sequence[Message], request_id: str, count: int) -> dict[str, Answer]:
        names = list(self._ways)
        first = count % len(names)
        return {
            name: await self._ways[name](messages, f"{request_id}-{name}") for name in names[first:] + names[:first]
        }


def write_summary(directory: Path, figures: dict[str, object], settings: dict[str, object]) -> Path:
    """Write summary.json: the figures, the settings that made them, the machine and versions they were measured on."""
    path = directory / SUMMARY_FILE
    content = {**figures, "settings": settings, **machine()}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
