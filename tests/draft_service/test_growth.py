"""Tree growth: what is chosen, in which order, and that nothing is ever orphaned."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.growth import TreeGrowth, best_nodes, best_subtree
from eagle_pangu.speculation.tree import TokenTree


def expand(growth: TreeGrowth, *children: tuple[int, int, float]) -> None:
    """Each child as (parent node, token, log-probability)."""
    parents, token_ids, log_probs = zip(*children, strict=True)
    growth.expand(np.array(parents), np.array(token_ids), np.array(log_probs, dtype=np.float32))


def test_the_best_nodes_are_those_of_highest_score_in_ascending_order() -> None:
    scores = np.array([0, -3, -1, -2, -1.5], dtype=np.float32)
    assert best_nodes(scores, 3).tolist() == [0, 2, 3, 4]


def test_ties_go_to_the_earlier_node() -> None:
    scores = np.array([0, -1, -1, -1, -1], dtype=np.float32)
    assert best_nodes(scores, 2).tolist() == [0, 1, 2]


def test_a_budget_beyond_the_candidates_takes_them_all_and_none_takes_the_root_alone() -> None:
    scores = np.array([0, -1, -2], dtype=np.float32)
    assert best_nodes(scores, 9).tolist() == [0, 1, 2]
    assert best_nodes(scores, 0).tolist() == [0]


def test_a_subtree_renumbers_parents() -> None:
    candidates = TokenTree.build([9, 1, 2, 3], [0, 0, 0, 2], [0, -5, -1, -2])
    tree = best_subtree(candidates, 2)
    assert tree.token_ids.tolist() == [9, 2, 3]
    assert tree.parents.tolist() == [0, 0, 1]
    assert tree.scores is not None
    assert tree.scores.tolist() == [0, -1, -2]


def test_only_the_widest_best_children_are_expanded_further() -> None:
    growth = TreeGrowth(root=9, rows=8, width=2)
    expand(growth, (0, 1, -3.0), (0, 2, -1.0), (0, 3, -2.0))
    assert growth.frontier.tolist() == [2, 3]


def test_a_node_outside_the_best_rows_is_not_expanded() -> None:
    growth = TreeGrowth(root=9, rows=2, width=4)
    expand(growth, (0, 1, -0.1), (0, 2, -5.0), (0, 3, -6.0))
    assert growth.frontier.tolist() == [1, 2]
    expand(growth, (1, 4, -0.1), (1, 5, -0.2), (2, 6, -0.1))
    assert growth.frontier.tolist() == [4]
    expand(growth, (4, 7, -9.0))
    assert growth.frontier.tolist() == []
    assert growth.tree().token_ids.tolist() == [9, 1, 4]


def test_scores_are_float32_sums_along_the_path() -> None:
    growth = TreeGrowth(root=9, rows=4, width=2)
    expand(growth, (0, 1, -0.1))
    expand(growth, (1, 2, -0.2))
    scores = growth.tree().scores
    assert scores is not None
    assert scores.dtype == np.float32
    assert scores.tolist() == [0, np.float32(-0.1), np.float32(-0.1) + np.float32(-0.2)]


LOG_PROBS = st.lists(st.sampled_from([0.0, -0.0, -0.5, -1.0, -1e-9, -30.0]), min_size=9, max_size=9)


def grow(levels: list[list[float]], rows: int, width: int, *, pruned: bool) -> TokenTree:
    """Levels of three children under each frontier node; a pruned frontier is what `TreeGrowth` offers by itself."""
    growth = TreeGrowth(root=99, rows=rows if pruned else 10**6, width=width)
    for log_probs in levels:
        nodes = growth.frontier[:3]
        if not nodes.size:
            break
        parents, token_ids = np.repeat(nodes, 3), np.tile(np.arange(3), len(nodes))
        growth.expand(parents, token_ids, np.array(log_probs[: len(parents)], dtype=np.float32))
    return best_subtree(growth.candidates, rows)


@given(st.lists(LOG_PROBS, min_size=1, max_size=5), st.integers(0, 20), st.integers(1, 3))
def test_every_grown_tree_is_valid_however_many_ties_there_are(
    levels: list[list[float]], rows: int, width: int
) -> None:
    tree = grow(levels, rows, width, pruned=True)
    tree.validate(vocab_size=100, max_rows=rows, max_depth=len(levels))
    assert tree.scores is not None
    assert (tree.scores <= tree.scores[tree.parents]).all()


@given(st.integers(1, 20), st.integers(1, 3), st.data())
def test_not_expanding_hopeless_nodes_changes_no_tree(rows: int, width: int, data: st.DataObject) -> None:
    # A child's log-probability depends on its path alone, so both growths see the same model.
    bias = data.draw(st.lists(st.sampled_from([-0.1, -0.5, -1.0, -2.0]), min_size=7, max_size=7))

    def run(kept_rows: int) -> TokenTree:
        growth = TreeGrowth(root=0, rows=kept_rows, width=width)
        for level in range(4):
            if not growth.frontier.size:
                break
            parents, token_ids = np.repeat(growth.frontier, 3), np.tile(np.arange(3), len(growth.frontier))
            above = growth.candidates.token_ids[parents]
            log_probs = np.array(bias, dtype=np.float32)[(token_ids * 2 + above + level) % 7]
            growth.expand(parents, token_ids, log_probs)
        return best_subtree(growth.candidates, rows)

    pruned, whole = run(rows), run(10**6)
    assert pruned.token_ids.tolist() == whole.token_ids.tolist()
    assert pruned.parents.tolist() == whole.parents.tolist()


def test_a_score_above_its_parents_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="parent was not chosen"):
        best_subtree(TokenTree.build([9, 1, 2], [0, 0, 1], [0, -2, -1]), 1)
