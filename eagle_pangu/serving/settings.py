"""The one typed configuration, for all services and the command line.

Read in this order, the later one winning: defaults, a TOML file (`--config` or EAGLE_PANGU_CONFIG), environment
(EAGLE_PANGU_TEACHER__DTYPE=bfloat16 sets `teacher.dtype`), flags. An unknown name or a bad value stops the start and
names the field. This module says what there is to configure; `configuration` reads it. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Device = Literal["cpu", "cuda", "npu"]
AttentionChoice = Literal[
    "auto",
    "sdpa",
    "eager",
    "npu_fused_infer_attention_score_v2",
    "npu_fused_infer_attention_score",
    "npu_fusion_attention",
]
DTypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
NumericsChoice = Literal["auto", "bitwise", "free"]
Mode = Literal["reference", "performance"]
BatchingName = Literal["ragged", "eqspec", "exspec"]
DrafterName = Literal["ngram", "standalone", "eagle3", "hybrid", "none"]
SectionName = Literal["teacher", "draft", "orchestrator", "http"]
Port = Annotated[int, Field(ge=0, le=65535)]

SERVICES: tuple[SectionName, ...] = ("teacher", "draft", "orchestrator")
"""The sections of the three gRPC services, which are started together."""

HEAD_DRAFTERS = ("eagle3", "hybrid")
"""The drafters that draft with an EAGLE-3 head."""


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(Section):
    """What every service's gRPC server needs."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 in a container.")
    port: Port = Field(default=0, description="Port to listen on; 0 lets the system choose one.")
    max_message_bytes: int = Field(
        default=16 * 2**20, ge=2**16, description="Largest message sent or received, in bytes."
    )
    keepalive_seconds: float = Field(default=30, gt=0, description="Ping interval on idle connections, in seconds.")
    write_seconds: float = Field(
        default=60, gt=0, description="Longest wait for a peer to take one message of a stream; past it the call ends."
    )
    drain_seconds: float = Field(
        default=30, ge=0, description="Longest wait for running sessions after SIGTERM, in seconds."
    )
    reflection: bool = Field(default=True, description="Serve gRPC reflection.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Lowest level logged.")


class ModelSettings(Section):
    """A model and how it computes."""

    stall_seconds: float = Field(
        default=60,
        gt=0,
        description="Longest time of one piece of model work; while one takes longer, health answers NOT_SERVING.",
    )

    model: str = Field(
        default="smollm2-135m-instruct", description="Name of a pulled model, or a transformers directory."
    )
    device: Device = Field(default="cpu", description="Device of the model.")
    dtype: DTypeChoice = Field(
        default="auto", description="Weights and activations; auto: what the device computes best."
    )
    attention: AttentionChoice = Field(
        default="auto",
        description="Attention under free numerics; auto: the device's fused one. eager: the reference, written out. "
        "The npu_ ones are operators of device npu.",
    )
    check_indices: bool = Field(
        default=False,
        description="Refuse a negative or out-of-range index in any operator of the model, before it runs. Slow; for "
        "finding faults.",
    )
    threads: int = Field(default=0, ge=0, description="CPU threads of the model; 0: all cores.")


class TeacherSettings(ServerSettings, ModelSettings):
    """The teacher service."""

    port: Port = Field(default=50051, description="Port to listen on; 0 lets the system choose one.")
    mode: Mode = Field(
        default="performance", description="reference: eager attention and every check; performance: serving."
    )
    numerics: NumericsChoice = Field(
        default="auto", description="bitwise: a row's bits never depend on its neighbours."
    )
    slots: int = Field(default=8, ge=1, le=1024, description="Sessions held at once; each owns one KV slot.")
    slot_capacity: int = Field(
        default=4096, ge=16, description="Tokens that one slot holds, speculative rows included."
    )
    kv_tokens: int = Field(
        default=0,
        ge=0,
        le=2**40,
        description="Tokens of KV that all sessions together may hold; a session counts for its prompt, its longest "
        "answer and its largest tree. 0: slots times slot_capacity.",
    )
    batching: BatchingName = Field(
        default="ragged",
        description="How sessions share a forward pass: ragged, or eqspec and exspec, which are there for comparison.",
    )
    step_rows: int = Field(
        default=256, ge=1, le=2**16, description="Most rows of one forward pass; one session's tree may be larger."
    )
    group_size: int = Field(default=8, ge=1, le=1024, description="Most sessions of a pass of eqspec and exspec.")
    window: int = Field(
        default=48, ge=1, le=1024, description="Waiting sessions that exspec looks at for a group of equal length."
    )
    advise_rows: bool = Field(
        default=True, description="Advise sessions to draft fewer rows while so many share the model that fewer pay."
    )
    queue_limit: int = Field(
        default=64, ge=0, description="Sessions that may wait for a slot; past it RESOURCE_EXHAUSTED."
    )
    queue_seconds: float = Field(default=30, ge=0, description="Longest wait for a slot, in seconds.")
    session_idle_seconds: float = Field(
        default=300, gt=0, description="Longest wait for a session's next message; past it the session ends."
    )
    prefill_chunk: int = Field(
        default=256, ge=1, description="Most prompt tokens in one forward pass, those of all sessions together."
    )
    prefix_cache_tokens: int = Field(
        default=8192,
        ge=0,
        le=2**40,
        description="Most tokens whose KV is kept of sessions that ended, for prompts that begin alike; 0: every "
        "session reads its whole prompt.",
    )
    max_rows: int = Field(default=64, ge=0, le=1024, description="Most drafted rows of a tree.")
    max_depth: int = Field(default=32, ge=0, le=1024, description="Deepest drafted row of a tree.")
    branch: Literal["shared", "replicate"] = Field(
        default="shared", description="Branch of the KV cache: shared prefix, or a deep copy (the reference)."
    )

    @field_validator("model")
    @classmethod
    def _model_is_named(cls, value: str) -> str:
        if not value:
            raise ValueError("expected the name of a pulled model or a transformers directory")
        return value

    @model_validator(mode="after")
    def _kv_holds_a_slot(self) -> Self:
        if 0 < self.kv_tokens < self.slot_capacity:
            raise ValueError(
                f"kv_tokens: expected 0, or at least slot_capacity ({self.slot_capacity}), got {self.kv_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _reference_attends_eagerly(self) -> Self:
        if self.mode == "reference" and self.attention not in ("auto", "eager"):
            raise ValueError(f"attention: expected auto or eager with mode = reference, got {self.attention}")
        return self

    @model_validator(mode="after")
    def _window_holds_a_group(self) -> Self:
        if self.batching == "exspec" and self.window < self.group_size:
            raise ValueError(f"window: expected at least group_size ({self.group_size}), got {self.window}")
        return self


class DraftSettings(ServerSettings, ModelSettings):
    """The draft service."""

    port: Port = Field(default=50052, description="Port to listen on; 0 lets the system choose one.")
    drafter: DrafterName = Field(default="ngram", description="Drafter of sessions that name none.")
    model: str = Field(
        default="", description="Model of the standalone drafter; empty: only drafters that need none are offered."
    )
    head: str = Field(
        default="",
        description="EAGLE-3 head of the eagle3 and hybrid drafters, a directory; empty: where one of them is "
        "`drafter`, the head that comes with the project for `embeddings`, else neither is offered.",
    )
    embeddings: str = Field(
        default="smollm2-135m-instruct",
        description="The head's teacher: its token embeddings, tokenizer and layer count are read, not the model.",
    )
    quantize: bool = Field(
        default=True, description="Round the head's weights to 8 bits where its device is faster so: on the CPU."
    )
    window: int = Field(
        default=0, ge=0, description="Rows that a row of the head sees, itself included; 0: all. For the ablation."
    )
    slots: int = Field(default=64, ge=1, le=1024, description="Sessions held at once; as many as requests.")
    slot_capacity: int = Field(default=4096, ge=16, description="Tokens that one slot of a drafter with a model holds.")
    session_idle_seconds: float = Field(
        default=300, gt=0, description="Longest wait for a session's next message; past it the session ends."
    )
    ngram_max: int = Field(default=4, ge=1, le=16, description="Longest suffix looked up, in tokens.")
    ngram_min: int = Field(default=1, ge=1, le=16, description="Shortest suffix looked up, in tokens.")
    ngram_matches: int = Field(default=8, ge=1, le=256, description="Most matches merged into one tree.")
    branching: int = Field(
        default=4, ge=1, le=64, description="Children tried under each node by drafters that hold a model."
    )
    max_rows: int = Field(default=64, ge=0, le=1024, description="Most drafted rows of a tree.")
    max_depth: int = Field(default=32, ge=0, le=1024, description="Deepest drafted row of a tree.")

    @model_validator(mode="after")
    def _ordered_ngrams(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min: expected at most ngram_max ({self.ngram_max}), got {self.ngram_min}")
        return self

    @model_validator(mode="after")
    def _standalone_has_a_model(self) -> Self:
        if self.drafter == "standalone" and not self.model:
            raise ValueError("model: expected a value, which the standalone drafter needs, got ''")
        return self

    def offers(self, drafter: str) -> bool:
        """Whether these settings hold what a drafter needs."""
        if drafter in HEAD_DRAFTERS:
            return bool(self.head) or self.drafter in HEAD_DRAFTERS
        return drafter != "standalone" or bool(self.model)


class OrchestratorSettings(ServerSettings):
    """The orchestrator."""

    port: Port = Field(default=50050, description="Port to listen on; 0 lets the system choose one.")
    teacher: str = Field(
        default="127.0.0.1:50051", description="Teacher target, as gRPC names it (host:port, dns:///...)."
    )
    draft: str = Field(default="", description="Draft target; empty: teacher-only.")
    drafter: str = Field(
        default="", description="Drafter of requests that name none; empty: the draft service's default."
    )
    rows: int = Field(
        default=15,
        ge=0,
        le=1024,
        description="Default tree budget: drafted rows. With the root they are 16, for which many devices take about "
        "the time of one.",
    )
    depth: int = Field(default=8, ge=0, le=1024, description="Default tree budget: depth.")
    default_max_tokens: int = Field(default=256, ge=1, description="max_tokens of requests that name none.")
    max_tokens_limit: int = Field(default=4096, ge=1, description="Largest max_tokens a request may name.")
    n_limit: int = Field(
        default=8, ge=1, le=1024, description="Most answers to one request; each holds a slot of the teacher."
    )
    prompt_bytes_limit: int = Field(default=2**20, ge=1, description="Largest prompt text, in bytes of UTF-8.")
    max_concurrent: int = Field(default=64, ge=1, description="Requests served at once; past it RESOURCE_EXHAUSTED.")
    draft_deadline_seconds: float = Field(default=2.0, gt=0, description="Longest wait for one proposal, in seconds.")
    draft_retry_seconds: float = Field(
        default=5.0, ge=0, description="After a failure of the draft service, wait before new use."
    )
    teacher_deadline_seconds: float = Field(
        default=120.0, gt=0, description="Longest silence of the teacher while an answer is awaited."
    )
    trace: Path | None = Field(default=None, description="File for one JSON line a round; none: no trace.")
    trace_text: bool = Field(default=False, description="Write prompt text into the trace.")

    @field_validator("trace", mode="before")
    @classmethod
    def _empty_is_no_trace(cls, value: object) -> object:
        return None if value == "" else value


class HttpSettings(Section):
    """The HTTP front, which speaks OpenAI's API and asks an orchestrator."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 in a container.")
    port: Port = Field(default=8080, description="Port to listen on; 0 lets the system choose one.")
    target: str = Field(
        default="127.0.0.1:50050", description="Orchestrator target, as gRPC names it (host:port, dns:///...)."
    )
    max_message_bytes: int = Field(
        default=16 * 2**20,
        ge=2**16,
        description="Largest request body, and largest message to or from the orchestrator, in bytes.",
    )
    attempts: int = Field(
        default=3, ge=1, le=100, description="Attempts of a call while the orchestrator is full or away; 1: no retries."
    )
    request_seconds: float = Field(
        default=600, gt=0, description="Longest time for one answer, in seconds; past it HTTP 504."
    )
    write_seconds: float = Field(
        default=60, gt=0, description="Longest wait for a client to take one event of a stream; past it the call ends."
    )
    drain_seconds: int = Field(
        default=30, ge=0, description="Longest wait for running requests after SIGTERM, in seconds."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Lowest level logged.")


class Settings(Section):
    """Everything: one section a service. Building it reads neither file nor environment."""

    teacher: TeacherSettings = TeacherSettings()
    draft: DraftSettings = DraftSettings()
    orchestrator: OrchestratorSettings = OrchestratorSettings()
    http: HttpSettings = HttpSettings()
