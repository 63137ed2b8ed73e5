"""Speak while somebody types: send text in small pieces over the WebSocket, save what is said.

`python examples/websocket_typing.py --url ws://127.0.0.1:8091 --output typed.wav`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import wave

from websockets.asyncio.client import ClientConnection, connect

TEXT = "I type slowly, word by word. The first sentence is spoken while I am still typing. This is the end."


async def type_slowly(socket: ClientConnection, seconds_per_word: float) -> None:
    """Send the text word by word, then say that no more will come."""
    for word in TEXT.split(" "):
        await socket.send(json.dumps({"type": "input.text", "text": word + " "}))
        await asyncio.sleep(seconds_per_word)
    await socket.send(json.dumps({"type": "input.done"}))


async def run(url: str, output: str, seconds_per_word: float) -> None:
    """One session."""
    pcm = bytearray()
    async with connect(f"{url}/v1/audio/speech/stream", max_size=None) as socket:
        await socket.send(json.dumps({"type": "session.config", "response_format": "pcm", "voice": "heart"}))
        typing = asyncio.create_task(type_slowly(socket, seconds_per_word))
        rate = 24000
        async for message in socket:
            if isinstance(message, bytes):
                pcm += message
                continue
            event = json.loads(message)
            if event["type"] == "audio.start":
                rate = event["sample_rate"]
                print(f"speaking: {event['sentence_text']}")
            elif event["type"] == "error":
                raise RuntimeError(event["message"])
            elif event["type"] == "session.done":
                break
        await typing
    with wave.open(output, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(pcm))
    print(f"{output}: {len(pcm) / 2 / rate:.1f} s of audio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="ws://127.0.0.1:8091")
    parser.add_argument("--output", default="typed.wav")
    parser.add_argument("--seconds-per-word", type=float, default=0.2)
    args = parser.parse_args()
    asyncio.run(run(args.url, args.output, args.seconds_per_word))


if __name__ == "__main__":
    main()
