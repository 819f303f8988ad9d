"""Who is in the next forward pass, and the pass: the `Batcher` of the teacher.

Trees come first, in order of arrival, up to the rows of a step; chunks of prompts take what is left of it, and while
one waits never less than their share, so that neither keeps the other waiting for ever. All of it on the worker's
thread, but what is said to be read from others. It knows neither messages nor what sessions do with their logits.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

from eagle_pangu.serving.batch_worker import Chosen, Plan, Waiting
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.segment import Segment
from teacher_service.advice import Advice
from teacher_service.batching import Batching, Computed
from teacher_service.gathering import Gathering
from teacher_service.passes import Passed, PassShare, PassStatistics, Reading, Request

PROMPT_SHARE = 1 / 4
"""Of a step's rows, that prompts get while some wait, whatever trees do."""


class Scheduler:
    """See the module.

    Args:
        batching: how trees share a pass.
        step_rows: most rows of a pass.
        chunk: most of them that are of prompts.

    Attributes:
        statistics: of the passes.
        sessions: that share the model now, those that read their prompts left out; from any thread.
    """

    def __init__(self, batching: Batching, step_rows: int, chunk: int) -> None:
        self.statistics = PassStatistics()
        self.sessions = 0
        self._batching = batching
        self._step_rows = step_rows
        self._chunk = min(chunk, step_rows)
        self._share = min(self._chunk, max(1, int(step_rows * PROMPT_SHARE)))
        self._gathering = Gathering()
        self._trees_were_last = False

    def begin(self, engine: Engine, advice: Advice) -> None:
        """The model is there; only now may anything be asked for.

        Args:
            engine: computes.
            advice: is told what passes cost, and knows it.
        """
        self._engine, self._advice = engine, advice

    def forget(self, session: Hashable) -> None:
        """A session has ended."""
        self._gathering.forget(session)

    def plan(self, waiting: Sequence[Waiting[Request]], now: float) -> Plan[Request]:
        """See `Batcher`."""
        trees: list[Waiting[Segment]] = []
        prompts: list[Waiting[Reading]] = []
        for each in waiting:
            if isinstance(each.request, Segment):
                trees.append(each)  # type: ignore[arg-type]  # what it holds was looked at
                self._gathering.come(each.session, each.since)
            else:
                prompts.append(each)  # type: ignore[arg-type]
        chosen = self._choose(trees, prompts)
        if len(chosen) == len(waiting):  # else it is full, or of one kind: more would not be in it
            patience = self._gathering.patience(len(chosen), self._advice.fixed_seconds, now)
            if patience > 0:
                return Plan((), patience)
        return Plan(chosen)

    def compute(self, chosen: Sequence[Chosen[Request]]) -> list[Passed]:
        """See `Batcher`."""
        self._gathering.begin()
        segments = [each.request if isinstance(each.request, Segment) else each.request.chunk(1) for each in chosen]
        started = time.monotonic()
        computed = self._pass(segments)
        self._engine.device.synchronize()
        ended = time.monotonic()
        share = PassShare(len(segments), computed.computed_rows, computed.realign_us)
        for each, segment in zip(chosen, segments, strict=True):
            if not segment.final:
                self._gathering.go(each.waiting.session, ended)
        self.sessions = self._gathering.present(ended)
        self._trees_were_last = not segments[0].final
        self.statistics.add(
            share,
            rows=sum(segment.rows for segment in segments),
            seconds=ended - started,
            longest_wait=started - min(each.waiting.since for each in chosen),
        )
        if not any(segment.final for segment in segments):
            self._advice.observe_pass(computed.computed_rows, ended - started)
        return [Passed(result, share) for result in computed.results]

    def _pass(self, segments: Sequence[Segment]) -> Computed:
        if self._batching.mixes_prompts or not segments[0].final:
            return self._batching.compute(self._engine, segments)
        results = self._engine.run(segments)
        return Computed(results, sum(result.rows for result in results), 0)

    def _choose(self, trees: Sequence[Waiting[Segment]], prompts: Sequence[Waiting[Reading]]) -> list[Chosen[Request]]:
        if not prompts:
            return self._of_trees(trees, self._step_rows)
        if not trees:
            return self._of_prompts(prompts, self._chunk)
        if not self._batching.mixes_prompts:
            prompts_turn = self._trees_were_last
            return self._of_prompts(prompts, self._chunk) if prompts_turn else self._of_trees(trees, self._step_rows)
        chosen = self._of_trees(trees, self._step_rows - self._share)
        # A beginning of them: the only way that mixes overtakes nobody.
        left = self._step_rows - sum(each.request.rows for each in trees[: len(chosen)])
        return [*chosen, *self._of_prompts(prompts, min(self._chunk, max(self._share, left)))]

    def _of_trees(self, trees: Sequence[Waiting[Segment]], rows: int) -> list[Chosen[Request]]:
        return [Chosen(each, each.request) for each in self._batching.choose(trees, rows)]

    def _of_prompts(self, prompts: Sequence[Waiting[Reading]], rows: int) -> list[Chosen[Request]]:
        """The next chunks of the oldest ones, the last of them cut to what is left of `rows`."""
        chosen: list[Chosen[Request]] = []
        request: Request
        for each in prompts:
            prompt = each.request
            if rows <= 0 or any(prompt.waits_for(other.request) for other in prompts):
                continue
            try:
                segment = prompt.chunk(min(prompt.prepare(), rows))
                rows, request = rows - segment.rows, segment
            except Exception:  # noqa: BLE001 -- it fails again in the pass, and there for its own session alone
                request = prompt
            chosen.append(Chosen(each, request))
        return chosen
