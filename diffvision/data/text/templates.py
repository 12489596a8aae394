"""Chat templates, rendered in Jinja's immutable sandbox as in transformers."""

import functools
import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diffvision.data.shards.sample import BadSample


def render(template: str, variables: dict[str, Any]) -> str:
    """Return the text of a template; it cannot ask for the time (`strftime_now`), so that it is always the same.

    Raises:
        BadSample: the template fails.
    """
    try:
        return _compile(template).render(**variables)
    except jinja2.TemplateError as error:
        raise BadSample(f"the chat template fails: {error.message}") from None
    except Exception as error:  # a template's expressions can fail in any way
        raise BadSample(f"the chat template fails with {type(error).__name__}") from None


def compile_template(template: str, name: str) -> None:
    """Raise ValueError for a text that is not Jinja; `name` is the template's, in messages."""
    try:
        _compile(template)
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ValueError(f"chat template {name}{line} cannot be compiled: {error.args[0]}") from None


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    """Compile a chat template in a sandbox, with what transformers' templates may use."""
    extensions = [loopcontrols, _Generation]
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.filters["tojson"] = _json
    jinja.globals["raise_exception"] = _refuse
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


def _refuse(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)
