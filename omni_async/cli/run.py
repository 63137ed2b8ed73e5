"""`omni-async run`: one request, answered into a file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from omni_async.api.media_plan import FORMATS, MediaPlan, plan_media
from omni_async.api.speech_fields import SpeechFields, speech_of
from omni_async.cli import deployment, flags
from omni_async.client import Omni
from omni_async.config import Deployment, SpeechConfig
from omni_async.errors import ConfigError
from omni_async.outputs import AudioChunk
from omni_async.speech import SpeechOptions

UNUSED_LIMITS = ("max_queue", "drain_timeout", "target_first_audio")
"""Of a server with many callers, some of whom listen while it speaks."""


def main(argv: Sequence[str]) -> int:
    """Speak `--text` into `--output`, whose ending is the format."""
    parser = deployment.make_parser("run", "Answer one request into a file.", without=UNUSED_LIMITS)
    parser.add_argument("--text", required=True, help="what is to be spoken")
    parser.add_argument("--output", required=True, type=Path, help=f"a file ending in {', '.join(FORMATS)}")
    parser.add_argument("--sample-rate", type=int, metavar="HZ", help="8000 to 48000 (default: the model's)")
    flags.add_struct(parser, SpeechOptions, "how it is spoken", without=("model",))
    args, resolved = deployment.parse(parser, argv)
    fields, speaks = _fields(args), _speaking(resolved)
    plan = plan_media(fields, speaks.sample_rate)
    speech = speech_of(fields, args.text, gapless=False)
    speech.resolve(speaks)
    with Omni(resolved) as omni:
        chunks = [chunk for chunk in omni.generate(speech) if isinstance(chunk, AudioChunk)]
    _write(args.output, _encode(chunks, plan))
    print(f"{args.output}: {sum(chunk.duration for chunk in chunks):.1f} s of audio")
    return 0


def _fields(args: argparse.Namespace) -> SpeechFields:
    """What is asked for. Raises `ConfigError`, before any model is loaded."""
    if not args.output.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {args.output.parent}.")
    options = msgspec.structs.asdict(flags.to_struct(args, SpeechOptions))
    wanted = {**options, "response_format": args.output.suffix[1:].lower(), "sample_rate": args.sample_rate}
    if wanted["response_format"] not in FORMATS:
        raise ConfigError(f"--output must end in one of {', '.join(FORMATS)}.")
    try:
        return msgspec.convert(wanted, SpeechFields)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}.") from None


def _speaking(resolved: Deployment) -> SpeechConfig:
    for pipeline in resolved.pipelines:
        if pipeline.speech is not None:
            return pipeline.speech
    names = ", ".join(pipeline.name for pipeline in resolved.pipelines)
    raise ConfigError(f"{names} does not speak; --text needs a MODEL that does.")


def _encode(chunks: Sequence[AudioChunk], plan: MediaPlan) -> bytes:
    from omni_async.api.audio_encoder import make_encoder

    encoder = make_encoder(plan, streaming=False)
    return b"".join([*(encoder.push(chunk.pcm) for chunk in chunks), encoder.finish()])


def _write(path: Path, data: bytes) -> None:
    """The whole file or none: what was there stays until the new one is complete."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"--output: {path}: {error.strerror}.") from None
