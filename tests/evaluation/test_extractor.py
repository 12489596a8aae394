"""Features as a step of a scikit-learn pipeline."""

import pickle

import numpy as np
import open_clip
import pytest
import timm
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks

from diffvision.evaluation import FeatureExtractor
from diffvision.opening import open_model

VIT, CLIP = "diff_vit_debug", "DiffCLIP-debug"
CHECKS = (  # those of scikit-learn's that need no table of numbers
    *("check_estimator_cloneable", "check_estimator_tags_renamed", "check_valid_tag_types", "check_estimator_repr"),
    *("check_no_attributes_set_in_init", "check_parameters_default_constructible", "check_get_params_invariance"),
    *("check_set_params", "check_mixin_order", "check_do_not_raise_errors_in_init_or_set_params"),
)


@pytest.fixture(scope="module")
def digits():
    """40 of scikit-learn's digits as uint8 [N, 8, 8], and what they are."""
    images, labels = load_digits(return_X_y=True)
    return np.rint(images[:40].reshape(-1, 8, 8) * 255 / 16).astype(np.uint8), labels[:40]


@pytest.mark.parametrize("check", CHECKS)
def test_scikit_learn_s_checks(check):
    getattr(estimator_checks, check)("FeatureExtractor", FeatureExtractor(VIT))


def test_images_in_any_form_are_the_model_s_own_features(digits, tmp_path):
    images = [Image.fromarray(array).convert("RGB") for array in digits[0][:5]]
    images[0].save(tmp_path / "digit.png")
    extractor = FeatureExtractor(VIT, batch_size=2)
    found = extractor.transform(images)
    assert found.shape == (5, 64)
    assert found.dtype == np.float32
    torch.manual_seed(0)
    loaded = open_model(VIT)
    with torch.no_grad():
        own = loaded.module.forward_head(
            loaded.module.forward_features(torch.stack([loaded.transform(image) for image in images])), pre_logits=True
        )
    np.testing.assert_allclose(found, own.numpy(), rtol=1e-4, atol=1e-5)
    mixed = [tmp_path / "digit.png", digits[0][1], digits[0][2] / 255, np.asarray(images[3]), images[4].convert("L")]
    np.testing.assert_array_equal(extractor.transform(mixed), found)
    np.testing.assert_array_equal(extractor.transform(digits[0][:5]), found)
    lengths = np.linalg.norm(FeatureExtractor(VIT, normalize=True).transform(images), axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)


def test_texts_and_their_images_share_a_space(digits):
    texts = FeatureExtractor(CLIP, tower="text", batch_size=2).fit_transform(np.array(["a cat", "two", "three"]))
    images = FeatureExtractor(CLIP).fit_transform(digits[0][:2])
    assert texts.shape[1] == images.shape[1]
    loaded = open_model(CLIP)
    torch.manual_seed(0)
    model = open_clip.create_model(CLIP).eval()
    with torch.no_grad():
        own = model.encode_text(loaded.tokenizer(["a cat", "two", "three"]))
    np.testing.assert_allclose(texts, own.numpy(), rtol=1e-4, atol=1e-5)


def test_pipelines_and_grids(digits):
    images, labels = digits
    pipeline = make_pipeline(FeatureExtractor(VIT), LogisticRegression(max_iter=2000))
    alone = cross_val_score(pipeline, images, labels, cv=2)
    grid = GridSearchCV(pipeline, {"featureextractor__normalize": [False, True]}, cv=2).fit(list(images), labels)
    assert grid.cv_results_["mean_test_score"][0] == alone.mean()
    assert grid.best_score_ > 0.2  # of ten digits, by random weights


@pytest.mark.slow  # two processes that import torch
def test_processes_have_the_same_random_weights(digits):
    pipeline = make_pipeline(FeatureExtractor(VIT), LogisticRegression(max_iter=2000))
    alone, shared = (cross_val_score(pipeline, *digits, cv=2, n_jobs=jobs) for jobs in (1, 2))
    np.testing.assert_array_equal(shared, alone)


def test_clones_pickles_and_names(digits):
    extractor = FeatureExtractor(VIT).fit(digits[0])
    found = extractor.transform(digits[0][:3])
    assert len(pickle.dumps(extractor)) < 1000  # the model is not in it
    for copy in (clone(extractor), pickle.loads(pickle.dumps(extractor))):
        np.testing.assert_array_equal(copy.transform(digits[0][:3]), found)
    assert clone(extractor).set_params(random_state=1).transform(digits[0][:3])[0, 0] != found[0, 0]
    names = extractor.get_feature_names_out()
    assert [names[0], len(names)] == ["featureextractor0", 64]
    assert extractor.set_output(transform="default").transform(digits[0][:3]).shape == (3, 64)


def test_a_checkpoint_that_is_written_anew_is_read_anew(digits, tmp_path):
    path, found = tmp_path / "weights.pth", []
    for seed in range(2):
        torch.manual_seed(seed)
        torch.save(timm.create_model(VIT).state_dict(), path)
        found.append(FeatureExtractor(VIT, path).transform(digits[0][:1]))
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_what_cannot_be_used_is_named(digits, tmp_path):
    extractor = FeatureExtractor(VIT)
    (tmp_path / "digit.png").write_bytes(b"no image")
    for samples, told in (
        ([], "X holds 0 samples"),
        (digits[0].reshape(40, 64), r"X\[0\] is not a usable image.*shape \(64,\).* not flattened"),
        (digits[0] / 16, r"from 0.0 to 1\d\..*give uint8, or floats between 0 and 1"),
        ([digits[0][0], tmp_path / "digit.png"], r"X\[1\] is not a usable image: not a JPEG, PNG or WebP"),
        (["none.png"], r"X\[0\] is not a usable image.*No such file"),
        ([np.full((4, 4), np.nan)], r"X\[0\].*from nan to nan"),
        (torch.zeros(1, 4, 4, requires_grad=True), r"X\[0\].*requires grad"),
        (tmp_path / "digit.png", "X is a PosixPath: give a list"),
        (Image.new("L", (4, 4)), "X is a Image: give a list"),
        (None, "X is a NoneType: give a list"),
    ):
        with pytest.raises(ValueError, match=told):
            extractor.transform(samples)
    for settings, told in (
        ({"tower": "audio"}, "tower is 'audio': choose image or text"),
        ({"tower": "text"}, "without a text tower: give an OpenCLIP model"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, r"batch_size is 2\.5: give a whole number"),
        ({"random_state": None}, "random_state is None: give a whole number"),
        ({"device": "cuda:9"}, "device 'cuda:9' is not here"),
    ):
        with pytest.raises(ValueError, match=told):
            FeatureExtractor(VIT, **settings).fit(None)
    for samples, told in (([3], r"X\[0\] is a int: the text tower takes strings"), ("two", "X is a str: give a list")):
        with pytest.raises(ValueError, match=told):
            FeatureExtractor(CLIP, tower="text").transform(samples)
