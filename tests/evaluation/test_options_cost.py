"""The cost of options, over a scripted orchestrator: what is asked, in which order, and what is made of the answers."""

from __future__ import annotations

import pytest

from eagle_pangu.client.client import GenerationClient
from eagle_pangu.evaluation.options_cost import WAYS, measure, ratio, with_every_option
from eagle_pangu.evaluation.prompts import PromptItem
from eagle_pangu.speculation.parameters import SamplingParameters
from protos.codec import decode_sampling
from protos.v1 import generation_pb2
from tests.evaluation.scripted_orchestrator import ScriptedOrchestrator, serving

ITEMS = [PromptItem("a", "test", ("one", "never asked")), PromptItem("b", "test", ("two",))]
NO_WORK_IN_A_ROUND = {"request_id", "prompt", "prompt_token_ids", "n", "echo", "prompt_logprobs", "priority"}
NOT_UNARY = {"stream_tokens"}
LEFT_TO_THE_SERVER = {"budget"}


async def test_each_prompt_is_asked_in_every_way_by_turns_and_the_first_is_thrown_away() -> None:
    orchestrator = ScriptedOrchestrator(rounds_us=round_us)
    with serving(orchestrator) as target:
        async with GenerationClient(target) as client:
            costs = [cost async for cost in measure(client, ITEMS, drafter="hybrid", max_tokens=9)]
    asked = [(each.chat.messages[0].content, way_of(each)) for each in orchestrator.requests]
    thrown_away, a, b = asked[:3], asked[3:6], asked[6:]
    assert thrown_away == [("one", "greedy"), ("one", "all options"), ("one", "all but cuts")]
    assert a == [("one", "all options"), ("one", "all but cuts"), ("one", "greedy")]
    assert b == [("two", "all but cuts"), ("two", "greedy"), ("two", "all options")]
    assert all(
        (each.drafter, each.max_tokens, each.ignore_eos) == ("hybrid", 9, True) for each in orchestrator.requests
    )
    assert [cost.id for cost in costs] == ["a", "b"]
    assert costs[0].ms == pytest.approx({"greedy": 8, "all options": 10, "all but cuts": 12})
    assert costs[1].ms == pytest.approx({"greedy": 12, "all options": 14, "all but cuts": 16})
    assert costs[0].rows == dict.fromkeys(WAYS, 4)
    assert [ratio(costs, way) for way in WAYS] == pytest.approx([1, 24 / 20, 28 / 20])


def round_us(options: generation_pb2.GenerationOptions) -> int:
    """Of the second prompt 4 ms longer, and longer by 2 ms a way."""
    return 8000 + 4000 * (options.chat.messages[0].content == "two") + 2000 * WAYS.index(way_of(options))


def way_of(options: generation_pb2.GenerationOptions) -> str:
    if not options.temperature:
        return "greedy"
    return "all options" if options.top_k and options.allowed_token_ids else "all but cuts"


def test_every_option_that_acts_in_a_round_is_set_and_the_whole_is_legal() -> None:
    plain = generation_pb2.GenerationOptions(max_tokens=9, drafter="none", ignore_eos=True)
    plain.chat.messages.add(role="user", content="x")
    options = with_every_option(plain, seed=1, vocab_size=1000)
    named = {field.name for field, _ in options.ListFields()}
    expected = {field.name for field in generation_pb2.GenerationOptions.DESCRIPTOR.fields}
    assert named == expected - NO_WORK_IN_A_ROUND - NOT_UNARY - LEFT_TO_THE_SERVER
    parameters = SamplingParameters(
        **decode_sampling(options),
        seed=options.seed,
        logit_bias=tuple(options.logit_bias.items()),
        end_token_ids=tuple(options.stop_token_ids),
    )
    parameters.validate(1000)
