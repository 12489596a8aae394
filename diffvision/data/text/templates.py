"""Chat templates, rendered in a child process with limits: a template of a few characters could take all memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffvision.data.shards.sample import BadSample
from diffvision.limited_process import Failed, LimitedProcess, LimitExceeded

_program = LimitedProcess(Path(__file__).with_name("jinja_program.py"))


def render(template: str, variables: Sequence[dict[str, Any]], *, clock: bool = False) -> list[str]:
    """Return the texts of a template.

    Args:
        template: Jinja.
        variables: plain values, those of each text.
        clock: whether it may ask for the time with `strftime_now`, as in transformers.

    Raises:
        BadSample: the template fails, or takes more time or memory than it may have.
    """
    reply = _reply(template, variables, clock)
    if "fault" in reply:
        raise BadSample(f"the chat template {reply['fault']}")
    return reply["texts"]


def check_template(template: str, name: str) -> None:
    """Raise an error for a text that is not Jinja.

    Args:
        template: the text.
        name: of the template, in messages.

    Raises:
        ValueError: it is not Jinja, or takes more time or memory than it may have.
    """
    try:
        reply = _reply(template, [])
    except BadSample as reason:
        raise ValueError(f"chat template {name} cannot be used: {reason}; correct it, or give another") from None
    if "fault" in reply:
        raise ValueError(f"chat template {name}, line {reply['line']}: {reply['fault']}")


def _reply(template: str, variables: Sequence[dict[str, Any]], clock: bool = False) -> dict[str, Any]:
    """Render a template in the limited process, and turn its failure into a bad sample."""
    try:
        return _program({"template": template, "variables": variables, "clock": clock})
    except LimitExceeded as fault:
        raise BadSample(f"the chat template {fault}") from None
    except Failed as error:  # a template's expressions can fail in any way
        raise BadSample(f"the chat template fails with {error}") from None
