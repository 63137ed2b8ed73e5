"""Serve inside your own asyncio program, without HTTP: three voices speak at once.

`python examples/embed_asyncio.py --output-dir .`
"""

from __future__ import annotations

import argparse
import asyncio
import wave
from pathlib import Path

import numpy as np

from omni_async import AsyncOmni, AudioChunk, Speech

LINES = {
    "heart": "I was asked to speak first.",
    "onyx": "I speak at the same time, in another voice.",
    "nova": "And nobody has to wait for anybody else.",
}


async def speak(omni: AsyncOmni, voice: str, text: str, path: Path) -> None:
    """One request; its chunks are float32 arrays that come while the rest is being made."""
    pcm: list[np.ndarray] = []
    rate = 24000
    async for chunk in omni.generate(Speech(input=text, voice=voice)):
        assert isinstance(chunk, AudioChunk)
        pcm.append(chunk.pcm)
        rate = chunk.sample_rate
    samples = np.rint(np.clip(np.concatenate(pcm), -1, 1) * 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    print(f"{path}: {len(samples) / rate:.1f} s in {len(pcm)} chunks")


async def run(folder: Path) -> None:
    """All lines at once."""
    async with AsyncOmni(model="hibari") as omni, asyncio.TaskGroup() as group:
        for voice, text in LINES.items():
            group.create_task(speak(omni, voice, text, folder / f"{voice}.wav"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path())
    asyncio.run(run(parser.parse_args().output_dir))


if __name__ == "__main__":
    main()
