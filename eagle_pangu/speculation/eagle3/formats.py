"""Heads on disk: reads every public layout, writes the one that most readers share.

A head that is read wrongly still drafts, only badly, and nothing says so: the tokens are the teacher's in any case. So
`configurations`, `rope`, `vocabulary` and `tensors` spell out what a layout means, and what is missing, left over,
contradictory or ambiguous is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle_pangu.speculation.eagle3.configurations import parse_config, write_config
from eagle_pangu.speculation.eagle3.errors import HeadError
from eagle_pangu.speculation.eagle3.head import Eagle3Head, HeadConfig
from eagle_pangu.speculation.eagle3.tensors import EMBEDDINGS, SAFETENSORS, check_weights, module_names, read_tensors
from eagle_pangu.speculation.eagle3.vocabulary import StoredVocabulary, stored_vocabulary, target_ids_of

__all__ = ["HeadError", "load_head", "save_head"]


def load_head(directory: Path, *, embeddings: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> Eagle3Head:
    """Read a head that SafeAILab's EAGLE, SpecForge, speculators or ModelOpt wrote, or `save_head`.

    Args:
        directory: config.json with model.safetensors, its shards and their index, or pytorch_model.bin.
        embeddings: [vocab_size, hidden_size] of the teacher, copied where the files hold none; theirs win.
        dtype: of the weights.

    Returns:
        The head on the CPU.

    Raises:
        HeadError: anything that would make it another head than the one that was trained.
    """
    try:
        config = parse_config(_read_json(directory / "config.json"))
        tensors = read_tensors(directory)
        return _assemble(config, tensors, embeddings, dtype)
    except HeadError as error:
        raise HeadError(f"{directory}: {error}") from error


def save_head(head: Eagle3Head, directory: Path, *, torch_dtype: torch.dtype) -> None:
    """Write a head in SafeAILab's layout, with SpecForge's and ModelOpt's fields for variants that it does not have.

    The embeddings are the teacher's and are left out, unless the head is of another width than its teacher.

    Args:
        directory: made if missing; config.json and model.safetensors in it are replaced.
        torch_dtype: of the weights in the file.

    Raises:
        HeadError: a head that `load_head` would refuse.
    """
    config = head.config
    try:
        document = write_config(config, torch_dtype)
        vocabulary = stored_vocabulary(head.target_ids.cpu(), config.vocab_size)
    except HeadError as error:
        raise HeadError(f"{directory}: {error}") from error
    parameters = head.state_dict()
    tensors = {
        name: parameters[module].to("cpu", torch_dtype).contiguous() for name, module in module_names(config).items()
    }
    if config.target_hidden_size == config.hidden_size:
        del tensors[EMBEDDINGS]
    tensors |= {name: tensor for name, tensor in vocabulary._asdict().items() if tensor is not None}
    directory.mkdir(parents=True, exist_ok=True)
    # Beside and then in place: nobody reads half a file, and one that is mapped somewhere does not change.
    unfinished = directory / f"{SAFETENSORS}.unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(directory / SAFETENSORS)
    (directory / "config.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", "utf-8")


def _assemble(
    config: HeadConfig, tensors: dict[str, torch.Tensor], embeddings: torch.Tensor | None, dtype: torch.dtype
) -> Eagle3Head:
    """Put stored tensors, by normal name, into a head."""
    vocabulary = StoredVocabulary(tensors.pop("d2t", None), tensors.pop("t2d", None))
    target_ids = target_ids_of(vocabulary, config.draft_vocab_size, config.vocab_size)
    if EMBEDDINGS not in tensors:
        tensors[EMBEDDINGS] = _of_teacher(embeddings, config)
    names = module_names(config)
    with torch.device("meta"):  # for the shapes only: a configuration may claim any size
        expected = Eagle3Head(config).state_dict()
    check_weights(tensors, {name: expected[module].shape for name, module in names.items()})
    head = Eagle3Head(config)
    # Copied: tensors of a file are a mapping of it, and the embeddings are another model's.
    state = {names[name]: tensor.to("cpu", dtype, copy=True) for name, tensor in tensors.items()}
    head.load_state_dict({**state, "target_ids": target_ids}, strict=True, assign=True)
    return head


def _of_teacher(embeddings: torch.Tensor | None, config: HeadConfig) -> torch.Tensor:
    """The teacher's embeddings, for a head that has none of its own."""
    expected = [config.vocab_size, config.hidden_size]
    if embeddings is None:
        raise HeadError(f"{EMBEDDINGS}: expected {expected} in the files or from the teacher, found none")
    if list(embeddings.shape) != expected:
        raise HeadError(f"{EMBEDDINGS}: expected {expected}, found none here, {list(embeddings.shape)} of the teacher")
    return embeddings.detach()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise HeadError(f"{path.name}: expected a head's configuration: {error.strerror}") from error
    except ValueError as error:
        raise HeadError(f"{path.name}: expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise HeadError(f"{path.name}: expected an object, found {type(document).__name__}")
    return document
