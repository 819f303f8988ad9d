"""The token tree: what it derives agrees with walking parents by hand, and every rule of it is refused alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_pangu.speculation.tree import TokenTree
from protos.errors import InvalidFieldError
from tests.trees import token_trees

VOCAB = 40


def path(tree: TokenTree, row: int) -> list[int]:
    """The row's path, root first, by walking parents."""
    rows = [row]
    while rows[0] != 0:
        rows.insert(0, int(tree.parents[rows[0]]))
    return rows


def validate(tree: TokenTree, *, max_rows: int = 24, max_depth: int = 24) -> None:
    tree.validate(vocab_size=VOCAB, max_rows=max_rows, max_depth=max_depth)


# ---- what is derived -------------------------------------------------------------------------------------------------


@given(token_trees())
def test_any_legal_tree_validates_within_its_own_size(tree: TokenTree) -> None:
    validate(tree, max_rows=tree.drafted, max_depth=int(tree.depth.max()))


@given(token_trees())
def test_depth_ancestors_and_mask_agree_with_walking_parents(tree: TokenTree) -> None:
    for row in range(tree.rows):
        walked = path(tree, row)
        assert tree.depth[row] == len(walked) - 1
        assert tree.ancestors[row, : len(walked)].tolist() == walked
        assert not tree.ancestors[row, len(walked) :].any()
        assert np.flatnonzero(tree.mask[row]).tolist() == sorted(walked)


@given(token_trees())
def test_no_derived_table_holds_an_index_outside_of_the_tree(tree: TokenTree) -> None:
    for table in (tree.parents, tree.ancestors):
        assert table.min() >= 0
        assert table.max() < tree.rows
    assert tree.ancestors.shape == (tree.rows, tree.depth.max() + 1)


@given(token_trees())
def test_children_name_each_drafted_row_once(tree: TokenTree) -> None:
    found = [(parent, token, row) for parent, children in enumerate(tree.children) for token, row in children.items()]
    expected = [(tree.parents[row], tree.token_ids[row], row) for row in range(1, tree.rows)]
    assert sorted(found, key=lambda child: child[2]) == expected


def test_the_root_alone_is_plain_decoding() -> None:
    tree = TokenTree.root_only(7)
    validate(tree, max_rows=0, max_depth=0)
    assert (tree.rows, tree.drafted, tree.accept([9])) == (1, 0, [])
    assert tree.ancestors.tolist() == [[0]]
    assert tree.mask.tolist() == [[True]]


# ---- the accept walk -------------------------------------------------------------------------------------------------


@given(token_trees(), st.data())
def test_accept_takes_the_longest_path_whose_tokens_were_all_decided(tree: TokenTree, data: st.DataObject) -> None:
    decided = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=tree.rows, max_size=tree.rows))

    def is_decided(row: int) -> bool:
        walked = path(tree, row)
        return all(decided[above] == tree.token_ids[below] for above, below in pairwise(walked))

    longest = max((path(tree, row) for row in range(tree.rows) if is_decided(row)), key=len)
    assert tree.accept(decided) == longest[1:]


@given(token_trees(), st.data())
def test_accept_follows_a_chosen_path_to_its_end(tree: TokenTree, data: st.DataObject) -> None:
    walked = path(tree, data.draw(st.integers(0, tree.rows - 1)))
    decided = np.full(tree.rows, VOCAB)  # no row carries this id: the walk stops where nothing else was decided
    for above, below in pairwise(walked):
        decided[above] = tree.token_ids[below]
    assert tree.accept(decided) == walked[1:]


# ---- padding ---------------------------------------------------------------------------------------------------------


@given(token_trees(), st.integers(0, 9))
def test_padding_changes_shape_and_nothing_else(tree: TokenTree, more: int) -> None:
    padded = tree.padded(tree.rows + more)
    validate(padded, max_rows=tree.drafted, max_depth=int(tree.depth.max()))
    assert (padded.rows, padded.drafted) == (tree.rows + more, tree.drafted)
    assert padded.children[: tree.rows] == tree.children
    assert np.array_equal(padded.mask[: tree.rows, : tree.rows], tree.mask)
    assert not padded.mask[: tree.rows, tree.rows :].any()
    decided = np.full(padded.rows, int(tree.token_ids[0]))  # the id that padded rows repeat
    assert padded.accept(decided) == tree.accept(decided)


@given(token_trees(max_rows=6), st.integers(0, 4), st.integers(0, 4))
def test_padding_twice_is_padding_once(tree: TokenTree, first: int, second: int) -> None:
    twice = tree.padded(tree.rows + first).padded(tree.rows + first + second)
    once = tree.padded(tree.rows + first + second)
    for name in ("token_ids", "parents", "scores", "valid"):
        assert np.array_equal(getattr(twice, name), getattr(once, name))


def test_a_tree_cannot_be_padded_to_fewer_rows() -> None:
    with pytest.raises(ValueError, match="3 rows cannot be padded to 2"):
        TokenTree.build([1, 2, 3], [0, 0, 0]).padded(2)


# ---- every rule, broken alone ----------------------------------------------------------------------------------------

#       0
#      / \
#     1   2
#    / \   \
#   3   4   5
LEGAL = TokenTree.build([5, 6, 7, 8, 9, 6], [0, 0, 0, 1, 1, 2], [0.0, -0.5, -1.0, -1.5, -2.0, -2.5])
ALL_VALID = np.ones(6, dtype=np.bool_)


def altered(column: str, row: int, value: float) -> TokenTree:
    tree = replace(LEGAL, valid=ALL_VALID) if column == "valid" else LEGAL
    values = getattr(tree, column).copy()
    values[row] = value
    return replace(tree, **{column: values})


BROKEN: dict[str, tuple[TokenTree, str, int | None, str]] = {
    "no row at all": (TokenTree.build([], []), "token_ids", None, "at least the root"),
    "no vector": (TokenTree.build([[5]], [[0]]), "token_ids", None, "at least the root"),
    "parents shorter": (replace(LEGAL, parents=LEGAL.parents[:-1]), "parents", None, "expected 6 rows, got 5"),
    "parents longer": (replace(LEGAL, parents=np.zeros(7, np.int64)), "parents", None, "expected 6 rows, got 7"),
    "no parents": (replace(LEGAL, parents=np.zeros(0, np.int64)), "parents", None, "expected 6 rows, got 0"),
    "id = vocabulary": (altered("token_ids", 4, VOCAB), "token_ids", 4, r"in \[0, 40\), got 40"),
    "largest id": (altered("token_ids", 0, 2**32 - 1), "token_ids", 0, "got 4294967295"),
    "negative id": (altered("token_ids", 2, -1), "token_ids", 2, "got -1"),
    "root with a parent": (altered("parents", 0, 1), "parents", 0, "root's parent to be 0, got 1"),
    "own parent": (altered("parents", 3, 3), "parents", 3, "earlier row.*got 3"),
    "later parent": (altered("parents", 1, 4), "parents", 1, "earlier row.*got 4"),
    "parent past the tree": (altered("parents", 5, 2**32 - 1), "parents", 5, "earlier row.*got 4294967295"),
    "sentinel": (altered("parents", 2, -1), "parents", 2, "earlier row.*got -1"),
    "second root": (altered("parents", 5, 5), "parents", 5, "earlier row"),
    "twins": (altered("token_ids", 4, 8), "token_ids", 4, "distinct siblings, got id 8 twice under row 1"),
    "scores shorter": (replace(LEGAL, scores=np.zeros(5, np.float32)), "scores", None, "expected 6 rows.*got 5"),
    "NaN score": (altered("scores", 3, np.nan), "scores", 3, "finite number, got nan"),
    "infinite score": (altered("scores", 1, -np.inf), "scores", 1, "finite number, got -inf"),
    "root with a score": (altered("scores", 0, -1), "scores", 0, "expected 0 at the root, got -1"),
    "valid shorter": (replace(LEGAL, valid=ALL_VALID[:-1]), "valid", None, "expected 6 rows, got 5"),
    "invalid root": (altered("valid", 0, False), "valid", 0, "root to be valid"),
    "valid row under a padded one": (altered("valid", 1, False), "valid", 3, "valid parent under a valid row"),
    "padded row with a parent": (altered("valid", 5, False), "valid", 5, "padded row to point at row 0, got 2"),
}


def test_the_tree_that_the_broken_ones_are_made_of_is_legal() -> None:
    validate(LEGAL, max_rows=5, max_depth=2)
    validate(replace(LEGAL, valid=ALL_VALID), max_rows=5, max_depth=2)


@pytest.mark.parametrize(("tree", "field", "row", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_is_refused_with_field_and_row(tree: TokenTree, field: str, row: int | None, reason: str) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as caught:
        tree.validate(vocab_size=VOCAB, max_rows=24, max_depth=24, field="verify.tree")
    assert (caught.value.field, caught.value.row) == (f"verify.tree.{field}", row)
    where = f"verify.tree.{field}" + ("" if row is None else f"[{row}]")
    assert str(caught.value).startswith(f"{where}: ")


@pytest.mark.parametrize(
    ("limits", "field", "row", "reason"),
    [
        ({"max_rows": 4}, "tree.token_ids", None, "at most 4 drafted rows, got 5"),
        ({"max_depth": 1}, "tree.parents", 3, "depth at most 1, got 2"),
        ({"max_depth": 0}, "tree.parents", 1, "depth at most 0, got 1"),
    ],
)
def test_a_tree_over_the_budget_is_refused(limits: dict[str, int], field: str, row: int | None, reason: str) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as caught:
        validate(LEGAL, **limits)
    assert (caught.value.field, caught.value.row) == (field, row)


@given(token_trees(max_rows=12), st.data())
def test_one_parent_bent_forward_is_refused_at_its_row(tree: TokenTree, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, tree.rows - 1))
    parents = tree.parents.copy()
    parents[row] = data.draw(st.integers(max(row, 1), 2**32 - 1))
    with pytest.raises(InvalidFieldError) as caught:
        validate(replace(tree, parents=parents))
    assert (caught.value.field, caught.value.row) == ("tree.parents", row)


@given(token_trees(max_rows=12), st.data())
def test_the_order_of_rows_decides_nothing_but_their_numbers(tree: TokenTree, data: st.DataObject) -> None:
    """Another topological order of the same tree accepts the same tokens."""
    order = [0]
    while len(order) < tree.rows:
        ready = [row for row in range(1, tree.rows) if row not in order and tree.parents[row] in order]
        order.append(data.draw(st.sampled_from(ready)))
    number = {row: new for new, row in enumerate(order)}
    other = TokenTree.build(tree.token_ids[order], [number[int(tree.parents[row])] for row in order])
    validate(other)
    decided = np.asarray(data.draw(st.lists(st.integers(0, 5), min_size=tree.rows, max_size=tree.rows)))
    assert [order[row] for row in other.accept(decided[order])] == tree.accept(decided)
