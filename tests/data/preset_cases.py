"""Small folders in the published forms of the presets, with real pictures."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

PHOTOS = {"train": 6, "val": 2, "test": 3}
CAPTIONS = 5
PRODUCTS = {"train": {7: 3, 8: 2, 9: 1}, "test": {20: 3, 21: 2, 22: 1}}
"""Split -> product -> how many pictures it has."""

SETS = 2
"""Sets of similar pictures in each split of CIRR, 6 pictures and 2 queries each."""


def draw(path: Path, seed: int) -> Path:
    """Write a small picture of its own colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(colours).resize((24, 20), PIL.Image.Resampling.NEAREST).save(buffer, "PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return path


def photos() -> list[dict[str, Any]]:
    """Return the pictures of Flickr30k's JSON file, in their order there: the splits are mixed."""
    names = [(split, number) for split, count in PHOTOS.items() for number in range(count)]
    names.sort(key=lambda name: (name[1], name[0]))
    return [
        {
            "sentids": [CAPTIONS * place + number for number in range(CAPTIONS)],
            "imgid": place,
            "sentences": [
                {"tokens": [], "raw": f"{split} photo {number} seen by {who}.", "imgid": place, "sentid": who}
                for who in range(CAPTIONS)
            ],
            "split": split,
            "filename": f"{split}{number}.jpg",
        }
        for place, (split, number) in enumerate(names)
    ]


def write_flickr30k(folder: Path, entries: list[Any] | None = None) -> Path:
    """Write Karpathy's form."""
    for place, photo in enumerate(photos()):
        draw(folder / "flickr30k-images" / photo["filename"], place)
    entries = photos() if entries is None else entries
    (folder / "dataset_flickr30k.json").write_text(json.dumps({"images": entries, "dataset": "flickr30k"}))
    return folder


def write_flickr30k_lists(folder: Path) -> Path:
    """Write the original captions and a list for each split."""
    write_flickr30k(folder)
    (folder / "dataset_flickr30k.json").unlink()
    lines = [
        f"{photo['filename']}#{number}\t{sentence['raw']}\n"
        for photo in photos()
        for number, sentence in enumerate(photo["sentences"])
    ]
    (folder / "results_20130124.token").write_text("".join(lines))
    for split in PHOTOS:
        names = [photo["filename"] for photo in photos() if photo["split"] == split]
        (folder / f"{split}.txt").write_text("".join(f"{name.removesuffix('.jpg')}\n" for name in names))
    return folder


def write_sop(folder: Path) -> Path:
    """Write both lists; the pictures of a product don't stand together."""
    number = 0
    for split, products in PRODUCTS.items():
        rows = []
        for copy in range(max(products.values())):
            for product, count in products.items():
                if copy < count:
                    number += 1
                    path = f"mug_final/{product}_{copy}.JPG"
                    draw(folder / path, number)
                    rows.append(f"{number} {product} 8 {path}")
        text = "\n".join(["image_id class_id super_class_id path", *rows])
        (folder / f"Ebay_{split}.txt").write_text(text + "\n")
    return folder


def pairs(split: str) -> list[dict[str, Any]]:
    """Return the queries of a split of CIRR."""
    return [
        {
            "pairid": 10 * group + pair,
            "reference": f"{split}-{group}-0",
            "target_hard": f"{split}-{group}-{pair + 1}",
            "target_soft": {f"{split}-{group}-{pair + 1}": 1.0},
            "caption": f"show {pair + 1} more of group {group}",
            "img_set": {"id": group, "members": [f"{split}-{group}-{place}" for place in range(6)]},
        }
        for group in range(SETS)
        for pair in range(2)
    ]


def write_cirr(folder: Path) -> Path:
    """Write the repository's form with the pictures in img_raw/."""
    for offset, (split, inner) in enumerate((("train", "train/3"), ("val", "dev"), ("test1", "test1"))):
        names = [f"{split}-{group}-{place}" for group in range(SETS) for place in range(6)]
        for place, name in enumerate(names):
            draw(folder / "img_raw" / inner / f"{name}.png", 100 * offset + place)
        rows = pairs(split)
        if split == "test1":
            rows = [{key: value for key, value in row.items() if not key.startswith("target")} for row in rows]
        write_json(folder / f"captions/cap.rc2.{split}.json", rows)
        write_json(folder / f"image_splits/split.rc2.{split}.json", {name: f"./{inner}/{name}.png" for name in names})
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write a value, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


WRITERS = {"flickr30k": write_flickr30k, "sop": write_sop, "cirr": write_cirr}
