"""The n-gram drafter against its definition."""

import math
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.base import Budget, run_alone
from draft_service.drafters.ngram import CONTINUATION_TRUST, SUFFIX_TRUST, Match, NgramDrafter, NgramIndex
from eagle_pangu.speculation.tree import TokenTree
from tests.draft_service.passes import Alone

SEQUENCES = st.lists(st.integers(0, 3), min_size=1, max_size=60)
BUDGETS = st.builds(Budget, st.integers(0, 24), st.integers(0, 12))


def propose(tokens: list[int], budget: Budget, *, shortest: int = 1, longest: int = 4, matches: int = 8) -> TokenTree:
    drafter = NgramDrafter(shortest, longest, matches)
    return run_alone(drafter, drafter.open(tokens, budget).propose(budget))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """Tokens from the root to each row, the root left out."""
    return {tuple(tree.token_ids[tree.ancestors[row, 1 : tree.depth[row] + 1]].tolist()) for row in range(1, tree.rows)}


def matches_by_definition(tokens: list[int], shortest: int, longest: int, limit: int) -> list[Match]:
    """Scan everything: longest suffix first, most recent first, each place once."""
    found: list[Match] = []
    for length in range(longest, shortest - 1, -1):
        for position in range(len(tokens) - 1, length - 1, -1):
            same = tokens[position - length : position] == tokens[len(tokens) - length :]
            if same and position not in [match.position for match in found]:
                found.append(Match(position, length))
    return found[:limit]


def test_what_followed_the_longest_suffix_is_proposed_first() -> None:
    # 2 was followed by 8 last, but 1 2 by 7.
    tree = propose([1, 2, 7, 5, 2, 8, 1, 2], Budget(rows=1, depth=1))
    assert tree.token_ids.tolist() == [2, 7]


def test_among_equal_suffixes_the_most_recent_match_comes_first() -> None:
    tree = propose([1, 2, 7, 1, 2, 8, 1, 2], Budget(rows=2, depth=1))
    assert tree.token_ids.tolist() == [2, 8, 7]


def test_several_matches_merge_into_one_tree_that_branches_where_they_differ() -> None:
    tree = propose([1, 5, 6, 0, 1, 5, 7, 0, 1], Budget(rows=8, depth=2))
    assert paths(tree) == {(5,), (5, 7), (5, 6)}
    assert tree.parents.tolist() == [0, 0, 1, 1]


def test_no_more_matches_are_merged_than_allowed() -> None:
    tokens = [1, 5, 1, 6, 1, 7, 1]
    assert paths(propose(tokens, Budget(8, 1), matches=2)) == {(7,), (6,)}
    assert paths(propose(tokens, Budget(8, 1), matches=8)) == {(7,), (6,), (5,)}


def test_without_a_match_the_tree_is_the_root_alone() -> None:
    tree = propose([1, 2, 3], Budget(8, 8))
    assert tree.token_ids.tolist() == [3]
    assert tree.scores is not None
    assert tree.scores.tolist() == [0]


def test_a_suffix_shorter_than_the_minimum_is_not_looked_up() -> None:
    assert propose([1, 5, 1], Budget(8, 1), shortest=2).rows == 1


def test_a_score_is_the_log_share_of_trust_through_the_node() -> None:
    # One match of two tokens (then 8), two more of one token (both then 7).
    tree = propose([4, 1, 8, 0, 1, 7, 0, 1, 7, 4, 1], Budget(8, 1))
    total = SUFFIX_TRUST**2 + 2 * SUFFIX_TRUST
    assert tree.scores is not None
    assert tree.token_ids.tolist() == [1, 8, 7]
    expected = [0, math.log(CONTINUATION_TRUST * SUFFIX_TRUST**2 / total)]
    expected.append(math.log(CONTINUATION_TRUST * 2 * SUFFIX_TRUST / total))
    np.testing.assert_allclose(tree.scores, expected, rtol=1e-6)


@given(SEQUENCES, BUDGETS)
def test_every_tree_is_valid_and_within_its_budget(tokens: list[int], budget: Budget) -> None:
    tree = propose(tokens, budget)
    tree.validate(vocab_size=4, max_rows=budget.rows, max_depth=budget.depth)
    assert tree.token_ids[0] == tokens[-1]
    assert tree.scores is not None
    assert tree.scores.dtype == np.float32


@given(SEQUENCES, BUDGETS)
def test_every_path_was_in_the_sequence_after_the_same_token(tokens: list[int], budget: Budget) -> None:
    text = [tuple(tokens[start:end]) for start in range(len(tokens)) for end in range(start, len(tokens) + 1)]
    assert all((tokens[-1], *path) in text for path in paths(propose(tokens, budget)))


@given(SEQUENCES, st.integers(1, 3), st.integers(0, 3), st.integers(1, 12), st.data())
def test_the_incremental_index_finds_what_a_full_scan_finds(
    tokens: list[int], shortest: int, more: int, limit: int, data: st.DataObject
) -> None:
    index, rest = NgramIndex(shortest, shortest + more), tokens
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        index.extend(rest[:size])
        rest = rest[size:]
        seen = tokens[: len(tokens) - len(rest)]
        assert index.matches(limit) == matches_by_definition(seen, shortest, shortest + more, limit)


@given(SEQUENCES, BUDGETS, st.data())
def test_the_same_sequence_gives_the_same_tree_whatever_was_asked_before(
    tokens: list[int], budget: Budget, data: st.DataObject
) -> None:
    split = data.draw(st.integers(1, len(tokens)))
    drafter = NgramDrafter(1, 4, 8)
    session = Alone(drafter, drafter.open(tokens[:split], budget))
    session.propose(Budget(3, 3))
    session.extend(tokens[split:])
    tree, fresh = session.propose(budget), propose(tokens, budget)
    assert tree.token_ids.tolist() == fresh.token_ids.tolist()
    assert tree.parents.tolist() == fresh.parents.tolist()
    assert np.array_equal(tree.scores, fresh.scores)


def test_a_draft_service_with_this_drafter_alone_imports_no_torch() -> None:
    program = (
        "import sys, draft_service.main\n"
        "from draft_service.drafters.base import Budget, run_alone\n"
        "from draft_service.drafters.registry import DRAFTERS\n"
        "from eagle_pangu.serving.settings import DraftSettings\n"
        "drafter = DRAFTERS['ngram'](DraftSettings())\n"
        "run_alone(drafter, drafter.open([1, 2], Budget(8, 8)).propose(Budget(8, 8)))\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
