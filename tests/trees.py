"""Hypothesis strategies for token trees: legal ones, and whatever a peer may send."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from eagle_pangu.speculation.tree import TokenTree
from protos.v1 import tree_pb2

UINT32_MAX = 2**32 - 1


@st.composite
def token_trees(draw: st.DrawFn, max_rows: int = 24, vocab_size: int = 40, scored: bool | None = None) -> TokenTree:
    """A legal tree of at most `max_rows` drafted rows, any shape from chain to star."""
    token_ids, parents = [draw(st.integers(0, vocab_size - 1))], [0]
    taken: set[tuple[int, int]] = set()
    for row in range(1, draw(st.integers(0, max_rows)) + 1):
        parent, token_id = draw(st.integers(0, row - 1)), draw(st.integers(0, vocab_size - 1))
        while (parent, token_id) in taken:
            token_id = (token_id + 1) % vocab_size
        taken.add((parent, token_id))
        parents.append(parent)
        token_ids.append(token_id)
    scores = None
    if draw(st.booleans()) if scored is None else scored:
        finite = st.floats(-1e6, 0, width=32)
        scores = [0.0, *draw(st.lists(finite, min_size=len(parents) - 1, max_size=len(parents) - 1))]
    return TokenTree.build(token_ids, parents, scores)


def wire_trees() -> st.SearchStrategy[tree_pb2.TokenTree]:
    """Any TokenTree message: lengths that disagree, huge ids, cycles, NaN; small numbers often: some are legal."""
    ids = st.one_of(st.integers(0, 6), st.integers(0, UINT32_MAX))
    scores = st.one_of(st.just(0.0), st.floats(width=32, allow_nan=True, allow_infinity=True))
    return st.builds(
        tree_pb2.TokenTree,
        token_ids=st.lists(ids, max_size=8),
        parents=st.one_of(st.lists(ids, max_size=8), st.integers(0, 8).map(lambda rows: np.arange(rows) // 2)),
        scores=st.one_of(st.just([]), st.lists(scores, max_size=8)),
    )
