"""From plain values to the messages of generation.proto; the only module here that writes one."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.counters import Counters
from orchestrator.generation import Generation
from orchestrator.model import ServedModel
from orchestrator.requests import TEACHER_ONLY
from orchestrator.rounds import Emission
from orchestrator.validation import Limits
from protos.v1 import generation_pb2, model_pb2, tree_pb2

FINISH_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}


def whole_answer(generation: Generation, emissions: Sequence[Emission]) -> generation_pb2.GenerateResponse:
    """The unary answer, from all emissions of a request."""
    end = emissions[-1].end
    assert end is not None
    return generation_pb2.GenerateResponse(
        request_id=generation.request.request_id,
        text="".join(emission.text for emission in emissions),
        token_ids=generation.answer,
        finish_reason=FINISH_REASONS[end.finish_reason],
        matched_stop=end.matched_stop,
        usage=_usage(generation),
        speculation=_speculation(generation.counters, len(generation.answer)),
        numerics=generation.numerics,
        margins=[margin for emission in emissions for margin in emission.margins]
        if generation.request.return_margins
        else [],
        seed=_seed(generation),
        logprobs=[entry for emission in emissions for entry in emission.logprobs],
    )


def delta(generation: Generation, emission: Emission) -> generation_pb2.GenerateStreamResponse:
    """One message of a stream."""
    message = generation_pb2.GenerateStreamResponse(
        request_id=generation.request.request_id,
        text=emission.text,
        token_ids=emission.token_ids,
        margins=emission.margins if generation.request.return_margins else [],
        logprobs=emission.logprobs,
    )
    if emission.end is not None:
        message.finish_reason = FINISH_REASONS[emission.end.finish_reason]
        message.matched_stop = emission.end.matched_stop
        message.usage.CopyFrom(_usage(generation))
        message.speculation.CopyFrom(_speculation(generation.counters, len(generation.answer)))
        message.numerics.CopyFrom(generation.numerics)
        seed = _seed(generation)
        if seed is not None:
            message.seed = seed
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
    )


def _seed(generation: Generation) -> int | None:
    sampling = generation.request.sampling
    return None if sampling.is_greedy else sampling.seed


def _usage(generation: Generation) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=len(generation.request.prompt_token_ids), completion_tokens=len(generation.answer)
    )


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
        timings=generation_pb2.RoundTimings(
            **times._asdict(),
            orchestrator_us=max(0, counters.rounds_us - sum(times)),
            rounds_us=counters.rounds_us,
            prefill_us=counters.prefill_us,
        ),
    )
