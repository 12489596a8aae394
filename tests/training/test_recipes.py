"""Recipes by name, in a clone and in a wheel, and configuration files that are none."""

import pytest

from diffvision.training import recipes


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The package as a wheel unpacks it, next to another package's configs/, in an empty working directory."""
    package, elsewhere = tmp_path / "site-packages/diffvision", tmp_path / "elsewhere"
    (package / "configs/clip").mkdir(parents=True)
    (package / "configs/clip/debug.yaml").write_text("model: ContrastiveModule\n")
    (tmp_path / "site-packages/configs/clip").mkdir(parents=True)
    (tmp_path / "site-packages/configs/clip/other.yaml").write_text("model: Foreign\n")
    elsewhere.mkdir()
    monkeypatch.setattr(recipes, "_PACKAGE", package)
    monkeypatch.chdir(elsewhere)
    return package


def test_a_clone_has_its_recipes_next_to_the_package(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = recipes.find_recipe("clip/debug.yaml")
    assert path.is_file()
    assert path == recipes.find_recipe("configs/clip/debug.yaml")
    assert recipes.resolve_recipes(["fit", "--config", "clip/debug.yaml", "--seed_everything", "1"]) == [
        *("fit", "--config", str(path), "--seed_everything", "1")
    ]


def test_a_wheel_has_its_recipes_inside(wheel):
    path = wheel / "configs/clip/debug.yaml"
    assert recipes.resolve_recipes(["fit", "--config=clip/debug.yaml", "-c", "configs/clip/debug.yaml"]) == [
        *("fit", f"--config={path}", "-c", str(path))
    ]
    with pytest.raises(FileNotFoundError, match="no configuration file"):
        recipes.find_recipe("clip/other.yaml")


def test_a_file_of_the_working_directory_comes_first(wheel, tmp_path):
    file = tmp_path / "elsewhere/clip/debug.yaml"
    file.parent.mkdir()
    file.write_text("model: Mine\n")
    assert recipes.resolve_recipes(["--config", "clip/debug.yaml"]) == ["--config", "clip/debug.yaml"]


def test_an_unknown_recipe_is_answered_with_the_nearest(wheel):
    with pytest.raises(FileNotFoundError, match=r"clip/debgu\.yaml: the nearest"):
        recipes.resolve_recipes(["--config", "clip/debgu.yaml"])
    with pytest.raises(FileNotFoundError, match=r"nope\.yaml: give a path, or"):
        recipes.resolve_recipes(["--config", "nope.yaml"])


def test_what_is_no_name_of_a_file_stays(wheel):
    inline = ["--config", "{model: X}", "--config=model: X\nfile: a.yaml", "--config", "model: " + "x" * 5000]
    words = ["fit", *inline, "--config", "null", "--data.train", "a.yaml"]
    assert recipes.resolve_recipes(words) == words
    assert recipes.resolve_recipes(["--config"]) == ["--config"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model:\n  a: 1\n b: [\n", "line 3"),
        ("a: " + 1_000 * "[", "file.yaml"),
        (b"PK\x03\x04\xa9\xff", "file.yaml"),
        ("- 1\n- 2\n", "file.yaml must be a configuration"),
        ("", "file.yaml must be a configuration"),
    ],
)
def test_what_is_no_configuration_is_named(text, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=named) as refused:
        recipes.resolve_recipes(["--config", "file.yaml"])
    assert "\n" not in str(refused.value)
