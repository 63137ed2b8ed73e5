"""`omni-async run`: one request, answered into a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omni_async.cli import deployment
from omni_async.client import Omni
from omni_async.errors import ConfigError
from omni_async.outputs import AudioChunk
from omni_async.speech import Speech


def main(argv: Sequence[str]) -> int:
    """Speak `--text` into `--output`, whose ending is the format."""
    from omni_async.api.file_encoder import FORMATS, write_audio

    parser = deployment.make_parser("run", "Answer one request into a file.")
    parser.add_argument("--text", required=True, help="what is to be spoken")
    parser.add_argument("--output", required=True, type=Path, help=f"a file ending in {', '.join(FORMATS)}")
    parser.add_argument("--voice")
    parser.add_argument("--speed", type=float)
    parser.add_argument("--seed", type=int)
    args, resolved = deployment.parse(parser, argv)
    kind = args.output.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise ConfigError(f"--output must end in one of {', '.join(FORMATS)}.")
    speech = Speech(input=args.text, voice=args.voice, speed=args.speed, seed=args.seed, gapless=False)
    with Omni(resolved) as omni:
        chunks = [chunk for chunk in omni.generate(speech) if isinstance(chunk, AudioChunk)]
    seconds = write_audio(args.output, kind, [chunk.pcm for chunk in chunks], chunks[0].sample_rate)
    print(f"{args.output}: {seconds:.1f} s of audio")
    return 0
