from diffvision import doctor

HEALTHY = {
    "torch": "2.11.0+cu130",
    "torchvision": "0.26",
    "timm": "1.0.31",
    "open_clip_torch": "3.3.0",
    "lightning": "2.6.6",
    "webdataset": "0.2.86",
    "jsonargparse": "4.53",
    "pillow": "13.0",
    "numpy": "2.3.5",
    "scikit-learn": "1.9",
}


def test_the_installation_is_ready(capsys):
    assert doctor.doctor() == 0
    printed = capsys.readouterr().out
    assert "ready" in printed
    assert "ViT-B/16" in printed
    assert "open_clip_torch[training]" in printed


def test_every_usual_shape_has_a_backend_and_a_reason():
    rows = doctor.backends()
    assert {row[0] for row in rows} == set(doctor.USUAL_SHAPES)
    chosen = {row[0]: row[2] for row in rows if row[1].startswith("cpu")}
    assert chosen["CLIP text, V1"] == "eager"
    assert chosen["ViT-B/16 at 224, V1"] == "blocked"
    assert chosen["language model, 4096 tokens, V1"] == "blocked"
    assert all(row[3] for row in rows)


def test_conflicts_are_found():
    def broken(**changed):
        return [f.text for f in doctor.conflicts({**HEALTHY, **changed}) if f.broken]

    def notes(**changed):
        return [f.text for f in doctor.conflicts({**HEALTHY, **changed}) if not f.broken]

    assert broken() == ["webdataset 0.2.86 is older than 1.0.2: pip install --upgrade 'webdataset>=1.0.2'"]
    good = {"webdataset": "1.0.2"}
    assert broken(**good) == []
    assert any("malicious" in text for text in broken(**good, lightning="2.6.3"))
    assert any("timm is not installed" in text for text in broken(**good, timm=None))
    assert any("torch 2.9.1 is older than 2.10" in text for text in broken(**good, torch="2.9.1"))
    assert any("open_clip_train" in text for text in notes(**good))
    assert any("CLIP_benchmark" in text for text in notes(numpy="2.4.6"))
    assert not any("CLIP_benchmark" in text for text in notes(numpy="2.3.5"))
