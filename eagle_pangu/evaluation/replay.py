"""Re-derives every emitted token of a trace, with no model and no service, and says where the trace contradicts itself.

What it proves: the answer follows from the first token and the recorded verdicts by the rules of a round (accept along
the tree, keep what the stop rules left). What it cannot prove: that the verdicts are the teacher's; equality with
teacher-only decoding (`bench`) does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle_pangu.evaluation.trace_file import RoundLine, TracedAnswer
from eagle_pangu.speculation.tree import TokenTree
from protos.errors import InvalidFieldError

# The trace knows neither vocabulary nor limits; the shape of a tree is checked all the same.
ANY_ID = 2**32


@dataclass(frozen=True)
class Replay:
    """One answer replayed.

    answer: its index within its request. token_ids: as re-derived. faults: what contradicts it, empty when all agrees.
    finished: an end was there.
    """

    request_id: str
    answer: int
    token_ids: tuple[int, ...]
    faults: tuple[str, ...]
    finished: bool


def replay(answer: TracedAnswer) -> Replay:
    """Walk the rounds of one answer and compare with its end."""
    emitted = [answer.opened.first_token_id]
    faults: list[str] = []
    committed = answer.opened.prompt_tokens
    for number, line in enumerate(answer.rounds, start=1):
        if line.round != number:
            faults.append(f"round {line.round}: round: expected {number}")
        faults += [f"round {line.round}: {fault}" for fault in _round_faults(line, emitted[-1], committed)]
        emitted += kept_tokens(line)
        committed += line.commit + 1
    if answer.end is not None:
        faults += _end_faults(answer, emitted)
    return Replay(answer.request_id, answer.index, tuple(emitted), tuple(faults), answer.end is not None)


def kept_tokens(line: RoundLine) -> list[int]:
    """The tokens that a round emitted: those of the accepted rows, then the next token, cut to `kept`.

    A row that the tree does not have gives no token; `replay` reports it.
    """
    tokens = line.tree.token_ids
    accepted = [tokens[row] for row in line.accepted_rows if 0 <= row < len(tokens)]
    return [*accepted, line.next_token_id][: line.kept]


def _round_faults(line: RoundLine, root: int, committed: int) -> Iterator[str]:
    tree = TokenTree.build(line.tree.token_ids, line.tree.parents, line.tree.scores)
    try:
        tree.validate(vocab_size=ANY_ID, max_rows=tree.rows, max_depth=tree.rows)
    except InvalidFieldError as error:
        yield str(error)
    if line.tree.token_ids[0] != root:
        yield f"tree.token_ids[0]: expected the last emitted token {root}, got {line.tree.token_ids[0]}"
    if line.committed_length != committed:
        yield f"committed_length: expected {committed}, got {line.committed_length}"
    parent = 0
    for row in line.accepted_rows:
        if not 1 <= row < min(len(line.tree.token_ids), len(line.tree.parents)):
            yield f"accepted_rows: expected a drafted row, got {row}"
            return
        if line.tree.parents[row] != parent:
            yield f"accepted_rows: expected a child of row {parent}, got {row} under {line.tree.parents[row]}"
        parent = row
    accepted = len(line.accepted_rows)
    if not 0 <= line.kept <= accepted + 1:
        yield f"kept: expected 0 .. {accepted + 1}, got {line.kept}"
    if line.commit != min(line.kept, accepted):
        yield f"commit: expected {min(line.kept, accepted)}, got {line.commit}"


def _end_faults(answer: TracedAnswer, emitted: Sequence[int]) -> Iterator[str]:
    end = answer.end
    assert end is not None
    position = _first_difference(emitted, end.token_ids)
    # An answer that was cut off may have lost the line of its last round, or the client its last tokens.
    if position is not None and (end.status == "OK" or position < min(len(emitted), len(end.token_ids))):
        ours, theirs = (ids[position] if position < len(ids) else "nothing" for ids in (emitted, end.token_ids))
        yield f"end: token_ids[{position}]: expected {ours}, got {theirs}"
    if end.status != "OK":
        return
    if end.rounds != len(answer.rounds):
        yield f"end: rounds: expected {len(answer.rounds)}, got {end.rounds}"
    drafted = sum(len(line.tree.token_ids) - 1 for line in answer.rounds)
    if end.drafted != drafted:
        yield f"end: drafted: expected {drafted}, got {end.drafted}"
    accepted = sum(line.commit for line in answer.rounds)
    if end.accepted != accepted:
        yield f"end: accepted: expected {accepted}, got {end.accepted}"


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
