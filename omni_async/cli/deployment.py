"""The flags that say what is served, shared by `serve`, `run` and `check`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from omni_async import deploy, logs
from omni_async.cli import flags
from omni_async.config import Deployment, ServerConfig


def make_parser(command: str, description: str) -> flags.Parser:
    """A parser with MODEL, the deployment's flags, the server's limits and the log flags."""
    parser = flags.Parser(prog=f"omni-async {command}", description=description, allow_abbrev=False)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="built-in name, folder or Hugging Face id")
    parser.add_argument("--deploy-config", metavar="YAML", help="what to serve, instead of the model's own")
    parser.add_argument("--stage-overrides", metavar="JSON", help='for example \'{"0": {"max_num_seqs": 4}}\'')
    parser.add_argument("--log-format", choices=logs.FORMATS, default="text")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    flags.add_struct(parser, ServerConfig, "limits and time-outs (seconds, bytes)")
    parser.epilog = "--stage-N-FIELD VALUE sets a field of stage N, for example --stage-1-max-num-seqs 8."
    return parser


def parse(parser: flags.Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, Deployment]:
    """The flags and the deployment they describe; sets up logging. Raises `ConfigError`."""
    rest, stage_flags = flags.take_stage_flags(argv)
    args = parser.parse_args(rest)
    logs.setup(args.log_format, args.log_level)
    deployment = deploy.load(
        model=args.model,
        deploy_config=args.deploy_config,
        stage_overrides=flags.read_overrides(args.stage_overrides),
        stage_flags=stage_flags,
        server=flags.to_struct(args, ServerConfig),
    )
    return args, deployment
