"""Speak a sentence over HTTP with the `openai` client and save it.

`python examples/http_client.py --url http://127.0.0.1:8091 --output hello.wav "Hello there."`
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="Hello! This sentence was made on your own machine.")
    parser.add_argument("--url", default="http://127.0.0.1:8091")
    parser.add_argument("--voice", default="heart")
    parser.add_argument("--output", default="hello.wav")
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.url}/v1", api_key="unused")
    speech = client.audio.speech.create(
        model="tts-1", voice=args.voice, input=args.text, response_format="wav"
    )
    speech.write_to_file(args.output)
    print(f"{args.output}: {len(speech.content)} bytes")


if __name__ == "__main__":
    main()
