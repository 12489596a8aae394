"""`diffvision answer`: a teacher's answers to prompts, as rows that another model is fine-tuned on."""

import json
import sys
from pathlib import Path
from typing import Any


def answer(
    model: str,
    prompts: str,
    output: str,
    *,
    chat: str = "tokenizer",
    new_tokens: int = 512,
    batch_size: int = 8,
    checkpoint: str | None = None,
    tokenizer: str | None = None,
    device: str = "auto",
) -> dict[str, int]:
    """Write a model's greedy answers to prompts as rows of `messages`, which `diffvision data tokenize --chat` takes.

    An answer that did not end within new_tokens, an empty one, and a prompt that leaves no room for one are left out
    and counted. A command that was ended continues where it was: OUTPUT.partial holds each batch of answers until
    the last one is there.

    Args:
        model: the teacher: hf:PATH_OR_ID of a causal model of transformers, or one of ours.
        prompts: a .jsonl file. A row is a conversation in one of the layouts of `diffvision data tokenize --chat`, or
            has a prompt alone. An answer that ends it is left away, and the teacher's is put in its place.
        output: the .jsonl file to write; it must not exist.
        chat: how the conversation is written: tokenizer, the template that came with the teacher's; chatml, question,
            plain, or a file of Jinja.
        new_tokens: the most tokens of an answer.
        batch_size: prompts at a time.
        checkpoint: if model is a name: its weights, a .ckpt file or a folder.
        tokenizer: tokenizer.json, or a directory that holds one; by default the one next to the weights.
        device: auto (cuda where there is one), cpu, cuda, cuda:1, ...

    Returns:
        How many rows were written, and how many were left out and why.

    Raises:
        ValueError: a row without a prompt, a model without a tokenizer or a chat template, or new_tokens below 1 or
            not below what the model reads.
        FileNotFoundError: no such model or file.
        FileExistsError: the output exists.
    """
    from diffvision.evaluation.distributed import resolve_device
    from diffvision.evaluation.language.chats import chat_of, template_text
    from diffvision.evaluation.language.generations import Prompt, generate_rows, room_for
    from diffvision.evaluation.language.tasks import model_identity
    from diffvision.evaluation.output import bar
    from diffvision.opening import open_model

    if new_tokens < 1:
        raise ValueError(f"new_tokens is {new_tokens}: it must be at least 1")
    target = Path(output)
    if target.exists():
        raise FileExistsError(f"{output} exists: give another output")
    conversations = _conversations(Path(prompts))
    opened = open_model(model, checkpoint, tokenizer=tokenizer, device=resolve_device(device)).for_text()
    write, room = chat_of(opened, chat), room_for(opened, new_tokens)
    asked = [Prompt(name, write(messages)) for name, messages in conversations.items()]
    fitting = [prompt for prompt in asked if room is None or len(prompt.tokens) <= room]
    partial = target.with_name(f"{target.name}.partial")
    settings = {**model_identity(opened), "chat": template_text(opened, chat)}
    answers = generate_rows(
        opened,
        fitting,
        max_new_tokens=new_tokens,
        file=partial,
        settings=settings,
        batch_size=batch_size,
        progress=bar,
    )
    whole = [one for one in answers if one.stopped_by != "length" and one.output.strip()]
    rows = [
        {"id": one.id, "messages": [*conversations[one.id], {"role": "assistant", "content": one.output.strip()}]}
        for one in whole
    ]
    if not rows:
        raise ValueError(f"none of {len(asked)} prompts has a whole answer within {new_tokens} tokens: give more")
    done = target.with_name(f"{target.name}.part")
    done.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    done.replace(target)
    partial.unlink()
    counts = {
        "written": len(rows),
        "not ended within new_tokens": sum(one.stopped_by == "length" for one in answers),
        "empty": sum(one.stopped_by != "length" and not one.output.strip() for one in answers),
        "prompt too long": len(asked) - len(fitting),
    }
    print(f"{target}: {', '.join(f'{count:,} {what}' for what, count in counts.items())}", file=sys.stderr)
    return counts


def _conversations(path: Path) -> dict[str, list[dict[str, str]]]:
    """Return the messages that are to be answered, by the numbers of their lines."""
    from diffvision.data.shards.sample import BadSample
    from diffvision.data.text.chat import ASSISTANT, messages_of

    conversations: dict[str, list[dict[str, str]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row: Any = json.loads(line)
            has_prompt = isinstance(row, dict) and isinstance(row.get("prompt"), str)
            messages = messages_of({"response": "", **row} if has_prompt else row)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON ({error}): write one object on each line") from error
        except BadSample as reason:
            raise ValueError(f"{where} is {reason}, or a prompt alone") from reason
        if messages and messages[-1]["role"] == ASSISTANT:
            messages = messages[:-1]
        if not messages or messages[-1]["role"] == ASSISTANT:
            raise ValueError(f"{where} has no question before its answer: leave the line out")
        conversations[f"{path.stem}-{number}"] = messages
    if not conversations:
        raise ValueError(f"no rows in {path}: give a file of JSON lines")
    return conversations
