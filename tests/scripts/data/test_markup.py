"""Markup becomes text: what a reader of the page sees, and nothing that only a program reads."""

from markup import html, rst

RST = """\
.. _library-cats:

:mod:`cats` --- Looking after cats
==================================

.. module:: cats
   :synopsis: Cats.

**See** `the site <https://cats.example>`_, :pep:`8`, :func:`feed <cats.feed>` and tables_.

.. class:: Cat(name, *, lives=9)

   A cat with ``*args``.

   .. versionchanged:: 3.8
      It sleeps.

Feed it::

    $ feed   *all*

.. note::

   Cats bite.

.. toctree::

   other

1. First
   item.

=====  ======
Name   Weight
=====  ======
Tom    4 kg
=====  ======

+-----+------+
| Tom | grey |
+-----+------+
"""
TEXT = """\
cats --- Looking after cats

See the site, PEP 8, feed and tables.

Cat(name, *, lives=9)

A cat with *args.

Changed in version 3.8: It sleeps.

Feed it:

    $ feed   *all*

Note: Cats bite.

1. First item.

Name   Weight
Tom    4 kg

Tom  grey"""


def test_restructured_text_as_a_reader_sees_it():
    assert rst(RST) == TEXT


def test_html_without_its_navigation():
    page = """<?xml version="1.0"?><html><head><title>left out</title><style>p {}</style></head><body>
      <div class="navheader"><div>Prev</div><p>Next</div><header>x</header>
      <h1><a name="x"/>Cats &amp; dogs</h1><script>if (a < b) "</p>"</script>
      <p>A cat
      is <em>here</em>.<br>And there.</p><ul><li><p>one</p></li><li>two</ul>
      <table><tr><th>Name</th><td>Tom</td></tr><tr><td>4</td></tr></table>
      <pre>  cat
    dog</pre><img src="x"><footer><footer>a</footer>b</footer></body></html>"""
    assert html(page) == (
        "Cats & dogs\n\nA cat is here.\nAnd there.\n\n- one\n\n- two\n\nName  Tom\n4\n\n  cat\n    dog"
    )
