"""mosec: `python -m benchmarks.peers.mosec_peer echo|speech|stream WORKERS PORT`."""

from __future__ import annotations

import base64
import sys
from typing import Any

from mosec import Server, SSEWorker, Worker


class Echo(Worker):
    """The text."""

    def forward(self, data: Any) -> Any:
        return {"text": data["text"]}


class Speech(Worker):
    """A whole answer."""

    resp_mime_type = "audio/pcm"

    def __init__(self) -> None:
        from benchmarks.peers.package import make

        self.voice = make()

    def forward(self, data: Any) -> Any:
        return self.voice(data["text"])

    def serialize(self, data: Any) -> bytes:
        from benchmarks.peers.package import pcm16

        return pcm16(data)


class Stream(SSEWorker):
    """One event a sentence; events are text, so base64."""

    def __init__(self) -> None:
        from benchmarks.peers.package import make

        self.voice = make()

    def forward(self, data: Any) -> Any:
        from benchmarks.peers.package import sentences

        for pcm in sentences(self.voice, data["text"]):
            self.send_stream_event(base64.b64encode(pcm).decode())
        return {}


if __name__ == "__main__":
    kind, workers, port = sys.argv[1:]
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", port, "--log-level", "error"]
    server = Server()
    server.append_worker({"echo": Echo, "speech": Speech, "stream": Stream}[kind], num=int(workers))
    server.run()
