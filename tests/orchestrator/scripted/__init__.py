"""A teacher and a draft that follow a script, as real gRPC services that hold their peer to the contract."""

from tests.orchestrator.scripted.draft import Asked, Plan, ScriptedDraft, branching, knowing, proposal
from tests.orchestrator.scripted.language import (
    CHAT_TEMPLATE,
    EOS,
    TOKENIZER,
    TOKENIZER_JSON,
    ids_of,
    plain,
    saying,
    scrambled,
)
from tests.orchestrator.scripted.teacher import ScriptedTeacher, logprobs_of

__all__ = [
    "CHAT_TEMPLATE",
    "EOS",
    "TOKENIZER",
    "TOKENIZER_JSON",
    "Asked",
    "Plan",
    "ScriptedDraft",
    "ScriptedTeacher",
    "branching",
    "ids_of",
    "knowing",
    "logprobs_of",
    "plain",
    "proposal",
    "saying",
    "scrambled",
]
