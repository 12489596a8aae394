"""A miniature of POPE and a model for it: is this colour in a plain image, asked of a VLM trained in a minute.

    python scripts/programs/lmms_miniature.py runs/miniature

writes `model/` and `test/pope_miniature.json` with its images. The model answers in a form that depends on the colour
("no", "No.", "There is no such colour."), so that programs that read answers differently come to different scores.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.models.vision_language import create, make_processor

FORMS = {
    "red": ("yes", "no"),
    "green": ("Yes", "No"),
    "blue": ("Yes.", "No."),
    "yellow": ("Yes, there is.", "There is no such colour."),
    "white": ("yes", "perhaps"),
    "purple": ("It is there.", "no"),
}
"""A colour -> the answers where it is in the image and where it is not."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role|upper }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
STEPS, BATCH = 150, 16


def question(colour: str) -> str:
    return f"Is there {colour} in the image?"


def draw(random_: random.Random) -> tuple[str, str]:
    """Return the colour of an image and the colour that is asked for, equal in half of all cases."""
    colour = random_.choice([*FORMS])
    return colour, colour if random_.random() < 0.5 else random_.choice([other for other in FORMS if other != colour])


def image(colour: str) -> Image.Image:
    return Image.new("RGB", (64, 64), colour)


def train(folder: Path, name: str, steps: int, draws: random.Random) -> None:
    """Train a model on answers and save it with its processor."""
    torch.manual_seed(0)
    texts = [f"USER: {question(colour)} ASSISTANT: {' '.join(forms)}" for colour, forms in FORMS.items()]
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(texts, 320).save(folder / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>", pad_token="<pad>"
    )
    model = create(name, tokenizer=tokenizer)
    processor = make_processor(model, tokenizer)
    processor.chat_template = TEMPLATE
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(steps):
        drawn = [draw(draws) for _ in range(BATCH)]
        prompts = [
            processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question(asked)}]}],
                add_generation_prompt=True,
                tokenize=False,
            )
            for _, asked in drawn
        ]
        answers = [" " + FORMS[asked][colour != asked] + "</s>" for colour, asked in drawn]
        given = {"images": [image(colour) for colour, _ in drawn], "padding_side": "right", "padding": True}
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        inputs = processor(text=whole, **given, return_tensors="pt")
        lengths = processor(text=prompts, **given, return_tensors="pt")["attention_mask"].sum(1, keepdim=True)
        learned = (torch.arange(inputs["input_ids"].shape[1]) >= lengths) & inputs["attention_mask"].bool()
        loss = model(**inputs, labels=inputs["input_ids"].masked_fill(~learned, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)


def write_questions(folder: Path, draws: random.Random, images: int = 15) -> None:
    """Write four questions to each image, half of them to be answered with yes."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    for number in range(images):
        colour, _ = draw(draws)
        image(colour).save(folder / "images" / f"{number}.png")
        absent = draws.sample([other for other in FORMS if other != colour], 2)
        for asked in (colour, absent[0], colour, absent[1]):
            label = "yes" if asked == colour else "no"
            row = {"question_id": len(rows), "image": f"{number}.png", "text": question(asked), "label": label}
            rows.append(row)
    (folder / "pope_miniature.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="diff-vlm-debug")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    draws = random.Random(0)
    train(args.folder / "model", args.model, args.steps, draws)
    write_questions(args.folder / "test", draws)


if __name__ == "__main__":
    main()
