"""How many functions of this package run on five code paths: a reader has to know them to follow the path.

    python scripts/benchmarks/code_paths.py                      # a table of all paths
    python scripts/benchmarks/code_paths.py --only block token   # some of them
    python scripts/benchmarks/code_paths.py --only block --list  # and their functions in the order of the first call

A function counts once per path, however often it runs. Lambdas, comprehensions and generator expressions do not count,
and neither do functions of other packages. Each path is counted in its own process, so that no cache is
filled by another. It takes about a minute, and writes the digits for `fit` and `evaluate` to a temporary folder.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
WARM = 2  # calls before the one that is counted


class Counter:
    """The functions of ours that were entered.

    Attributes:
        functions: code -> its qualified name and file, in the order of the first calls.
        calls: of them.
        is_counting: False stops the count for good.
    """

    def __init__(self) -> None:
        import diffvision

        self.package = str(Path(diffvision.__file__).parent) + os.sep
        self.functions: dict[CodeType, str] = {}
        self.calls, self.is_counting = 0, True

    @contextmanager
    def counting(self, until: str = "") -> Iterator[None]:
        """Count what is called in the context, in all threads.

        Args:
            until: the count ends when a function of ours of this name returns for the first time.
        """

        def profile(frame: FrameType, event: str, _: Any) -> None:
            if not self.is_counting or not self._is_ours(frame):
                return
            if event == "call":
                self._enter(frame)
            elif event == "return" and until and frame.f_code.co_name == until:
                self.is_counting = False

        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _is_ours(self, frame: FrameType) -> bool:
        """Return whether the frame is of a function in the package: not of a module, class body or expression."""
        code = frame.f_code
        is_function = bool(code.co_flags & 1) and not code.co_name.startswith("<")  # CO_OPTIMIZED: has fast locals
        return is_function and code.co_filename.startswith(self.package)

    def _enter(self, frame: FrameType) -> None:
        code = frame.f_code
        self.calls += 1
        file = code.co_filename.removeprefix(self.package)
        self.functions.setdefault(code, f"{file}:{code.co_firstlineno} {code.co_qualname}")


def count_block(counter: Counter, _: Path) -> None:
    """Count a warm block of `diff_vit_debug` in evaluation mode, without gradients."""
    import timm
    import torch

    model = timm.create_model("diff_vit_debug").eval()
    tokens = torch.randn(2, model.pos_embed.shape[1], model.embed_dim)
    with torch.no_grad():
        for _call in range(WARM):
            model.blocks[0](tokens)
        with counter.counting():
            model.blocks[0](tokens)


def count_token(counter: Counter, _: Path) -> None:
    """Count a token of `diff-debug` after a prompt of three: its hidden state and logits."""
    import torch

    from diffvision.models import language

    model = language.create("diff-debug").eval()
    cache, token = model.new_cache(1, 64), torch.tensor([[3]])

    def decode() -> None:
        model.logits(model.hidden(token, cache=cache))

    with torch.no_grad():
        model.hidden(torch.tensor([[1, 2, 3]]), cache=cache)
        for _call in range(WARM):
            decode()
        with counter.counting():
            decode()


def count_batch(counter: Counter, folder: Path) -> None:
    """Count a training batch of four samples from a shard of digits that is open already, without workers."""
    import torch

    from diffvision.data import ImageTextData
    from diffvision.data.images.image_data import to_float

    def tokenize(captions: list[str]) -> torch.Tensor:
        return torch.zeros(len(captions), 1)

    shard = str(digits(folder) / "train" / "000000.tar")
    data = ImageTextData(shard, batch_size=4, num_workers=0, transform=to_float, tokenizer=tokenize)
    data.setup("fit")
    batches = iter(data.train_dataloader())
    for _call in range(WARM):
        next(batches)
    with counter.counting():
        next(batches)


def count_fit(counter: Counter, folder: Path) -> None:
    """Count `fit` with the debug recipe of CLIP from its arguments to the first loss."""
    from diffvision.cli import main

    words = ["fit", "--config", str(ROOT / "configs" / "clip" / "debug.yaml")]
    made = digits(folder)
    os.chdir(folder)
    settings = {"data.train": made / "train", "data.evaluations": f"[{made / 'zero_shot'}]", "trainer.max_steps": 1}
    words += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with counter.counting(until="training_step"):
        main(words)


def count_evaluate(counter: Counter, folder: Path) -> None:
    """Count `evaluate` of an untrained DiffCLIP-debug on the folder of digits for zero-shot classification."""
    from diffvision.cli import main

    words = ["evaluate", "DiffCLIP-debug", "--data", str(digits(folder) / "zero_shot")]
    with counter.counting():
        main(words)


def digits(folder: Path) -> Path:
    """Return the made digits, which are written on the first call."""
    from diffvision.data.make import make

    made = folder / "digits"
    if not made.exists():
        make("digits", str(made))
    return made


PATHS: dict[str, tuple[str, Callable[[Counter, Path], None]]] = {
    "block": ("a warm block of diff_vit_debug", count_block),
    "token": ("one decoded token of diff-debug", count_token),
    "batch": ("a batch of four samples from an open shard", count_batch),
    "fit": ("fit --config clip/debug.yaml to its first loss", count_fit),
    "evaluate": ("evaluate MODEL --data FOLDER", count_evaluate),
}


def count_apart(name: str, folder: Path) -> list[str]:
    """Count a path in a process of its own, and return its functions."""
    result = folder / f"{name}.json"
    words = [sys.executable, __file__, "--only", name, "--folder", str(folder), "--result", str(result)]
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode or not result.exists():
        sys.exit(f"{name} failed:\n{ended.stderr}")
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PATHS, default=list(PATHS), help="paths to count; all by default")
    parser.add_argument("--list", action="store_true", help="list each path's functions in the order of the first call")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.result is not None:
        [name] = given.only
        counter = Counter()
        PATHS[name][1](counter, given.folder)
        given.result.write_text(json.dumps(list(counter.functions.values())))
        return
    print("| path | functions |\n|---|---:|")
    listed = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.only:
            functions = listed[name] = count_apart(name, Path(scratch))
            print(f"| {PATHS[name][0]} | {len(functions)} |", flush=True)
    if given.list:
        for name, functions in listed.items():
            print("\n".join([f"\n{PATHS[name][0]}:", *(f"  {function}" for function in functions)]))


if __name__ == "__main__":
    main()
