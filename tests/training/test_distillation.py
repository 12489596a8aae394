"""A teacher's logits: its distributions against its documents read alone; `test_language` has the loss."""

import json

import pytest
import torch
import training_fits
from torch.utils.data import DataLoader

from diffvision.data.text.tokenizers import END, train_tokenizer
from diffvision.models import language
from diffvision.training.cross_entropy import IGNORED
from diffvision.training.distillation import Distillation, Teacher
from diffvision.training.language import LanguageModule
from diffvision.training.optim import OptimizerSettings

transformers = pytest.importorskip("transformers")
LETTERS = train_tokenizer(["abcdef"], 257)
LLAMA = {
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SMALL = {"vocab_size": 257, "dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 24, "max_length": 64}
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2], [0] * 10])
BATCH = {
    "tokens": torch.randint(257, (2, 10), generator=torch.Generator().manual_seed(0)),
    "documents": DOCUMENTS,
    "learned": torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 0, 0], [0, 1, 0, 1, 0, 1, 0, 1, 1, 1]], dtype=torch.bool),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A Llama with more rows of embeddings than tokens, and its tokenizer. Not to be changed."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.5)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    LETTERS.save(folder / "tokenizer.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def test_distributions_are_those_of_each_document_read_alone(teacher):
    inputs, targets = BATCH["tokens"][:, :-1], torch.where(BATCH["learned"][:, 1:], BATCH["tokens"][:, 1:], IGNORED)
    opened = Teacher(Distillation(f"hf:{teacher}", top_k=5), LETTERS, 9)
    soft = opened.soft_targets(inputs, targets, DOCUMENTS[:, :-1])
    ids, probabilities = soft.ids.view(2, 9, 5), soft.probabilities.view(2, 9, 5)
    for row, start, stop in ((0, 0, 4), (0, 4, 7), (0, 7, 9), (1, 0, 9)):
        with torch.no_grad():
            logits = opened.model(inputs[row : row + 1, start:stop]).logits[0, :, :257]
        for position in range(start, stop):
            if targets[row, position] == IGNORED:
                assert not probabilities[row, position].any()
                continue
            best = logits[position - start].topk(5)
            assert ids[row, position].tolist() == best.indices.tolist()
            torch.testing.assert_close(probabilities[row, position], best.values.softmax(0))


def trained(distill, tmp_path):
    torch.manual_seed(0)
    module = LanguageModule(
        "transformer-debug",
        model_args=SMALL,
        tokenizer=str(tmp_path / "tokenizer.json"),
        optimizer=OptimizerSettings(lr=1e-3, warmup_steps=0),
        distill=distill,
    )
    LETTERS.save(tmp_path / "tokenizer.json")
    trainer = training_fits.trainer(log_every_n_steps=1)
    rows = [{name: part[row] for name, part in BATCH.items()} for row in range(2)]
    trainer.fit(module, DataLoader(rows, batch_size=2))
    return trainer, module


def test_a_model_that_is_its_teacher_has_nothing_to_learn(tmp_path):
    torch.manual_seed(0)
    language.save(language.create("transformer-debug", **SMALL), tmp_path / "same", LETTERS)
    same = Distillation(str(tmp_path / "same"), top_k=1000, weight=1.0)
    trainer, _ = trained(same, tmp_path)
    assert trainer.logged_metrics["train/grad_norm"] < 1e-5
    assert trained(None, tmp_path)[0].logged_metrics["train/grad_norm"] > 0.1


def test_a_teacher_is_in_no_checkpoint(teacher, tmp_path):
    trainer, module = trained({"teacher": f"hf:{teacher}", "top_k": 4}, tmp_path)
    assert trainer.logged_metrics["train/objective"] != trainer.logged_metrics["train/loss"]
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert stored["state_dict"].keys() == {f"model.{name}" for name in module.model.state_dict()}
    assert stored["hyper_parameters"]["distill"] == {"teacher": f"hf:{teacher}", "top_k": 4, "weight": 0.5}
    assert LanguageModule.load_from_checkpoint(tmp_path / "x.ckpt").distill == module.distill


def test_what_cannot_teach_is_refused(teacher, tmp_path):
    with pytest.raises(ValueError, match="must have the data's tokenizer"):
        Teacher(Distillation(f"hf:{teacher}"), train_tokenizer(["ababab"], 258), 9)
    with pytest.raises(ValueError, match=r"data.length must be at most 64"):
        Teacher(Distillation(f"hf:{teacher}"), LETTERS, 65)
    language.save(language.create("transformer-debug", **SMALL), tmp_path / "bare")
    with pytest.raises(ValueError, match=r"must have a tokenizer.json"):
        Teacher(Distillation(str(tmp_path / "bare")), LETTERS, 9)
    for wrong in ({"top_k": 0}, {"weight": 0.0}, {"weight": 1.5}):
        with pytest.raises(ValueError, match=f"distill.{next(iter(wrong))}"):
            Distillation("x", **wrong)
