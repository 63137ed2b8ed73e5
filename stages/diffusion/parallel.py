"""One network over several processes: context and tensor parallelism of diffusers.

The stage's own process leads. Each call of its network is broadcast to the peers (`peer.py`), which hold the
same weights or their shards and take part in the same collectives. Calls are keyword arguments of tensors
and plain values; they travel as msgpack and raw tensors, over gloo or NCCL on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from omni_async.config import StageConfig
from omni_async.errors import ConfigError
from omni_async.stages.diffusion.adapter import Adapter
from omni_async.stages.diffusion.forwarding import replace_forward
from omni_async.stages.diffusion.options import Options

STOP = b""
SECONDS_TO_LEAVE = 10.0


class Call(msgspec.Struct, frozen=True):
    """A call of the network: its arguments with tensors replaced by their places, and the tensors' kinds."""

    arguments: dict[str, Any]
    dtypes: list[str]
    shapes: list[list[int]]


def parallelize(adapter: Adapter, options: Options) -> None:
    """Have the network of this process be one of `world_size`. Raises `ConfigError`."""
    from diffusers import ContextParallelConfig, TensorParallelConfig

    if adapter.device.type == "cpu":
        # diffusers divides ranks by the number of accelerators, which is 0 here.
        torch.accelerator.device_count = lambda: 1
    if len(adapter.networks) > 1:
        raise ConfigError(
            f"{type(adapter.pipe).__name__} has several networks, and only one can be parallel."
        )
    settings: Any = None
    if options.tensor_parallel_size > 1:
        settings = TensorParallelConfig(tp_degree=options.tensor_parallel_size)
    else:
        settings = ContextParallelConfig(
            ulysses_degree=options.ulysses_degree,
            ring_degree=options.ring_degree,
            # Texts and pictures of any length, not only of multiples of the degree.
            ulysses_anything=options.ring_degree == 1,
        )
    try:
        adapter.transformer.enable_parallelism(config=settings)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{type(adapter.transformer).__name__} cannot be parallel: {error}") from None
    # Rows of several sizes need positions that only the leading process knows.
    adapter.mixes_sizes = False


def check_parallel(config: StageConfig, options: Options) -> None:
    """Raises `ConfigError` for what is not to be had."""
    if options.cfg_parallel_size > 1:
        raise ConfigError("cfg_parallel_size: diffusers has no parallel guidance; only 1 is possible.")
    contexts = options.ulysses_degree * options.ring_degree
    if contexts > 1 and options.tensor_parallel_size > 1:
        raise ConfigError(f"Stage {config.name}: context and tensor parallelism exclude each other.")
    if len(config.devices) != options.world_size:
        raise ConfigError(
            f"Stage {config.name}: {options.world_size} processes need as many devices, one each; "
            f"devices names {len(config.devices)}."
        )
    others = ("enable_cpu_offload", "enable_layerwise_offload", "quantization", "cache_backend")
    for name in (*others, "component_devices"):
        if getattr(options, name):
            raise ConfigError(f"Stage {config.name}: {name} cannot be combined with parallelism.")
    if not options.enforce_eager:
        raise ConfigError(f"Stage {config.name}: enforce_eager: false cannot be combined with parallelism.")


class Peers:
    """The other processes of a stage, seen from the one that leads."""

    def __init__(self, config: StageConfig, options: Options) -> None:
        check_parallel(config, options)
        self._size = options.world_size
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self._processes = [self._spawn(config, rank, port) for rank in range(1, self._size)]
        join_group(config, 0, self._size, port)

    def _spawn(self, config: StageConfig, rank: int, port: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "omni_async.stages.diffusion.peer", str(rank), str(port)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        return process

    def lead(self, network: torch.nn.Module) -> None:
        """Have each call of `network` reach the peers first."""

        def forward(**arguments: Any) -> Any:
            self._tell(arguments, next(network.parameters()).device)
            try:
                return own(**arguments)
            except RuntimeError as error:
                self._end_if_alone(error)
                raise

        own = replace_forward(network, forward)

    def _tell(self, arguments: dict[str, Any], device: torch.device) -> None:
        try:
            broadcast_call(arguments, device)
        except RuntimeError as error:
            self._end_if_alone(error)
            raise

    def _end_if_alone(self, error: RuntimeError) -> None:
        """Without its peers this process can do nothing: it ends, and the supervisor starts all anew."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[0].wait(1.0)
        if any(process.poll() is not None for process in self._processes):
            raise SystemExit("a peer process of this stage has ended") from error

    def close(self, device: torch.device) -> None:
        """Let the peers end."""
        with contextlib.suppress(RuntimeError):
            _broadcast_bytes(STOP, device)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_LEAVE)
        self.kill()

    def kill(self) -> None:
        """End those that have not ended."""
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        dist.destroy_process_group()


def join_group(config: StageConfig, rank: int, size: int, port: int) -> None:
    """Meet the other processes."""
    device = torch.device(config.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
    )


def broadcast_call(arguments: dict[str, Any], device: torch.device) -> None:
    """Send a call to the peers."""
    tensors: list[torch.Tensor] = []
    placed = {name: _place(value, tensors) for name, value in arguments.items()}
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    call = Call(placed, dtypes, [list(tensor.shape) for tensor in tensors])
    _broadcast_bytes(msgspec.msgpack.encode(call), device)
    for tensor in tensors:
        dist.broadcast(_sendable(tensor.contiguous().to(device)), 0)


def receive_call(device: torch.device) -> dict[str, Any] | None:
    """The next call, or None when there will be none."""
    data = _broadcast_bytes(None, device)
    if not data:
        return None
    call = msgspec.msgpack.decode(data, type=Call)
    tensors: list[torch.Tensor] = []
    for dtype, shape in zip(call.dtypes, call.shapes, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        dist.broadcast(_sendable(tensor), 0)
        tensors.append(tensor)
    return {name: _fill(value, tensors) for name, value in call.arguments.items()}


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _broadcast_bytes(data: bytes | None, device: torch.device) -> bytes:
    size = torch.tensor([len(data or b"")], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    if not int(size):
        return b""
    body = torch.empty(int(size), dtype=torch.uint8, device=device)
    if data is not None:
        body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(body, 0)
    return bytes(body.cpu().numpy())


def _place(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"$tensor": len(tensors) - 1}
    if isinstance(value, list | tuple):
        return [_place(each, tensors) for each in value]
    if isinstance(value, dict):
        return {name: _place(each, tensors) for name, each in value.items()}
    return value


def _fill(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        items = [_fill(each, tensors) for each in value]
        return tuple(items) if all(isinstance(each, int) for each in items) else items
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        return {name: _fill(each, tensors) for name, each in value.items()}
    return value
