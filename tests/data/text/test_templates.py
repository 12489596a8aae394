"""Chat templates, rendered in process: as in transformers, and failures as one kind of error."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from diffvision.data.shards.sample import BadSample
from diffvision.data.text.chat import CHATML
from diffvision.data.text.templates import compile_template, render

BRACKETS = "{{ " + "(" * 5000 + ")" * 5000 + " }}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(9999999) %}{% endfor %}", "OverflowError"),
        (BRACKETS, "RecursionError"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ nothing.at_all }}", "'nothing'"),
        ("{{ strftime_now('%Y') }}", "'strftime_now'"),
    ],
)
def test_a_template_that_fails_is_a_bad_sample(template, reason):
    row = {"messages": [{"content": "a"}]}
    with pytest.raises(BadSample, match=reason):
        render(template, row)
    assert row == {"messages": [{"content": "a"}]}


@pytest.mark.parametrize("template", [BRACKETS, "\n{% if %}"])
def test_a_text_that_is_no_template_is_refused(template):
    with pytest.raises(ValueError, match="template mine"):
        compile_template(template, "mine")


def test_a_template_writes_texts_without_and_with_a_prompt():
    message = [{"role": "user", "content": "\ud800 é\n"}]
    text = render(CHATML, {"messages": message})
    assert text == "<|im_start|>user\n\ud800 é\n<|im_end|>\n"
    assert render(CHATML, {"messages": message, "add_generation_prompt": True}) == text + "<|im_start|>assistant\n"


def test_marked_answers_and_json_are_as_in_transformers():
    marked = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    template = marked + "{{ messages | tojson(true, 1) }}"
    messages = [{"role": "user", "content": "é"}]
    theirs, _ = render_jinja_template([messages], chat_template=template)
    assert [render(template, {"messages": messages})] == theirs
