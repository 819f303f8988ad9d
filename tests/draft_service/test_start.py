"""What the service starts with: the drafters that it can load, and the teachers that they can serve."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from eagle_pangu.serving.bootstrap import StartError
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_tree
from protos.v1 import draft_pb2, model_pb2
from tests.draft_service.peer import ask, failure, open_request, propose_request, serving


async def test_the_service_does_not_start_when_the_model_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"draft\.model"):
        async with serving(DraftSettings(model=str(tmp_path / "nothing"))):
            pass


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


async def test_a_teacher_with_the_draft_models_tokenizer_is_served_and_any_other_is_told_both_sides(
    model_directory: Path,
) -> None:
    import torch

    from eagle_pangu.speculation.checkpoints import load_checkpoint
    from eagle_pangu.speculation.devices import get_device
    from tests.models import EOS, VOCAB_SIZE

    ours = load_checkpoint(model_directory, torch.float32, get_device("cpu")).tokenizer.sha256
    settings = DraftSettings(
        drafter="standalone", model=str(model_directory), dtype="float32", threads=1, slot_capacity=128
    )
    same = model_pb2.ModelFingerprint(
        model="big", tokenizer_sha256=ours, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], context_limit=512
    )
    async with serving(settings) as stub:
        answer = await stub.GetDrafters(draft_pb2.GetDraftersRequest())
        assert list(answer.drafters) == ["ngram", "standalone"]
        stream = stub.Propose()
        opened = (await ask(stream, open_request(drafter="", teacher=same))).opened
        assert opened == draft_pb2.DraftSessionOpened(drafter="standalone", needs_features=False, context_limit=128)
        tree = TokenTree(*decode_tree((await ask(stream, propose_request())).proposal.tree))
        tree.validate(vocab_size=VOCAB_SIZE, max_rows=8, max_depth=2)
        assert tree.drafted == 8

        other = model_pb2.ModelFingerprint()
        other.CopyFrom(same)
        other.tokenizer_sha256 = "cd" * 32
        error = await failure(stub.Propose(), open_request(drafter="", teacher=other))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        for part in ("'big'", f"'{model_directory.name}'", ours, "cd" * 32):
            assert part in str(error.details())
        assert (await ask(stub.Propose(), open_request(drafter="ngram", teacher=other))).HasField("opened")
