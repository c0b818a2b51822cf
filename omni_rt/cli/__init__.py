"""The command `omni-rt`. Each command imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from omni_rt.errors import OmniError

app = typer.Typer(
    name="omni-rt",
    help="Any-to-any models on one box.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Pipeline file. Without one: the bundled model."),
]


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
) -> None:
    """Serve a pipeline behind the OpenAI API."""
    from omni_rt.cli.serve import serve_command

    raise typer.Exit(serve_command(config, host, port))


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="What is asked.")],
    config: ConfigOption = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File for the picture, or for the sound: *.wav."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**53, help="Seed; without one a random one.")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(help="A request parameter, NAME=VALUE. Repeatable.")
    ] = None,
) -> None:
    """Do one request without a server."""
    from omni_rt.cli.run import run_command

    raise typer.Exit(run_command(prompt, config, output, seed, param or []))


@app.command("config")
def config_command(
    file: Annotated[Path | None, typer.Argument(help="Pipeline file.")] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of pipeline files.")
    ] = False,
) -> None:
    """Print a pipeline's full effective form, and where each value came from."""
    import json

    from omni_rt.config import bundled, effective
    from omni_rt.config import schema as json_schema

    print(json.dumps(json_schema(), indent=2) if schema else effective(file or bundled()), end="")


def main() -> NoReturn:
    """Entry point. Errors of ours are one line on stderr; status 2 for what the user can mend."""
    from omni_rt.errors import BadRequest, ConfigError

    try:
        app()
    except (ConfigError, BadRequest) as error:
        print(f"omni-rt: {error}", file=sys.stderr)
        sys.exit(2)
    except OmniError as error:
        print(f"omni-rt: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
