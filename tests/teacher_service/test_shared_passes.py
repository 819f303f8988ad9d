"""Sessions in shared passes on a real engine, a tiny random Llama: each gets the bits that it gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from eagle_pangu.serving.batch_worker import Waiting
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.parameters import SamplingParameters
from eagle_pangu.speculation.tree import TokenTree
from teacher_service import main
from teacher_service.advice import Advice
from teacher_service.batching.ragged import Ragged
from teacher_service.opening import Limits
from teacher_service.prefix_cache import PrefixCache
from teacher_service.round import Round
from teacher_service.scheduler import Scheduler
from teacher_service.session import Session, Steps
from tests.models import VOCAB_SIZE, tiny_llama
from tests.teacher_service.openings import opening

LIMITS = Limits(vocab_size=VOCAB_SIZE, context_limit=512, slot_capacity=256, max_rows=8, max_depth=8)
ROUNDS = 6


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request, tmp_path_factory):
    directory = tiny_llama(tmp_path_factory.mktemp("tiny"))
    settings = TeacherSettings(
        model=str(directory), dtype=request.param, numerics="bitwise", slot_capacity=256, max_rows=8, threads=1
    )
    return main.build_engine(settings)


class Talk:
    """A session of a prompt and some rounds on random trees; `seen` holds all that it was given, to the bit."""

    def __init__(self, engine, seed: int, cache: PrefixCache) -> None:
        rng = self._random = random.Random(seed)
        prompt = np.array([rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 5, 40, 90]))])
        wishes = {
            "want_features": rng.random() < 0.5,
            "logprobs": rng.choice([None, 2]),
            "prompt_logprobs": rng.choice([None, None, 1]),
            "sampling": SamplingParameters(temperature=rng.choice([0.0, 0.9]), seed=seed),
        }
        self.seen: list[object] = []
        self.session = Session(engine, opening(prompt=prompt, **wishes), LIMITS, 32, cache)
        self._features: list[np.ndarray] = []

    def steps(self) -> Steps[None]:
        chunks = []
        yield from self.session.prefill(chunks.append)
        # How a prompt was cut into chunks is the scheduler's affair; what they hold together is not.
        for kind in ("features", "prompt_logprobs"):
            parts = [getattr(chunk, kind) for chunk in chunks if getattr(chunk, kind) is not None]
            self.seen.append([part[0] for part in parts][:1])
            if kind == "features":
                self.seen.append(b"".join(part.bits.tobytes() for part in parts))
            else:
                self.seen.append([b"".join(part.found[n].tobytes() for part in parts) for n in range(3)])
        first = chunks[-1].first_token
        self._see(first.token_id, first.margin, first.logprobs)
        root, committed, commit = first.token_id, len(self.session.opening.prompt), 0
        for number in range(1, ROUNDS + 1):
            tree = self._tree(root)
            message = Round(4, number, committed, commit, tree)
            assert self.session.check(message) is None
            self.session.commit(message)
            verdict = yield from self.session.verify(message)
            self._see(verdict.accepted_rows, verdict.next_token_id, verdict.margins.tobytes(), verdict.logprobs)
            self._see(None if verdict.features is None else verdict.features.bits.tobytes())
            root, commit = verdict.next_token_id, len(verdict.accepted_rows)
            committed += commit + 1

    def _see(self, *what: object) -> None:
        for each in what:
            self.seen.append([part.tobytes() for part in each] if hasattr(each, "_asdict") else each)

    def _tree(self, root: int) -> TokenTree:
        """Of random shape, and of few tokens so that some are accepted."""
        rows = self._random.randrange(9)
        parents = [0] + [self._random.randrange(row) for row in range(1, rows + 1)]
        tokens = [root] + [(7 * row + self._random.randrange(3)) % VOCAB_SIZE for row in range(1, rows + 1)]
        return TokenTree.build(tokens, parents)


def run(engine, talks: list[Talk], arrivals: Callable[[int], int], step_rows: int) -> list[int]:
    """All of them to their ends; after n passes, `arrivals(n)` of them have come. Sessions of each pass."""
    scheduler = Scheduler(Ragged(), step_rows, 32)
    scheduler.begin(engine, Advice(()))
    steps = {talk: talk.steps() for talk in talks}
    waiting: dict[Talk, Waiting] = {}
    come, passes = 0, []
    while waiting or come < len(talks):
        due = max(arrivals(len(passes)), come if waiting else come + 1)
        for talk in talks[come:due]:
            waiting[talk] = Waiting(talk, next(steps[talk]), float(len(passes)))
        come = due
        chosen = scheduler.plan(list(waiting.values()), float(len(passes))).chosen
        passes.append(len(chosen))
        for each, passed in zip(chosen, scheduler.compute(chosen), strict=True):
            talk = each.waiting.session
            del waiting[talk]
            try:
                waiting[talk] = Waiting(talk, steps[talk].send(passed), float(len(passes)))
            except StopIteration:
                talk.session.close()
    return passes


@pytest.mark.parametrize("step_rows", [12, 256])
@pytest.mark.parametrize("seed", range(3))
def test_a_mix_of_trees_and_chunks_gives_each_session_the_bits_that_it_gets_alone(engine, seed, step_rows):
    seeds = [10 * seed + n for n in range(7)]
    alone = []
    for each in seeds:
        talk = Talk(engine, each, PrefixCache(0))
        run(engine, [talk], lambda passes: 1, 256)
        alone.append(talk.seen)
    cache = PrefixCache(1000)
    together = [Talk(engine, each, cache) for each in seeds]
    passes = run(engine, together, lambda passes: 2 + passes // 2, step_rows)
    assert max(passes) > 1
    assert [talk.seen for talk in together] == alone


def test_sessions_of_one_prompt_that_come_at_once_read_it_once(engine):
    cache = PrefixCache(1000)
    talks = [Talk(engine, 1, cache) for _ in range(4)]
    prompt = np.arange(90) % VOCAB_SIZE
    for talk in talks:
        talk.session = Session(engine, opening(prompt=prompt), LIMITS, 32, cache)
    run(engine, talks, lambda passes: 4, 256)
    assert [talk.session.cached_tokens for talk in talks] == [0, 89, 89, 89]
    assert all(talk.seen == talks[0].seen for talk in talks)
