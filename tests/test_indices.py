"""Tensors are indexed in one module: what the lint finds and lets pass, that the house keeps to it, and the watch."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from eagle_pangu.speculation.index_guard import IllegalIndexError
from eagle_pangu.speculation.indexing import copy_into, fill, gather, index_tensor, marked, replaced, select
from tests import index_watch as watching
from tests.index_lint import findings
from tests.index_watch import IndexWatch, index_watch

__all__ = ["index_watch"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protos", "eagle_pangu", "draft_service", "teacher_service", "orchestrator", "deploy")
MAY = {
    "eagle_pangu/speculation/indexing.py": {"operator"},
    "eagle_pangu/speculation/index_guard.py": {"operator", "take_along_dim"},  # it names them to refuse them
    "eagle_pangu/doctor/indices.py": {"operator"},  # it tries the operators of a device, that of model code among them
}

CAUGHT = {
    "operator": (
        "import torch\nx.gather(1, y)",
        "import torch\ntorch.gather(x, 1, y)",
        "import torch\nx.take(y)",
        "import torch\npick = torch.index_select",
        "from torch import scatter",
        "x.index_copy_(0, y, z)",
        "x.scatter_(0, y, 1.0)",
        "torch.ops.aten.index_put_(x, [y], z)",
        "F.embedding(y, x)",
        "F.one_hot(y)",
        'getattr(x, "index_add_")(0, y, z)',
    ),
    "take_along_dim": (
        "torch.take_along_dim(x, y, 0)",
        "x.take_along_dim(y, 0)",
        "from torch import take_along_dim",
        "from torch import take_along_dim as along",
        'getattr(torch, "take_along_dim")(x, y)',
    ),
    "negative": (
        "torch.tensor([0, -1])",
        "torch.tensor([[0], [-1]], dtype=torch.int64)",
        "torch.tensor([-1] * rows)",
        "torch.as_tensor((-1,))",
        "torch.full((rows,), -1)",
        "torch.full((rows,), fill_value=-1, dtype=torch.long)",
        "x.new_full((2,), -1)",
        "x.masked_fill(mask, -1)",
        "torch.where(mask, x, -1)",
        "F.pad(x, (0, 1), value=-1)",
        "torch.LongTensor([3, -2])",
    ),
    "advanced": (
        "def f(x: torch.Tensor, y: torch.Tensor): return x[y]",
        "def f(x, y: torch.Tensor): return x[:, y]",
        "def f(x, y: torch.Tensor | None): x[y] = 0",
        "def f(x, y: torch.Tensor): x[..., y] += 1",
        "def f(x): return x[torch.tensor([0, 1])]",
        "def f(x, y): return x[y.argmax(dim=-1)]",
        "def f(x: torch.Tensor): return x[[0, 1]]",
        "def f(x: torch.Tensor, rows): return x[list(rows)]",
        "def f(x: torch.Tensor, parents): return x[parents[1:]]",
        "def f(x: torch.Tensor): return x[np.arange(2)]",
        "def f(x: torch.Tensor): return x[x > 0]",
        "def f(x: torch.Tensor):\n    rows, ids = x.topk(2)\n    return x[rows, ids]",
        "def f(x):\n    a, b = (torch.from_numpy(y) for y in x)\n    return x[a]",
        "def g() -> tuple[torch.Tensor, torch.Tensor]: ...\ndef f(x):\n    a, b = g()\n    return x[a, 0]",
        "class P:\n    kept: torch.Tensor\ndef f(x, p: P): return x[p.kept]",
        "def f(x, y): return x[index_tensor(y, 3, d)]",
    ),
}

PASSED = {
    "operator": (
        "await asyncio.gather(a, b)",
        "slots.take(3)",
        "import torch\nnp.take(x, y)",
        "x.masked_fill(y, 1)",
        "self.embed_tokens(ids)",
        "indexing.select(x, 0, y)",
    ),
    "take_along_dim": ("np.take_along_axis(x, y, axis=1)", '"see take_along_dim, which wraps"'),
    "negative": (
        "torch.tensor([-1.0, 2.0])",
        "torch.tensor([0, -1], dtype=torch.float32)",
        "torch.full((2,), -1, dtype=torch.bfloat16)",
        "x.sum(-1)",
        "x.masked_fill(mask, -torch.inf)",
        "torch.tensor([0, 1])",
        "np.where(mask, x, -1)",
    ),
    "advanced": (
        "def f(x: torch.Tensor): return x[0], x[-1], x[1:], x[..., None], x[:, -2:]",
        "def f(x: torch.Tensor, row: int): return x[row, : row + 1]",
        "def f(x: NDArray[np.int64], y: NDArray[np.int64]): return x[y], x[[0, *y]]",
        "def f(x: torch.Tensor, y): return y[int(x[0])], y[x.shape[0]], y[len(x)]",
        "def f(x: torch.Tensor, y): return y[x.argmax().item()]",
        "def f(x: dict[str, torch.Tensor], name: str): return x[name]",
        "class P:\n    kept: torch.Tensor\ndef f(x, p: Q): return x[p.kept]",
        "def f(x: list[torch.Tensor]) -> tuple[torch.Tensor, int]: ...",
    ),
}


def samples(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(rule, source) for rule, sources in table.items() for source in sources]


@pytest.mark.parametrize(("rule", "source"), samples(CAUGHT))
def test_the_lint_finds(rule: str, source: str) -> None:
    assert rule in {finding.rule for finding in findings(source)}


@pytest.mark.parametrize(("rule", "source"), samples(PASSED))
def test_the_lint_lets_pass(rule: str, source: str) -> None:
    assert rule not in {finding.rule for finding in findings(source)}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_house_indexes_tensors_in_one_module(package: str) -> None:
    wrong = []
    for file in sorted((ROOT / package).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        found = [] if file.stem.endswith(("_pb2", "_pb2_grpc")) else findings(file.read_text("utf-8"))
        wrong += [f"{path}: {finding}" for finding in found if finding.rule not in MAY.get(path, set())]
    assert not wrong


@pytest.mark.parametrize("values", [[0, 3], [0, -1], [2**62]])
def test_an_index_is_held_to_its_table_on_the_host(values: list[int]) -> None:
    with pytest.raises(IndexError, match=rf"rows: expected an index in \[0, 3\), got {values[-1]}"):
        index_tensor(values, 3, torch.device("cpu"), field="rows")


def test_an_index_is_of_64_bits_and_shaped_as_its_values() -> None:
    index = index_tensor([[0, 2], [1, 1]], 3, torch.device("cpu"))
    assert (index.dtype, index.tolist()) == (torch.int64, [[0, 2], [1, 1]])
    assert index_tensor([], 0, torch.device("cpu")).shape == (0,)


def test_what_the_module_reads_and_writes() -> None:
    table = torch.arange(12.0).view(3, 4)
    index = index_tensor([2, 0], 3, table.device)
    assert select(table, 0, index).tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert gather(table, 0, index[None]).tolist() == [[8, 1]]
    assert replaced(table, 1, index[:, None], -1.0).tolist() == [[0, 1, -1, 3], [-1, 5, 6, 7], [8, 9, 10, 11]]
    rows, columns = marked(table > 6)
    assert (rows.tolist(), columns.tolist()) == ([1, 2, 2, 2, 2], [3, 0, 1, 2, 3])
    copy_into(table, 0, index, torch.zeros(2, 4))
    fill(table, 1, index[:1], 5.0)
    assert table.tolist() == [[0, 0, 5, 0], [4, 5, 5, 7], [0, 0, 5, 0]]


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_the_watch_refuses_a_bad_index_on_any_thread(index_watch: IndexWatch, in_thread: bool, inference: bool) -> None:
    caught: list[Exception] = []

    def run() -> None:
        table = torch.arange(12.0).view(3, 4)
        calls = (
            lambda: gather(table, 0, torch.tensor([[0, 3]])),
            lambda: table[torch.tensor([-1])],
            lambda: table.index_fill_(0, torch.tensor([5]), 0.0),
            lambda: torch.nn.functional.embedding(torch.tensor([-2]), table),
        )
        with torch.inference_mode(inference):
            for call in calls:
                try:
                    call()
                except IllegalIndexError as error:
                    caught.append(error)
            gather(table, 0, torch.tensor([[0, 2]]))

    if in_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert len(caught) == len(index_watch.refused) == 4
    index_watch.refused.clear()  # else this test fails, whoever has caught the errors


def test_the_watch_refuses_an_index_from_elsewhere_in_the_house(
    index_watch: IndexWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, index = torch.zeros(3), torch.tensor([1])
    monkeypatch.setattr(watching, "OURS", (*watching.OURS, __file__))
    select(table, 0, index)
    with pytest.raises(IndexError, match=r"index_select.*expected to be called in .*indexing, was in tests/test_ind"):
        table.index_select(0, index)
    assert table[table > 1].tolist() == []
    index_watch.refused.clear()


def test_outside_of_a_test_the_watch_lets_everything_pass(index_watch: IndexWatch) -> None:
    index_watch.active = False
    assert torch.arange(3)[torch.tensor([-1])].item() == 2
