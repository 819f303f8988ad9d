"""`eagle-pangu generate`: one answer, streamed as text or as one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import Annotated, Any

import grpc
import grpc.aio
import typer

from eagle_pangu.cli import services
from eagle_pangu.cli.console import EXPECTED, CommandError, answers, fail, run
from eagle_pangu.client.client import GenerationClient
from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.settings import OrchestratorSettings, ServerSettings, Settings
from protos.v1 import generation_pb2, tree_pb2

DEFAULT_SERVER = f"127.0.0.1:{OrchestratorSettings().port}"
CONNECT_SECONDS = 2.0

FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


def generate(
    text: Annotated[str | None, typer.Argument(help="What to say to the model; - reads it from stdin.")] = None,
    token_ids: Annotated[str | None, typer.Option(help="Prompt as ids with commas, instead of a text.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The text as it is, without the chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of the answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the answer; may be repeated.")] = None,
    drafter: Annotated[
        str, typer.Option(help="ngram, standalone, eagle3, hybrid; none: teacher-only; default: the server's.")
    ] = "",
    rows: Annotated[int | None, typer.Option(min=0, help="Tree budget: drafted rows; with --depth.")] = None,
    depth: Annotated[int | None, typer.Option(min=0, help="Tree budget: depth; with --rows.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence id.")] = False,
    include_stop: Annotated[bool, typer.Option("--include-stop", help="Leave the stop string in the text.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0: greedy, the default.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from so many best tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the best tokens that hold this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Sample from tokens this near to the best one.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same tokens; --json tells it.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1: none.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Logits less per occurrence in the answer.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Logits less for any occurrence there.")] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS; may be repeated.")] = None,
    min_tokens: Annotated[int | None, typer.Option(min=0, help="No end of the answer before so many tokens.")] = None,
    stop_token_ids: Annotated[str | None, typer.Option(help="Ids that end the answer, with commas.")] = None,
    bad_words: Annotated[list[str] | None, typer.Option(help="Ids never to come in a row; may be repeated.")] = None,
    allowed_token_ids: Annotated[str | None, typer.Option(help="No other ids are decided; with commas.")] = None,
    logprobs: Annotated[int | None, typer.Option(min=0, help="With --json: so many best log-probabilities.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
    server: Annotated[str, typer.Option(help="HOST:PORT of the orchestrator.")] = DEFAULT_SERVER,
    start: Annotated[bool, typer.Option("--start", help="Start the three services for this answer.")] = False,
    dtype: services.Dtype = None,
    mode: services.Mode = None,
    numerics: services.Numerics = None,
    teacher_model: services.TeacherModel = None,
    draft_model: services.DraftModel = None,
) -> None:
    """Answer a text (through the chat template unless --raw) or token ids.

    --dtype, --mode, --numerics, --teacher-model and --draft-model describe the services of --start.
    """
    described = services.ServiceFlags(
        dtype=dtype, mode=mode, numerics=numerics, teacher_model=teacher_model, draft_model=draft_model
    )
    try:
        options = _options(text, token_ids, raw=raw)
        if (rows is None) != (depth is None):
            raise CommandError("--rows and --depth go together")
        if not start and described != services.ServiceFlags():
            raise CommandError("--dtype and its like describe services to start; give --start too")
        settings = replace(described, drafter=drafter or None, port=0).settings() if start else None
        for name, value in (("stop_token_ids", stop_token_ids), ("allowed_token_ids", allowed_token_ids)):
            getattr(options, name).extend(_ids(name, value) if value is not None else ())
        for word in bad_words or ():
            options.bad_words.add(token_ids=_ids("bad_words", word))
        for entry in logit_bias or ():
            token_id, bias = _bias(entry)
            options.logit_bias[token_id] = bias
    except EXPECTED as error:
        fail(error)
    scalars = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "min_tokens": min_tokens,
        "logprobs": logprobs,
    }
    for name, scalar in scalars.items():
        if scalar is not None:
            try:
                setattr(options, name, scalar)
            except ValueError as error:  # does not fit the field
                fail(CommandError(f"--{name.replace('_', '-')}: {error}"))
    options.include_stop = include_stop
    if rows is not None and depth is not None:
        options.budget.CopyFrom(tree_pb2.TreeBudget(rows=rows, depth=depth))
    options.stop.extend(stop or ())
    options.drafter = drafter
    options.ignore_eos = ignore_eos
    run(_answer(options, server, settings, as_json=as_json))


def _options(text: str | None, token_ids: str | None, *, raw: bool) -> generation_pb2.GenerationOptions:
    if (text is None) == (token_ids is None):
        raise CommandError("give either TEXT or --token-ids")
    if token_ids is not None:
        ids = generation_pb2.TokenIds(ids=_ids("token_ids", token_ids))
        return generation_pb2.GenerationOptions(prompt_token_ids=ids)
    assert text is not None
    if text == "-":
        text = sys.stdin.read()
    if raw:
        return generation_pb2.GenerationOptions(prompt=text)
    return generation_pb2.GenerationOptions(chat=user_says(text))


def _ids(name: str, text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        ids = [-1]
    if not all(0 <= token_id < 2**32 for token_id in ids):
        raise CommandError(f"--{name.replace('_', '-')}: expected ids with commas between, got {text!r}")
    return ids


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, bias = text.partition("=")
    try:
        if equals and 0 <= int(token_id) < 2**32:
            return int(token_id), float(bias)
    except ValueError:
        pass
    raise CommandError(f"--logit-bias: expected ID=BIAS, got {text!r}")


def user_says(text: str) -> generation_pb2.ChatMessages:
    """A chat of one message."""
    return generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content=text)])


async def _answer(
    options: generation_pb2.GenerationOptions, server: str, settings: Settings | None, *, as_json: bool
) -> None:
    if settings is not None:
        async with services.launched(settings) as trio:
            await trio.unless_died(_ask(options, trio.target, as_json=as_json))
        return
    async with channel(server, ServerSettings()) as connection:
        try:
            await asyncio.wait_for(connection.channel_ready(), CONNECT_SECONDS)
        except TimeoutError:
            raise CommandError(
                f"no server answers at {server}; start one with: eagle-pangu up (or give --start, or --server)"
            ) from None
    await _ask(options, server, as_json=as_json)


async def _ask(options: generation_pb2.GenerationOptions, target: str, *, as_json: bool) -> None:
    async with GenerationClient(target) as client:
        try:
            if as_json:
                answers.print(json.dumps(as_object(await client.generate(options)), ensure_ascii=False), markup=False)
                return
            async for delta in client.generate_stream(options):
                sys.stdout.write(delta.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"{error.code().name}: {error.details()}") from None


def as_object(answer: generation_pb2.GenerateResponse) -> dict[str, Any]:
    """An answer as plain values, the names those of generation.proto."""
    speculation = answer.speculation
    return {
        "request_id": answer.request_id,
        "token_ids": list(answer.token_ids),
        "text": answer.text,
        "finish_reason": FINISH_REASONS.get(answer.finish_reason, "unspecified"),
        "matched_stop": answer.matched_stop,
        "seed": answer.seed if answer.HasField("seed") else None,
        "logprobs": [
            {
                "logprob": entry.logprob,
                "top": dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True)),
            }
            for entry in answer.logprobs
        ],
        "usage": {
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
        },
        "speculation": {
            "drafter": speculation.drafter,
            "rounds": speculation.rounds,
            "drafted": speculation.drafted,
            "accepted": speculation.accepted,
            "tokens_per_round": round(speculation.tokens_per_round, 4),
            "fallback_rounds": speculation.fallback_rounds,
            "fallback_reasons": list(speculation.fallback_reasons),
            "timings": {field.name: getattr(speculation.timings, field.name) for field in _TIMINGS},
        },
        "numerics": {field.name: getattr(answer.numerics, field.name) for field in answer.numerics.DESCRIPTOR.fields},
    }


_TIMINGS = generation_pb2.RoundTimings.DESCRIPTOR.fields
