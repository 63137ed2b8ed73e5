"""LitServe: `python -m benchmarks.peers.litserve_peer echo|speech|stream WORKERS PORT`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import litserve
from fastapi import Response


class Echo(litserve.LitAPI):
    """The text."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    # No annotation: LitServe reads it, and would take the body for a query parameter.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return request["text"]

    def predict(self, x: Any) -> Any:
        return x

    def encode_response(self, output: Any) -> Any:
        return {"text": output}


class Speech(Echo):
    """A whole answer."""

    def setup(self, device: str) -> None:
        from benchmarks.peers.package import make

        self.voice = make()

    def predict(self, x: Any) -> Any:
        return self.voice(x)

    def encode_response(self, output: Any) -> Any:
        from benchmarks.peers.package import pcm16

        return Response(content=pcm16(output), media_type="audio/pcm")


class Stream(Speech):
    """One chunk a sentence."""

    def predict(self, x: Any) -> Iterator[bytes]:
        from benchmarks.peers.package import sentences

        yield from sentences(self.voice, x)

    def encode_response(self, output: Any) -> Any:
        yield from output


if __name__ == "__main__":
    kind, workers, port = sys.argv[1:]
    api = {"echo": Echo, "speech": Speech}[kind]() if kind != "stream" else Stream(stream=True)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=int(workers))
    server.run(
        host="127.0.0.1", port=int(port), generate_client_file=False, log_level="error", access_log=False
    )
