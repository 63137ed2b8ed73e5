"""A process that helps a diffusion stage: the same network, called whenever the leading process calls it.

`python -m omni_async.stages.diffusion.peer RANK PORT`, with the stage's config as a line of JSON on standard
input. It ends when told to, and when its standard input does: its parent is gone then.
"""

from __future__ import annotations

import os
import sys
import threading

import msgspec
import torch

from omni_async.config import StageConfig
from omni_async.stages.diffusion.loading import load_adapter
from omni_async.stages.diffusion.options import read_options
from omni_async.stages.diffusion.parallel import join_group, receive_call


def main(rank: int, port: int) -> None:
    """Join, load, and take part in calls."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=StageConfig)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    options = read_options(config)
    join_group(config, rank, options.world_size, port)
    own = msgspec.structs.replace(config, devices=(config.devices[rank],))
    adapter = load_adapter(own, options, "diffusion" if config.inputs else "")
    with torch.no_grad():
        while (arguments := receive_call(adapter.device)) is not None:
            adapter.transformer(**arguments)


def _leave_with_parent() -> None:
    # Not by sys.stdin, whose lock would be held while this process ends.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
