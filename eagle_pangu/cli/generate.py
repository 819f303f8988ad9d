"""`eagle-pangu generate`: answers streamed as text, or as one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import Annotated

import grpc
import grpc.aio
import typer
from google.protobuf import json_format

from eagle_pangu.cli import services
from eagle_pangu.cli.answer_output import AnswerPrinter, as_object
from eagle_pangu.cli.console import EXPECTED, CommandError, answers, fail, notes, run
from eagle_pangu.client.client import GenerationClient
from eagle_pangu.client.retries import RetryPolicy
from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.settings import OrchestratorSettings, ServerSettings, Settings
from protos.v1 import generation_pb2, tree_pb2

DEFAULT_SERVER = f"127.0.0.1:{OrchestratorSettings().port}"
CONNECT_SECONDS = 2.0


def generate(
    text: Annotated[str | None, typer.Argument(help="What to say to the model; - reads it from stdin.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to go on with, no chat template; - as above.")] = None,
    prompt_token_ids: Annotated[str | None, typer.Option(help="The same as ids, with commas.")] = None,
    chat: Annotated[
        str | None, typer.Option(help='A whole chat: {"messages": [{"role": "system", "content": "..."}, ...]}.')
    ] = None,
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
    prompt_logprobs: Annotated[int | None, typer.Option(min=0, help="The same for the tokens of the prompt.")] = None,
    return_margins: Annotated[bool, typer.Option("--return-margins", help="With --json: top-2 margins.")] = False,
    n: Annotated[int | None, typer.Option(min=1, help="So many answers; seeds count up from --seed.")] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Begin every answer with the text of the prompt.")] = False,
    priority: Annotated[int | None, typer.Option(help="-100 to 100; higher ones wait less; default 0.")] = None,
    stream_tokens: Annotated[bool, typer.Option("--stream-tokens", help="Print token by token.")] = False,
    request_id: Annotated[str, typer.Option(help="For logs and traces; default: one is made.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
    server: Annotated[str, typer.Option(help="HOST:PORT of the orchestrator.")] = DEFAULT_SERVER,
    start: Annotated[bool, typer.Option("--start", help="Start the three services for this answer.")] = False,
    dtype: services.Dtype = None,
    mode: services.Mode = None,
    numerics: services.Numerics = None,
    teacher_model: services.TeacherModel = None,
    draft_model: services.DraftModel = None,
) -> None:
    """Answer a text as the only message of a chat, or one of --prompt, --prompt-token-ids and --chat.

    --dtype, --mode, --numerics, --teacher-model and --draft-model describe the services of --start.
    """
    described = services.ServiceFlags(
        dtype=dtype, mode=mode, numerics=numerics, teacher_model=teacher_model, draft_model=draft_model
    )
    try:
        options = _options(text, prompt, prompt_token_ids, chat)
        if (rows is None) != (depth is None):
            raise CommandError("--rows and --depth go together")
        if not as_json and (logprobs is not None or prompt_logprobs is not None or return_margins):
            notes.print("log-probabilities or margins are asked for, but printed by --json alone", style="yellow")
        if stream_tokens and as_json:
            raise CommandError("--stream-tokens is of the stream, which --json does not print")
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
            if bias and not options.logit_bias[token_id]:
                raise CommandError(f"--logit-bias: expected ID=BIAS, BIAS 0 or not 0 in 32 bits, got {entry!r}")
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
        "prompt_logprobs": prompt_logprobs,
        "n": n,
        "priority": priority,
    }
    for name, scalar in scalars.items():
        if scalar is not None:
            try:
                setattr(options, name, scalar)
            except ValueError as error:  # does not fit the field
                fail(CommandError(f"--{name.replace('_', '-')}: {error}"))
            if scalar and not getattr(options, name):  # of the field's 32 bits nothing is left
                fail(CommandError(f"--{name.replace('_', '-')}: expected 0 or a number that is not 0 in 32 bits"))
    options.request_id = request_id
    options.return_margins = return_margins
    options.include_stop = include_stop
    options.echo = echo
    options.stream_tokens = stream_tokens
    if rows is not None and depth is not None:
        options.budget.CopyFrom(tree_pb2.TreeBudget(rows=rows, depth=depth))
    options.stop.extend(stop or ())
    options.drafter = drafter
    options.ignore_eos = ignore_eos
    run(_answer(options, server, settings, as_json=as_json))


def _options(
    text: str | None, prompt: str | None, prompt_token_ids: str | None, chat: str | None
) -> generation_pb2.GenerationOptions:
    """A request with its prompt, the one of the four that was given."""
    if sum(given is not None for given in (text, prompt, prompt_token_ids, chat)) != 1:
        raise CommandError("give one of TEXT, --prompt, --prompt-token-ids and --chat")
    if prompt is not None:
        return generation_pb2.GenerationOptions(prompt=_or_stdin(prompt))
    if prompt_token_ids is not None:
        ids = generation_pb2.TokenIds(ids=_ids("prompt_token_ids", prompt_token_ids))
        return generation_pb2.GenerationOptions(prompt_token_ids=ids)
    if chat is not None:
        try:
            return generation_pb2.GenerationOptions(chat=json_format.Parse(chat, generation_pb2.ChatMessages()))
        except json_format.ParseError as error:
            raise CommandError(f"--chat: {error}") from None
    assert text is not None
    return generation_pb2.GenerationOptions(chat=user_says(_or_stdin(text)))


def _or_stdin(text: str) -> str:
    return sys.stdin.read() if text == "-" else text


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
    # Who waits at a terminal would rather read the error than wait for another attempt.
    async with GenerationClient(target, retries=RetryPolicy(attempts=1)) as client:
        try:
            if as_json:
                answers.print(json.dumps(as_object(await client.generate(options)), ensure_ascii=False), markup=False)
                return
            printer = AnswerPrinter(options.n)
            async for delta in client.generate_stream(options):
                printer.take(delta)
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"{error.code().name}: {error.details()}") from None
