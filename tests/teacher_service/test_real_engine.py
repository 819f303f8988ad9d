"""The service on a real engine, a tiny random Llama, held against transformers' own greedy decoding."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_pangu.serving.bootstrap import StartError
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.engine import Numerics
from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_features
from teacher_service import main
from tests.models import VOCAB_SIZE, tiny_llama
from tests.teacher_service.fakes import FakeEngine
from tests.teacher_service.peer import serving

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(directory):
    """The greedy answer to PROMPT by code that shares nothing with ours."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return ids[0, len(PROMPT) :].tolist()


@pytest.fixture(scope="module")
def engines(directory):
    """Engines by mode and branch, each built once."""
    built = {}

    def engine(mode: str, branch: str):
        if (mode, branch) not in built:
            settings = TeacherSettings(
                model=str(directory),
                dtype="float32",
                mode=mode,
                numerics="auto" if mode == "performance" else "free",
                branch=branch,
                slot_capacity=128,
                max_rows=8,
                prefill_chunk=16,
            )
            built[mode, branch] = main.build_engine(settings)
        return built[mode, branch]

    return engine


def scripted(answer: list[int], right: int):
    """A draft that knows the answer: two branches, the second one right for `right` rows and wrong from there on."""

    def draft(history: list[int]) -> TokenTree:
        rest = (answer + [0] * 8)[len(history) - len(PROMPT) :]
        good = [*rest[:right], *[(token + 1) % VOCAB_SIZE for token in rest[right:4]]]
        decoy = (good[0] + 7) % VOCAB_SIZE
        return TokenTree.build([history[-1], decoy, good[0], decoy, *good[1:]], [0, 0, 0, 1, 2, 4, 5])

    return draft


@pytest.mark.parametrize("chunk", [5, 100])
@pytest.mark.parametrize("right", [0, 1, 4])
@pytest.mark.parametrize(("mode", "branch"), [("performance", "shared"), ("reference", "replicate")])
async def test_answers_are_those_of_plain_greedy_decoding(engines, oracle, mode, branch, right, chunk):
    async with serving(engines(mode, branch), prefill_chunk=chunk, slot_capacity=128) as served:
        session = served.session()
        assert await session.decode(PROMPT, TOKENS, scripted(oracle, right)) == oracle


async def test_features_are_the_same_bits_whether_a_token_was_read_in_the_prompt_or_accepted_from_a_tree(
    engines, oracle
):
    engine = engines("performance", "shared")
    if engine.numerics.policy != "bitwise":
        pytest.skip("no invariance class on this machine")
    width = engine.checkpoint.feature_width
    async with serving(engine, slot_capacity=128) as served:
        whole, session = served.session(), served.session()
        await whole.open([*PROMPT, *oracle[:5]], want_features=True)
        await session.open(PROMPT, want_features=True)
        verdict = await session.verdict(1, len(PROMPT), 0, scripted(oracle, 4)([*PROMPT, oracle[0]]))
        assert list(verdict.accepted_rows) == [2, 4, 5, 6]
        of_prompt = np.concatenate([decode_features(part, width) for part in whole.features])
        in_rounds = [decode_features(part, width) for part in (*session.features, verdict.features)]
        np.testing.assert_array_equal(np.concatenate(in_rounds), of_prompt)


async def test_two_sessions_in_turn_do_not_disturb_each_other(engines, oracle):
    async with serving(engines("performance", "shared"), slot_capacity=128) as served:
        one, other = served.session(), served.session()
        draft = scripted(oracle, 2)
        await one.open(PROMPT)
        verdict = await one.verdict(1, len(PROMPT), 0, draft([*PROMPT, oracle[0]]))
        assert await other.decode(PROMPT, TOKENS, scripted(oracle, 4)) == oracle
        kept = [*PROMPT, *oracle[:3]]
        assert list(verdict.accepted_rows) == [2, 4]
        following = await one.verdict(2, len(kept), 2, TokenTree.root_only(verdict.next_token_id))
        assert following.next_token_id == oracle[4]


def test_where_the_default_dtype_keeps_no_bitwise_numerics_float32_takes_its_place(monkeypatch):
    loaded, warm = [], []

    class Engine(FakeEngine):
        def __init__(self, dtype) -> None:
            super().__init__()
            self.dtype = dtype
            self.numerics = Numerics(str(dtype), "free", "performance", "no class", "sdpa", "")

    def load(settings, device, dtype):
        loaded.append(dtype)
        return Engine(dtype)

    monkeypatch.setattr(main, "_load", load)
    monkeypatch.setattr(main, "warm_up", lambda engine: warm.append(engine.dtype))
    monkeypatch.setattr("eagle_pangu.speculation.devices.cpu.CpuDevice.default_dtype", lambda self: torch.bfloat16)
    assert main.build_engine(TeacherSettings()).dtype is torch.float32
    assert (loaded, warm) == ([torch.bfloat16, torch.float32], [torch.float32])
    assert main.build_engine(TeacherSettings(dtype="bfloat16")).dtype is torch.bfloat16


async def test_a_model_that_cannot_be_had_stops_the_start_and_is_named(tmp_path):
    service = main.TeacherService(TeacherSettings(model=str(tmp_path / "nothing")))
    try:
        with pytest.raises(StartError, match="nothing"):
            await service.start()
    finally:
        await service.stop()
