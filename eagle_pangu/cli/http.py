"""`eagle-pangu http`: OpenAI's API over HTTP, in front of an orchestrator."""

from __future__ import annotations

import typer

from eagle_pangu.cli.console import CommandError, fail


def http(context: typer.Context) -> None:
    """Serve OpenAI's API until Ctrl-C: eagle-pangu http --target HOST:PORT --port 8080; --help lists its flags."""
    try:
        from eagle_pangu.openai_api.main import main  # here: the other commands run without the extra
    except ModuleNotFoundError as error:
        fail(CommandError(f"{error.name} is not installed; it comes with: pip install 'eagle-pangu[http]'"))
    main(context.args)
