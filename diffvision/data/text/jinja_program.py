"""Renders chat templates: the program of `templates`' child process, which needs nothing of this package."""

import datetime
import functools
import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the texts of a template, or why there are none.

    Args:
        request: "template"; "variables", those of each text, none to compile it alone; "clock", whether it may ask for
            the time.
    """
    try:
        template = _compile(request["template"], request["clock"])
        return {"texts": [template.render(**variables) for variables in request["variables"]]}
    except jinja2.TemplateSyntaxError as error:
        return {"line": error.lineno, "fault": error.message}
    except _Refused as refusal:
        return {"fault": f"refuses the row: {refusal}"}
    except jinja2.UndefinedError as error:
        return {"fault": f"needs what a row does not have: {error.message}"}


@functools.lru_cache(maxsize=8)
def _compile(template: str, clock: bool) -> jinja2.Template:
    """Compile a chat template in a sandbox, with what transformers' templates may use."""
    # As transformers has it; sandboxed, for a template comes from whoever wrote the tokenizer.
    extensions = [loopcontrols, _Generation]
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.filters["tojson"] = _json
    jinja.globals["raise_exception"] = _refuse
    if clock:
        jinja.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    return jinja.from_string(template)


class _Generation(Extension):
    """Templates that mark the assistant's tokens, for transformers' `return_assistant_tokens_mask`, as if unmarked."""

    tags = {"generation"}  # noqa: RUF012  # an instance's in jinja2, which never changes it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        # A scope of its own, as the block of a call has there: what is set inside of it does not leave it.
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Refused(Exception):
    """What a template raises with `raise_exception`."""


def _refuse(message: str) -> None:
    raise _Refused(message)
