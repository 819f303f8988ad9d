"""What could be wrong with our calls of Ascend's operators, and what notices each: one table.

`python -m tests.simulated_npu.mutations` prints it; `tests/speculation/npu/test_mutations.py` tries every row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from eagle_pangu.speculation.devices.npu import fused_infer, fusion, masks
from eagle_pangu.speculation.devices.npu.choice import FUSION_OPERATOR
from eagle_pangu.speculation.indexing import index_tensor
from eagle_pangu.speculation.plan import ForwardPlan
from protos.errors import InvalidFieldError
from tests.simulated_npu.trials import (
    CPU,
    HEADS,
    V1,
    V2,
    Catcher,
    Trial,
    call,
    change,
    descendants_for_ancestors,
    host,
    instead,
    is_chain,
    is_one_row,
    is_tree,
    masks_by_rows,
    narrow_mask,
    own_mask,
    repeated,
    unturned,
    validate,
    where,
    without,
)


class Mutation(NamedTuple):
    """One way to be wrong; `says` is part of the text that catches it. operators: that it is tried on."""

    name: str
    caught_by: Catcher
    says: str
    trial: Trial
    operators: tuple[str, ...] = (V2, V1)


CONTRACT, COMPARISON, ROWS, HOST = Catcher
FUSION = (FUSION_OPERATOR,)
ALL = (V2, V1, FUSION_OPERATOR)

MUTATIONS = (
    # The mask.
    Mutation("mask of a tree not turned round", COMPARISON, "filled up", own_mask(lambda mask: ~mask)),
    Mutation("causal mask not turned round", CONTRACT, "causal mask", instead(masks, "hidden", lambda keep: keep)),
    Mutation("dense mask not turned round", COMPARISON, "one mask", instead(fused_infer, "hidden_of_heads", unturned)),
    Mutation("mask turned round twice", COMPARISON, "filled up", own_mask(lambda mask: masks.hidden(mask))),
    Mutation("mask of another pass", COMPARISON, "tree", instead(masks.PlanMasks, "of", masks_by_rows())),
    Mutation("mask transposed", CONTRACT, "mask shape", own_mask(lambda mask: mask.mT.contiguous())),
    Mutation("mask not contiguous", CONTRACT, "contiguity", own_mask(lambda mask: mask.mT.contiguous().mT)),
    Mutation("mask of the columns in use only", CONTRACT, "mask shape", instead(masks.PlanMasks, "of", narrow_mask)),
    Mutation("mask in floating point", CONTRACT, "mask dtype", own_mask(lambda mask: mask.float())),
    Mutation("additive mask in integers", CONTRACT, "mask meaning", own_mask(lambda mask: mask.char() * -100)),
    Mutation("mask left on another device", CONTRACT, "device", own_mask(lambda mask: mask.to("meta"))),
    Mutation("mask left out", COMPARISON, "filled up", own_mask(lambda mask: None)),
    Mutation("a tree taken for a chain", COMPARISON, "a tree", instead(ForwardPlan, "is_chain", True)),
    Mutation("descendants shown, ancestors hidden", ROWS, "differ", descendants_for_ancestors),
    # The mode.
    Mutation("sparse_mode 1", CONTRACT, "1 needs a mask", change(sparse_mode=1)),
    Mutation("sparse_mode 2 for a tree", CONTRACT, "causal mask", where(is_tree, sparse_mode=2)),
    Mutation("sparse_mode 3 for a tree", CONTRACT, "causal mask", where(is_tree, sparse_mode=3)),
    Mutation("sparse_mode 9 for a tree", CONTRACT, "latent attention", where(is_tree, sparse_mode=9)),
    Mutation("sparse_mode 2 for a chain", COMPARISON, "behind a prefix", where(is_chain, sparse_mode=2)),
    Mutation("sparse_mode 0 for a chain", CONTRACT, "mask shape", where(is_chain, sparse_mode=0)),
    Mutation("inner_precise 0 for a tree", CONTRACT, "inner_precise", where(is_tree, inner_precise=0)),
    Mutation("inner_precise 2 for one row", CONTRACT, "inner_precise", where(is_one_row, inner_precise=2)),
    Mutation("next_tokens 0", COMPARISON, "filled up", change(next_tokens=0)),
    Mutation("pre_tokens 0", COMPARISON, "filled up", change(pre_tokens=0)),
    # The scale.
    Mutation("scale left out", CONTRACT, "scale", without("scale"), ALL),
    Mutation("scale not under the root", COMPARISON, "one row", change(scale=1 / HEADS.head_dim), ALL),
    Mutation("scale multiplied in twice", COMPARISON, "one row", change(query=lambda given: given["query"] * 0.5), ALL),
    # K and V.
    Mutation("K and V repeated over query heads", CONTRACT, "heads", call(
        lambda given: given.update(key=repeated(given["key"]), value=repeated(given["value"])))),
    Mutation("K and V cut to the columns in use", CONTRACT, "contiguity", call(
        lambda given: given.update({name: given[name][:, :, : given["columns"][0]] for name in ("key", "value")}))),
    Mutation("K and V exchanged", COMPARISON, "one row", call(
        lambda given: given.update(key=given["value"], value=given["key"])), ALL),
    Mutation("K of another dtype", CONTRACT, "dtype", change(key=lambda given: given["key"].float()), ALL),
    Mutation("V of another dtype", CONTRACT, "dtype", change(value=lambda given: given["value"].half()), ALL),
    # The heads, the layout.
    Mutation("query not contiguous", CONTRACT, "contiguity", change(
        query=lambda given: given["query"].mT.contiguous().mT if given["query"].shape[2] > 1 else given["query"])),
    Mutation("head counts exchanged", CONTRACT, "heads", call(
        lambda given: given.update(heads=given["num_key_value_heads"], num_key_value_heads=given["heads"]))),
    Mutation("KV heads left out", CONTRACT, "heads", without("num_key_value_heads")),
    Mutation("query heads in another order", COMPARISON, "one row", change(
        query=lambda given: given["query"].roll(1, dims=1)), ALL),
    Mutation("layout left out", CONTRACT, "layout", without("input_layout")),
    Mutation("layout BSND", CONTRACT, "heads", change(input_layout="BSND")),
    # The lengths.
    Mutation("actual length one short", COMPARISON, "one row", change(columns=lambda given: [given["columns"][0] - 1])),
    Mutation("actual length one long", COMPARISON, "one row", change(
        columns=lambda given: [min(given["columns"][0] + 1, given["key"].shape[2])])),
    Mutation("actual length left out", COMPARISON, "one row", without("columns")),
    Mutation("actual length as a tensor", CONTRACT, "actual lengths", change(
        columns=lambda given: torch.tensor(given["columns"]))),
    Mutation("actual length past the buffer", CONTRACT, "actual lengths", change(columns=[65])),
    # The operator of training.
    Mutation("mask of a tree not turned round", COMPARISON, "a chain", own_mask(lambda mask: ~mask), FUSION),
    Mutation("dense mask not turned round", COMPARISON, "one mask", instead(
        fusion, "hidden_of_heads", unturned), FUSION),
    Mutation("query heads of the KV", CONTRACT, "heads", change(heads=HEADS.kv_heads), FUSION),
    # Before any operator: what a card would follow anywhere.
    Mutation("parent -1 (a sentinel)", HOST, "earlier row", host(InvalidFieldError, lambda: validate([0, 0, -1]))),
    Mutation("parent after its row", HOST, "earlier row", host(InvalidFieldError, lambda: validate([0, 2, 0]))),
    Mutation("index -1", HOST, "got -1", host(IndexError, lambda: index_tensor([0, -1], 4, CPU))),
    Mutation("index past the end", HOST, "got 4", host(IndexError, lambda: index_tensor([4], 4, CPU))),
)  # fmt: skip


def main() -> None:
    """Print the table in Markdown."""
    print("| mutation | of | caught by |\n|---|---|---|")  # noqa: T201
    short = {(V2, V1): "fused_infer v2, v1", FUSION: "fusion", ALL: "all three"}
    for mutation in MUTATIONS:
        of = "" if mutation.caught_by is HOST else short[mutation.operators]
        print(f"| {mutation.name} | {of} | {mutation.caught_by.value} |")  # noqa: T201


if __name__ == "__main__":
    main()
