"""Let a language model judge whether outputs follow from their documents, and compare models sample by sample.

    python scripts/studies/hallucination.py plain=plain.jsonl diff=diff.jsonl --judge NAME --url http://localhost:8000/v1
    python scripts/studies/hallucination.py plain=plain.jsonl diff=diff.jsonl --judge hf:FOLDER --output verdicts

A file has one model's samples, a line each: those of lm-eval (`--log_samples`, tasks such as longbench_hotpotqa or
cnn_dailymail), or {"id", "document", "output"} with "question" and "truth" where there are any. The judge is a model at
an OpenAI-compatible server, whose key is read from $OPENAI_API_KEY, or a chat model that transformers loads. Each
verdict is written as it comes to OUTPUT/LABEL.jsonl, from which the same command resumes. An output without a clear
verdict is undecided, and counts as not accurate.

Source: arXiv 2410.05258 section 3.6 judges 100 outputs of each of six sets by GPT-4o, after Lookback Lens
(arXiv 2407.07071), whose parts the prompt has in our words.
"""

import argparse
import hashlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from diffvision.evaluation.intervals import PAIRED_RULE, difference, wilson_interval
from diffvision.evaluation.per_sample import PerSample

PROMPT = """\
Below are a document, a reference and a proposed text. Decide whether everything that the proposed text says follows \
directly from the document. A statement that the document does not support makes it false, even if it is true \
elsewhere. A text that differs from the reference is not false for that reason. Explain your decision first.

#Document#: {document}

#Question#: {question}

#Reference#: {truth}

#Proposed text#: {output}

End with the verdict, alone on a line: **Conclusion: True** if the proposed text follows from the document, or \
**Conclusion: False** if it does not."""
DOCUMENT = ("document", "context", "article", "text")  # fields of lm-eval's documents that hold the context
QUESTION, TRUTH = ("question", "input"), ("truth", "answers", "reference", "highlights", "summary")
VERDICT = re.compile(r"conclusion\W*[:：]\W*([^\n]*?)(?:\*\*|\n|$)", re.IGNORECASE)
DENIED = re.compile(r"\b(?:not|neither|cannot|partly|partially|mostly)\b|n['’]t\b")
TRIES, PAUSE, TIMEOUT = 4, 5.0, 120.0  # of a server, in seconds
NEW_TOKENS = 512  # of a judge's reply

Judge = Callable[[str], str]


class Sample(NamedTuple):
    """An output about a document."""

    id: str
    document: str
    output: str
    question: str
    truth: str

    def prompt(self) -> str:
        """Return what a judge is asked."""
        filled = {name: value or "none" for name, value in self._asdict().items()}
        return re.sub(r"\{(document|question|truth|output)\}", lambda name: filled[name[1]], PROMPT)


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a file; ValueError names the line that is not one, or a repeated id."""
    samples: dict[str, Sample] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            fields = row.get("doc", row)
            output = row["output"] if "output" in row else (row.get("filtered_resps") or row["resps"][0])[0]
            document = next(fields[name] for name in DOCUMENT if isinstance(fields.get(name), str))
            name = str(row["doc_id"] if "doc_id" in row else row["id"])
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            raise ValueError(f"{path}, line {number} must have id, document and output ({error!r})") from None
        if not isinstance(output, str) or name in samples:
            raise ValueError(f"{path}, line {number}: output must be a text and id {name!r} occur once")
        question, truth = (next((fields[n] for n in names if fields.get(n)), "") for names in (QUESTION, TRUTH))
        samples[name] = Sample(name, document, output, str(question), truth if isinstance(truth, str) else str(truth))
    return list(samples.values())


def verdict_of(reply: str) -> bool | None:
    """Return the verdict of a judge's reply; None if it has none, both, or a denied one ("not true", "partly true")."""
    verdicts: set[bool] = set()
    for match in VERDICT.finditer(reply):
        text = match[1].lower()
        found = {word == "true" for word in re.findall(r"\b(?:true|false)\b", text)}
        if found and DENIED.search(text):
            return None
        verdicts |= found
    return verdicts.pop() if len(verdicts) == 1 else None


def server_judge(name: str, url: str) -> Judge:
    """Return a judge at an OpenAI-compatible server. No error has text of the server, which could repeat the key."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"

    def ask(prompt: str) -> str:
        body = {"model": name, "temperature": 0, "messages": [{"role": "user", "content": prompt}]}
        request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
        for attempt in range(TRIES):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                    return json.load(answer)["choices"][0]["message"]["content"] or ""
            except urllib.error.HTTPError as error:
                failure, can_pass = f"status {error.code}", error.code == 429 or error.code >= 500
            except (OSError, ValueError, LookupError, TypeError) as error:
                failure, can_pass = type(error).__name__, isinstance(error, OSError)
            if not can_pass:
                break
            time.sleep(PAUSE * 2**attempt * (attempt < TRIES - 1))
        raise SystemExit(f"the judge at {url} did not answer ({failure}): the same command resumes when it does")

    return ask


def local_judge(path: str) -> Judge:
    """Return a chat model of transformers as a judge, which answers greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()

    def ask(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            made = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
        return tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)

    return ask


def judged(samples: list[Sample], judge: Judge, name: str, file: Path) -> list[bool | None]:
    """Return the verdicts of the samples, those that the file has taken from it and the others added to it."""
    known = {}
    if file.exists():
        known = {row["key"]: row["verdict"] for row in map(json.loads, file.read_text("utf-8").splitlines())}
    keys = [hashlib.sha256(f"{name}\n{sample.prompt()}".encode()).hexdigest() for sample in samples]
    with file.open("a", encoding="utf-8") as out:
        for number, (sample, key) in enumerate(zip(samples, keys, strict=True), start=1):
            if key not in known and sample.output.strip():
                reply = judge(sample.prompt())
                known[key] = verdict_of(reply)
                out.write(json.dumps({"id": sample.id, "key": key, "verdict": known[key], "reply": reply}) + "\n")
                out.flush()
            print(f"\r{file.stem}: {number}/{len(samples)}", end="", flush=True)
    print()
    return [known[key] if sample.output.strip() else False for sample, key in zip(samples, keys, strict=True)]


def main() -> None:
    """Judge the samples of each model, and print accuracies and their differences from the first model's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", nargs="+", metavar="LABEL=FILE")
    parser.add_argument("--judge", required=True, help="the model's name at the server, or hf:PATH")
    parser.add_argument("--url", default=os.environ.get("OPENAI_BASE_URL"), help="by default $OPENAI_BASE_URL")
    parser.add_argument("--output", type=Path, default=Path("hallucination"))
    given = parser.parse_args()
    try:
        files = {label: read_samples(Path(path)) for label, _, path in (one.partition("=") for one in given.samples)}
    except (ValueError, OSError) as error:
        parser.error(str(error))
    first, *others = files
    for label in others:
        if [sample.id for sample in files[label]] != [sample.id for sample in files[first]]:
            parser.error(f"{label} must have the samples of {first}, in the same order")
    if not given.judge.startswith("hf:") and not given.url:
        parser.error("--url, or $OPENAI_BASE_URL, must name the judge's server")
    is_local = given.judge.startswith("hf:")
    judge = local_judge(given.judge.removeprefix("hf:")) if is_local else server_judge(given.judge, given.url)
    given.output.mkdir(parents=True, exist_ok=True)
    accurate = {}
    for label, samples in files.items():
        verdicts = judged(samples, judge, given.judge, given.output / f"{label}.jsonl")
        right = [verdict is True for verdict in verdicts]
        accurate[label] = PerSample(torch.tensor(right), torch.arange(len(right)))
        low, high = wilson_interval(sum(right), len(right))
        print(f"{label}: {sum(right)}/{len(right)} accurate [{low:.3f}, {high:.3f}], {verdicts.count(None)} undecided")
    for label in others:
        one, other = accurate[first], accurate[label]
        found = difference([one.mean()], [other.mean()], [one], [other], largest=1.0)
        interval = "" if found.low is None else f" [{found.low:+.3f}, {found.high:+.3f}]"
        p = "" if found.p is None else f", p {found.p:.3f}"
        print(f"{label} - {first}: {found.value:+.3f}{interval} {found.word or found.method}{p}")
    print(PAIRED_RULE)


if __name__ == "__main__":
    main()
