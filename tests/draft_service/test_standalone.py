"""The standalone drafter against plain transformers, on tiny random models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_service.drafters.base import Budget
from draft_service.drafters.standalone import (
    CATCH_UP_ROWS,
    StandaloneDrafter,
    load_standalone,
)
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.checkpoints import load_checkpoint
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.engine import Arrange, Engine, ForwardResult
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.tree import TokenTree
from tests.draft_service.passes import Alone
from tests.models import VOCAB_SIZE, tiny_llama

CONTEXT = 160
PROMPT = np.random.default_rng(0).integers(0, 256, 40).tolist()
pytestmark = pytest.mark.usefixtures("one_thread")
BUDGET = Budget(rows=12, depth=5)


class RecordingEngine(Engine):
    """Counts the rows of every pass."""

    passes: list[tuple[str, int]]

    def run(self, segments: Sequence[Segment], arrange: Arrange | None = None) -> list[ForwardResult]:
        for segment in segments:
            kind = "read" if segment.final else "level" if segment.first_row else "root"
            self.passes.append((kind, segment.rows))
        return super().run(segments, arrange)


@pytest.fixture(scope="module")
def checkpoint_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of this scale are sure of themselves, so that trees go deep."""
    directory = tmp_path_factory.mktemp("draft")
    return tiny_llama(directory, max_position_embeddings=CONTEXT, num_hidden_layers=2, initializer_range=0.6)


@pytest.fixture(scope="module")
def model(checkpoint_directory: Path) -> PreTrainedModel:
    """Plain transformers: the oracle."""
    return AutoModelForCausalLM.from_pretrained(checkpoint_directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def loaded(checkpoint_directory: Path) -> RecordingEngine:
    device = get_device("cpu")
    checkpoint = load_checkpoint(checkpoint_directory, torch.float32, device)
    return RecordingEngine(checkpoint, device, numerics="free", slot_capacity=CONTEXT, max_rows=64, chunk=16)


@pytest.fixture
def engine(loaded: RecordingEngine) -> Iterator[RecordingEngine]:
    loaded.passes = []
    return loaded


def open_session(engine: Engine, tokens: list[int], width: int = 4) -> Alone:
    drafter = StandaloneDrafter(engine, width)
    return Alone(drafter, drafter.open(tokens, BUDGET))


def log_probs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab_size] of the next token after each."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), dim=-1)


def path(tree: TokenTree, row: int) -> list[int]:
    return tree.token_ids[tree.ancestors[row, 1 : tree.depth[row] + 1]].tolist()


def assert_same(tree: TokenTree, other: TokenTree) -> None:
    assert tree.token_ids.tolist() == other.token_ids.tolist()
    assert tree.parents.tolist() == other.parents.tolist()
    np.testing.assert_allclose(tree.scores, other.scores, atol=1e-4)


def test_with_one_child_a_node_the_tree_is_the_models_greedy_continuation(
    engine: RecordingEngine, model: PreTrainedModel
) -> None:
    tokens = list(PROMPT)
    for _ in range(8):
        tokens.append(int(log_probs(model, tokens)[-1].argmax()))
    tree = open_session(engine, PROMPT, width=1).propose(Budget(rows=8, depth=8))
    assert tree.token_ids.tolist() == tokens[len(PROMPT) - 1 :]
    assert tree.parents.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]


def test_scores_are_the_sums_of_the_models_own_log_probabilities(
    engine: RecordingEngine, model: PreTrainedModel
) -> None:
    tree = open_session(engine, PROMPT).propose(BUDGET)
    tree.validate(vocab_size=VOCAB_SIZE, max_rows=BUDGET.rows, max_depth=BUDGET.depth)
    assert tree.drafted == BUDGET.rows
    assert tree.scores is not None
    for row in range(1, tree.rows):
        drafted = path(tree, row)
        steps = log_probs(model, [*PROMPT, *drafted])[len(PROMPT) - 1 : -1]
        assert tree.scores[row] == pytest.approx(float(steps[range(len(drafted)), drafted].sum()), abs=1e-4)


def test_no_better_row_is_left_out_at_the_first_level(engine: RecordingEngine, model: PreTrainedModel) -> None:
    tree = open_session(engine, PROMPT).propose(Budget(rows=4, depth=1))
    best = log_probs(model, PROMPT)[-1].topk(4).indices.tolist()
    assert tree.token_ids[1:].tolist() == best


@pytest.mark.parametrize("accepted", range(BUDGET.depth + 1))
def test_after_any_accepted_length_the_next_tree_is_that_of_a_fresh_session(
    engine: RecordingEngine, accepted: int
) -> None:
    session = open_session(engine, PROMPT)
    tree = session.propose(BUDGET)
    deepest = int(tree.depth.argmax())
    assert tree.depth[deepest] == BUDGET.depth
    tokens = list(PROMPT)
    for appended in ([*path(tree, deepest)[:accepted], 7], [3]):  # a second round stands on what the first committed
        session.extend(appended)
        tokens.extend(appended)
        assert_same(session.propose(BUDGET), open_session(engine, tokens).propose(BUDGET))


def test_every_row_of_a_tree_may_be_the_accepted_one(engine: RecordingEngine) -> None:
    rows = open_session(engine, PROMPT).propose(BUDGET).rows
    for row in range(1, rows):
        session = open_session(engine, PROMPT)
        tree = session.propose(BUDGET)
        session.extend([*path(tree, row), 7])
        fresh = open_session(engine, [*PROMPT, *path(tree, row), 7])
        assert_same(session.propose(BUDGET), fresh.propose(BUDGET))


def test_tokens_decided_without_a_draft_are_caught_up_with(engine: RecordingEngine) -> None:
    session = open_session(engine, PROMPT)
    session.propose(BUDGET)
    tokens = list(PROMPT)
    for count in (1, CATCH_UP_ROWS, CATCH_UP_ROWS + 1, 30):
        session.extend(list(range(count)))
        tokens.extend(range(count))
        assert_same(session.propose(BUDGET), open_session(engine, tokens).propose(BUDGET))


def test_accepted_rows_of_the_branch_are_not_computed_again(engine: RecordingEngine) -> None:
    session = open_session(engine, PROMPT)
    tree = session.propose(BUDGET)
    deepest = int(tree.depth.argmax())
    assert tree.depth[deepest] == BUDGET.depth
    session.extend([*path(tree, deepest), 7])
    engine.passes.clear()
    session.propose(BUDGET)
    # A row of the last level was never expanded, so it is read now, with the new root: two rows.
    assert engine.passes[0] == ("root", 2)
    assert all(kind == "level" for kind, _ in engine.passes[1:])


def test_the_prompt_is_read_in_chunks_before_the_first_round(engine: RecordingEngine) -> None:
    session = open_session(engine, PROMPT)
    assert engine.passes == []
    session.advance()
    assert engine.passes == [("read", 16), ("read", 16)]
    session.propose(Budget(rows=1, depth=1))
    assert engine.passes[2:] == [("root", 8)]


def test_asking_twice_gives_the_same_tree(engine: RecordingEngine) -> None:
    session = open_session(engine, PROMPT)
    assert_same(session.propose(BUDGET), session.propose(BUDGET))


@pytest.mark.parametrize("budget", [Budget(0, 5), Budget(5, 0)])
def test_an_empty_budget_gives_the_root_alone_and_costs_no_pass(engine: RecordingEngine, budget: Budget) -> None:
    tree = open_session(engine, PROMPT).propose(budget)
    assert tree.token_ids.tolist() == [PROMPT[-1]]
    assert engine.passes == []


def test_a_budget_of_one_row_costs_one_pass_once_the_rest_is_hopeless(engine: RecordingEngine) -> None:
    session = open_session(engine, PROMPT)
    tree = session.propose(Budget(rows=1, depth=5))
    assert tree.drafted == 1
    assert sum(rows for kind, rows in engine.passes if kind == "level") <= 4


def test_no_row_passes_the_context_limit_and_past_it_the_root_stands_alone(engine: RecordingEngine) -> None:
    session, length = open_session(engine, PROMPT, width=1), len(PROMPT)
    while length < CONTEXT + 5:
        assert session.propose(BUDGET).drafted == max(0, min(BUDGET.depth, CONTEXT - length))
        session.extend([1, 2, 3])
        length += 3


def test_a_slot_too_small_for_the_branch_ends_the_tree_early(checkpoint_directory: Path) -> None:
    device = get_device("cpu")
    checkpoint = load_checkpoint(checkpoint_directory, torch.float32, device)
    small = Engine(checkpoint, device, numerics="free", slot_capacity=64, max_rows=64, chunk=16)
    drafter = StandaloneDrafter(small, 4)
    assert drafter.context_limit == 64
    session = Alone(drafter, drafter.open(PROMPT, BUDGET))
    for length in range(len(PROMPT), 70):
        tree = session.propose(BUDGET)
        tree.validate(vocab_size=VOCAB_SIZE, max_rows=BUDGET.rows, max_depth=BUDGET.depth)
        assert (tree.drafted > 0) == (length < 64)
        session.extend([5])


def test_the_configured_model_is_loaded_and_says_who_it_is(checkpoint_directory: Path) -> None:
    settings = DraftSettings(model=str(checkpoint_directory), dtype="float32", slot_capacity=512)
    drafter = load_standalone(settings)
    assert drafter.context_limit == CONTEXT
    assert drafter.identity.vocab_size == VOCAB_SIZE
    assert len(drafter.identity.tokenizer_sha256) == 64
