"""What a request's options cost: the time of a round with every option that acts in a round, over that of a greedy one.

Both ways are asked by turns of the same running services, each prompt once in each way. A round's time is the
orchestrator's own figure, draft, wire and teacher included, so the ratio is what a caller would see.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from eagle_pangu.client.client import GenerationClient
from eagle_pangu.evaluation.prompts import PromptItem
from protos.v1 import generation_pb2, sampling_pb2

MOST_ALLOWED = 4096  # ids; of a byte-pair vocabulary the first ones are the most frequent


@dataclass(frozen=True)
class RoundCost:
    """One prompt. Milliseconds of a round and drafted rows of a round, greedy and with all options."""

    id: str
    greedy_ms: float
    options_ms: float
    greedy_rows: float
    options_rows: float


async def measure(
    client: GenerationClient, items: Sequence[PromptItem], *, drafter: str, max_tokens: int
) -> AsyncIterator[RoundCost]:
    """One cost an item, after one item in both ways that is thrown away; which way comes first alternates.

    Args:
        client: of a running orchestrator.
        items: their first turns are asked.
        drafter: of both ways; the budget is the server's default.
        max_tokens: of every answer, which no end-of-sequence id ends.

    Raises:
        grpc.aio.AioRpcError: a request was refused.
    """
    info = await client.model_info()
    for place, item in enumerate([items[0], *items]):
        plain = _greedy(item, drafter, max_tokens)
        full = with_every_option(plain, seed=place, vocab_size=info.teacher.vocab_size)
        figures = {}
        for options in (plain, full) if place % 2 else (full, plain):
            answer = await client.generate(options)
            rounds = max(1, answer.speculation.rounds)
            figures[options is full] = (
                answer.speculation.timings.rounds_us / rounds / 1e3,
                answer.speculation.drafted / rounds,
            )
        if place:
            (greedy_ms, greedy_rows), (options_ms, options_rows) = figures[False], figures[True]
            yield RoundCost(item.id, greedy_ms, options_ms, greedy_rows, options_rows)


def ratio(costs: Sequence[RoundCost]) -> float:
    """Time of a round with all options over that of a greedy one, each the mean over the prompts."""
    return sum(cost.options_ms for cost in costs) / sum(cost.greedy_ms for cost in costs)


def with_every_option(
    plain: generation_pb2.GenerationOptions, *, seed: int, vocab_size: int
) -> generation_pb2.GenerationOptions:
    """The same request with every option that costs time in a round."""
    options = generation_pb2.GenerationOptions(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        seed=seed,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias=dict.fromkeys(range(min(vocab_size, 64)), 0.5),
        min_tokens=plain.max_tokens,
        stop=["\N{SNOWMAN}\N{SNOWMAN}"],
        stop_token_ids=[vocab_size - 1],
        bad_words=[
            sampling_pb2.TokenSequence(token_ids=[vocab_size - 2]),
            sampling_pb2.TokenSequence(token_ids=[vocab_size - 3, vocab_size - 2]),
        ],
        allowed_token_ids=range(min(vocab_size // 2, MOST_ALLOWED)),
        include_stop=True,
        logprobs=5,
        return_margins=True,
    )
    options.MergeFrom(plain)
    return options


def _greedy(item: PromptItem, drafter: str, max_tokens: int) -> generation_pb2.GenerationOptions:
    message = generation_pb2.ChatMessage(role="user", content=item.turns[0])
    return generation_pb2.GenerationOptions(
        chat=generation_pb2.ChatMessages(messages=[message]),
        max_tokens=max_tokens,
        ignore_eos=True,
        drafter=drafter,
    )
