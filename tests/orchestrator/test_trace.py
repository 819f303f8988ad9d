"""A trace re-derives every emitted token, and says no more than it was asked to."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from eagle_pangu.evaluation.replay import replay
from eagle_pangu.evaluation.trace_file import read_trace
from orchestrator.trace import SCHEMA
from protos.v1 import generation_pb2
from tests.orchestrator.conftest import options, stack
from tests.orchestrator.scripted import EOS, ScriptedTeacher, branching, ids_of, knowing, saying, scrambled

PROMPT = ids_of("prompt")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def replayed(lines: list[dict[str, Any]]) -> list[int]:
    """As the module's docstring says."""
    tokens = [lines[0]["first_token_id"]]
    for line in lines[1:-1]:
        ids = line["tree"]["token_ids"]
        assert ids[0] == tokens[-1]
        assert line["committed_length"] == lines[0]["prompt_tokens"] + len(tokens) - 1
        run = [*(ids[row] for row in line["accepted_rows"]), line["next_token_id"]]
        tokens += run[: line["kept"]]
        assert line["commit"] == min(line["kept"], len(line["accepted_rows"]))
    return tokens


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 30}, {"max_tokens": 30, "drafter": "none"}, {"stop": ["rld, a"]}, {"max_tokens": 1}, {}]
)
async def test_a_trace_replays_to_the_answer(tmp_path: Path, fields: dict[str, Any]) -> None:
    teacher = ScriptedTeacher(saying(len(PROMPT), [*ids_of("hello world, and more"), EOS]))
    async with stack(teacher, branching(teacher.next_token), trace=tmp_path / "deep" / "trace.jsonl") as each:
        response = await each.generate(request_id="one", **fields)
    lines = lines_of(tmp_path / "deep" / "trace.jsonl")
    assert [line["event"] for line in lines] == ["open", *["round"] * response.speculation.rounds, "end"]
    assert {(line["schema"], line["request_id"]) for line in lines} == {(SCHEMA, "one")}
    assert replayed(lines) == lines[-1]["token_ids"] == list(response.token_ids)
    assert {line["epoch"] for line in lines} == {each.teacher.sessions[0].epoch}
    assert {line["answer"] for line in lines} == {0}
    assert [line["round"] for line in lines[1:-1]] == list(range(1, len(lines) - 1))
    end = lines[-1]
    stats = response.speculation
    assert (end["rounds"], end["drafted"], end["accepted"]) == (stats.rounds, stats.drafted, stats.accepted)
    for part in ("draft", "queue", "teacher", "commit", "wire"):
        assert sum(line["times_us"][part] for line in lines[1:-1]) == getattr(stats.timings, f"{part}_us")


async def test_the_lines_of_several_answers_replay_each_to_its_own(tmp_path: Path) -> None:
    path, teacher = tmp_path / "trace.jsonl", ScriptedTeacher()
    teacher.samples = True
    async with stack(teacher, trace=path) as each:
        asked: dict[str, Any] = {"max_tokens": 20, "temperature": 1, "drafter": "none", "seed": 2**64 - 1}
        response = await each.generate(n=3, request_id="one", **asked)
        await each.stream(n=2, request_id="two", **asked)
    answers = [response, *response.further_answers]
    replays = [replay(traced) for traced in read_trace(path)]
    assert sorted((one.request_id, one.answer) for one in replays) == [("one", i) for i in range(3)] + [
        ("two", i) for i in range(2)
    ]
    for one in replays:
        assert one.faults == ()
        assert one.finished
        assert list(one.token_ids) == list(answers[one.answer].token_ids)
    opened = [line for line in lines_of(path) if line["event"] == "open" and line["request_id"] == "one"]
    assert {line["answer"]: line["sampling"]["seed"] for line in opened} == {0: 2**64 - 1, 1: 0, 2: 1}
    assert {line["answer"]: line["cached_prompt_tokens"] for line in opened} == {0: 0, 1: 5, 2: 5}
    assert all(line["status"] == "OK" for line in lines_of(path) if line["event"] == "end")


async def test_an_answer_has_its_end_line_while_others_go_on(tmp_path: Path) -> None:
    path, others_may_go_on = tmp_path / "trace.jsonl", asyncio.Event()
    async with stack(trace=path) as each:

        async def hold_the_second(record: Any, _context: Any) -> None:
            if each.teacher.sessions.index(record) == 1:
                await others_may_go_on.wait()

        each.teacher.on_verify = hold_the_second
        request = generation_pb2.GenerateStreamRequest(options=options(max_tokens=9, n=2))
        async for part in each.stub.GenerateStream(request):
            if part.index == 0 and part.finish_reason:
                assert [line["answer"] for line in lines_of(path) if line["event"] == "end"] == [0]
                others_may_go_on.set()
    assert [line["answer"] for line in lines_of(path) if line["event"] == "end"] == [0, 1]


async def test_answers_given_up_with_a_failed_one_have_their_end_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with stack(trace=path) as each:

        async def fail(record: Any, context: grpc.aio.ServicerContext) -> None:
            if each.teacher.sessions.index(record) == 1 and len(record.rounds) == 3:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

        each.teacher.on_verify = fail
        with pytest.raises(grpc.aio.AioRpcError):
            await each.generate(max_tokens=400, n=2)
        await each.idle()
    opened, ended = ([line for line in lines_of(path) if line["event"] == event] for event in ("open", "end"))
    assert {line["answer"]: line["status"] for line in ended} == {0: "CANCELLED", 1: "RESOURCE_EXHAUSTED"}
    assert len(opened) == 2
    assert [one.faults for one in map(replay, read_trace(path))] == [(), ()]


async def test_losses_are_in_the_trace(tmp_path: Path) -> None:
    async def lose(record: Any, context: grpc.aio.ServicerContext) -> None:
        if record is each.teacher.sessions[0] and len(record.rounds) == 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    async with stack(plan=knowing(scrambled, lambda number: 2), trace=tmp_path / "trace.jsonl") as each:
        each.teacher.on_verify = lose
        response = await each.generate(max_tokens=20)
    lines = lines_of(tmp_path / "trace.jsonl")
    assert replayed(lines) == list(response.token_ids)
    lost = lines[3]
    assert (lost["reopened"], lost["fallback"], lost["accepted_rows"]) == (True, "teacher_lost", [])
    assert [line["epoch"] for line in lines[:3]] == [each.teacher.sessions[0].epoch] * 3
    assert lines[4]["epoch"] == each.teacher.sessions[1].epoch


async def test_prompts_are_written_only_when_asked_for(tmp_path: Path) -> None:
    for with_text in (False, True):
        path = tmp_path / f"{with_text}.jsonl"
        async with stack(trace=path, trace_text=with_text) as each:
            await each.generate(max_tokens=3, stop=["secret"])
        opened = lines_of(path)[0]
        assert ("secret" in path.read_text()) is with_text
        assert opened.get("prompt_token_ids") == (PROMPT if with_text else None)


async def test_a_request_cut_off_has_its_end_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with stack(trace=path, teacher_deadline_seconds=0.2) as each:

        async def fail(record: Any, context: grpc.aio.ServicerContext) -> None:
            if len(record.rounds) == 2:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

        each.teacher.on_verify = fail
        with pytest.raises(grpc.aio.AioRpcError):
            await each.generate(max_tokens=20)
    lines = lines_of(path)
    assert lines[-1]["event"] == "end"
    assert (lines[-1]["status"], lines[-1]["finish_reason"]) == ("RESOURCE_EXHAUSTED", None)
    assert replayed(lines) == lines[-1]["token_ids"]


async def test_a_trace_that_cannot_be_written_stops_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(trace=tmp_path / "trace.jsonl") as each:

        def full(*_: Any, **__: Any) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(each.service._trace._logger, "info", full, raising=False)
        assert len((await each.generate(max_tokens=5)).token_ids) == 5
        assert each.service._trace._failed
