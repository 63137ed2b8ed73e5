"""Play as it is made: read the PCM stream, report when each second of audio arrived, save a WAV.

`python examples/stream_to_file.py --url http://127.0.0.1:8091 --output story.wav`
"""

from __future__ import annotations

import argparse
import time
import wave

import httpx

TEXT = (
    "Streaming means that you hear the first word while the last one is still being made. "
    "A player needs a new piece of audio before the one it plays has run out. "
    "This one only writes to a file, and tells you how far ahead of playback it was."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8091")
    parser.add_argument("--output", default="story.wav")
    args = parser.parse_args()

    body = {"input": TEXT, "response_format": "pcm", "stream": True}
    began = time.perf_counter()
    with (
        httpx.stream("POST", f"{args.url}/v1/audio/speech", json=body, timeout=60) as response,
        wave.open(args.output, "wb") as file,
    ):
        response.raise_for_status()
        rate = int(response.headers["X-Sample-Rate"])
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        samples, first = 0, 0.0
        for data in response.iter_bytes():
            first = first or time.perf_counter() - began
            file.writeframes(data)
            samples += len(data) // 2
    seconds = samples / rate
    print(f"{args.output}: {seconds:.1f} s of audio, first after {first * 1000:.0f} ms, ", end="")
    print(f"all after {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
