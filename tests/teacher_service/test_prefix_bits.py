"""Prefix reuse on a real engine, a tiny random Llama: a warm start gives the bits of a cold one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_features
from protos.v1 import sampling_pb2
from teacher_service import main
from teacher_service.opening import Limits
from teacher_service.prefix_cache import PrefixCache
from teacher_service.session import Session
from tests.models import tiny_llama
from tests.teacher_service.fakes import chunks_of, root_only
from tests.teacher_service.openings import opening
from tests.teacher_service.peer import serving
from tests.teacher_service.test_real_engine import PROMPT

TOKENS = 20
START = PROMPT * 6
LIMITS = Limits(vocab_size=260, context_limit=512, slot_capacity=256, max_rows=8, max_depth=8)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request, tmp_path_factory):
    directory = tiny_llama(tmp_path_factory.mktemp("tiny"))
    settings = TeacherSettings(
        model=str(directory), dtype=request.param, numerics="bitwise", slot_capacity=256, max_rows=8
    )
    return main.build_engine(settings)


async def answers(engine, draft, **settings) -> tuple[list, list[int], list[int]]:
    """Three sampled answers, the prompt of each being the ones before: the second starts from one that still runs.

    Returns:
        what must be equal (ids, and bits of features, margin and log-probabilities of the prompt's last token); the
        tokens reused; the whole text at the end.
    """
    sampling = sampling_pb2.Sampling(temperature=0.8, repetition_penalty=1.2, seed=11)
    width, seen, cached, history = engine.checkpoint.feature_width, [], [], list(START)
    async with serving(engine, slot_capacity=256, slots=4, **settings) as served:
        for running in (True, False, False):
            session = served.session()
            found = await session.decode(history, TOKENS, draft, sampling=sampling, want_features=True, logprobs=2)
            bits = np.concatenate([decode_features(part, width) for part in session.features])
            prefilled = session.prefilled
            cached.append(prefilled.cached_tokens)
            seen.append((found, bits.tobytes(), prefilled.margin, prefilled.logprobs.SerializeToString()))
            if not running:
                await session.close()
            history += found
    return seen, cached, history


@pytest.mark.parametrize("chunk", [7, 256])
async def test_ids_features_and_logits_of_a_warm_start_are_those_of_a_cold_one_to_the_bit(engine, chunk):
    cold, none, text = await answers(engine, root_only, prefill_chunk=256, prefix_cache_tokens=0)

    def draft(history: list[int]) -> TokenTree:
        """The right path, four rows deep, between the rows of a wrong one: what is committed is gathered from both."""
        good = (text + [0] * 4)[len(history) :][:4]
        wrong = (good[0] + 7) % 260
        return TokenTree.build([history[-1], wrong, good[0], wrong, *good[1:]], [0, 0, 0, 1, 2, 4, 5])

    warm, cached, _ = await answers(engine, draft, prefill_chunk=chunk)
    assert warm == cold
    assert none == [0, 0, 0]
    assert cached[0] == 0
    assert len(START) + 10 < cached[1] < len(START) + TOKENS < cached[2]  # answers included


@pytest.mark.parametrize("ended", [False, True])
def test_only_the_columns_that_are_reused_are_copied(engine, ended):
    """What lies behind them is poisoned, in the source and in the slot that starts from it."""
    cache, prompt = PrefixCache(1000), np.array(START)
    first = Session(engine, opening(prompt=prompt), LIMITS, 100, cache)
    next(chunks_of(engine, first))
    _poison(first._slot, from_column=50)
    if ended:
        first.close()
    other = np.concatenate([prompt[:50], prompt[:9]])
    later, cold = (Session(engine, opening(prompt=other), LIMITS, 100, each) for each in (cache, PrefixCache(0)))
    opened = engine.open_slot

    def poisoned(capacity: int):
        slot = opened(capacity)
        _poison(slot, from_column=0)
        return slot

    engine.open_slot = poisoned
    try:
        warm, whole = (next(chunks_of(engine, session)) for session in (later, cold))
        assert warm.first_token == whole.first_token
    finally:
        engine.open_slot = opened
    assert later.cached_tokens == 50
    for side in ("keys", "values"):
        warm_kv, cold_kv = (getattr(session._slot._main, side)[:, :, : len(other)] for session in (later, cold))
        assert torch.equal(warm_kv, cold_kv)


def _poison(slot, from_column: int) -> None:
    slot._main.keys[:, :, from_column:] = float("nan")
    slot._main.values[:, :, from_column:] = float("nan")


def test_a_session_waits_for_one_that_reads_its_prompt_unless_that_lacks_the_features_it_needs(engine):
    cache, prompt = PrefixCache(1000), np.array(START)

    def session(*, want_features: bool) -> Session:
        return Session(engine, opening(prompt=prompt, want_features=want_features), LIMITS, 100, cache)

    plain = session(want_features=False)
    plain.prepare()
    assert session(want_features=False).waits_for(plain)
    assert not session(want_features=True).waits_for(plain)
    with_features = session(want_features=True)
    with_features.prepare()
    assert session(want_features=True).waits_for(with_features)
    assert not plain.waits_for(with_features)
