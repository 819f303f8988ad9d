"""From plain values to the messages of generation.proto; the only module here that writes one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.answers import Answers
from orchestrator.counters import Counters
from orchestrator.generation import Generation
from orchestrator.limits import Limits
from orchestrator.model import ServedModel
from orchestrator.requests import TEACHER_ONLY
from orchestrator.rounds import Emission
from orchestrator.stops import End
from orchestrator.token_bytes import TokenBytes
from protos.v1 import generation_pb2, model_pb2, sampling_pb2, tree_pb2

FINISH_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}


def whole_answer(answers: Answers, emissions: Sequence[Sequence[Emission]]) -> generation_pb2.GenerateResponse:
    """The unary answer, from all emissions of each answer."""
    request, first = answers.request, answers.generations[0]
    whole = generation_pb2.GenerateResponse(
        request_id=request.request_id,
        usage=_usage(answers),
        numerics=_numerics(answers),
        prompt_token_ids=_echoed_ids(answers),
        prompt_tokens=map(answers.token_bytes.of, _echoed_ids(answers)),
        prompt_logprobs=_prompt_logprobs(answers, emissions[0][0]),
    )
    _fill(whole, first, emissions[0], answers.token_bytes)
    for generation, its_emissions in zip(answers.generations[1:], emissions[1:], strict=True):
        _fill(whole.further_answers.add(), generation, its_emissions, answers.token_bytes)
    return whole


class Deltas:
    """The messages of one stream, in order: the first and the last of them hold more than the others.

    Args:
        answers: of which they are.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._begun = False
        self._going_on = len(answers.generations)

    def message(self, index: int, emission: Emission) -> generation_pb2.GenerateStreamResponse:
        """The next one.

        Args:
            index: of the answer that the emission adds to.
            emission: what it adds.
        """
        answers = self._answers
        generation, request = answers.generations[index], answers.request
        message = generation_pb2.GenerateStreamResponse(
            request_id=request.request_id,
            index=index,
            text="".join(emission.pieces),
            token_ids=emission.token_ids,
            margins=emission.margins if request.return_margins else [],
            logprobs=_named(emission.token_ids, emission.logprobs, answers.token_bytes),
        )
        if not self._begun:
            self._begun = True
            message.prompt_token_ids.extend(_echoed_ids(answers))
            message.prompt_tokens.extend(map(answers.token_bytes.of, _echoed_ids(answers)))
            message.prompt_logprobs.extend(_prompt_logprobs(answers, emission))
        if emission.end is not None:
            self._going_on -= 1
            _fill_end(message, generation, emission.end)
        if not self._going_on:
            message.usage.CopyFrom(_usage(answers))
            message.numerics.CopyFrom(_numerics(answers))
        return message


def model_info(
    model: ServedModel, limits: Limits, drafters: Sequence[str], default_drafter: str
) -> generation_pb2.GetModelInfoResponse:
    """What requests may ask; the context limit is the one that applies here."""
    teacher = model_pb2.ModelFingerprint()
    teacher.CopyFrom(model.fingerprint)
    teacher.context_limit = limits.context_limit
    return generation_pb2.GetModelInfoResponse(
        teacher=teacher,
        numerics=model.numerics,
        drafters=[*drafters, TEACHER_ONLY],
        default_drafter=default_drafter,
        default_budget=tree_pb2.TreeBudget(rows=limits.default_rows, depth=limits.default_depth),
        max_budget=tree_pb2.TreeBudget(rows=limits.rows, depth=limits.depth),
        default_max_tokens=limits.default_max_tokens,
        max_tokens_limit=limits.max_tokens,
        n_limit=limits.answers,
    )


def _fill(
    message: generation_pb2.GenerateResponse | generation_pb2.Answer,
    generation: Generation,
    emissions: Sequence[Emission],
    token_bytes: TokenBytes,
) -> None:
    """Write one whole answer."""
    end = emissions[-1].end
    assert end is not None
    message.text = "".join(piece for emission in emissions for piece in emission.pieces)
    message.token_ids.extend(generation.answer)
    if generation.request.return_margins:
        message.margins.extend(margin for emission in emissions for margin in emission.margins)
    logprobs = [entry for emission in emissions for entry in emission.logprobs]
    message.logprobs.extend(_named(generation.answer, logprobs, token_bytes))
    _fill_end(message, generation, end)


def _fill_end(
    message: generation_pb2.GenerateResponse | generation_pb2.Answer | generation_pb2.GenerateStreamResponse,
    generation: Generation,
    end: End,
) -> None:
    """Write what is known of an answer once it is over."""
    message.finish_reason = FINISH_REASONS[end.finish_reason]
    message.matched_stop = end.matched_stop
    message.speculation.CopyFrom(_speculation(generation.counters, len(generation.answer)))
    sampling = generation.request.sampling
    if not sampling.is_greedy:
        message.seed = sampling.seed


def _echoed_ids(answers: Answers) -> Sequence[int]:
    return () if answers.request.echo is None else answers.request.prompt_token_ids


def _prompt_logprobs(answers: Answers, first: Emission) -> Sequence[sampling_pb2.TokenLogprobs]:
    return _named(answers.request.prompt_token_ids[1:], first.prompt_logprobs, answers.token_bytes)


def _named(
    token_ids: Iterable[int], logprobs: Sequence[sampling_pb2.TokenLogprobs], token_bytes: TokenBytes
) -> Sequence[sampling_pb2.TokenLogprobs]:
    """Log-probabilities, where there are any, with the bytes of their tokens."""
    if logprobs:
        token_bytes.fill(token_ids, logprobs)
    return logprobs


def _usage(answers: Answers) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=len(answers.request.prompt_token_ids),
        completion_tokens=sum(len(generation.answer) for generation in answers.generations),
        cached_prompt_tokens=answers.generations[0].counters.cached_prompt_tokens,
    )


def _numerics(answers: Answers) -> model_pb2.TeacherNumerics:
    """How the answers were computed; where teachers differ, one that gives a reason for doing less than it should."""
    found = [generation.numerics for generation in answers.generations]
    reasons = (numerics for numerics in found if numerics.degraded_reason or numerics.attention_fallback_reason)
    return next(reasons, found[0])


def _speculation(counters: Counters, emitted: int) -> generation_pb2.SpeculationStats:
    times = counters.times
    return generation_pb2.SpeculationStats(
        drafter=counters.drafter,
        rounds=counters.rounds,
        drafted=counters.drafted,
        accepted=counters.accepted,
        tokens_per_round=counters.tokens_per_round(emitted),
        fallback_rounds=counters.fallback_rounds,
        fallback_reasons=counters.fallback_reasons,
        load_limited_rounds=counters.load_limited_rounds,
        timings=generation_pb2.RoundTimings(
            **times._asdict(),
            orchestrator_us=max(0, counters.rounds_us - sum(times)),
            rounds_us=counters.rounds_us,
            prefill_us=counters.prefill_us,
        ),
    )
