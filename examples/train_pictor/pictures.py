"""Named pictures out of a colour font: `pictures.safetensors` (uint8 `[n, 32, 32, 3]`) and `names.json`."""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

SIDE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--font", type=Path, required=True, help="a font with bitmaps in a CBDT table")
    parser.add_argument("--names", type=Path, required=True, help="emojibase's data.json")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    font = Font(args.font)
    names, pictures = [], []
    for entry in json.loads(args.names.read_text(encoding="utf-8")):
        picture = font.picture(entry["hexcode"])
        if picture is not None:
            names.append({"label": plain(entry["label"]), "tags": [plain(t) for t in entry.get("tags", [])]})
            pictures.append(on_white(picture))
    args.output.mkdir(parents=True, exist_ok=True)
    save_file({"pictures": np.stack(pictures)}, args.output / "pictures.safetensors")
    (args.output / "names.json").write_text(json.dumps(names), encoding="utf-8")
    print(f"{len(names)} pictures")


def plain(name: str) -> str:
    """Lower case, letters and digits."""
    return re.sub(r"[^a-z0-9 '-]", " ", name.lower().replace("’", "'").replace("flag: ", "flag of ")).strip()


def on_white(picture: Image.Image) -> np.ndarray:
    """uint8 `[32, 32, 3]`."""
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    white.alpha_composite(picture)
    side = max(white.size)
    square = Image.new("RGB", (side, side), (255, 255, 255))
    square.paste(white.convert("RGB"), ((side - white.width) // 2, (side - white.height) // 2))
    return np.asarray(square.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


class Font:
    """The bitmaps of a font by code points, its ligatures included."""

    def __init__(self, path: Path) -> None:
        from fontTools.ttLib import TTFont

        font = TTFont(path)
        self._bitmaps: dict[str, Any] = font["CBDT"].strikeData[0]
        self._glyphs: dict[int, str] = font.getBestCmap() or {}
        self._ligatures: dict[tuple[str, ...], str] = {}
        for lookup in font["GSUB"].table.LookupList.Lookup:
            for table in lookup.SubTable:
                self._add(table.ExtSubTable if table.LookupType == 7 else table)

    def _add(self, table: Any) -> None:
        if table.LookupType == 4:
            for first, ligatures in table.ligatures.items():
                for each in ligatures:
                    self._ligatures[first, *each.Component] = each.LigGlyph

    def picture(self, hexcode: str) -> Image.Image | None:
        """RGBA, or None where the font has none."""
        points = [int(part, 16) for part in hexcode.split("-")]
        for kept in (points, [point for point in points if point != 0xFE0F]):
            glyphs = tuple(self._glyphs.get(point, "") for point in kept)
            name = glyphs[0] if len(glyphs) == 1 else self._ligatures.get(glyphs, "")
            if name in self._bitmaps:
                bitmap = self._bitmaps[name]
                data = bitmap.imageData if hasattr(bitmap, "imageData") else bitmap.data
                return Image.open(io.BytesIO(data)).convert("RGBA")
        return None


if __name__ == "__main__":
    main()
