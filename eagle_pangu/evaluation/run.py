"""One whole `bench` run: what to ask, of whom, where the files go. Launches the three processes, or uses a server.

It knows files and processes and leaves the asking to `bench`, the figures to `summary`, and the terminal to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_pangu.evaluation.asking import TEACHER_ONLY, RequestLimits
from eagle_pangu.evaluation.bench import TURNS_FILE, Bench, write_summary
from eagle_pangu.evaluation.oracle import OracleThread, loaded_oracle
from eagle_pangu.evaluation.prompts import PromptItem, default_prompts, load_prompts, spread
from eagle_pangu.evaluation.records import Numerics, TurnRecord
from eagle_pangu.evaluation.services_under_test import ServicesUnderTest, on_services
from eagle_pangu.evaluation.sharding import WHOLE, Shard
from eagle_pangu.evaluation.summary import Summary, summarise
from eagle_pangu.evaluation.trace_file import outside_models_ms, read_trace
from eagle_pangu.serving.configuration import load_settings
from eagle_pangu.serving.settings import Settings, TeacherSettings
from eagle_pangu.serving.trio import OnState
from eagle_pangu.speculation.models import resolve_model

TRACE_FILE = "trace.jsonl"

OF_SERVICES = ("mode", "dtype", "numerics", "draft_model", "draft_threads", "prefill_chunk", "batching")
OF_ORACLE = ("teacher_model", "teacher_threads")  # of services too; transformers' generate takes them after the teacher

OnTurn = Callable[[TurnRecord], None]


@dataclass(frozen=True)
class RunSettings:
    """One run. A field of the services that is None keeps what configuration file and environment say.

    output: folder of turns.jsonl, summary.json and, for launched services, trace.jsonl and logs.
    prompts: a prompt file; None: this project's own set. limit: items, spread evenly over the file; None: all.
    max_tokens: most tokens of an answer. drafter: by name; "none": teacher-only alone. rows, depth: tree budget.
    dtype: of both models. batching: how sessions share the teacher's passes, by name. server: HOST:PORT of a running
    orchestrator; None: launch. warmup: turns thrown away first.
    against_transformers: time transformers' generate in this process too. against_prompt_lookup: that, and once more
    with its prompt lookup. near_tie_margin: in logits; None: by dtype.
    """

    output: Path
    prompts: Path | None = None
    limit: int | None = None
    shard: Shard = WHOLE
    max_tokens: int = 128
    drafter: str = "ngram"
    rows: int | None = None
    depth: int | None = None
    mode: str | None = None
    dtype: str | None = None
    numerics: str | None = None
    teacher_model: str | None = None
    draft_model: str | None = None
    teacher_threads: int | None = None
    draft_threads: int | None = None
    prefill_chunk: int | None = None
    batching: str | None = None
    server: str | None = None
    warmup: int = 1
    against_transformers: bool = False
    against_prompt_lookup: bool = False
    near_tie_margin: float | None = None

    def __post_init__(self) -> None:
        """Refuse what would change nothing.

        Raises:
            ValueError: names the setting.
        """
        if self.server is None:
            return
        of_services = (
            OF_SERVICES if self.against_transformers or self.against_prompt_lookup else OF_SERVICES + OF_ORACLE
        )
        for name in of_services:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: the services behind a server have their own; give it where they are started")

    def items(self) -> list[PromptItem]:
        """What to ask: the file, thinned to the limit, then to the shard.

        Raises:
            PromptFileError: the file breaks a rule.
            ValueError: nothing is left.
        """
        items = default_prompts() if self.prompts is None else load_prompts(self.prompts)
        items = self.shard.of(items if self.limit is None else spread(items, self.limit))
        if not items:
            raise ValueError(f"shard: no item left for {self.shard.index}/{self.shard.count}")
        return items

    def services(self) -> Settings:
        """The effective configuration of the three services.

        Raises:
            SettingsError: a value that they do not take.
        """
        return load_settings(overrides=self.overrides())

    def overrides(self) -> dict[str, dict[str, Any]]:
        """What this run lays over file and environment: section -> field -> value."""
        limits = {
            "max_rows": _raised(self.rows, TeacherSettings().max_rows),
            "max_depth": _raised(self.depth, TeacherSettings().max_depth),
        }
        teacher = {
            "model": self.teacher_model,
            "dtype": self.dtype,
            "mode": self.mode,
            "numerics": self.numerics,
            "threads": self.teacher_threads,
            "prefill_chunk": self.prefill_chunk,
            "batching": self.batching,
            # A turn is asked teacher-only and with a draft in the same processes: the KV of the first would spare the
            # second its prefill, and pass for speed-up.
            "prefix_cache_tokens": 0,
            **limits,
        }
        draft = {
            "model": self.draft_model,
            "dtype": self.dtype,
            "threads": self.draft_threads,
            "drafter": None if self.drafter == TEACHER_ONLY else self.drafter,
            **limits,
        }
        trace = str((self.output / TRACE_FILE).resolve())
        orchestrator = {"port": 0, "rows": self.rows, "depth": self.depth, "trace": trace}
        return {"teacher": _given(teacher), "draft": _given(draft), "orchestrator": _given(orchestrator)}

    def to_json(self) -> dict[str, Any]:
        """For summary.json."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


async def run(
    settings: RunSettings,
    *,
    on_state: OnState = lambda name, state: None,
    on_turn: OnTurn = lambda record: None,
) -> Summary:
    """Ask everything, write the files, return the figures.

    Args:
        settings: of the run.
        on_state: told of every step of the processes; not called with a server of the caller's.
        on_turn: called after each turn.

    Raises:
        AskError, PromptFileError, SettingsError, ModelError, ProcessDiedError, TimeoutError: the run could not be made;
            the lines of the turns before are written.
    """
    items, services = settings.items(), settings.services()
    settings.output.mkdir(parents=True, exist_ok=True)
    trace = settings.output / TRACE_FILE
    trace.unlink(missing_ok=True)  # the orchestrator appends

    async def ask(under_test: ServicesUnderTest) -> tuple[Numerics, list[TurnRecord]]:
        return await _ask(settings, under_test, items, services, on_turn)

    numerics, records = await on_services(services, settings.server, settings.output, ask, on_state)
    summary = summarise(
        records, numerics, near_tie=settings.near_tie_margin, outside_models_ms=_outside_models_ms(trace, records)
    )
    launched = None if settings.server else services.model_dump(mode="json")
    write_summary(settings.output, summary.to_json(), {**settings.to_json(), "services": launched})
    return summary


async def _ask(
    settings: RunSettings,
    under_test: ServicesUnderTest,
    items: Sequence[PromptItem],
    services: Settings,
    on_turn: OnTurn,
) -> tuple[Numerics, list[TurnRecord]]:
    async with AsyncExitStack() as stack:
        limits = RequestLimits(settings.max_tokens, services.orchestrator.rows, services.orchestrator.depth)
        asker, _ = await stack.enter_async_context(under_test.connected(limits))
        numerics = (await asker.teacher()).numerics
        oracle: OracleThread | None = None
        if settings.against_transformers or settings.against_prompt_lookup:
            directory, threads = resolve_model(services.teacher.model), services.teacher.threads
            oracle = await stack.enter_async_context(
                loaded_oracle(directory, numerics.dtype, threads, settings.max_tokens)
            )
        turns_file = stack.enter_context((settings.output / TURNS_FILE).open("w", encoding="utf-8"))
        bench = Bench(asker, settings.drafter, oracle, prompt_lookup=settings.against_prompt_lookup)
        return numerics, await bench.run(items, turns_file, warmup=settings.warmup, on_turn=on_turn)


def _outside_models_ms(trace: Path, records: Sequence[TurnRecord]) -> list[float]:
    """Round by round; nothing when a server of the caller's keeps its own trace."""
    if not trace.exists():
        return []
    return outside_models_ms(read_trace(trace), {record.answer.request_id for record in records})


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _raised(asked: int | None, limit: int) -> int | None:
    """A service limit that a budget needs raised; None where it fits."""
    return asked if asked is not None and asked > limit else None
