"""Chat templates, rendered in process: as in transformers, and failures as one kind of error."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from diffvision.data.shards.sample import BadSample
from diffvision.data.text.chat import CHATML
from diffvision.data.text.templates import check_template, render

BRACKETS = "{{ " + "(" * 5000 + ")" * 5000 + " }}"


def test_a_template_that_fails_is_a_bad_sample_or_an_error():
    with pytest.raises(BadSample, match="OverflowError"):
        render("{% for a in range(9999999) %}{% endfor %}", [{}])
    with pytest.raises(BadSample, match="RecursionError"):
        render(BRACKETS, [{"messages": []}])
    with pytest.raises(ValueError, match=r"mine .*RecursionError"):
        check_template(BRACKETS, "mine")
    with pytest.raises(ValueError, match="mine, line 2"):
        check_template("\n{% if %}", "mine")
    assert render("{{ 'and' }}", [{}]) == ["and"]


def test_a_template_writes_texts_without_and_with_a_prompt():
    message = [{"role": "user", "content": "\ud800 é\n"}]
    texts = render(CHATML, [{"messages": message}, {"messages": message, "add_generation_prompt": True}])
    assert texts[0] == "<|im_start|>user\n\ud800 é\n<|im_end|>\n"
    assert texts[1] == texts[0] + "<|im_start|>assistant\n"


def test_threads_get_their_own_texts():
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: render("{{ n }}", [{"n": n}]), range(200))) == [[str(n)] for n in range(200)]


def test_a_template_cannot_change_a_row():
    row = {"messages": [{"content": "a"}]}
    with pytest.raises(BadSample, match="SecurityError"):
        render("{{ messages.append(1) }}", [row])
    assert row == {"messages": [{"content": "a"}]}


def test_what_a_template_may_not_do_or_asks_for():
    with pytest.raises(BadSample, match="fails with SecurityError"):
        render("{{ ''.__class__.__mro__ }}", [{}])
    with pytest.raises(BadSample, match="refuses the row: no"):
        render("{{ raise_exception('no') }}", [{}])
    with pytest.raises(BadSample, match="'nothing' is undefined"):
        render("{{ nothing.at_all }}", [{}])
    with pytest.raises(BadSample, match="'strftime_now' is undefined"):
        render("{{ strftime_now('%Y') }}", [{}])


def test_marked_answers_and_json_are_as_in_transformers():
    marked = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    template = marked + "{{ messages | tojson(true, 1) }}"
    messages = [{"role": "user", "content": "é"}]
    theirs, _ = render_jinja_template([messages], chat_template=template)
    assert render(template, [{"messages": messages}]) == theirs
