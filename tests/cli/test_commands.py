"""Every command against small programs in place of the services: what it sends, prints and returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from click.testing import Result
from google.protobuf import text_format
from typer.testing import CliRunner

from eagle_pangu.cli.main import app
from eagle_pangu.serving import processes
from eagle_pangu.speculation.licences import OPENPANGU
from protos.v1 import generation_pb2, sampling_pb2

SERVICES = {
    "teacher": "tests.serving.echo_service",
    "draft": "tests.serving.echo_service",
    "orchestrator": "tests.cli.fake_orchestrator",
}


def call(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    command = [sys.executable, "-m", SERVICES["orchestrator"], "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
        process.terminate()


@pytest.fixture
def small_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in SERVICES.items():
        monkeypatch.setitem(processes.ENTRY_POINTS, name, module)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


def up(model: str, *flags: str, **modules: str) -> subprocess.Popen[str]:
    """`eagle-pangu up` as a process of its own, with small programs or these modules for services."""
    program = (
        "from eagle_pangu.serving import processes; from eagle_pangu.cli.main import app;"
        f"processes.ENTRY_POINTS.update({SERVICES | modules!r}); app()"
    )
    command = [sys.executable, "-c", program, "up", "--port", "0", "--teacher-model", model, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_text_goes_through_the_chat_template_and_is_streamed(server: str) -> None:
    result = call("generate", "hello", "--server", server)
    assert result.exit_code == 0, result.output
    assert result.stdout == "chat: user hello | max - | stop [] | budget - | drafter - | eos False | é€\n"


def test_every_flag_of_generate_reaches_the_request(server: str) -> None:
    flags = ["--prompt", "hello", "--max-tokens", "5", "--stop", "a", "--stop", "b", "--drafter", "none", "--rows", "4"]
    result = call("generate", *flags, "--depth", "2", "--ignore-eos", "--server", server)
    assert result.stdout == "prompt: hello | max 5 | stop ['a', 'b'] | budget 4x2 | drafter none | eos True | é€\n"


def test_every_way_of_deciding_tokens_has_a_flag_named_as_its_field(server: str) -> None:
    asked = [
        *("--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1", "--seed", str(2**64 - 1)),
        *("--repetition-penalty", "1.5", "--frequency-penalty", "-1", "--presence-penalty", "0.5"),
        *("--logit-bias", "3=-2.5", "--logit-bias", "4=1", "--min-tokens", "2", "--stop-token-ids", "5,6"),
        *("--bad-words", "7", "--bad-words", "8,9", "--allowed-token-ids", "1,2", "--include-stop", "--logprobs", "0"),
        *("--prompt-logprobs", "0", "--n", "1", "--echo", "--priority", "-7", "--stream-tokens"),
        *("--request-id", "mine", "--return-margins"),
    ]
    requests = [call("generate", "--prompt", "everything", *flags, "--server", server).stdout for flags in (asked, ())]
    requests[0] = requests[0].removeprefix("0 ")
    options, plain = (text_format.Parse(text, generation_pb2.GenerationOptions()) for text in requests)
    expected = generation_pb2.GenerationOptions(
        prompt="everything",
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        frequency_penalty=-1,
        presence_penalty=0.5,
        logit_bias={3: -2.5, 4: 1.0},
        min_tokens=2,
        stop_token_ids=[5, 6],
        bad_words=[sampling_pb2.TokenSequence(token_ids=ids) for ids in ([7], [8, 9])],
        allowed_token_ids=[1, 2],
        include_stop=True,
        logprobs=0,
        prompt_logprobs=0,
        n=1,
        echo=True,
        priority=-7,
        stream_tokens=True,
        request_id="mine",
        return_margins=True,
    )
    assert options == expected
    assert plain == generation_pb2.GenerationOptions(prompt="everything")
    fields = {field.name for field in generation_pb2.GenerationOptions.DESCRIPTOR.fields}
    of_other_names = {
        "budget": {"rows", "depth"},
    }
    flags = {parameter.name for parameter in typer.main.get_command(app).commands["generate"].params}
    for field in fields:
        assert of_other_names.get(field, {field}) <= flags


def test_a_prompt_may_be_token_ids_a_whole_chat_or_stdin(server: str) -> None:
    ids = call("generate", "--prompt-token-ids", "1,2,3", "--server", server)
    assert ids.stdout.startswith("prompt_token_ids: [1, 2, 3]")
    chat = '{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]}'
    said = call("generate", "--chat", chat, "--server", server).stdout
    assert said.startswith("chat: system be brief, user hello")
    assert call("generate", "-", "--server", server, stdin="piped").stdout.startswith("chat: user piped")
    assert call("generate", "--prompt", "-", "--server", server, stdin="piped").stdout.startswith("prompt: piped")


def test_json_is_one_object_with_ids_usage_and_speculation(server: str) -> None:
    answer = json.loads(call("generate", "hi", "--json", "--server", server).stdout)
    assert answer["token_ids"] == [ord(character) for character in "chat: user hi"]
    assert answer["text"].endswith("é€")
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 13, "cached_prompt_tokens": 2}
    assert (answer["further_answers"], answer["prompt_token_ids"], answer["prompt_logprobs"]) == ([], [], [])
    speculation = {name: answer["speculation"][name] for name in ("drafter", "rounds", "drafted", "accepted")}
    assert speculation == {"drafter": "ngram", "rounds": 4, "drafted": 9, "accepted": 6}
    assert answer["speculation"]["tokens_per_round"] == 2.5
    assert answer["speculation"]["fallback_rounds"] == 0


def test_json_holds_all_answers_and_what_is_told_of_the_prompt(server: str) -> None:
    flags = ["--n", "3", "--echo", "--logprobs", "1", "--prompt-logprobs", "1", "--return-margins"]
    answer = json.loads(call("generate", "hi", *flags, "--json", "--server", server).stdout)
    answers = [answer, *answer["further_answers"]]
    assert [each["text"][:12] for each in answers] == [f"{index} chat: user" for index in range(3)]
    assert {"token_ids", "text", "finish_reason", "matched_stop", "seed", "margins", "logprobs", "speculation"} == {
        *answers[1]
    }
    entry = {"logprob": -0.5, "bytes": [0xE2, 0x82], "top": {"7": -0.25}}
    assert (answer["logprobs"], answer["prompt_logprobs"]) == ([entry], [entry] * 2)
    assert (answer["prompt_token_ids"], answer["margins"]) == ([1, 2, 3], [0.25])


def test_several_answers_are_printed_one_after_the_other(server: str) -> None:
    lines = call("generate", "hi", "--n", "3", "--server", server).stdout.splitlines()
    assert lines[0::2] == ["--- answer 0", "--- answer 1", "--- answer 2"]
    assert [line[:14] for line in lines[1::2]] == ["0 chat: user h", "1 chat: user h", "2 chat: user h"]
    assert all(line.endswith("é€") for line in lines[1::2])


def test_a_refusal_is_one_line_with_status_and_field(server: str) -> None:
    result = call("generate", "refuse", "--server", server)
    assert result.exit_code == 1
    assert result.stderr == "error: INVALID_ARGUMENT: max_tokens: expected at most 10, got 11\n"


def test_without_a_server_the_error_names_the_command_that_starts_one() -> None:
    result = call("generate", "hello", "--server", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "eagle-pangu up" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of TEXT, --prompt, --prompt-token-ids and --chat"),
        (["hello", "--prompt-token-ids", "1"], "one of TEXT, --prompt, --prompt-token-ids and --chat"),
        (["--prompt-token-ids", "1,x"], "--prompt-token-ids: expected ids"),
        (["--chat", '{"messages": [{"rule": "user"}]}'], 'ChatMessage" has no field named "rule"'),
        (["hello", "--bad-words", "1,-2"], "--bad-words: expected ids"),
        (["hello", "--logit-bias", "3"], "--logit-bias: expected ID=BIAS"),
        (["hello", "--seed", str(2**64)], "--seed"),
        (["hello", "--priority", str(2**31)], "--priority"),
        (["hello", "--min-p", "1e-300"], "--min-p: expected 0 or a number"),
        (["hello", "--logit-bias", "3=1e-300"], "--logit-bias: expected ID=BIAS"),
        (["hello", "--stream-tokens", "--json"], "--stream-tokens is of the stream"),
        (["hello", "--rows", "4"], "--rows and --depth go together"),
        (["hello", "--dtype", "float32"], "give --start too"),
        (["hello", "--start", "--dtype", "int3"], "teacher.dtype"),
        (["hello", "--start", "--teacher-model", "nowhere"], "'nowhere' is neither a directory"),
    ],
)
def test_generate_refuses_what_it_cannot_mean(arguments: list[str], said: str) -> None:
    result = call("generate", *arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("small_services")
def test_generate_can_start_the_services_for_one_answer(model: str) -> None:
    result = call("generate", "hello", "--start", "--teacher-model", model)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("chat: user hello")


@pytest.mark.usefixtures("small_services")
@pytest.mark.parametrize(("prompt", "status", "identical"), [("same", 0, "yes"), ("differ", 1, "NO")])
def test_demo_compares_both_ways_and_fails_when_they_differ(
    prompt: str, status: int, identical: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_PANGU_TEACHER__MODEL", model)
    result = call("demo", "--prompt", prompt)
    assert result.exit_code == status, result.output
    rows = {
        cells[1].strip(): cells[2].strip() for line in result.stdout.splitlines() if len(cells := line.split("│")) > 3
    }
    assert rows["identical"] == identical
    assert rows["tokens"] == str(len(f"chat: user {prompt}"))
    assert (rows["rounds"], rows["tokens per round"]) == ("4", "2.50")


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_up_names_its_address_and_its_end_drains_all_three(
    how: signal.Signals, status: int, model: str, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    with up(model, "--log-directory", str(logs), "--teacher.slots", "3", "--check-indices") as process:
        assert process.stdout is not None
        word, target = process.stdout.readline().split()
        assert word == "orchestrator"
        assert call("generate", "hello", "--server", target).exit_code == 0
        os.kill(process.pid, how)
        assert process.wait(timeout=20) == status
    assert "slots = 3" in (logs / "teacher.toml").read_text()
    for name in ("teacher", "draft"):
        assert "check_indices = true" in (logs / f"{name}.toml").read_text()
    deadline = time.monotonic() + (10 if how == signal.SIGKILL else 0)  # killed, it cannot wait for its children
    for name in SERVICES:
        while '"event": "stopped"' not in (log := (logs / f"{name}.log").read_text()):
            assert time.monotonic() < deadline, log
            time.sleep(0.05)


def test_up_ends_running_answers_at_once_when_its_teacher_is_killed(model: str) -> None:
    with up(model, teacher="tests.cli.dying_teacher", orchestrator="orchestrator.main") as process:
        assert process.stdout is not None
        target = process.stdout.readline().split()[1]
        result = call("generate", "--prompt", "hello", "--max-tokens", "50", "--drafter", "none", "--server", target)
        killed = time.monotonic()
        assert result.exit_code == 1
        assert result.stderr.startswith("error: UNAVAILABLE: the teacher is lost: ")
        assert process.wait(timeout=20) == 1
        assert time.monotonic() - killed < 10  # far less than the drain time
        assert process.stderr is not None
        assert "the teacher process ended with status -9" in process.stderr.read()


def test_up_on_a_port_in_use_launches_nothing_and_names_the_setting(
    server: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.ServiceProcess, "launch", None)
    port = server.rpartition(":")[2]
    result = call("up", "--teacher-model", model, "--port", port)
    assert result.exit_code == 1
    assert f"error: orchestrator.port: the address 127.0.0.1:{port} is in use" in result.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--teacher-model", ""], "teacher.model: expected the name of a pulled model or a transformers directory"),
        (["--teacher-model", "nowhere"], "teacher.model: 'nowhere' is neither a directory"),
        (["--draft-model", "nowhere"], "draft.model: 'nowhere' is neither a directory"),
        (
            ["--drafter", "standalone", "--draft-model", ""],
            "draft.model: expected a value, which the standalone drafter needs",
        ),
    ],
)
def test_up_names_the_setting_of_a_model_that_is_not_there(
    flags: list[str], said: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.ServiceProcess, "launch", None)
    monkeypatch.setenv("EAGLE_PANGU_TEACHER__MODEL", model)
    result = call("up", *flags)
    assert result.exit_code == 1
    assert f"error: {said}" in result.stderr


def test_up_stops_with_the_reason_when_a_setting_is_wrong(model: str) -> None:
    result = call("up", "--teacher-model", model, "--teacher.slots", "none")
    assert result.exit_code == 1
    assert "error: teacher.slots: " in result.stderr


def test_config_prints_the_effective_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_PANGU_TEACHER__SLOTS", "7")
    shown = call("config", "--draft.slots", "6").stdout
    assert "[teacher]" in shown
    assert "slots = 7" in shown
    assert "slots = 6" in shown


def test_models_are_listed_and_shown_and_an_unknown_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_PANGU_HOME", str(tmp_path))
    assert "smollm2-135m-instruct" in call("models", "list").stdout
    shown = json.loads(call("models", "show").stdout)
    assert shown["pulled"] is False
    assert shown["directory"] == str(tmp_path / "models" / "smollm2-135m-instruct")
    (tmp_path / "pangu").mkdir()
    (tmp_path / "pangu" / "config.json").write_text('{"model_type": "PanguEmbedded"}')
    shown = json.loads(call("models", "show", str(tmp_path / "pangu")).stdout)
    assert shown["license"] == OPENPANGU
    assert shown["config"] == {"model_type": "PanguEmbedded"}
    for odd, said in ((b'{"a":', "Expecting value"), (b"[]", "expected an object, got list"), (b"\xff\xfe", "utf-8")):
        (tmp_path / "pangu" / "config.json").write_bytes(odd)
        result = call("models", "show", str(tmp_path / "pangu"))
        assert result.exit_code == 1
        assert "config.json" in result.stderr
        assert said in result.stderr
    result = call("models", "pull", "gpt-9")
    assert result.exit_code == 1
    assert "unknown model 'gpt-9'" in result.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sizes", "1,x"], "sizes: expected ascending whole numbers"),
        (["--sizes", "2,1"], "sizes: expected ascending whole numbers"),
        (["--sizes", "0,1"], "sizes: expected ascending whole numbers"),
        (["--batching", "ragged,magic"], "batching: expected some of ragged, eqspec, exspec, got 'magic'"),
        (["--batching", "ragged,ragged"], "batching: expected each once"),
        (["--dtype", "int3"], "teacher.dtype"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--teacher-model", "nowhere"], "'nowhere' is neither a directory"),
    ],
)
def test_ablate_batch_launches_nothing_where_a_flag_is_wrong(
    flags: list[str], said: str, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.ServiceProcess, "launch", None)
    usual = {"--dtype": "float32", "--numerics": "free", "--teacher-model": model, "--drafter": "ngram"}
    arguments = [word for flag, value in {**usual, **dict([flags])}.items() for word in (flag, value)]
    result = call("ablate", "batch", "-o", str(tmp_path / "out"), *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_ablate_batch_needs_to_be_told_how_the_models_compute(tmp_path: Path) -> None:
    result = call("ablate", "batch", "-o", str(tmp_path))
    assert result.exit_code == 2
    assert "--dtype" in result.stderr
