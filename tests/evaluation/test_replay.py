"""A trace replays to its own answer, and a trace that was tampered with does not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from eagle_pangu.cli.trace import app as trace_commands
from eagle_pangu.evaluation.replay import replay
from eagle_pangu.evaluation.trace_file import TraceError, outside_models_ms, read_trace

Line = dict[str, Any]

app = typer.Typer()
app.add_typer(trace_commands, name="trace")

ANSWER = [10, 11, 12, 13, 14, 15]


def line(event: str, **fields: Any) -> Line:
    head = {
        "schema": "eagle_pangu.trace/4",
        "event": event,
        "time": "2025-01-01T00:00:00Z",
        "request_id": "r-1",
        "answer": 0,
    }
    return {**head, "epoch": 7, **fields}


def round_line(number: int, committed_length: int, tree: list[int], parents: list[int], **fields: Any) -> Line:
    times = {"draft": 1000, "wire": 500, "queue": 100, "teacher": 9000, "commit": 200, "orchestrator": 200}
    return line(
        "round",
        round=number,
        committed_length=committed_length,
        tree={"token_ids": tree, "parents": parents, "scores": None},
        fallback=None,
        load_limited=False,
        reopened=False,
        batch={"sessions": 1, "rows": len(tree), "realign_us": 0},
        times_us=times,
        **fields,
    )


def good_trace() -> list[Line]:
    """Prompt of 4 tokens, answer ANSWER: a round that accepts two rows, one that accepts none, one cut by a stop."""
    return [
        line(
            "open",
            drafter="ngram",
            budget={"rows": 8, "depth": 6},
            prompt_tokens=4,
            max_tokens=6,
            ignore_eos=False,
            first_token_id=10,
            prefill_us=5000,
        ),
        round_line(1, 4, [10, 11, 90, 12], [0, 0, 0, 1], accepted_rows=[1, 3], next_token_id=13, kept=3, commit=2),
        round_line(2, 7, [13, 91], [0, 0], accepted_rows=[], next_token_id=14, kept=1, commit=0),
        round_line(3, 8, [14, 15], [0, 0], accepted_rows=[1], next_token_id=16, kept=1, commit=1),
        line(
            "end",
            status="OK",
            finish_reason="length",
            token_ids=ANSWER,
            rounds=3,
            drafted=5,
            accepted=3,
            fallback_rounds=0,
            fallback_reasons=[],
            load_limited_rounds=0,
        ),
    ]


def write(path: Path, lines: list[Line]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_a_good_trace_replays_to_the_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", good_trace())
    (request,) = read_trace(path)
    replayed = replay(request)
    assert replayed.token_ids == tuple(ANSWER)
    assert replayed.faults == ()
    assert replayed.finished
    assert run("replay", str(path)) == (0, "1 answers, 6 tokens re-derived, 0 contradicted, 0 without an end\n")


def set_field(index: int, *path: str | int) -> Callable[[list[Line], Any], None]:
    def tamper(lines: list[Line], value: Any) -> None:
        place: Any = lines[index]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return tamper


@pytest.mark.parametrize(
    ("tamper", "value", "fault"),
    [
        (set_field(0, "first_token_id"), 99, "tree.token_ids[0]"),
        (set_field(1, "tree", "token_ids", 3), 99, "token_ids[2]"),
        (set_field(1, "tree", "parents", 3), 3, "tree.parents[3]"),
        (set_field(1, "accepted_rows"), [2, 3], "child of row 2"),
        (set_field(1, "accepted_rows"), [1], "kept"),
        (set_field(1, "accepted_rows"), [1, 9], "a drafted row"),
        (set_field(1, "next_token_id"), 99, "token_ids[3]"),
        (set_field(1, "kept"), 2, "token_ids[3]"),
        (set_field(1, "commit"), 1, "commit"),
        (set_field(2, "round"), 3, "round: expected 2"),
        (set_field(2, "committed_length"), 6, "committed_length: expected 7"),
        (set_field(4, "token_ids", 5), 99, "token_ids[5]"),
        (set_field(4, "token_ids"), ANSWER[:-1], "token_ids[5]"),
        (set_field(4, "accepted"), 4, "end: accepted"),
        (set_field(4, "drafted"), 4, "end: drafted"),
        (set_field(4, "rounds"), 4, "end: rounds"),
    ],
)
def test_a_tampered_trace_contradicts_itself(
    tmp_path: Path, tamper: Callable[[list[Line], Any], None], value: Any, fault: str
) -> None:
    lines = copy.deepcopy(good_trace())
    tamper(lines, value)
    path = write(tmp_path / "trace.jsonl", lines)
    (request,) = read_trace(path)
    assert any(fault in each for each in replay(request).faults), replay(request).faults
    assert run("replay", str(path))[0] == 1


def test_a_round_that_went_missing_is_noticed(tmp_path: Path) -> None:
    lines = good_trace()
    del lines[2]
    (request,) = read_trace(write(tmp_path / "trace.jsonl", lines))
    assert replay(request).faults


def test_a_request_without_its_end_is_unfinished_and_no_contradiction(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", good_trace()[:-1])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"schema": "eagle_pangu.trace/4", "ev')  # being written
    assert run("replay", str(path)) == (
        0,
        f"{path}: the last line is incomplete and left out\n"
        "1 answers, 6 tokens re-derived, 0 contradicted, 1 without an end\n",
    )


def test_a_cancelled_request_may_lack_its_last_tokens_but_not_change_them(tmp_path: Path) -> None:
    lines = good_trace()
    lines[-1].update(status="CANCELLED", finish_reason=None, token_ids=ANSWER[:4])
    (request,) = read_trace(write(tmp_path / "trace.jsonl", lines))
    assert replay(request).faults == ()
    lines[-1]["token_ids"] = [10, 11, 99]
    (request,) = read_trace(write(tmp_path / "trace.jsonl", lines))
    assert replay(request).faults != ()


def test_lines_of_concurrent_requests_are_told_apart(tmp_path: Path) -> None:
    other = [{**each, "request_id": "r-2"} for each in good_trace()]
    mixed = [each for pair in zip(good_trace(), other, strict=True) for each in pair]
    requests = read_trace(write(tmp_path / "trace.jsonl", mixed))
    assert [request.request_id for request in requests] == ["r-1", "r-2"]
    assert [replay(request).token_ids for request in requests] == [tuple(ANSWER)] * 2


def test_lines_of_the_answers_to_one_request_are_told_apart(tmp_path: Path) -> None:
    other = copy.deepcopy([{**each, "answer": 1} for each in good_trace()])
    other[3]["kept"], other[4]["token_ids"][-1] = 0, 99
    mixed = [each for pair in zip(good_trace(), other, strict=True) for each in pair]
    path = write(tmp_path / "trace.jsonl", mixed)
    replays = [replay(each) for each in read_trace(path)]
    assert [(each.request_id, each.answer, bool(each.faults)) for each in replays] == [
        ("r-1", 0, False),
        ("r-1", 1, True),
    ]
    status, output = run("replay", str(path))
    assert status == 1
    assert "r-1 answer 1: " in output
    assert "2 answers, 11 tokens re-derived, 1 contradicted, 0 without an end" in output


def test_time_outside_the_models_is_per_round_and_per_request(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path / "trace.jsonl", good_trace()))
    assert outside_models_ms(requests, {"r-1"}) == [1.0, 1.0, 1.0]
    assert outside_models_ms(requests, {"r-2"}) == []


@pytest.mark.parametrize(
    ("index", "changes", "where"),
    [
        (0, {"schema": "eagle_pangu.trace/2"}, ":1: open.schema"),
        (0, {"event": "start"}, ":1: "),
        (1, {"kept": "3"}, ":2: round.kept"),
        (1, {"tree": {"token_ids": [], "parents": [], "scores": None}}, ":2: round.tree.token_ids"),
        (2, {"request_id": "r-9"}, ":3: request_id"),
        (2, {"answer": 1}, ":3: request_id: round of answer 1 of 'r-1'"),
    ],
)
def test_a_line_that_breaks_the_schema_is_refused_by_line_and_field(
    tmp_path: Path, index: int, changes: Line, where: str
) -> None:
    lines = good_trace()
    lines[index].update(changes)
    path = write(tmp_path / "trace.jsonl", lines)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{where}")


def test_show_prints_the_tree_with_its_accepted_path_and_the_times(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", good_trace())
    status, output = run("show", str(path), "--request", "r-1")
    assert status == 0
    for expected in ("r-1", "10(11*(12*) 90)", "13(91)", "11 12 13", "11.0", "OK, 6 tokens"):
        assert expected in output
    assert run("show", str(path), "--request", "r-9")[0] == 1
