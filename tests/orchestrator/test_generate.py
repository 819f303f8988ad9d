"""The answer is the teacher's, whatever the draft does; counters and budget agree with the script."""

from __future__ import annotations

from itertools import product

import pytest

from protos.v1 import generation_pb2, tree_pb2
from tests.orchestrator.conftest import Stack, stack
from tests.orchestrator.scripted import EOS, ScriptedTeacher, branching, ids_of, knowing, plain, saying, scrambled

PROMPT = ids_of("prompt")


async def test_the_answer_is_the_teachers_with_and_without_a_draft(usual: Stack) -> None:
    expected = plain(scrambled, PROMPT, 40)
    with_draft = await usual.generate(max_tokens=40)
    without = await usual.generate(max_tokens=40, drafter="none")
    assert list(with_draft.token_ids) == expected
    assert list(without.token_ids) == expected
    assert with_draft.text == without.text
    assert with_draft.speculation.rounds < without.speculation.rounds == 39
    assert (with_draft.speculation.drafter, without.speculation.drafter) == ("scripted", "none")


async def test_counters_agree_with_the_script(usual: Stack) -> None:
    # Accepted 0, 1, 2, 3 in turn, plus one token a round: 1 + (1 + 2 + 3 + 4) * 2 = 21 tokens in 8 rounds.
    response = await usual.generate(max_tokens=21 + 7, budget=tree_pb2.TreeBudget(rows=6, depth=6))
    # 7 more: 1 + 2 + 3, then the last one, for which no draft is of use.
    stats = response.speculation
    assert stats.rounds == 12
    assert stats.accepted == 6 + 6 + 3
    assert stats.drafted == 6 * 8 + 6 + 5 + 3
    assert stats.fallback_rounds == 0
    assert list(stats.fallback_reasons) == []
    assert stats.tokens_per_round == pytest.approx(27 / 12)
    assert len(response.token_ids) == 1 + stats.accepted + stats.rounds


async def test_times_add_up_to_the_rounds(usual: Stack) -> None:
    timings = (await usual.generate(max_tokens=21)).speculation.timings
    parts = ("draft", "wire", "queue", "teacher", "commit", "orchestrator")
    assert sum(getattr(timings, f"{part}_us") for part in parts) == timings.rounds_us > 0
    assert timings.draft_us == 8 * 10
    assert (timings.queue_us, timings.teacher_us, timings.commit_us) == (8, 160, 24)
    assert timings.prefill_us > 0


async def test_every_max_tokens_and_depth_delivers_as_many_tokens_as_it_should() -> None:
    length = 9
    answer = [*plain(scrambled, PROMPT, length - 1), EOS]
    teacher = ScriptedTeacher(saying(len(PROMPT), answer))
    async with stack(teacher, knowing(teacher.next_token, lambda number: 8)) as each:
        for max_tokens, depth in product(range(1, 13), range(1, 9)):
            response = await each.generate(max_tokens=max_tokens, budget=tree_pb2.TreeBudget(rows=8, depth=depth))
            delivered = min(max_tokens, length)
            assert list(response.token_ids) == answer[:delivered]
            assert response.usage.completion_tokens == delivered
            stop = delivered == length
            reason = generation_pb2.FINISH_REASON_STOP if stop else generation_pb2.FINISH_REASON_LENGTH
            assert response.finish_reason == reason
            stats = response.speculation
            assert 0 <= stats.accepted <= stats.drafted
            cut = 1 + stats.accepted + stats.rounds - delivered
            assert cut in (0, 1)


async def test_accepted_rows_that_are_not_dense_are_followed() -> None:
    async with stack(plan=branching(scrambled)) as each:
        response = await each.generate(max_tokens=50, budget=tree_pb2.TreeBudget(rows=16, depth=4))
    assert list(response.token_ids) == plain(scrambled, PROMPT, 50)
    assert response.speculation.accepted > response.speculation.rounds


@pytest.mark.parametrize("room", [-1, 0, 1])
async def test_an_answer_ends_at_the_context_limit(room: int) -> None:
    teacher = ScriptedTeacher()
    teacher.context_limit = 40
    async with stack(teacher, knowing(scrambled, lambda number: 8)) as each:
        left = 40 - len(PROMPT)
        response = await each.generate(max_tokens=left + room)
    assert len(response.token_ids) == min(left, left + room)
    assert response.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert list(response.token_ids) == plain(scrambled, PROMPT, len(response.token_ids))


async def test_a_slot_keeps_room_for_the_largest_tree_whatever_the_budget() -> None:
    teacher = ScriptedTeacher()
    teacher.slot_capacity = 100
    teacher.max_budget.rows = 16
    async with stack(teacher) as each:
        lengths = {
            len((await each.generate(max_tokens=200, budget=tree_pb2.TreeBudget(rows=rows, depth=4))).token_ids)
            for rows in (0, 4, 16)
        }
    assert lengths == {100 - 16 - len(PROMPT)}


async def test_no_draft_is_asked_for_where_none_is_of_use(usual: Stack) -> None:
    await usual.generate(max_tokens=1)
    await usual.generate(max_tokens=2)
    await usual.generate(max_tokens=8, budget=tree_pb2.TreeBudget(rows=0, depth=4))
    assert usual.draft.asked == []


async def test_past_the_drafts_context_decoding_goes_on_without_it(usual: Stack) -> None:
    usual.draft.context_limit = len(PROMPT) + 10
    response = await usual.generate(max_tokens=40)
    assert list(response.token_ids) == plain(scrambled, PROMPT, 40)
    assert response.speculation.fallback_rounds == 0
    assert max(len(asked.sequence) for asked in usual.draft.asked) <= usual.draft.context_limit


async def test_unary_and_stream_agree(usual: Stack) -> None:
    usual.teacher.next_token = saying(len(PROMPT), [*ids_of("héllo wörld, 日本 😀 STOP more"), EOS])
    usual.draft.plan = knowing(usual.teacher.next_token, lambda number: number % 4)
    await usual.generate(max_tokens=1)  # the prompt is cached for all that follow
    for fields in ({"max_tokens": 9}, {"max_tokens": 60}, {"max_tokens": 60, "stop": ["STOP"]}):
        whole = await usual.generate(**fields, return_margins=True)
        usual.draft.asked.clear()
        parts = await usual.stream(**fields, return_margins=True)
        usual.draft.asked.clear()
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == list(whole.token_ids)
        assert [margin for part in parts for margin in part.margins] == list(whole.margins)
        last = parts[-1]
        assert (last.finish_reason, last.matched_stop, last.usage) == (
            whole.finish_reason,
            whole.matched_stop,
            whole.usage,
        )
        assert all(part.finish_reason == generation_pb2.FINISH_REASON_UNSPECIFIED for part in parts[:-1])
        assert last.speculation.rounds == whole.speculation.rounds
        assert len(parts) == whole.speculation.rounds + 1


async def test_margins_come_one_a_token_and_only_when_asked_for(usual: Stack) -> None:
    response = await usual.generate(max_tokens=10, return_margins=True)
    assert list(response.margins) == [0.5] + [0.25] * 9
    assert list((await usual.generate(max_tokens=10)).margins) == []


async def test_numerics_and_request_id_come_back(usual: Stack) -> None:
    response = await usual.generate(request_id="mine", max_tokens=2)
    assert response.request_id == "mine"
    assert response.numerics.policy == "bitwise"
    assert usual.teacher.sessions[-1].open.request_id == "mine"
    assert usual.teacher.sessions[-1].metadata["x-request-id"] == "mine"


async def test_features_reach_a_drafter_that_needs_them() -> None:
    async with stack(needs_features=True) as each:
        first = await each.generate(max_tokens=30)
        second = await each.generate(max_tokens=30)  # the need is known now, and both sessions open at once
        assert list(first.token_ids) == list(second.token_ids) == plain(scrambled, PROMPT, 30)
        assert all(session.open.want_features for session in each.teacher.sessions)
        assert each.draft.features[: len(PROMPT)] == PROMPT


async def test_features_are_not_asked_for_in_vain(usual: Stack) -> None:
    await usual.generate(max_tokens=4)
    await usual.generate(max_tokens=4, drafter="none")
    assert not any(session.open.want_features for session in usual.teacher.sessions)


async def test_a_chat_is_rendered_with_the_models_template(usual: Stack) -> None:
    chat = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    response = await usual.generate(chat=chat, max_tokens=3)
    rendered = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert list(usual.teacher.sessions[-1].open.prompt_token_ids) == rendered
    assert response.usage.prompt_tokens == len(rendered)


async def test_model_info_names_drafters_budgets_and_limits(usual: Stack) -> None:
    info = await usual.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
    assert list(info.drafters) == ["scripted", "other", "none"]
    assert info.default_drafter == "scripted"
    assert (info.default_budget.rows, info.max_budget.rows, info.max_budget.depth) == (15, 64, 32)
    assert info.teacher.vocab_size == 258
    assert info.numerics.dtype == "float32"
    assert (info.default_max_tokens, info.max_tokens_limit, info.n_limit) == (256, 4096, 8)
