"""What a request's options cost: the time of a round with every option that acts in a round, over that of a greedy one.

All ways are asked by turns of the same running services, each prompt once in each way. A round's time is the
orchestrator's own figure, draft, wire and teacher included, so the ratio is what a caller would see. Two options leave
so few tokens in play that the others have little to do, `top_k` and `allowed_token_ids`: there is a way without them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from eagle_pangu.client.client import GenerationClient
from eagle_pangu.evaluation.prompts import PromptItem
from protos.v1 import generation_pb2, sampling_pb2

MOST_ALLOWED = 4096  # ids; of a byte-pair vocabulary the first ones are the most frequent


WAYS = ("greedy", "all options", "all but cuts")


@dataclass(frozen=True)
class RoundCost:
    """One prompt. Milliseconds of a round and drafted rows of a round, by way."""

    id: str
    ms: Mapping[str, float]
    rows: Mapping[str, float]


async def measure(
    client: GenerationClient, items: Sequence[PromptItem], *, drafter: str, max_tokens: int
) -> AsyncIterator[RoundCost]:
    """One cost an item, after one item in all ways that is thrown away; which way comes first changes in turn.

    Args:
        client: of a running orchestrator.
        items: their first turns are asked.
        drafter: of all ways; the budget is the server's default.
        max_tokens: of every answer, which no end-of-sequence id ends.

    Raises:
        grpc.aio.AioRpcError: a request was refused.
    """
    info = await client.model_info()
    for place, item in enumerate([items[0], *items]):
        plain = _greedy(item, drafter, max_tokens)
        full = with_every_option(plain, seed=place, vocab_size=info.teacher.vocab_size)
        uncut = generation_pb2.GenerationOptions()
        uncut.CopyFrom(full)
        uncut.ClearField("top_k")
        uncut.ClearField("allowed_token_ids")
        asked = dict(zip(WAYS, (plain, full, uncut), strict=True))
        ms, rows = {}, {}
        for way in [*WAYS[place % len(WAYS) :], *WAYS[: place % len(WAYS)]]:
            answer = await client.generate(asked[way])
            rounds = max(1, answer.speculation.rounds)
            ms[way] = answer.speculation.timings.rounds_us / rounds / 1e3
            rows[way] = answer.speculation.drafted / rounds
        if place:
            yield RoundCost(item.id, ms, rows)


def ratio(costs: Sequence[RoundCost], way: str) -> float:
    """Time of a round in one of the `WAYS` over that of a greedy one, each the mean over the prompts."""
    return sum(cost.ms[way] for cost in costs) / sum(cost.ms[WAYS[0]] for cost in costs)


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
