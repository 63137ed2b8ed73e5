"""Draw a picture and keep what it looked like on the way (standard library only).

    python examples/draw_with_previews.py --prompt "red apple" --output-dir .

Writes `preview0.png`, `preview1.png`, … as they arrive, and `picture.png`.
"""

from __future__ import annotations

import argparse
import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server-sent events of one request, as they arrive."""
    request = urllib.request.Request(
        f"{url}/v1/images/generations",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8091")
    parser.add_argument("--prompt", default="red apple")
    parser.add_argument("--size", default="512x512")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output-dir", type=Path, default=Path())
    args = parser.parse_args()
    body = {"prompt": args.prompt, "size": args.size, "num_inference_steps": args.steps}
    for event in events(args.url, {**body, "stream": True, "partial_images": 3}):
        if event["type"] == "error":
            raise SystemExit(event["error"]["message"])
        number = event.get("partial_image_index")
        name = "picture.png" if number is None else f"preview{number}.png"
        (args.output_dir / name).write_bytes(base64.b64decode(event["b64_json"]))
        print(f"{name}: {event['size']}, seed {event['seed']}")


if __name__ == "__main__":
    main()
