"""The trace: one JSON object a line, enough to re-derive every emitted token offline. It decides nothing.

Schema ``eagle_pangu.trace/4``. Every line holds `schema`, `event`, `time` (UTC, ISO 8601), `request_id`, `answer` (its
index among those to the request; each has lines of its own, from `open` to `end`) and `epoch` (of the teacher session;
it changes when that is reopened). Lines of concurrent answers and requests interleave.

``open``, once the first token is decided:
    drafter: asked for; "none": teacher-only; "": the draft service's default. budget: {rows, depth} of every tree.
    prompt_tokens; max_tokens: after the cut to the context limit; end_token_ids: that end it.
    sampling: as in eagle_pangu.speculation.parameters; without its seed the tokens cannot be had again.
    first_token_id: decided by prefill, always emitted. prefill_us; cached_prompt_tokens: that it did not read.
    prompt_token_ids, stop: only when text is traced.
    traceparent: W3C trace context of the request, when it came with one.
``round``:
    round: 1, 2, ... over the whole answer. committed_length: tokens before the root.
    tree: {token_ids, parents, scores}, [rows] each; scores null when the drafter gives none. Row 0 is the root.
    accepted_rows: in path order, root left out. next_token_id: the teacher's token after the last of them.
    kept: how many of the accepted tokens, followed by the next one, were emitted; all, but in the last round.
    commit: accepted rows made final by that, min(kept, accepted).
    fallback: why the round had no draft although one was asked for, else null.
    load_limited: the draft was asked for fewer rows than the budget, or not asked, since the teacher was shared.
    reopened: the teacher was lost in this round, and the prefill of its new session decided the one token.
    batch: {sessions, rows, realign_us} of the teacher's pass: of the round's part `teacher`, what moving KV took.
    times_us: {draft, wire, queue, teacher, commit, orchestrator}; their sum is the round.
``end``:
    status: "OK", or the name of the gRPC status. finish_reason: "stop" or "length", null unless OK.
    token_ids: the answer. rounds, drafted, accepted, fallback_rounds, fallback_reasons, load_limited_rounds: as in
        SpeculationStats.

Replay: the answer is first_token_id, then for each round the first `kept` of ``[token_ids[row] for row in
accepted_rows] + [next_token_id]``. An answer whose prefill failed has no line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from eagle_pangu.serving.logs import get_logger
from eagle_pangu.speculation.tree import TokenTree
from orchestrator.counters import Batch, Counters, PartTimes
from orchestrator.requests import Request

SCHEMA = "eagle_pangu.trace/4"

log = get_logger(__name__)


class TraceFile:
    """Appends to one file, shared by all requests of the process.

    A file that can no longer be written stops the trace, said once in the log; it never stops a request.

    Args:
        path: Made with its folders when missing.
        with_text: Write prompt ids and stop strings too.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, with_text: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.with_text = with_text
        self._file = path.open("a", encoding="utf-8")
        self._failed = False
        self._logger = structlog.wrap_logger(
            structlog.WriteLogger(self._file),
            processors=[structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"), _render],
            wrapper_class=structlog.BoundLogger,
        ).bind()

    def write(self, event: str, **fields: Any) -> None:
        """One line, flushed."""
        if self._failed:
            return
        try:
            self._logger.info(event, **fields)
        except OSError as error:
            self._failed = True
            log.error("trace stopped", reason=str(error))

    def close(self) -> None:
        """Release the file."""
        self._file.close()


class AnswerTrace:
    """The lines of one answer to a request; without a file it does nothing.

    Args:
        file: to write to.
        request: that the answer is to.
        answer: which one.

    Attributes:
        epoch: Of the current teacher session, written into each line.
    """

    def __init__(self, file: TraceFile | None, request: Request, answer: int) -> None:
        self.epoch = 0
        self._file = file
        self._request = request
        self._answer = answer
        self._opened = False

    @property
    def enabled(self) -> bool:
        """Somebody reads."""
        return self._file is not None

    def open(self, first_token_id: int, counters: Counters) -> None:
        """The first token is decided."""
        if self._file is None:
            return
        request = self._request
        self._opened = True
        text: dict[str, Any] = {}
        if self._file.with_text:
            text = {"prompt_token_ids": list(request.prompt_token_ids), "stop": list(request.stop)}
        if request.traceparent:
            text["traceparent"] = request.traceparent
        self._write(
            "open",
            drafter=request.drafter,
            budget={"rows": request.rows, "depth": request.depth},
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
            end_token_ids=list(request.sampling.end_token_ids),
            sampling=asdict(request.sampling),
            first_token_id=first_token_id,
            prefill_us=counters.prefill_us,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            **text,
        )

    def round(
        self,
        *,
        number: int,
        committed_length: int,
        tree: TokenTree,
        accepted_rows: Sequence[int],
        next_token_id: int,
        kept: int,
        fallback: str | None,
        load_limited: bool,
        reopened: bool,
        batch: Batch,
        times: PartTimes,
        round_us: int,
    ) -> None:
        """One round has been decided and cut."""
        if self._file is None:
            return
        parts = {name.removesuffix("_us"): value for name, value in times._asdict().items()}
        self._write(
            "round",
            round=number,
            committed_length=committed_length,
            tree={
                "token_ids": tree.token_ids.tolist(),
                "parents": tree.parents.tolist(),
                "scores": None if tree.scores is None else tree.scores.tolist(),
            },
            accepted_rows=list(accepted_rows),
            next_token_id=next_token_id,
            kept=kept,
            commit=min(kept, len(accepted_rows)),
            fallback=fallback,
            load_limited=load_limited,
            reopened=reopened,
            batch=batch._asdict(),
            times_us={**parts, "orchestrator": max(0, round_us - sum(times))},
        )

    def end(self, status: str, finish_reason: str | None, token_ids: Sequence[int], counters: Counters) -> None:
        """The answer is over, whichever way."""
        if self._file is None or not self._opened:
            return
        self._write(
            "end",
            status=status,
            finish_reason=finish_reason,
            token_ids=list(token_ids),
            rounds=counters.rounds,
            drafted=counters.drafted,
            accepted=counters.accepted,
            fallback_rounds=counters.fallback_rounds,
            fallback_reasons=list(counters.fallback_reasons),
            load_limited_rounds=counters.load_limited_rounds,
        )

    def _write(self, event: str, **fields: Any) -> None:
        assert self._file is not None
        self._file.write(event, request_id=self._request.request_id, answer=self._answer, epoch=self.epoch, **fields)


def _render(_logger: object, _method: str, event: structlog.typing.EventDict) -> str:
    head = {"schema": SCHEMA, "event": event.pop("event"), "time": event.pop("time")}
    return json.dumps({**head, **event}, separators=(",", ":"), ensure_ascii=False)
