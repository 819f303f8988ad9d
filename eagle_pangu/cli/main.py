"""The `eagle-pangu` command: one module a subcommand, gathered here. Imports without torch."""

from __future__ import annotations

import typer

from eagle_pangu.cli.ablate import app as ablate
from eagle_pangu.cli.bench import bench
from eagle_pangu.cli.bench_numerics import bench_numerics
from eagle_pangu.cli.bench_options import bench_options
from eagle_pangu.cli.console import EXPECTED, answers, fail, launch
from eagle_pangu.cli.demo import demo
from eagle_pangu.cli.doctor import doctor
from eagle_pangu.cli.generate import generate
from eagle_pangu.cli.http import http
from eagle_pangu.cli.models import app as models
from eagle_pangu.cli.trace import app as trace
from eagle_pangu.cli.train_draft import train_draft
from eagle_pangu.cli.up import up
from eagle_pangu.serving.configuration import load_settings, to_toml

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact tree speculative decoding, split over a draft and a teacher service.",
)
app.command(context_settings=PASS_ON)(up)
app.command()(generate)
app.command(context_settings={**PASS_ON, "help_option_names": []})(http)
app.command()(demo)
app.command()(doctor)
app.command()(bench)
app.command("bench-numerics")(bench_numerics)
app.command("bench-options")(bench_options)
app.command("train-draft", context_settings={**PASS_ON, "help_option_names": []})(train_draft)
app.add_typer(ablate, name="ablate")
app.add_typer(models, name="models")
app.add_typer(trace, name="trace")


@app.command(context_settings={**PASS_ON, "help_option_names": []})
def config(context: typer.Context) -> None:
    """Print the effective configuration as TOML; takes --config FILE and --SECTION.FIELD VALUE; --help lists all."""
    try:
        answers.print(to_toml(load_settings(context.args, program="eagle-pangu config")), end="", markup=False)
    except EXPECTED as error:
        fail(error)


def main() -> None:
    """Console script `eagle-pangu`."""
    launch(app, "eagle-pangu")


if __name__ == "__main__":
    main()
