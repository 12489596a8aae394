"""Parsers of jsonargparse that answer a mistake in one line, instead of a page of usage."""

from collections.abc import Iterable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from diffvision.allowlist import refusal
from diffvision.errors import NAMED, Mistake, Problem, did_you_mean, nearest, read_message, see_help


class OneLineErrors:
    """Mixin for parsers that raise a `Mistake` of one line, with the nearest name where one is unknown."""

    exit_on_error: bool

    def error(self: Any, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a `Mistake` with jsonargparse's message in one line."""
        if not self.exit_on_error:
            super().error(message, ex)  # type: ignore[misc]
        if text := refusal(message):
            raise Mistake(text) from ex
        cause: BaseException | None = ex
        while cause is not None:  # a file's, which the option that names it reports
            if isinstance(cause, Mistake):
                raise cause
            cause = cause.__cause__
        problem = read_message(message)
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        raise Mistake(see_help(problem.text + self.advice(problem, parser.options()), program)) from ex

    def options(self: Any) -> list[str]:
        """Return the options of the parser."""
        return [f"--{name}" for name in self.get_defaults().keys()]  # noqa: SIM118

    def advice(self, problem: Problem, options: Iterable[str]) -> str:
        """Return what may have been meant: one of the possible values, or an option."""
        if problem.value:
            return did_you_mean(problem.value, problem.choices)
        inside = f"--{problem.setting}." if problem.setting else "--"
        known = [option.removeprefix(inside) for option in options if option.startswith(inside)]
        *_, unknown = [name.removeprefix("--") for name in NAMED.findall(problem.text)] or [""]
        if unknown in ("", *known):
            return ""
        # A section that is mistyped, such as trainr.max_epochs, is told before a setting that ends alike.
        sections = dict.fromkeys(name.partition(".")[0] for name in known)
        section, dot, rest = unknown.partition(".")
        if section not in sections and (near := nearest(section, sections, min_ratio=0.7)):
            whole = f"{near[0]}{dot}{rest}"
            return f"; did you mean {inside}{whole if whole in known else near[0]}?"
        return did_you_mean(unknown, known).replace("mean ", f"mean {inside}")


class Parser(OneLineErrors, ArgumentParser):
    """Parser of the commands that are plain functions."""
