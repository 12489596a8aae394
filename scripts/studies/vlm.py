"""A plain or differential image tower with a plain or differential language model: do they hallucinate less?

    diffvision data make scenes-vqa data/scenes-vqa
    python scripts/studies/vlm.py data --source data/scenes-vqa    # images and questions, as tensors
    python scripts/studies/vlm.py grid                             # the runs, and what they cost
    python scripts/studies/vlm.py tune                             # three learning rates a cell, one seed
    python scripts/studies/vlm.py train                            # fresh seeds
    python scripts/studies/vlm.py report --images docs/images

Two by two: the tower is CLIP-debug's at 64 pixels with patches of 16, plain or V2; the language model is
`transformer-debug` or `diffv2-debug`. Twins have equal parameters within 0.5%. Each seed has one CLIP for each kind of
tower, trained on the captions of the scenes, and one language model of each kind, trained on conversations without
images; the four cells share them. The projector is LLaVA-1.5's. It is trained alone for an epoch at twice the learning
rate, then everything. `tune` and `train` leave out what is done; each run is one JSON.

Declared before the first run:

- Primary metric: F1 on POPE's adversarial questions. All others are secondary: CHAIR_i, and the exact match of counts,
  colours and places.
- Learning rates: three for each cell, with a seed of their own. The best one has the highest likelihood of the answers
  in the validation conversations: the geometric mean over tokens.
- Contrasts, paired by seed over five fresh seeds: the main effects of tower and language model, and their interaction,
  with Holm's correction over the three.
- Rival without training: PAI's text-only contrast (arXiv 2407.21771, gamma 1.1) on the plain cell.
- Cut by this rule alone, if the machine's time runs out: the two cells of the plain tower with the V2 language model
  and of the V2 tower with the plain one go together, which leaves one paired difference. No cell loses learning rates
  or seeds. Runs are compared on one kind of processor only.
"""

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffvision.data.datasets.scenes_vqa import DESCRIBE
from diffvision.evaluation.per_sample import means
from diffvision.evaluation.vision_language.chair import ObjectNames, chair
from diffvision.evaluation.vision_language.pope_metrics import pope
from diffvision.evaluation.vision_language.vqa import vqa
from diffvision.models import language
from diffvision.models.vision_language import TimmLlava, create
from diffvision.training.optim import param_groups
from grid import Difference, Grid, Run, contrasts, paired_interval, processor, processor_folder, run_study
from small_clip import Captions, SmallClip, Towers, pixels, read

SIZE, PATCH, BATCH = 64, 16, 64
TOWERS = {"plain": "plain_vit_debug_clip", "V2": "diffv2_vit_debug_clip"}
LANGUAGES = {"plain": "transformer-debug", "V2": "diffv2-debug"}
FACTORS = ("tower", "language model")
CELLS = {f"{tower} tower, {text} language": (tower, text) for tower in TOWERS for text in LANGUAGES}
PRIMARY = ("POPE adversarial F1",)
SECONDARY = (
    "POPE adversarial accuracy",
    "yes, adversarial",
    "POPE popular F1",
    "POPE random F1",
    "CHAIR_i",
    "recall",
    "count",
    "colour",
    "place",
)
RIVAL = "text-only contrast"
EPOCHS = 8  # of everything together, after one of the projector
CLIP_EPOCHS, TEXT_EPOCHS = 40, 4
TURNS = 3  # of a scene's five, drawn for each epoch
SETTINGS = {"weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-6, "warmup_epochs": 1, "clip_norm": 1.0}
PRETRAINING = 2e-3  # learning rate of CLIP and of the language models, between the best ones of clip.md's cells
QUESTIONS = ("pope_random", "pope_popular", "pope_adversarial", "vqa", "captions")
PAD, END, MARK, IMAGE = range(4)  # token ids: padding, the end of an answer, its beginning, an image's placeholder
GRID = Grid(
    Path(__file__).parents[2] / "docs" / "results" / "vlm" / processor_folder(),
    tuple(CELLS),
    rates=(1e-3, 2e-3, 4e-3),
    primary=("likelihood",),
    seeds=(1, 2, 3, 4, 5),
    epochs=EPOCHS,
)


# ---- data ----------------------------------------------------------------------------------------------------------


def make_data(source: Path, file: Path) -> None:
    """Decode the folder that `diffvision data make scenes-vqa` wrote, and write it as one file."""
    content: dict[str, Any] = {"images": {}, "turns": {}, "questions": {}}
    for split in ("train", "validation"):
        samples = read(source / split)
        content["images"][split] = pixels(samples)
        records = [json.loads(sample["json"])["conversations"] for sample in samples]
        values = [[turn["value"].removeprefix("<image>\n") for turn in record] for record in records]
        content["turns"][split] = [list(zip(row[::2], row[1::2], strict=True)) for row in values]
    names = sorted(path.name for path in (source / "test" / "images").iterdir())
    content["images"]["test"] = pixels([{"png": (source / "test" / "images" / name).read_bytes()} for name in names])
    for name in QUESTIONS:
        rows = [json.loads(line) for line in (source / "test" / f"{name}.json").read_text("utf-8").splitlines()]
        content["questions"][name] = [row | {"image": names.index(row["image"])} for row in rows]
    content["objects"] = (source / "test" / "objects.txt").read_text("utf-8").splitlines()
    pixel = content["images"]["train"].float() / 255
    content |= {"mean": pixel.mean().item(), "std": pixel.std().item()}
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file)
    print({name: len(images) for name, images in content["images"].items()})


def words(text: str) -> list[str]:
    """Return the words of a text, and its punctuation."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


class Data:
    """What `make_data` wrote, with a token for each word; a row is the image's placeholders, then the conversation."""

    def __init__(self, file: Path) -> None:
        self.content = torch.load(file, weights_only=True)
        self.images: dict[str, Tensor] = self.content["images"]
        self.turns: dict[str, list[list[tuple[str, str]]]] = self.content["turns"]
        self.mean, self.std = self.content["mean"], self.content["std"]
        known = {word for row in self.turns["train"] for turn in row for text in turn for word in words(text)}
        self.words = ["<pad>", "<end>", ":", "<image>", *sorted(known - {":"})]
        self.number = {word: number for number, word in enumerate(self.words)}
        self.names = ObjectNames(self.content["objects"])
        self.encoded = [[self._encode_turn(*turn) for turn in row] for row in self.turns["train"]]
        self.single = [self._encode_turn(*turn) for row in self.turns["validation"] for turn in row]
        captions = {split: [dict(row)[DESCRIBE] for row in turns] for split, turns in self.turns.items()}
        self.captions = Captions(captions, "CLIP-debug")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; words that no training scene has are left out."""
        return [self.number[word] for word in words(text) if word in self.number]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words of tokens up to the end of an answer."""
        ids = list(ids)
        return " ".join(self.words[token] for token in (ids[: ids.index(END)] if END in ids else ids))

    def normalised(self, images: Tensor) -> Tensor:
        """Return uint8 images as a tower takes them."""
        return (images.float() / 255 - self.mean) / self.std

    def _encode_turn(self, question: str, answer: str) -> tuple[Tensor, Tensor]:
        """Return the tokens of a question with its answer, and whether each is learned."""
        prompt, said = [*self.encode(question), MARK], [*self.encode(answer), END]
        return torch.tensor(prompt + said), torch.tensor([False] * len(prompt) + [True] * len(said))

    def drawn(self, rows: Tensor, turns: int) -> tuple[Tensor, Tensor]:
        """Return tokens [B, L] of some turns of training conversations in any order, and whether each is learned."""
        drawn = [[row[i] for i in torch.randperm(len(row))[:turns]] for row in (self.encoded[i] for i in rows)]
        return padded([tuple(map(torch.cat, zip(*row, strict=True))) for row in drawn])


def padded(rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return rows of tokens [N, L], padded at the right, and whether each is learned."""
    tokens, learned = zip(*rows, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(tokens, batch_first=True, padding_value=PAD), pad(learned, batch_first=True, padding_value=False)


# ---- training ------------------------------------------------------------------------------------------------------


def fit(
    module: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    count: int,
    *,
    rate: float,
    epochs: int,
    seed: int,
) -> float:
    """Train a module's parameters that need gradients by AdamW, warm-up and a cosine; return the CPU seconds."""
    parameters = [one for one in module.parameters() if one.requires_grad]
    settings: Any = {"lr": rate, "betas": SETTINGS["betas"], "eps": SETTINGS["eps"]}
    optimizer = torch.optim.AdamW(param_groups(module, SETTINGS["weight_decay"]), fused=True, **settings)
    steps = count // BATCH
    total, warmup, step, start = epochs * steps, steps // 2, 0, time.process_time()
    module.train()
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for chosen in order[: steps * BATCH].view(steps, BATCH):
            share = (
                (step + 1) / warmup
                if step < warmup
                else 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (total - warmup))
            )
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            loss = loss_of(chosen)
            if not loss.isfinite():
                raise FloatingPointError(f"the loss is {loss.item()} at step {step}")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, SETTINGS["clip_norm"])
            optimizer.step()
            step += 1
    module.eval()
    return time.process_time() - start


def answers_loss(hidden: Tensor, weight: Tensor, tokens: Tensor, learned: Tensor) -> Tensor:
    """Return the mean cross entropy of the learned tokens, each predicted from the one before it."""
    which = learned[:, 1:]
    return F.cross_entropy(hidden[:, :-1][which] @ weight.T, tokens[:, 1:][which])


def pretrained_tower(kind: str, seed: int, data: Data, folder: Path, epochs: int) -> dict[str, Tensor]:
    """Return the weights of a tower whose CLIP learned the captions of the training scenes with this seed."""
    file = folder / f"tower-{kind}-{seed}.pt"
    if not file.is_file():
        torch.manual_seed(seed)
        clip = SmallClip(Towers(TOWERS[kind]).create(SIZE, PATCH), data.captions, data.mean, data.std)
        captions = data.captions.of["train"]
        clip.fit(data.images["train"], captions, {**SETTINGS, "lr": PRETRAINING}, epochs=epochs, seed=seed)
        torch.save(clip.model.visual.trunk.state_dict(), file)
    return torch.load(file, weights_only=True)


def pretrained_language(kind: str, seed: int, data: Data, folder: Path, epochs: int) -> Path:
    """Return the folder of a language model that learned the training conversations without their images."""
    folder = folder / f"language-{kind}-{seed}"
    if not folder.is_dir():
        torch.manual_seed(seed)
        model = language.create(LANGUAGES[kind], vocab_size=len(data.words), max_length=256)

        def loss_of(chosen: Tensor) -> Tensor:
            tokens, _ = data.drawn(chosen, TURNS)
            return answers_loss(model.hidden(tokens), model.head_weight, tokens, tokens != PAD)

        fit(model, loss_of, len(data.encoded), rate=PRETRAINING, epochs=epochs, seed=seed)
        language.save(model, folder)
    return folder


def build(family: str, seed: int, data: Data, models: Path, quick: bool) -> TimmLlava:
    """Return a cell's model with its pretrained halves and a new projector."""
    tower, text = CELLS[family]
    state = pretrained_tower(tower, seed, data, models, 1 if quick else CLIP_EPOCHS)
    words = pretrained_language(text, seed, data, models, 1 if quick else TEXT_EPOCHS)
    torch.manual_seed(seed)
    model = create(
        tower=TOWERS[tower],
        tower_args={"img_size": SIZE, "patch_size": PATCH},
        language=f"local-dir:{words}",
        feature_layer=-1,
        image_token_id=IMAGE,
    )
    model.generation_config.update(eos_token_id=END, pad_token_id=PAD)
    own = model.vision_tower.timm_model
    own.load_state_dict({name: state[name] for name in own.state_dict()})
    return model


def train(run: Run, data: Data, epochs: int, models: Path) -> dict[str, Any]:
    """Train and measure one run."""
    quick = epochs < EPOCHS
    model = build(run.family, run.seed, data, models, quick)
    numbers: dict[str, Any] = {
        **asdict(run),
        "epochs": epochs,
        "images": len(data.images["train"]),
        "parameters": sum(one.numel() for one in model.parameters()),
        "processor": processor(),
    }

    def loss_of(chosen: Tensor) -> Tensor:
        return loss(model, data.normalised(data.images["train"][chosen]), *data.drawn(chosen, TURNS))

    count = len(data.images["train"])
    try:
        model.requires_grad_(False)
        model.multi_modal_projector.requires_grad_(True)
        seconds = fit(model, loss_of, count, rate=2 * run.rate, epochs=1, seed=run.seed)
        model.requires_grad_(True)
        seconds += fit(model, loss_of, count, rate=run.rate, epochs=epochs, seed=run.seed + 50)
    except FloatingPointError as error:
        return {**numbers, "diverged": str(error)}
    with torch.no_grad():
        images = data.images["validation"].repeat_interleave(len(data.single) // len(data.images["validation"]), 0)
        likelihood = math.exp(-loss(model, data.normalised(images), *padded(data.single)).item())
        test, answers = measure(model, data)
        rival = measure(model, data, contrast=1.1)[0] if CELLS[run.family] == ("plain", "plain") else {}
    models.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), models / f"{run.name}.pt")
    (models / f"{run.name}-answers.json").write_text(json.dumps(answers))
    scores = {"validation": {"likelihood": round(likelihood, 4)}, "test": test, "rival": rival}
    return {**numbers, "diverged": "", "seconds": round(seconds), **scores}


def loss(model: TimmLlava, images: Tensor, tokens: Tensor, learned: Tensor) -> Tensor:
    """Return the mean cross entropy of the learned tokens of rows, each after its image."""
    image = torch.full((len(tokens), model.image_tokens), IMAGE)
    tokens, learned = torch.cat([image, tokens], 1), torch.cat([image < 0, learned], 1)
    embeds = model.embed(tokens, model.get_image_features(images).pooler_output)
    decoder, mask = model.language_model.base_model, (tokens != PAD).long()
    hidden = decoder(inputs_embeds=embeds, attention_mask=mask, use_cache=False).last_hidden_state
    return answers_loss(hidden, model.get_output_embeddings().weight, tokens, learned)


# ---- measuring -----------------------------------------------------------------------------------------------------


def measure(model: TimmLlava, data: Data, contrast: float = 0.0) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Return the metrics of the test questions, and the answers.

    Args:
        model: the model.
        data: with the questions.
        contrast: PAI's gamma; 0 for none.
    """
    answers = {name: answer(model, data, rows, contrast) for name, rows in data.content["questions"].items()}
    numbers: dict[str, float] = {}
    for kind in ("adversarial", "popular", "random"):
        rows = data.content["questions"][f"pope_{kind}"]
        truth, images = [row["label"] == "yes" for row in rows], [row["image"] for row in rows]
        found = means(pope(answers[f"pope_{kind}"], truth, images))
        numbers |= {f"POPE {kind} {label}": found[name] for name, label in (("f1", "F1"), ("accuracy", "accuracy"))}
        numbers |= {f"yes, {kind}": found["yes_ratio"], f"unparsed, {kind}": found["unparsed"]}
    rows = data.content["questions"]["captions"]
    named = means(chair(answers["captions"], [row["objects"] for row in rows], data.names))
    numbers |= {"CHAIR_i": named["chair_i"], "CHAIR_s": named["chair_s"], "recall": named["recall"]}
    rows = data.content["questions"]["vqa"]
    matched = means(vqa(answers["vqa"], [[row["label"]] for row in rows], [row["kind"] for row in rows]))
    numbers |= {name.rpartition("/")[2]: value for name, value in matched.items()}
    return {name: round(value, 4) for name, value in numbers.items()}, answers


def answer(model: TimmLlava, data: Data, rows: list[dict[str, Any]], contrast: float) -> list[str]:
    """Return greedy answers to questions about test images, in the questions' order."""
    answers = []
    for start in range(0, len(rows), 256):
        part = rows[start : start + 256]
        asked = [torch.tensor([*data.encode(row["text"]), MARK]) for row in part]
        longest = max(map(len, asked))
        texts = torch.stack([F.pad(one, (longest - len(one), 0), value=PAD) for one in asked])
        images = torch.full((len(part), model.image_tokens), IMAGE)
        mask = (texts != PAD).long()
        settings: dict[str, Any] = {}
        if contrast:
            settings = {
                "guidance_scale": contrast,
                "negative_prompt_ids": texts,
                "negative_prompt_attention_mask": mask,
            }
        # Padding is at the left of the image, as in training it has nothing before it.
        pads = (texts == PAD).sum(1)
        tokens = torch.stack(
            [torch.cat([one[:n], image, one[n:]]) for one, image, n in zip(texts, images, pads.tolist(), strict=True)]
        )
        said = model.generate(
            input_ids=tokens,
            pixel_values=data.normalised(data.images["test"][[row["image"] for row in part]]),
            attention_mask=(tokens != PAD).long(),
            max_new_tokens=24,
            do_sample=False,
            **settings,
        )
        answers += [data.decode(ids) for ids in said[:, tokens.shape[1] :].tolist()]
    return answers


# ---- report --------------------------------------------------------------------------------------------------------


def recorded(grid: Grid) -> Grid:
    """Return the grid with its own folder of runs, or the first one with runs if this kind of processor has none."""
    if not grid.results.is_dir() and (others := sorted(grid.results.parent.glob("*/"))):
        return replace(grid, results=others[0])
    return grid


def report(grid: Grid) -> None:
    """Print the tables, in Markdown."""
    grid = recorded(grid)
    print(f"{grid.results.name}: {grid.describe()}", end="\n\n")
    for metrics in (PRIMARY, SECONDARY[:4], SECONDARY[4:]):
        print(grid.means(metrics), end="\n\n")
    print(f"| contrast, points of {PRIMARY[0]} | |\n|---|---|")
    cells = {tuple(part == "V2" for part in CELLS[name]): grid.by_seed(name, PRIMARY[0]) for name in CELLS}
    for name, one in contrasts(cells, FACTORS).items():
        print(f"| {name} | {one.text(2)} |")
    plain = next(iter(CELLS))
    runs = [numbers for seed in grid.seeds if (numbers := grid.numbers(Run(plain, grid.chosen(plain) or 0, seed)))]
    print(f"\n| {RIVAL} on {plain} | from none |\n|---|---|")
    for metric in (*PRIMARY, *SECONDARY):
        gained = [100 * (numbers["rival"][metric] - numbers["test"][metric]) for numbers in runs]
        mean, width, p = paired_interval(gained)
        print(f"| {metric} | {Difference(mean, width, p).text(2)} |")


def trainer(file: Path, epochs: int) -> Callable[[Run], dict[str, Any]]:
    """Return the function that trains a run on the data of a file."""
    data, models = Data(file), file.parent / ("models" if epochs == EPOCHS else "models-quick")
    models.mkdir(exist_ok=True)
    return lambda run: train(run, data, epochs, models)


if __name__ == "__main__":
    run_study(GRID, __doc__, make_data=make_data, trainer=trainer, report=report)
