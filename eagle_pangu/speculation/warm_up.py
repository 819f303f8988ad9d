"""What an engine runs before it serves: the self-test of its bits, and every shape of a device that compiles shapes."""

from __future__ import annotations

import numpy as np
import torch

from eagle_pangu.speculation.buckets import Buckets
from eagle_pangu.speculation.cache import Slot
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.invariance import NoInvarianceError
from eagle_pangu.speculation.plan import BLOCK
from eagle_pangu.speculation.segment import Segment, known_tokens
from eagle_pangu.speculation.tree import TokenTree


def warm_up(engine: Engine) -> None:
    """Run the shapes that serving runs, so that no request pays for first-use work.

    Under `bitwise` this is also the self-test; where that fails the policy becomes `free`, unless `bitwise` was asked
    for.

    Raises:
        NoInvarianceError: the self-test failed, and `bitwise` was asked for.
    """
    try:
        _run_and_compare(engine)
    except NoInvarianceError as error:
        engine.degrade(error)
    if engine.buckets and engine.shapes:
        _run_every_bucket(engine, engine.buckets)
        engine.shapes.end_warm_up()


def _run_and_compare(engine: Engine) -> None:
    """One tree, alone and beside another session's; under `bitwise` against one-by-one decoding, bit by bit.

    Raises:
        NoInvarianceError: a row's bits depend on its company.
    """
    slot, other = engine.open_slot(), engine.open_slot()
    tree = _legal(engine, TokenTree.build([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 3, 2, 4]))
    length = min(BLOCK + 3, engine.chunk, slot.capacity - tree.rows)
    prompt = np.arange(length, dtype=np.int64) % engine.checkpoint.vocab_size
    engine.prefill(slot, prompt, want_logits=True, want_features=True)
    engine.prefill(other, prompt[:1], want_logits=True)
    engine.verify(slot, tree)
    together = engine.run([Segment(other, tree), Segment(slot, tree)])[1].logits
    assert together is not None
    if engine.numerics.policy != "bitwise":
        return
    for row, depth in enumerate(tree.depth):
        slot.truncate(length)
        alone = None
        for ancestor in tree.ancestors[row, : depth + 1]:
            alone = engine.prefill(slot, tree.token_ids[ancestor : ancestor + 1], want_logits=True).logits
        assert alone is not None
        if not torch.equal(alone[0], together[row]):
            raise NoInvarianceError(f"self-test: row {row} of a tree differs from one-by-one decoding")


def _run_every_bucket(engine: Engine, buckets: Buckets) -> None:
    """Chains and trees of every row bucket over slots of every length, then passes that only several sessions fill."""
    most = max(engine.chunk, engine.max_rows + 1)
    for length in buckets.lengths:
        slot = engine.open_slot(length)
        for rows, fewest in zip(buckets.rows, buckets.fewest, strict=True):
            if fewest > min(most, length):
                break
            slot.truncate(0)
            # As many rows as there can be: a chain that is not filled up may have a kernel of its own.
            engine.run([_chain(engine, slot, min(rows, most, length))])
            slot.truncate(0)
            # As few as there can be: more might not fit a slot that serving fills to this bucket.
            if fewest + _STEM <= length:
                _run_tree(engine, slot, fewest)
    _run_together(engine, buckets, buckets.rows_for(min(most, buckets.lengths[-1])))


def _run_together(engine: Engine, buckets: Buckets, largest: int) -> None:
    """Passes of more rows than `largest`, the bucket of one session's most.

    A pass is bounded by the rows that its sessions ask for; each is filled up by less than as many again, so all of
    them by no more than twice the last bucket.
    """
    shortest = buckets.lengths[0]
    rows = max(each for each in buckets.rows if each <= min(largest, shortest, engine.chunk))
    for total in (*buckets.rows, 2 * buckets.rows[-1]):
        if total > largest:
            slots = [engine.open_slot(shortest) for _ in range(total // rows)]
            engine.run([_chain(engine, slot, rows) for slot in slots])


def _chain(engine: Engine, slot: Slot, rows: int) -> Segment:
    token_ids = np.arange(rows, dtype=np.int64) % engine.checkpoint.vocab_size
    return known_tokens(slot, token_ids, want_logits=True, every_row=True)


_STEM = 2
"""Rows of a tree that are there already when its other rows are computed: so those may be few, and yet no chain."""


def _run_tree(engine: Engine, slot: Slot, rows: int) -> None:
    """A pass over so many rows, all of them children of one root."""
    star = _legal(engine, TokenTree(np.arange(_STEM + rows), np.zeros(_STEM + rows, dtype=np.int64)))
    engine.run([Segment(slot, TokenTree(star.token_ids[:_STEM], star.parents[:_STEM]))])
    engine.run([Segment(slot, star, first_row=_STEM)])


def _legal(engine: Engine, tree: TokenTree) -> TokenTree:
    return TokenTree(tree.token_ids % engine.checkpoint.vocab_size, tree.parents)
