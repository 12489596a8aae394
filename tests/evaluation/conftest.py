"""A folder of images in memory, and a model whose features are known."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from diffvision.data.datasets.digits import png
from diffvision.data.shards.report import Report
from diffvision.data.shards.writer import write_evaluation_split


@dataclass
class MemoryFolder:
    """What the evaluations ask of an `EvaluationFolder`; images are grey, of the value given."""

    task: str
    rows: dict[str, list]  # split -> (grey value, label or captions, kind or not); of pairs, two rows a sample
    name: str = "memory"
    classnames: list[str] | None = None
    templates: list[str] | None = None
    own_names: list[str] = field(default_factory=list)
    path: str = "memory"
    reads: list[str] = field(default_factory=list)

    @property
    def splits(self):
        return list(self.rows)

    def batches(self, transform, *, split="test", batch_size=64, num_workers=0, rank=0, world_size=1):
        self.reads.append(split)
        rows = self.rows[split]
        images = 2 if self.task == "pairs" else 1  # of a sample
        start, stop = (len(rows) // images * r // world_size * images for r in (rank, rank + 1))
        return MemoryBatches(list(self._batches(transform, rows, start, stop, batch_size * images)))

    def _batches(self, transform, rows, start, stop, batch_size):
        for first in range(start, stop, batch_size):
            own = rows[first : min(first + batch_size, stop)]
            image = torch.stack([transform(Image.new("RGB", (8, 8), (row[0],) * 3)) for row in own])
            if self.task == "zero_shot":
                yield {"image": image, "label": torch.tensor([label for _, label in own])}
            else:
                kinds = {"kind": [row[2] for row in own]} if len(own[0]) > 2 else {}
                yield {"image": image, "captions": [row[1] for row in own], **kinds}


@dataclass
class MemoryBatches:
    batches: list
    report = Report(0)

    def __iter__(self):
        return iter(self.batches)


class Circle(nn.Module):
    """Features on a circle: an image's by its grey value, a text's by the number in it (both 0..255)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.eye(2))
        self.tower = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2))

    def encode_image(self, image):
        assert not self.training
        assert not torch.is_grad_enabled()
        return self._on_circle(image.mean(dim=(1, 2, 3)) * 255)

    def encode_text(self, tokens):
        return self._on_circle(tokens[:, 0].float())

    def _on_circle(self, value):
        angle = value * torch.pi / 256
        return torch.stack([angle.cos(), angle.sin()], dim=1) @ self.scale


@pytest.fixture
def circle():
    return Circle()


@pytest.fixture
def to_tensor():
    return lambda image: torch.tensor(list(image.get_flattened_data()), dtype=torch.float32).T.reshape(3, 8, 8) / 255


@pytest.fixture
def numbers():
    """A tokenizer of one token: the number that a text ends with."""
    return lambda texts: torch.tensor([[int(text.split()[-1])] for text in texts])


@pytest.fixture
def classified():
    """Three classes at 10, 100 and 200; one image of eight is nearest to another's."""
    greys = [(12, 0), (20, 0), (90, 1), (110, 1), (120, 1), (190, 2), (210, 2), (60, 0)]
    return MemoryFolder(
        "zero_shot",
        {"train": [(grey + shift, label) for grey, label in greys[:7] for shift in range(6)], "test": greys},
        classnames=["10", "100", "200"],
        templates=["a grey of {c}", "{c}"],
    )


@pytest.fixture
def captioned():
    rows = [(10, ["grey 12", "about 18"]), (100, ["grey 99"]), (200, ["grey 201", "grey 101", "grey 190"])]
    return MemoryFolder("retrieval", {"test": rows})


@pytest.fixture
def swapped():
    rows = [(10, ["grey 12", "grey 90"]), (100, ["grey 99", "grey 10"]), (200, ["grey 20", "grey 190"])]
    return MemoryFolder("composition", {"test": rows})


@pytest.fixture
def paired():
    """Three pairs of two kinds; in the second, the captions are of the other image."""
    pairs = [((10, 200), "Texts"), ((100, 20), "State and Condition"), ((250, 150), "State and Condition")]
    rows = [(grey, [f"grey {grey}"], kind) for greys, kind in pairs for grey in greys]
    rows[2], rows[3] = (100, ["grey 20"], rows[2][2]), (20, ["grey 100"], rows[3][2])
    return MemoryFolder("pairs", {"test": rows})


@pytest.fixture
def memory_folder():
    return MemoryFolder


COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def square(colour):
    noise = np.random.default_rng(sum(colour)).integers(0, 40, (32, 32, 3))
    return png(np.array(colour) * 0.8 + noise)


def write_split(directory, samples):
    write_evaluation_split(directory, ({"__key__": f"s{n:03}", **members} for n, members in enumerate(samples)))


@pytest.fixture(scope="session")
def colours(tmp_path_factory):
    """Folders of three evaluations, and a split to train on, of squares in three colours. Not to be changed."""
    root = tmp_path_factory.mktemp("made") / "colours"
    labelled = [{"png": square(c), "cls": str(label).encode()} for label, c in enumerate(COLOURS.values())]
    write_split(root / "zero_shot" / "train", labelled * 5)
    write_split(root / "zero_shot" / "test", labelled * 4)
    (root / "zero_shot" / "classnames.txt").write_text("\n".join(COLOURS))
    (root / "zero_shot" / "zeroshot_classification_templates.txt").write_text("a {c} square\nthe colour {c}")
    captioned = [{"png": square(c), "txt": f"a {name} square\nsomething {name}"} for name, c in COLOURS.items()]
    for task in ("retrieval", "composition"):
        write_split(root / task / "test", captioned)
        (root / task / "dataset_type.txt").write_text("retrieval")
    return root
