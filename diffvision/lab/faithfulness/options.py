"""The settings of the judges of faithfulness."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JudgeOptions:
    """Which judges decide whether an output is faithful, and how they are asked.

    Args:
        by: names of judges, as a list or separated by commas: contains (a right answer is in the output), grounded
            (its numbers and names are in the document), nli, llm, hf; of two or more their agreement is reported.
        nli: for the judge nli, a transformers classifier of premise and hypothesis, a folder or a name on the Hub.
        llm: for the judge llm, the model's name at the server.
        url: of the server, up to /chat/completions; by default the environment's OPENAI_BASE_URL.
        key_env: the environment's variable with the server's key. A key is no option, for options are recorded.
        hf: for the judge hf, a language model as `diffvision.open_model` takes it, which is run here.
        prompt: file with another prompt for llm and hf, with {document}, {output}, {question} and {truth}.
        new_tokens: the most tokens of a reply of hf.
        timeout: seconds for a whole reply of llm's server.
        tries: how often it is asked before the evaluation is ended; a run of the same command resumes.
        parallel: requests at a time.
    """

    by: str | list[str] = "grounded"
    nli: str | None = None
    llm: str | None = None
    url: str | None = None
    key_env: str = "OPENAI_API_KEY"
    hf: str | None = None
    prompt: str | None = None
    new_tokens: int = 512
    timeout: float = 120.0
    tries: int = 5
    parallel: int = 4

    def __post_init__(self) -> None:
        for name in ("new_tokens", "timeout", "tries", "parallel"):
            if getattr(self, name) <= 0:
                raise ValueError(f"judge.{name} is {getattr(self, name)}: give a number above 0")
        if not self.key_env.isidentifier():  # most likely the key itself, which must be in no message
            raise ValueError("judge.key_env is not a variable's name: set OPENAI_API_KEY to the key, or name another")
        if not any(self.names):
            raise ValueError(f"judge.by is {self.by!r}, which names no judge: give one, such as grounded")

    @property
    def names(self) -> list[str]:
        """The judges' names, each once."""
        names = self.by.split(",") if isinstance(self.by, str) else self.by
        return list(dict.fromkeys(name.strip() for name in names))
