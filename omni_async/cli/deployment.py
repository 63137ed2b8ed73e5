"""The flags that say what is served, shared by `serve`, `run` and `check`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

from omni_async import deploy, logs
from omni_async.cli import flags
from omni_async.config import Deployment, ServerConfig


def make_parser(command: str, description: str, *, without: Collection[str] = ()) -> flags.Parser:
    """A parser with MODEL, the deployment's flags, the server's limits and the log flags.

    `without` names the fields of `ServerConfig` that would have no effect on this command.
    """
    parser = flags.Parser(command, description, flags.STAGE_FLAG_HELP)
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="built-in name, folder or Hugging Face id")
    add("--deploy-config", metavar="YAML", help="laid over the pipeline of MODEL, or whole without MODEL")
    add("--stage-overrides", metavar="JSON", help='fields of stages: \'{"0": {"max_num_seqs": 4}}\'')
    add("--log-format", choices=logs.FORMATS, default="text", help="text or JSON lines on standard error")
    add("--log-level", choices=logs.LEVELS, default="info", help="debug also logs every request")
    flags.add_struct(parser, ServerConfig, "limits and time-outs", without=without)
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
