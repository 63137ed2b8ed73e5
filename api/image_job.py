"""A validated image request and its way to pictures; both image routes share it."""

from __future__ import annotations

import asyncio
import random
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from omni_async.api.allowed_path import existing_under
from omni_async.api.client import OmniClient
from omni_async.api.config import ApiConfig
from omni_async.api.image_fields import ImageFields, Upload, image_of, refuse_conflicts
from omni_async.api.media_pool import MediaPool
from omni_async.config import ImageConfig
from omni_async.errors import InvalidRequest, StageFailed
from omni_async.image import Image, Lora
from omni_async.outputs import ImageChunk


class TokenDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The input, by kind."""

    text_tokens: int
    image_tokens: int


class ImageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request used, in OpenAI's shape.

    Text counts its characters, pictures their begun squares of 16 pixels: a model's own tokens are not
    known here, and differ from model to model.
    """

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    total_tokens: int


class Drawn(msgspec.Struct, frozen=True):
    """A picture as a file in base64; `index` says which of the n."""

    index: int
    chunk: ImageChunk
    b64_json: str

    @property
    def size(self) -> str:
        """`WxH` of the file."""
        height, width = self.chunk.pixels.shape[:2]
        return f"{width}x{height}"


class ImageJob(msgspec.Struct, frozen=True):
    """What is asked of the engine, one request a picture, and the files that its pictures become."""

    images: tuple[Image, ...]
    output_format: str
    compression: int | None
    opaque: bool

    def background(self, drawn: Drawn) -> str:
        """What the file has: `transparent` when it keeps an alpha channel, else `opaque`."""
        return "transparent" if drawn.chunk.pixels.shape[2] == 4 and not self.opaque else "opaque"

    def usage(self, drawn: Sequence[Drawn]) -> ImageUsage:
        """What the finished pictures used."""
        first = self.images[0]
        text = len(first.prompt) + len(first.negative_prompt or "")
        seen = sum(_squares(*pixels.shape[:2]) for pixels in first.images)
        made = sum(_squares(*each.chunk.pixels.shape[:2]) for each in drawn)
        return ImageUsage(
            input_tokens=text + seen,
            input_tokens_details=TokenDetails(text_tokens=text, image_tokens=seen),
            output_tokens=made,
            total_tokens=text + seen + made,
        )


def _squares(height: int, width: int) -> int:
    return -(-height // 16) * -(-width // 16)


class ImageService:
    """Checks requests against what is served, and runs them."""

    def __init__(self, omni: OmniClient, config: ApiConfig, media: MediaPool) -> None:
        self.omni = omni
        self.config = config
        self.media = media

    def accept(self, fields: ImageFields) -> ImageConfig:
        """What draws them. Raises `InvalidRequest` or `NotFound`; needs no upload, so that none is read
        for a request that is wrong anyway."""
        refuse_conflicts(fields)
        if len(fields.prompt) > self.config.max_input_chars:
            limit = self.config.max_input_chars
            message = f"prompt has {len(fields.prompt)} characters; at most {limit} are taken."
            raise InvalidRequest(message, param="prompt", code="input_too_long")
        pipeline = self.omni.pipeline_for("image", fields.model)
        if pipeline.image is None:
            raise InvalidRequest(f"Model {pipeline.name!r} does not draw.", param="model")
        return pipeline.image

    def prepare(self, fields: ImageFields, upload: Upload | None = None) -> ImageJob:
        """The job. Raises `InvalidRequest` or `NotFound` before any stage is asked."""
        draws = self.accept(fields)
        if fields.lora is not None:
            fields = msgspec.structs.replace(fields, lora=self._lora(fields.lora))
        seed = random.getrandbits(32) if fields.seed is None else fields.seed
        images = tuple(image_of(fields, upload or Upload(), seed + i) for i in range(fields.n or 1))
        images[0].resolve(draws, self.config.max_generated_image_size)
        kind = (fields.output_format or "png").replace("jpg", "jpeg")
        opaque = kind == "jpeg" or fields.background == "opaque"
        return ImageJob(images, kind, fields.output_compression, opaque)

    def _lora(self, lora: Lora) -> Lora:
        """With its path resolved. Raises `InvalidRequest` for one that is not under the allowed folder."""
        root = self.config.allowed_lora_path
        if not root:
            raise InvalidRequest("This server takes no LoRA (--allowed-lora-path).", param="lora.path")
        path = existing_under(root, lora.path)
        if path is None:
            raise InvalidRequest(f"There is no LoRA {lora.path!r}.", param="lora.path")
        return msgspec.structs.replace(lora, path=str(path))

    async def drawn(self, job: ImageJob, request_id: str) -> AsyncGenerator[Drawn, None]:
        """Pictures of all n requests as they are made, previews too; closing it cancels them all.

        Raises the first error, after which the other requests are cancelled.
        """
        ready: asyncio.Queue[Drawn | Exception | None] = asyncio.Queue(maxsize=1)
        tasks = [
            asyncio.create_task(self._draw(job, index, request_id, ready)) for index in range(len(job.images))
        ]
        try:
            left = len(tasks)
            while left:
                item = await ready.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _draw(
        self, job: ImageJob, index: int, request_id: str, ready: asyncio.Queue[Drawn | Exception | None]
    ) -> None:
        finished = False
        try:
            async with aclosing(self.omni.generate(job.images[index], request_id=request_id)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, ImageChunk):
                        finished = finished or chunk.partial is None
                        await ready.put(await self._encoded(job, index, chunk))
            await ready.put(None if finished else StageFailed("The model made no picture."))
        except Exception as error:
            await ready.put(error)

    async def _encoded(self, job: ImageJob, index: int, chunk: ImageChunk) -> Drawn:
        from omni_async.api.image_codec import write_picture

        def encode() -> str:
            kind, compression = job.output_format, job.compression
            return b64encode(write_picture(chunk.pixels, kind, compression, opaque=job.opaque)).decode()

        return Drawn(index, chunk, await self.media.run(encode))
