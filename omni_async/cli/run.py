"""`omni-async run`: one request, answered into a file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from omni_async.api.image_fields import ImageFields, Upload, image_of, refuse_conflicts
from omni_async.api.media_plan import FORMATS, MediaPlan, plan_media
from omni_async.api.speech_fields import SpeechFields, speech_of
from omni_async.cli import deployment, flags
from omni_async.client import Omni
from omni_async.config import Deployment
from omni_async.errors import ConfigError
from omni_async.image import ImageOptions
from omni_async.outputs import AudioChunk, ImageChunk
from omni_async.speech import SpeechOptions

UNUSED_LIMITS = ("max_queue", "drain_timeout", "target_first_audio")
"""Of a server with many callers, some of whom listen while it speaks."""
PICTURES = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp"}
SHARED = ("model", "seed")
"""Options of speech and of pictures alike."""


def main(argv: Sequence[str]) -> int:
    """Speak `--text`, or draw `--prompt`, into `--output`, whose ending is the format."""
    parser = deployment.make_parser("run", "Answer one request into a file.", without=UNUSED_LIMITS)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--text", help="what is to be spoken")
    asked.add_argument("--prompt", help="what is to be drawn")
    endings = ", ".join((*FORMATS, *PICTURES))
    parser.add_argument("--output", required=True, type=Path, help=f"a file ending in {endings}")
    parser.add_argument("--sample-rate", type=int, metavar="HZ", help="8000 to 48000 (default: the model's)")
    flags.add_struct(parser, SpeechOptions, "how it is spoken", without=("model",))
    flags.add_struct(parser, ImageOptions, "how it is drawn", without=SHARED)
    args, resolved = deployment.parse(parser, argv)
    if not args.output.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {args.output.parent}.")
    return _speak(args, resolved) if args.prompt is None else _draw(args, resolved)


def _speak(args: argparse.Namespace, resolved: Deployment) -> int:
    _refuse_others(args, ImageOptions, "--text")
    given = {"response_format": _ending(args, tuple(FORMATS)), "sample_rate": args.sample_rate}
    fields = _fields(args, SpeechOptions, SpeechFields, given)
    resolved = _only(resolved, "speech", "does not speak; --text")
    speaks = resolved.pipelines[0].speech
    assert speaks is not None
    plan = plan_media(fields, speaks.sample_rate)
    speech = speech_of(fields, args.text, gapless=False)
    speech.resolve(speaks)
    with Omni(resolved) as omni:
        chunks = [chunk for chunk in omni.generate(speech) if isinstance(chunk, AudioChunk)]
    _write(args.output, _encode(chunks, plan))
    print(f"{args.output}: {sum(chunk.duration for chunk in chunks):.1f} s of audio")
    return 0


def _draw(args: argparse.Namespace, resolved: Deployment) -> int:
    from omni_async.api.image_codec import write_picture

    _refuse_others(args, SpeechOptions, "--prompt")
    if args.sample_rate is not None:
        raise ConfigError("--sample-rate has no effect on --prompt.")
    kind = PICTURES[_ending(args, tuple(PICTURES))]
    fields = _fields(args, ImageOptions, ImageFields, {"prompt": args.prompt, "output_format": kind})
    refuse_conflicts(fields)
    resolved = _only(resolved, "image", "does not draw; --prompt")
    draws = resolved.pipelines[0].image
    assert draws is not None
    request = image_of(fields, Upload(), fields.seed)
    request.resolve(draws)
    with Omni(resolved) as omni:
        (picture,) = [chunk for chunk in omni.generate(request) if isinstance(chunk, ImageChunk)]
    _write(args.output, write_picture(picture.pixels, kind, None))
    height, width = picture.pixels.shape[:2]
    print(f"{args.output}: {width}x{height}, seed {picture.seed}")
    return 0


def _refuse_others(args: argparse.Namespace, struct: type[msgspec.Struct], flag: str) -> None:
    """A flag of the other kind of request would have no effect."""
    for name in struct.__struct_fields__:
        if name not in SHARED and getattr(args, name, None) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect on {flag}.")


def _ending(args: argparse.Namespace, known: tuple[str, ...]) -> str:
    ending = args.output.suffix[1:].lower()
    if ending not in known:
        raise ConfigError(f"--output must end in one of {', '.join(known)}.")
    return ending


def _fields(args: argparse.Namespace, options: Any, fields: Any, given: dict[str, Any]) -> Any:
    """What is asked for. Raises `ConfigError`, before any model is loaded."""
    try:
        return msgspec.convert({**msgspec.structs.asdict(flags.to_struct(args, options)), **given}, fields)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}.") from None


def _only(resolved: Deployment, kind: str, lacks: str) -> Deployment:
    """The deployment of the one pipeline that answers; the others need not be loaded."""
    for pipeline in resolved.pipelines:
        if getattr(pipeline, kind) is not None:
            return msgspec.structs.replace(resolved, pipelines=(pipeline,))
    names = ", ".join(pipeline.name for pipeline in resolved.pipelines)
    raise ConfigError(f"{names} {lacks} needs a MODEL that does.")


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
