"""A GenerationService whose answers a test writes down: a real gRPC server, no model behind it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import grpc

from protos.v1 import generation_pb2, generation_pb2_grpc, model_pb2

ROUNDS_US = 8000
DELTA_TOKENS = 2


def usual_answer(options: generation_pb2.GenerationOptions) -> list[int]:
    """Ids that depend on the conversation alone, as many as asked for."""
    digest = hashlib.sha256(repr([(m.role, m.content) for m in options.chat.messages]).encode()).digest()
    return [digest[position % len(digest)] for position in range(options.max_tokens)]


@dataclass
class ScriptedOrchestrator(generation_pb2_grpc.GenerationServiceServicer):
    """answer: ids of a request; margin: of every token; rounds_us: of each of its rounds. `requests` holds every
    request seen, in order.

    A stream is one token, then two a delta. silent_after: it says nothing after so many deltas, until `left` is set.
    """

    dtype: str = "float32"
    policy: str = "free"
    answer: Callable[[generation_pb2.GenerationOptions], list[int]] = usual_answer
    margin: float = 2.0
    rounds_us: Callable[[generation_pb2.GenerationOptions], int] = lambda options: ROUNDS_US
    fallback_reason: str = ""
    requests: list[generation_pb2.GenerationOptions] = field(default_factory=list)
    silent_after: int | None = None
    left: threading.Event = field(default_factory=threading.Event)

    def GetModelInfo(  # noqa: N802
        self, request: generation_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> generation_pb2.GetModelInfoResponse:
        return generation_pb2.GetModelInfoResponse(
            teacher=model_pb2.ModelFingerprint(vocab_size=1000), numerics=self._numerics()
        )

    def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> generation_pb2.GenerateResponse:
        options = request.options
        self.requests.append(options)
        if any(message.content == "refuse" for message in options.chat.messages):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "options.chat: too long")
        ids = self.answer(options)
        alone = options.drafter == "none"
        rounds = max(0, len(ids) - 1) if alone else len(ids) // 2
        return generation_pb2.GenerateResponse(
            request_id=options.request_id,
            text=f"answer of {options.drafter}: {ids}",
            token_ids=ids,
            finish_reason=generation_pb2.FINISH_REASON_LENGTH,
            usage=generation_pb2.Usage(prompt_tokens=5, completion_tokens=len(ids)),
            speculation=generation_pb2.SpeculationStats(
                drafter=options.drafter,
                rounds=rounds,
                drafted=0 if alone else 4 * rounds,
                accepted=0 if alone else max(0, len(ids) - 1 - rounds),
                tokens_per_round=(len(ids) - 1) / rounds if rounds else 0,
                fallback_rounds=1 if self.fallback_reason and not alone else 0,
                fallback_reasons=[self.fallback_reason] if self.fallback_reason and not alone else [],
                timings=generation_pb2.RoundTimings(
                    draft_us=0 if alone else 1000 * rounds,
                    wire_us=500 * rounds,
                    teacher_us=6000 * rounds,
                    orchestrator_us=500 * rounds,
                    rounds_us=self.rounds_us(options) * rounds,
                    prefill_us=9000,
                ),
            ),
            numerics=self._numerics(),
            margins=[self.margin] * len(ids),
        )

    def GenerateStream(  # noqa: N802
        self, request: generation_pb2.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateStreamResponse]:
        whole = self.Generate(request, context)
        count = len(whole.token_ids)
        cuts = [0, *range(1, count, DELTA_TOKENS), count]
        for place, (start, end) in enumerate(pairwise(cuts)):
            if place == self.silent_after:
                self.left.wait(timeout=30)  # as long as its caller stays
                return
            yield generation_pb2.GenerateStreamResponse(
                request_id=whole.request_id, token_ids=whole.token_ids[start:end], margins=whole.margins[start:end]
            )
        yield generation_pb2.GenerateStreamResponse(
            request_id=whole.request_id,
            text=whole.text,
            finish_reason=whole.finish_reason,
            usage=whole.usage,
            speculation=whole.speculation,
            numerics=whole.numerics,
        )

    def _numerics(self) -> model_pb2.TeacherNumerics:
        return model_pb2.TeacherNumerics(dtype=self.dtype, policy=self.policy, mode="performance")


@contextmanager
def serving(orchestrator: ScriptedOrchestrator) -> Iterator[str]:
    """Serve while the block runs; yields HOST:PORT. On threads, so that a command with a loop of its own may call."""
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(orchestrator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
