"""Chat templates of strangers: within limits of time and memory, whatever they do, and quick where they do little."""

import multiprocessing
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from diffvision.cli import main
from diffvision.data.shards.sample import BadSample
from diffvision.data.text import templates
from diffvision.data.text.chat import CHATML
from diffvision.data.text.templates import check_template, render
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.limited_process import LimitedProcess

LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = "{% set n = namespace(s=START) %}{% for i in range(40) %}{% set n.s = n.s SIGN n.s %}{% endfor %}{{ n.s }}"
HOSTILE = {
    "nested loops": LOOPS,
    "a width in %": "{{ '%2000000000d' % 1 }}",
    "a method's width": "{{ 'a'.center(2000000000) }}",
    "a text doubled": DOUBLED.replace("START", "'ab'").replace("SIGN", "~"),
    "a list doubled": DOUBLED.replace("START", "[1]").replace("SIGN", "+"),
    "a filter's width": "{{ 'a' | center(2000000000) }}",
    "a constant": "{{ 'a' * 2000000000 }}",
    "a width in format": "{{ '{:2000000000d}'.format(1) }}",
    "a power": "{{ 9**9**9 ** 9**9 }}",
    "replacements": "{{ ('a' * 99999).replace('a', 'a' * 99999) }}",
    "columns of tabs": "{{ '\t'.expandtabs(2000000000) }}",
    "bytes": "{{ (1).to_bytes(2000000000, 'big') }}",
    "ipsum": "{{ lipsum(n=1000000000) }}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "brackets": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
}


@pytest.fixture
def quick(monkeypatch):
    program = Path(templates.__file__).with_name("jinja_program.py")
    monkeypatch.setattr(templates, "_program", LimitedProcess(program, seconds=0.4))


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_template_has_limits(template, quick):
    with pytest.raises(BadSample, match=r"template (takes more than|fails)"):
        render(template, [{"messages": []}])
    assert render("{{ 'and' }}", [{}]) == ["and"]  # the next one is none the worse


def test_compiling_has_limits_too(quick):
    with pytest.raises(ValueError, match="chat template mine cannot be used"):
        check_template("{{ 'a' | center(2000000000) }}{{ " + "(" * 5000 + " }}", "mine")
    with pytest.raises(ValueError, match="chat template mine, line 2"):
        check_template("\n{% if %}", "mine")


def test_a_thousand_conversations_take_one_process(monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a) or popen(*a, **k))
    message = [{"role": "user", "content": "\ud800 é\n"}]
    for _ in range(500):
        texts = render(CHATML, [{"messages": message}, {"messages": message, "add_generation_prompt": True}])
    assert texts[0] == "<|im_start|>user\n\ud800 é\n<|im_end|>\n"
    assert texts[1] == texts[0] + "<|im_start|>assistant\n"
    assert len(started) <= 1


def test_threads_and_forks_get_their_own_replies():
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: render("{{ n }}", [{"n": n}]), range(200))) == [[str(n)] for n in range(200)]
    forked, ours = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_render_many, args=(forked,))
    process.start()
    assert [render("{{ n }}", [{"n": n}]) for n in range(200)] == [[str(n)] for n in range(200)]
    assert ours.poll(30)
    assert ours.recv() == [[f"-{n}"] for n in range(200)]
    process.join()


def _render_many(pipe):
    pipe.send([render("-{{ n }}", [{"n": n}]) for n in range(200)])


def test_what_is_printed_or_asked_of_the_system_is_no_reply():
    with pytest.raises(BadSample, match="fails with SecurityError"):
        render("{{ ''.__class__.__mro__ }}", [{}])
    with pytest.raises(BadSample, match="refuses the row: no"):
        render("{{ raise_exception('no') }}", [{}])
    with pytest.raises(BadSample, match="'nothing' is undefined"):
        render("{{ nothing.at_all }}", [{}])
    with pytest.raises(BadSample, match="'strftime_now' is undefined"):
        render("{{ strftime_now('%Y') }}", [{}])
    assert len(render("{{ strftime_now('%Y') }}", [{}], clock=True)[0]) == 4


def test_marked_answers_and_json_are_as_in_transformers():
    marked = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    template = marked + "{{ messages | tojson(true, 1) }}"
    messages = [{"role": "user", "content": "é"}]
    theirs, _ = render_jinja_template([messages], chat_template=template)
    assert render(template, [{"messages": messages}]) == theirs


def test_data_tokenize_refuses_a_hostile_template(tmp_path, capsys, quick):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}\n' * 3)
    (tmp_path / "mine.jinja").write_text(LOOPS)
    train_tokenizer(["a b"], 280).save(tmp_path / "tokenizer.json")
    words = ["data", "tokenize", str(rows), str(tmp_path / "out"), str(tmp_path / "tokenizer.json")]
    assert main([*words, "--chat", str(tmp_path / "mine.jinja")]) == 1
    error = capsys.readouterr().err
    assert "chat template mine.jinja" in error
    assert "0.4 s" in error
    assert not list(tmp_path.glob("out/*.tar"))
