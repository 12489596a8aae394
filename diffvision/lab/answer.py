"""`diffvision answer`: a teacher's answers to prompts, as rows that another model is fine-tuned on."""

import json
import sys
from pathlib import Path
from typing import Any

_LAST = 8  # tokens of a prompt in which its end is looked for


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
    """Write a teacher's answers as rows for fine-tuning.

    The answers are greedy, and the rows of `messages` are what `diffvision data tokenize --chat` takes. An answer ends
    where the model ends a document, or with what the chat template writes after an answer. Answers that did not end
    within new_tokens, empty ones, and prompts that leave no room for one are left out and counted. Earlier answers of a
    conversation stay as they are, and `data tokenize` has them learned too. The same command resumes one that was
    ended: OUTPUT.partial holds each batch of answers until the last one is there.

    Args:
        model: the teacher: hf:PATH_OR_ID of a causal model of transformers, or one of ours.
        prompts: a file that `diffvision.data.rows` reads: .jsonl, .json or .parquet. A row is a conversation in one of
            the layouts of `diffvision data tokenize --chat`, or has only a prompt. The teacher's answer replaces the
            one at the conversation's end, if there is one.
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
        ValueError: a row without a prompt, or with one that cannot be written; a model without a tokenizer, a chat
            template or an end of answers; no prompt that leaves room; an output that is no .jsonl; batch_size or
            new_tokens below 1, or new_tokens not below what the model reads.
        FileNotFoundError: no such model or file.
        FileExistsError: the output exists.
    """
    from diffvision.data.text.chat import read_context
    from diffvision.evaluation.distributed import resolve_device
    from diffvision.evaluation.language.tasks import model_identity
    from diffvision.evaluation.output import bar, write_bytes
    from diffvision.lab.language.chats import chat_of, ends_of, template_text
    from diffvision.lab.language.generations import Prompt, generate_rows, room_for
    from diffvision.opening import open_model

    for name, value in (("new_tokens", new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    target = Path(output)
    if target.suffix != ".jsonl":
        raise ValueError(f"the output is {output}: rows are written as lines, give a name that ends with .jsonl")
    if target.exists():
        raise FileExistsError(f"{output} exists: give another output")
    target.parent.mkdir(parents=True, exist_ok=True)
    conversations = _conversations(Path(prompts))
    opened = open_model(model, checkpoint, tokenizer=tokenizer, device=resolve_device(device)).for_text()
    write, room = chat_of(opened, chat), room_for(opened, new_tokens)
    stops = ends_of(opened, chat)
    if not stops and opened.tokenizer.eos_id is None:
        raise ValueError(f"{model} ends no answers: its tokenizer has no end token, and chat {chat} writes none")
    asked = []
    for name, (messages, given) in conversations.items():
        try:
            asked.append(Prompt(name, write(messages, read_context(given))))
        except ValueError as error:
            raise ValueError(f"row {name} of {prompts}: {error}") from error
    fitting = [prompt for prompt in asked if room is None or len(prompt.tokens) <= room]
    if not fitting:
        raise ValueError(
            f"all prompts are longer than the {room} tokens that new_tokens {new_tokens} leaves: give fewer"
        )
    partial = target.with_name(f"{target.name}.partial")
    settings = {**model_identity(opened), "chat": template_text(opened, chat)}
    answers = generate_rows(
        opened,
        fitting,
        max_new_tokens=new_tokens,
        stops=stops,
        file=partial,
        settings=settings,
        batch_size=batch_size,
        progress=bar,
    )
    whole = [one for one in answers if one.stopped_by != "length" and one.output.strip()]
    if not whole:
        raise ValueError(
            f"none of {len(fitting)} answers ended within {new_tokens} tokens: give more, and remove {partial}, which "
            "has these"
        )
    # Where the template begins the answer itself, as with <think>, the beginning belongs to it.
    begun = {one.id: _begun(opened.tokenizer.decode(one.tokens[-_LAST:])) for one in fitting}
    rows = [
        {
            "id": one.id,
            "messages": [*messages, {"role": "assistant", "content": begun[one.id] + one.output.strip()}],
            **given,
        }
        for one in whole
        for messages, given in [conversations[one.id]]
    ]
    write_bytes(target, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode())
    partial.unlink()
    counts = {
        "written": len(rows),
        "not ended within new_tokens": sum(one.stopped_by == "length" for one in answers),
        "empty": sum(one.stopped_by != "length" and not one.output.strip() for one in answers),
        "prompt too long": len(asked) - len(fitting),
    }
    print(f"{target}: {', '.join(f'{count:,} {what}' for what, count in counts.items())}", file=sys.stderr)
    return counts


def _begun(prompt: str) -> str:
    """Return what a prompt begins of the answer: a thought that is open at its end."""
    return "<think>\n" if prompt.rstrip().endswith("<think>") else ""


def _conversations(path: Path) -> dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Return the messages that are to be answered, and what rows have of `CONTEXT`, by the rows' numbers."""
    from diffvision.data.rows import read_rows
    from diffvision.data.shards.sample import BadSample
    from diffvision.data.text.chat import ASSISTANT, CONTEXT, read_context, read_messages

    conversations: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {}
    for number, row in read_rows(path):
        where = f"row {number} of {path}"
        try:
            is_prompt = isinstance(row, dict) and "prompt" in row and not {"response", "completion"} & row.keys()
            messages = read_messages({**row, "response": ""} if is_prompt else row)
            given = {key: value for key, value in row.items() if key in CONTEXT}
            read_context(given)  # raises what it will below
        except BadSample as reason:
            raise ValueError(f"{where}: {reason}") from reason
        if messages and messages[-1]["role"] == ASSISTANT:
            messages = messages[:-1]
        if not messages or messages[-1]["role"] == ASSISTANT:
            raise ValueError(f"{where} has no question before its answer: leave the row out")
        conversations[f"{path.stem}-{number}"] = messages, given
    if not conversations:
        raise ValueError(f"no rows in {path}: give a file of rows, such as .jsonl")
    return conversations
