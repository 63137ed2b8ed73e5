"""Qwen's processor for pictures alone: the library's own also wants a processor of films, and with it
torchvision, which not every build of torch has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, ProcessorMixin, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class PictureProcessor(Qwen2VLProcessor):
    """Text and pictures → token ids, masks and patches, as `Qwen2VLProcessor` makes them."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
    ) -> None:
        for kind in ("image", "video"):
            mark = f"<|{kind}_pad|>"
            setattr(self, f"{kind}_token", mark)
            setattr(self, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(mark))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def load(folder: Path) -> PictureProcessor:
    """The processor of a diffusers folder (its subfolder `processor`)."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "processor")
    pictures: Any = Qwen2VLImageProcessorPil.from_pretrained(folder / "processor")
    return PictureProcessor(pictures, tokenizer, tokenizer.chat_template)
