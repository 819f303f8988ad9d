"""The CUDA device: the same interface, and the same ids as the CPU's. All but the refusal need a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eagle_pangu.speculation.checkpoints import load_checkpoint
from eagle_pangu.speculation.devices import Device, get_device, resolve_dtype
from eagle_pangu.speculation.devices.base import AttentionError, HeadShape
from eagle_pangu.speculation.devices.comparison import compare_with_eager
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.layouts.rectangle import Rectangle
from eagle_pangu.speculation.layouts.rectangular import RectangularLayout
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.warm_up import warm_up
from tests.models import ARCHITECTURES, tiny_model
from tests.speculation.engines import NUMERICS, bushy_tree, one_by_one, prompt

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PROMPT = prompt(70)
TREE = bushy_tree(13, seed=1)
CLOSE = {"atol": 1e-3, "rtol": 1e-3}
"""Of logits of size 7 in float32: products are summed up in another order."""


def test_without_a_device_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        RuntimeError, match="device cuda: torch finds no CUDA device; use device cpu, or install a CUDA build of torch"
    ):
        get_device("cuda")


@pytest.fixture
def cuda() -> Device:
    return get_device("cuda")


@needs_cuda
def test_it_is_the_current_device(cuda: Device) -> None:
    assert (cuda.name, cuda.static_shapes) == ("cuda", False)
    assert cuda.torch_device == torch.device("cuda", torch.cuda.current_device())
    assert cuda.for_drafting() is cuda
    assert resolve_dtype("auto", cuda) == cuda.default_dtype()
    assert cuda.default_dtype() in (torch.bfloat16, torch.float16)
    cuda.synchronize()


@needs_cuda
def test_threads_are_those_of_the_host(cuda: Device) -> None:
    before = torch.get_num_threads()
    try:
        assert cuda.configure_threads(1) == torch.get_num_threads() == 1
        assert cuda.configure_threads(0) >= 1
    finally:
        torch.set_num_threads(before)


@needs_cuda
def test_memory_is_that_of_the_device_and_what_is_taken_is_not_free(cuda: Device) -> None:
    before = cuda.memory()
    assert 0 < before.free < before.total
    taken = torch.empty(2**28, dtype=torch.uint8, device=cuda.torch_device)
    assert cuda.memory().total == before.total
    assert torch.cuda.memory_allocated(cuda.torch_device) >= taken.numel()
    assert cuda.memory().free <= before.total - taken.numel()


@needs_cuda
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_torchs_own(cuda: Device, bias: bool) -> None:
    layer = torch.nn.Linear(8, 4, bias=bias).to(cuda.torch_device)
    rows = torch.randn(3, 8, device=cuda.torch_device)
    assert torch.equal(cuda.linear_kernel(layer)(rows), F.linear(rows, layer.weight, layer.bias))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["auto", "sdpa", "eager"])
def test_attention_over_slots_and_under_a_mask_of_each_head_is_the_written_out_one(
    cuda: Device, name: str, dtype: torch.dtype
) -> None:
    heads = HeadShape(heads=8, kv_heads=2, head_dim=32, dtype=dtype)
    attention = cuda.attention(name, heads)
    assert attention[:2] == ("sdpa" if name == "auto" else name, "")
    compare_with_eager(attention, heads, cuda.torch_device)


@needs_cuda
def test_an_attention_of_another_device_is_refused(cuda: Device) -> None:
    with pytest.raises(AttentionError, match="attention npu_fusion_attention is not one of device cuda; expected auto"):
        cuda.attention("npu_fusion_attention", HeadShape(8, 2, 32, torch.float32))


def engine_on(name: str, directory: Path, **options: Any) -> Engine:
    """A float32 engine over a random llama, or what `architecture` says, made once in the directory."""
    architecture = options.pop("architecture", "llama")
    if not (directory / architecture).is_dir():
        tiny_model(directory / architecture, architecture)
    device = get_device(name)
    checkpoint = load_checkpoint(directory / architecture, torch.float32, device)
    return Engine(checkpoint, device, **{"slot_capacity": 512, **options})


def prompt_and_tree(target: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """[vocab] logits after the prompt, and [rows, vocab] of the tree, on the host."""
    slot = target.open_slot()
    read = target.prefill(slot, PROMPT, want_logits=True).logits
    verified = target.verify(slot, TREE).logits
    assert read is not None
    assert verified is not None
    return read[-1].cpu(), verified.cpu()


@needs_cuda
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("mode", "attention"), [("performance", "sdpa"), ("performance", "eager"), ("reference", "auto")]
)
def test_ids_are_those_of_the_cpu(tmp_path: Path, architecture: str, mode: str, attention: str) -> None:
    options = {"architecture": architecture, "mode": mode, "numerics": "free", "attention": attention}
    host, card = (engine_on(name, tmp_path, **options) for name in ("cpu", "cuda"))
    assert card.numerics.attention == ("eager" if mode == "reference" else attention)
    for ours, theirs in zip(prompt_and_tree(card), prompt_and_tree(host), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@needs_cuda
@pytest.mark.parametrize("branch", ["shared", "replicate"])
@pytest.mark.parametrize(("mode", "numerics"), NUMERICS)
def test_rows_of_a_tree_are_those_of_one_by_one_decoding(tmp_path: Path, mode: str, numerics: str, branch: str) -> None:
    """With `auto` in the place of `bitwise`: whether this card keeps bits is measured; where it does they are kept."""
    asked = "auto" if numerics == "bitwise" else numerics
    target = engine_on("cuda", tmp_path, mode=mode, numerics=asked, branch=branch)
    warm_up(target)
    assert bool(target.numerics.degraded_reason) == (target.numerics.policy != numerics)
    _, verified = prompt_and_tree(target)
    for row in range(TREE.rows):
        alone = one_by_one(target, PROMPT, TREE, row).cpu()
        if target.numerics.policy == "bitwise":
            assert torch.equal(verified[row], alone)
        torch.testing.assert_close(verified[row], alone, **CLOSE)
        assert verified[row].argmax() == alone.argmax()


@needs_cuda
def test_decoding_goes_on_from_a_committed_path_as_on_the_cpu(tmp_path: Path) -> None:
    after = []
    for name in ("cpu", "cuda"):
        target = engine_on(name, tmp_path, numerics="free")
        slot = target.open_slot()
        target.prefill(slot, PROMPT, want_logits=False)
        target.verify(slot, TREE)
        target.commit(slot, TREE.ancestors[12, 1 : TREE.depth[12] + 1].tolist())
        logits = target.verify(slot, bushy_tree(7, seed=2)).logits
        assert logits is not None
        after.append(logits.cpu())
    torch.testing.assert_close(*after, **CLOSE)


@needs_cuda
@pytest.mark.parametrize(
    ("mode", "attention"), [("performance", "sdpa"), ("performance", "eager"), ("reference", "auto")]
)
def test_a_rectangle_of_several_sessions_gives_what_separate_passes_give(
    tmp_path: Path, mode: str, attention: str
) -> None:
    target = engine_on("cuda", tmp_path, mode=mode, numerics="free", attention=attention)
    assert target.attention is not None
    masked, trees = target.attention.masked, [bushy_tree(11, seed=1), bushy_tree(1), bushy_tree(6, seed=2)]
    slots = [target.open_slot() for _ in trees]
    for index, slot in enumerate(slots):
        target.prefill(slot, prompt(1 + 35 * index, index), want_logits=False)
    alone = [target.verify(slot, tree).logits for slot, tree in zip(slots, trees, strict=True)]
    rectangle = Rectangle(target.cache_shape)
    rectangle.align(slots, 11)
    rectangle.check_content(slots)
    together = target.run(
        [Segment(slot, tree) for slot, tree in zip(slots, trees, strict=True)],
        lambda _, plans: RectangularLayout(rectangle, plans, masked),
    )
    for result, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(result.logits, expected, **CLOSE)
