"""Shards as img2dataset 1.47 writes them, with random images: tars, and the notes and tables next to them."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image
from webdataset import TarWriter

NOT_FOUND = "HTTP Error 404: Not Found"


def jpeg(seed, size=(24, 16)):
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def write_img2dataset(folder, captions, per_shard=10, failed=()):
    """Write the captions' shards without the numbers that failed, each with a table and notes, which we do not read."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    for shard in range(-(-len(captions) // per_shard)):
        numbers = range(shard * per_shard, min(len(captions), (shard + 1) * per_shard))
        with TarWriter(str(folder / f"{shard:05d}.tar")) as tar:
            for row, number in enumerate(numbers):
                if number not in failed:
                    tar.write(sample(f"{shard:05d}{row:04d}", number, captions[number]))
        (folder / f"{shard:05d}.parquet").write_bytes(b"PAR1")
        (folder / f"{shard:05d}_stats.json").write_text(json.dumps({"count": len(numbers)}, indent=4))
    return folder


def sample(key, number, caption):
    image = jpeg(number)
    record = {"caption": caption, "url": f"http://127.0.0.1/{number}.jpg", "key": key, "status": "success"}
    record |= {"error_message": None, "width": 24, "height": 16}
    record |= {"exif": "{}", "sha256": hashlib.sha256(image).hexdigest()}
    return {"__key__": key, "jpg": image, "txt": caption, "json": json.dumps(record, indent=4)}
