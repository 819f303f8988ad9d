"""Loading any decoder-only transformers directory, and what identifies it to a peer.

Nothing is half-loaded: a missing, unexpected or misshapen tensor, an architecture with other than full attention, or a
directory without a tokenizer is an error that names what is wrong. Weights come from disk only, never from a hub, and
no remote code runs. What openPangu is in terms of transformers, `openpangu` knows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from eagle_pangu.speculation.attention import TREE_ATTENTION
from eagle_pangu.speculation.checkpoint_checks import (
    UnfitError,
    check_eos,
    check_given_sizes,
    check_sizes,
    check_vocabulary,
    check_weight_files,
)
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.licences import licence_notice
from eagle_pangu.speculation.openpangu import MODEL_TYPE as OPENPANGU
from eagle_pangu.speculation.openpangu import OpenPanguError, check_dropped_tensors, llama_config
from eagle_pangu.speculation.openpangu_tokenizer import convert_tokenizer
from protos.fingerprint import tokenizer_sha256

log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A model directory that cannot serve; the text names the directory and the fault."""


@dataclass(frozen=True)
class Tokenizer:
    """What a torch-free peer needs to turn text into ids and back.

    Attributes:
        json: tokenizer.json in the format of the `tokenizers` library.
        chat_template: Jinja source; empty when the model has none.
        special_tokens: the strings that a template may use by name (bos_token, eos_token, ...).
        adds_bos: a prompt made from text begins with `bos_token`, which its text does not hold.
    """

    json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    adds_bos: bool = False

    @cached_property
    def sha256(self) -> str:
        """As peers compare it."""
        return tokenizer_sha256(self.json)

    @cached_property
    def vocab_size(self) -> int:
        """One past the highest id that it can read."""
        document = json.loads(self.json)
        vocabulary = document["model"]["vocab"]
        # Unigram models list [piece, score] in id order; the others map text to id.
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        return 1 + max(ids + [token["id"] for token in document.get("added_tokens") or []])


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with what identifies it.

    Attributes:
        name: the directory's name; for people only.
        vocab_size: ids that the model may emit and the tokenizer can read: padded embedding rows are left out.
        eos_token_ids: ascending.
        context_limit: longest sequence in tokens.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    context_limit: int

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.model.config.hidden_size)

    @property
    def feature_width(self) -> int:
        """Values of one token's features: low, middle and high hidden state."""
        return 3 * self.hidden_size


def load_checkpoint(directory: Path, dtype: torch.dtype, device: Device) -> Checkpoint:
    """Load a transformers directory for tree-masked forwards.

    Raises:
        CheckpointError: anything that would make the model half-loaded or its output not its own.
    """
    config = read_config(directory)
    tokenizer = read_tokenizer(directory)
    eos_token_ids = read_eos_token_ids(directory, config)
    _say_licence(directory)
    with _reading(directory, "cannot be loaded"):
        check_vocabulary(config, tokenizer.vocab_size, eos_token_ids)
        check_weight_files(directory)
        if _is_openpangu(directory):
            check_dropped_tensors(directory, config)
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=TREE_ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            # Not to accept them: so that the report names them, below.
            ignore_mismatched_sizes=True,
        )
    faults = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if faults:
        raise CheckpointError(f"{directory}: tensors do not match the architecture: {faults}")
    if config.tie_word_embeddings and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        # transformers keeps such a head, with a warning that nobody reads.
        raise CheckpointError(f"{directory}: tie_word_embeddings is true, and the file holds a head of other values")
    model = model.to(device.torch_device).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Checkpoint(
        name=directory.name,
        model=model,
        tokenizer=tokenizer,
        vocab_size=known_vocab_size(config, tokenizer),
        eos_token_ids=eos_token_ids,
        context_limit=int(config.max_position_embeddings),
    )


def read_config(directory: Path) -> Any:
    """The transformers configuration, of a kind that is served here.

    Raises:
        CheckpointError: missing, unreadable, or of another kind.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: expected a transformers model directory, found no config.json")
    if _is_openpangu(directory):
        with _reading(directory, "config.json cannot be read"):
            return llama_config(_read_json(directory / "config.json"))
    with _reading(directory, "config.json cannot be read"):
        check_given_sizes(_read_json(directory / "config.json"))
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{directory}: expected a decoder-only model, got {config.model_type}")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise CheckpointError(f"{directory}: expected full attention in every layer, got {sorted(layer_types)}")
    with _reading(directory, "config.json cannot be read"):
        check_sizes(config)
    return config


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory.

    Raises:
        CheckpointError: there is none of the fast kind, or a file beside it cannot be read.
    """
    settings = _read_json(directory / "tokenizer_config.json")
    template = _read_template(directory, settings)
    special = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special[name] = text
    if _is_openpangu(directory):
        with _reading(directory, "the tokenizer cannot be read"):
            document = _read_json(directory / "config.json")
            converted = convert_tokenizer(directory, settings, document.get("bos_token_id"))
        return Tokenizer(converted.json, template, special, converted.adds_bos)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{directory}: expected tokenizer.json (save the tokenizer as a fast tokenizer)")
    with _reading(directory, "tokenizer.json cannot be read"):
        tokenizer = Tokenizer(path.read_bytes(), template, special)
        tokenizers.Tokenizer.from_buffer(tokenizer.json)  # as the orchestrator will
        _ = tokenizer.vocab_size  # its ids, while a fault in them is this file's
    return tokenizer


def _read_template(directory: Path, settings: dict[str, Any]) -> str:
    """Of a file of its own, else of tokenizer_config.json."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        with _reading(directory, f"{file.name} cannot be read"):
            return file.read_text("utf-8")
    template = settings.get("chat_template") or ""
    if not isinstance(template, str):
        raise CheckpointError(f"{directory}: tokenizer_config.json: chat_template: expected a text, got {template!r}")
    return template


def known_vocab_size(config: Any, tokenizer: Tokenizer) -> int:
    """Ids that the tokenizer can read: past them lie padding rows of the embedding, which must never be emitted."""
    return min(int(config.vocab_size), tokenizer.vocab_size)


def read_eos_token_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """Ids that end an answer, ascending: of the generation configuration, else of the model's.

    Raises:
        CheckpointError: the generation configuration cannot be read, or what should be ids is something else.
    """
    generation = _read_json(directory / "generation_config.json")
    with _reading(directory, "generation_config.json cannot be read"):
        eos = GenerationConfig(**generation).eos_token_id
        if eos is not None:
            return check_eos("generation_config.json", eos)
    with _reading(directory, "config.json cannot be read"):
        eos = getattr(config, "eos_token_id", None)
        return () if eos is None else check_eos("config.json", eos)


def _is_openpangu(directory: Path) -> bool:
    return _read_json(directory / "config.json").get("model_type") == OPENPANGU


@cache
def _say_licence(directory: Path) -> None:
    """Once a process."""
    if notice := licence_notice(_read_json(directory / "config.json")):
        log.warning("licence of %s: %s", directory.name, notice)


@contextmanager
def _reading(directory: Path, otherwise: str) -> Iterator[None]:
    """Reading a stranger's files: whatever that raises is a CheckpointError, with what is said otherwise."""
    try:
        yield
    except CheckpointError:
        raise
    except (OpenPanguError, UnfitError) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{directory}: {otherwise}: {type(error).__name__}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return document
